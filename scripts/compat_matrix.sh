#!/usr/bin/env bash
# Asks `optimus-cc doctor` about the training lines of Megatron-LM's own functional tests: which ones are accepted,
# accepted with classes of traffic left dense, or refused, and why. Needs a checkout of Megatron-LM, and no GPU.
#   scripts/compat_matrix.sh CHECKOUT [--target h100] [--only TEXT] [--json FILE] [-- FLAGS OF OURS]
# FLAGS OF OURS are --optimus-cc balanced by default. Prints Markdown tables; docs/compatibility.md shows one tag's.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
# shellcheck source=scripts/find_python.sh
source "$root/scripts/find_python.sh"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
python="$(find_python "$root")"
exec "$python" -P -m scripts.compat.matrix "$@"
