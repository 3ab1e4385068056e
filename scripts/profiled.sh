#!/usr/bin/env bash
# One rank, started by torchrun for scripts/pretrain_gpt.sh: with PROFILER in front if it is rank PROFILED_RANK.
#   profiled.sh COMMAND [ARGUMENTS...]
set -euo pipefail
profiler=()
[[ "${RANK:-0}" != "${PROFILED_RANK:-0}" ]] || read -r -a profiler <<<"${PROFILER:-}"
exec "${profiler[@]}" "$@"
