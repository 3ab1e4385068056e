#!/usr/bin/env bash
# Prints by version which functions of Megatron that we wrap are as expected. Releases are fetched from the package
# index into a temporary folder; checkouts of Megatron-LM are given as folders. Needs no GPU.
#   scripts/compat_versions.sh [CHECKOUT ...] [--index VERSION ...]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
# shellcheck source=scripts/find_python.sh
source "$root/scripts/find_python.sh"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
python="$(find_python "$root")"
exec "$python" -P -m scripts.compat.versions "$@"
