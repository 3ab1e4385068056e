#!/usr/bin/env bash
# Installs optimus_cc_ext into a PyTorch image; every builder (Dockerfile, Apptainer, Pyxis) calls it inside the base image,
# as root, in a folder that holds the repository:
#
#   scripts/image/install.sh dependencies    needs only requirements*.lock, pyproject.toml and scripts/image
#   scripts/image/install.sh package         needs all of the repository
#   scripts/image/install.sh megatron [CHECKOUT]   Megatron's scripts; by default GitHub's, at MEGATRON_LM_TAG
#
#   EXTRAS          extras of pyproject.toml, comma-separated (data,report); empty: none
#   ALLOW_MISSING   what may be missing of transformer_engine, apex and fused_weight_gradient_mlp_cuda, comma-separated,
#                   or "all" (nothing)
#   IGNORE_CONSTRAINTS   yes: ignore the base image's constraints
#
# Packages of the base image stay if they are new enough for pyproject.toml; those missing or too old are installed in
# the locked versions. The base image's constraints (PIP_CONSTRAINT) hold; if one of them forbids a version that is
# needed, the build ends and names the package. The list of all versions stays in /opt/optimus-cc.freeze.txt.
set -euo pipefail

# PIP_BREAK_SYSTEM_PACKAGES lets pip install into the image's own Python, which is the environment.
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_BREAK_SYSTEM_PACKAGES=1
export EXTRAS="${EXTRAS-data,report}" # empty: none
[[ -n "${PIP_INDEX_URL:-}" ]] || unset PIP_INDEX_URL

[[ "${IGNORE_CONSTRAINTS:-}" != yes ]] || unset PIP_CONSTRAINT

fail() { # WHAT REASON CURE
  printf 'install.sh: error: %s: %s. %s.\n' "$@" >&2
  exit 2
}

# torch and the GPU's packages stay the base image's, built for its CUDA; the build ends if anything replaces torch.
torch_version() { python -c 'import torch; print(torch.__version__)'; }

dependencies() {
  local before work name
  before="$(torch_version)" || fail BASE_IMAGE "it has no torch" "Give an image with Python >= 3.12 and PyTorch"
  for name in transformer_engine apex fused_weight_gradient_mlp_cuda; do
    python -c "import importlib.util as u, sys; sys.exit(u.find_spec('$name') is None)" ||
      [[ ",${ALLOW_MISSING:-},all," == *",$name,"* || "${ALLOW_MISSING:-}" == all ]] ||
      fail "$name" "the base image lacks it, and training on GPUs would end or be slower without it" \
        "Give another BASE_IMAGE, or ALLOW_MISSING=$name where its flag of Megatron's is left out"
  done
  work="$(mktemp -d)"
  # With --no-deps, because megatron-core requires torch, which is the base image's.
  python -m pip install --no-deps "$(grep -E '^megatron-core==' requirements.lock)"
  python scripts/image/requirements.py wanted >"$work/wanted.txt"
  python scripts/image/requirements.py missing >"$work/locked.txt"
  # The first pass only lists installations: a package that is there and too old gets its locked version, too.
  python -m pip install --quiet --dry-run --report "$work/report.json" --constraint "$work/locked.txt" -r "$work/wanted.txt" ||
    fail PIP_CONSTRAINT "the base image's constraints and pyproject.toml forbid each other (pip's message is above)" \
      "Give another BASE_IMAGE, or IGNORE_CONSTRAINTS=yes"
  python scripts/image/requirements.py replaced "$work/report.json" >>"$work/locked.txt"
  python -m pip install --constraint "$work/locked.txt" -r "$work/wanted.txt" ||
    fail PIP_CONSTRAINT "the base image's constraints and the locked versions forbid each other (pip's message is above)" \
      "Give another BASE_IMAGE, or IGNORE_CONSTRAINTS=yes"
  [[ "$before" == "$(torch_version)" ]] || fail torch "something replaced the base image's $before" "Leave out the extra that did"
  if ! command -v numactl >/dev/null; then
    { apt-get update -q && apt-get install -q -y --no-install-recommends numactl && rm -rf /var/lib/apt/lists/*; } \
      >/dev/null 2>&1 || echo "install.sh: numactl could not be installed: ranks are not bound to their GPU's processors"
  fi
  rm -rf "$work"
}

package() {
  python -m pip install --no-deps --no-build-isolation . 2>/dev/null || python -m pip install --no-deps .
  # Slurm's batch scripts find the other scripts under this link.
  ln -sfn "$(optimus-cc files)" /opt/optimus-cc
  python -m pip freeze >/opt/optimus-cc.freeze.txt
}

megatron() { # [CHECKOUT]: only scripts, because its folder `megatron` would be a second Megatron in the image
  local from="${1:-}"
  if [[ -z "$from" ]]; then
    from="$(mktemp -d)/megatron-lm"
    git -c advice.detachedHead=false clone --quiet --depth 1 --branch "${MEGATRON_LM_TAG:-core_v0.19.0}" \
      https://github.com/NVIDIA/Megatron-LM.git "$from"
  fi
  mkdir -p /opt/megatron-lm
  cp -r "$from/LICENSE" "$from"/*.py "$from/tools" /opt/megatron-lm/
}

case "${1:-}" in
  dependencies | package | megatron) "$@" ;;
  *) fail "${1:-install.sh}" "it is not a step" "Give dependencies, package or megatron" ;;
esac
