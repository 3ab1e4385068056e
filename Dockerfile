# optimus_cc_ext on top of a PyTorch image that brings its own torch, CUDA, NCCL, Transformer Engine and Apex.
#
#   docker build -t optimus-cc .
#   docker build -t optimus-cc --build-arg BASE_IMAGE=<an image with Python >= 3.12 and PyTorch >= 2.9> .
#   docker build -t optimus-cc --build-context megatron-lm=/path/to/Megatron-LM .      (no access to GitHub)
#
# buildah and podman take the same arguments (with `--format docker`, or the health check is left out). pip looks where
# the base image's settings say, or --build-arg PIP_INDEX_URL=...; scripts/slurm/build_image.sbatch is all of it in one.
# The default is the image that Megatron-LM core_v0.19.0 is tested in.
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:26.06-py3

# --- Megatron-LM's scripts: a plain checkout. A build context of the name megatron-lm replaces the second stage.
# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS clone
ARG MEGATRON_LM_TAG=core_v0.19.0
ARG MEGATRON_LM_URL=https://github.com/NVIDIA/Megatron-LM.git
RUN git -c advice.detachedHead=false clone --quiet --depth 1 --branch "$MEGATRON_LM_TAG" "$MEGATRON_LM_URL" /megatron-lm

FROM scratch AS megatron-lm
COPY --from=clone /megatron-lm /

# hadolint ignore=DL3006
FROM ${BASE_IMAGE}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# Unless it is given, the base image's own setting holds.
ARG PIP_INDEX_URL
WORKDIR /tmp/optimus-cc
COPY requirements.lock pyproject.toml setup.py README.md LICENSE ./
COPY patches patches
COPY scripts scripts
COPY optimus_cc_ext optimus_cc_ext

# What the base image has stays, where it is new enough for pyproject.toml; the rest comes in the locked versions.
# --no-deps for megatron-core: its "torch" is the base image's, built for its CUDA. The comparison makes the build
# fail should anything have replaced it.
# PIP_BREAK_SYSTEM_PACKAGES: the image is the environment. /opt/optimus-cc: where Slurm's batch scripts find the others.
RUN export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_BREAK_SYSTEM_PACKAGES=1 \
 && before="$(python -c 'import torch; print(torch.__version__)')" \
 && { python -m pip list --format=freeze; cat "${PIP_CONSTRAINT:-/dev/null}"; } > /tmp/present.txt \
 && awk -F '[=<>!~ @]+' '{ name = tolower($1); gsub(/[-_.]+/, "-", name) } \
      NR == FNR { present[name]; next } name !~ /^#/ && !(name in present)' \
      /tmp/present.txt requirements.lock > /tmp/missing.txt \
 && python -m pip install --no-deps "$(grep -E '^megatron-core==' requirements.lock)" \
 && python -m pip install --constraint /tmp/missing.txt '.[data,report]' \
 && test "$before" = "$(python -c 'import torch; print(torch.__version__)')" \
 && ln -s "$(optimus-cc files)" /opt/optimus-cc \
 && rm -r /tmp/present.txt /tmp/missing.txt /tmp/optimus-cc

# Only the scripts: the `megatron` folder of the checkout would be a second Megatron, without its compiled helper.
COPY --from=megatron-lm /LICENSE /*.py /opt/megatron-lm/
COPY --from=megatron-lm /tools /opt/megatron-lm/tools

# Batch systems run containers as the calling user, whoever that is: nothing above belongs to this one.
RUN useradd --uid 10001 --create-home --shell /bin/bash optimus && install -d -m 1777 /workspace
USER 10001
WORKDIR /workspace
ENV PYTHONUNBUFFERED=1 MEGATRON_LM=/opt/megatron-lm

ARG BASE_IMAGE
ARG MEGATRON_LM_TAG=core_v0.19.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="optimus_cc_ext" \
      org.opencontainers.image.description="NVIDIA Megatron with Optimus-CC communication compression" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.base.name="$BASE_IMAGE" \
      megatron-lm.tag="$MEGATRON_LM_TAG"

# It imports torch and Megatron: seconds of work, so not often.
HEALTHCHECK --interval=30m --timeout=3m --start-period=1m CMD ["optimus-cc", "doctor"]
CMD ["optimus-cc", "doctor"]
