#!/usr/bin/env bash
# Trains three iterations of entry scripts of Megatron-LM or of its forks on this machine's CPU: vanilla, with this
# extension off, with `balanced` and with `paper`, every rank a node of its own. Needs checkouts, and no GPU.
#   scripts/compat_entries.sh CHECKOUT[:SCRIPT] ... [--ranks 4] [--modes vanilla off] [--limit SECONDS]
# SCRIPT is pretrain_gpt.py by default. Prints a Markdown table; `off` has to have vanilla's weights.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
# shellcheck source=scripts/find_python.sh
source "$root/scripts/find_python.sh"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 OPTIMUS_CC_DEVICE=cpu
python="$(find_python "$root")"
exec "$python" -P -m scripts.compat.entries "$@"
