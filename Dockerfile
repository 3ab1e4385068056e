# optimus_cc_ext on top of a PyTorch image that brings its own torch, CUDA, NCCL, Transformer Engine and Apex.
#
#   docker build -t optimus-cc .
#   docker build -t optimus-cc --build-arg BASE_IMAGE=<an image with Python >= 3.12 and PyTorch >= 2.9> .
#   docker build -t optimus-cc --build-context megatron-lm=/path/to/Megatron-LM .      (no access to GitHub)
#
# buildah and podman take the same arguments (with `--format docker`, or the health check is left out). pip looks for
# packages where the base image's settings say, or --build-arg PIP_INDEX_URL=...; scripts/slurm/build_image.sbatch does
# all of this. The default is the image that Megatron-LM core_v0.19.0 is tested in, by tag and digest: docker, podman
# and buildah check it.
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:26.06-py3@sha256:43c018d6a12963f1a1bad85ef8574b5c2a978eec2be0ebcacfb87f69e0d210e1

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

# Unless this index is given, the base image's own setting holds.
ARG PIP_INDEX_URL=""
# "yes" switches the base image's pip constraints off.
ARG IGNORE_CONSTRAINTS=""
# Extras of pyproject.toml: add eval for scripts/eval, wandb for Megatron's logging to it.
ARG EXTRAS=data,report
# Names, of transformer_engine, apex and fused_weight_gradient_mlp_cuda, that the base image may lack; "all" for all.
ARG ALLOW_MISSING=""
WORKDIR /tmp/optimus-cc
# Dependencies have a layer of their own below the sources, so that an edit of the sources repeats no download.
COPY requirements.lock requirements-eval.lock pyproject.toml ./
COPY scripts/image scripts/image
RUN scripts/image/install.sh dependencies
COPY setup.py README.md LICENSE ./
COPY patches patches
COPY scripts scripts
COPY optimus_cc_ext optimus_cc_ext
RUN scripts/image/install.sh package && rm -r /tmp/optimus-cc

# Only the checkout's scripts are copied: its folder `megatron` would be a second Megatron, without a compiled helper.
COPY --from=megatron-lm /LICENSE /*.py /opt/megatron-lm/
COPY --from=megatron-lm /tools /opt/megatron-lm/tools

# Batch systems run containers as the calling user, so no file above may belong to the user of this line.
RUN useradd --uid 10001 --create-home --shell /bin/bash optimus && install -d -m 1777 /workspace
USER 10001
WORKDIR /workspace
ENV PYTHONUNBUFFERED=1 MEGATRON_LM=/opt/megatron-lm

ARG BASE_IMAGE
# The digest of BASE_IMAGE, behind its @; scripts/slurm/build_image.sbatch gives it.
ARG BASE_DIGEST=""
ARG MEGATRON_LM_TAG=core_v0.19.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="optimus_cc_ext" \
      org.opencontainers.image.description="NVIDIA Megatron with Optimus-CC communication compression" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.base.name="$BASE_IMAGE" \
      org.opencontainers.image.base.digest="$BASE_DIGEST" \
      megatron-lm.tag="$MEGATRON_LM_TAG"

# The health check imports torch and Megatron, which takes seconds, so it runs rarely.
HEALTHCHECK --interval=30m --timeout=3m --start-period=1m CMD ["optimus-cc", "doctor"]
CMD ["optimus-cc", "doctor"]
