#!/usr/bin/env bash
# Checks a machine with a GPU, in 8 minutes at most: kernels, streams, graphs, NCCL, memory, and a benchmark.
#   scripts/gpu_check.sh [--output DIR] [--only CHECK ...]      (--help shows all; docs/evidence.md explains)
#   scripts/gpu_check.sh --dry-run-on-cpu                       all that runs without a GPU
# Results: results/gpu_check/gpu_check.json and gpu_check.md. Exit code 0: all checks passed; 1: one failed; 2: this
# machine cannot run them, and one sentence says why.
#
#   OPTIMUS_CC_WHEELS=DIR   without a network: makes .venv-gpu-check from the wheels in DIR (of optimus_cc_ext, torch,
#                           megatron-core and what these need), and uses it
#   OPTIMUS_CC_PYTHON=PATH  the Python 3.12 or 3.13 that makes .venv-gpu-check (python3.12 or python3)
set -euo pipefail
# The script stays in the current folder, because paths on the command line are the caller's.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
# shellcheck source=scripts/find_python.sh
source "$root/scripts/find_python.sh"

if [[ -n "${OPTIMUS_CC_WHEELS:-}" ]]; then
  venv="$(find_workspace "$root")/.venv-gpu-check" base="${OPTIMUS_CC_PYTHON:-$(command -v python3.12 || command -v python3)}"
  "$base" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info < (3, 14))' || {
    echo "error: $base is not Python 3.12 or 3.13. Set OPTIMUS_CC_PYTHON to one that the wheels are for" >&2
    exit 2
  }
  "$base" -m venv --clear "$venv"
  "$venv/bin/python" -m pip install --quiet --no-index --find-links "$OPTIMUS_CC_WHEELS" 'optimus_cc_ext[data,report]' || {
    echo "error: OPTIMUS_CC_WHEELS=$OPTIMUS_CC_WHEELS lacks what pip names above. Add these wheels" >&2
    exit 2
  }
  python="$venv/bin/python"
else
  python="$(find_python "$root")" || { echo "error: no python: run scripts/setup_env.sh" >&2; exit 2; }
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
# With -P Python ignores a folder named scripts in the current folder. The last --output counts.
exec "$python" -P -m scripts.gpu_check --output "$(find_workspace "$root")/results/gpu_check" "$@"
