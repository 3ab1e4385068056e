#!/usr/bin/env bash
# Asks `optimus-cc doctor` about the training lines of Megatron-LM's own functional tests: which are accepted, which
# with classes of traffic left dense, which are refused, and why. Needs a checkout of Megatron-LM, and no GPU.
#   scripts/compat_matrix.sh CHECKOUT [--target h100] [--only TEXT] [--json FILE] [-- FLAGS OF OURS]
# FLAGS: --optimus-cc balanced by default. Prints Markdown tables; docs/compatibility.md has them for one tag.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
# shellcheck source=scripts/find_python.sh
source "$root/scripts/find_python.sh"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
exec "$(find_python "$root")" -P -m scripts.compat.matrix "$@"
