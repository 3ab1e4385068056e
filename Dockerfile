# optimus_cc_ext on top of a PyTorch image that brings its own torch, CUDA and NCCL.
# Not built in CI yet: a starting point, not a tested image.
#   docker build --build-arg BASE_IMAGE=<an image with Python >= 3.12 and PyTorch> -t optimus-cc .
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:25.09-py3
FROM ${BASE_IMAGE}

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /opt/optimus-cc
COPY . .

# --no-deps for megatron-core and for this package: their "torch" is the base image's, built for its CUDA.
# The other packages do not depend on torch; the comparison makes the build fail should one of them replace it.
RUN before="$(python -c 'import torch; print(torch.__version__)')" \
 && grep -E '^(tokenizers|transformers|tensorboard|rich|matplotlib|psutil)==' requirements.lock > /tmp/light.txt \
 && pip install --no-cache-dir -r /tmp/light.txt \
 && pip install --no-cache-dir --no-deps "$(grep -E '^megatron-core==' requirements.lock)" \
 && pip install --no-cache-dir --no-deps . \
 && rm /tmp/light.txt \
 && test "$before" = "$(python -c 'import torch; print(torch.__version__)')"

# Elsewhere than the sources, so that what runs is what was installed.
WORKDIR /workspace
CMD ["optimus-cc", "doctor"]
