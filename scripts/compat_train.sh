#!/usr/bin/env bash
# Trains 24 shrunken lines of different layouts from Megatron-LM's own functional tests, each in vanilla and with
# `balanced`, on at most 8 ranks of this machine's CPU, every rank a node of its own. Needs a checkout of Megatron-LM.
#   scripts/compat_train.sh CHECKOUT [--lines 24] [--ranks 8] [--only TEXT] [--limit SECONDS] [--results FOLDER]
# Results are kept in --results, and a second start goes on where the first one ended. Prints a Markdown table.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
# shellcheck source=scripts/find_python.sh
source "$root/scripts/find_python.sh"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 OPTIMUS_CC_DEVICE=cpu
python="$(find_python "$root")"
exec "$python" -P -m scripts.compat.train_lines "$@"
