#!/usr/bin/env bash
# Starts one rank of scripts/pretrain_gpt.sh for torchrun, with PROFILER in front if it is rank PROFILED_RANK.
#   profiled.sh COMMAND [ARGUMENTS...]
set -euo pipefail
profiler=()
[[ "${RANK:-0}" != "${PROFILED_RANK:-0}" ]] || read -r -a profiler <<<"${PROFILER:-}"
exec "${profiler[@]}" "$@"
