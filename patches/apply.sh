#!/usr/bin/env bash
# Makes plain `torchrun SCRIPT` of a checkout of Megatron-LM, or of any fork, load Optimus-CC, or undoes this change.
#   patches/apply.sh DIR [SCRIPT ...]           patch scripts of the checkout DIR (default: pretrain_gpt.py)
#   patches/apply.sh DIR [SCRIPT ...] --check   only print their state, and which Megatron they find
#   patches/apply.sh DIR [SCRIPT ...] --undo    take the block out again; every other byte stays
# It calls `optimus-cc patch DIR/SCRIPT ...`, and takes its flags.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
# shellcheck source=scripts/find_python.sh
source "$root/scripts/find_python.sh"

paths=() flags=()
for word in "$@"; do
  if [[ "$word" == -* ]]; then flags+=("$word"); else paths+=("$word"); fi
done
[[ ${#paths[@]} -gt 0 ]] || { sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
[[ ${#paths[@]} -gt 1 ]] || paths+=(pretrain_gpt.py)
scripts=("${paths[@]:1}")
exec "$(find_python "$root")" -P -m optimus_cc_ext.tools.cli patch "${flags[@]}" "${scripts[@]/#/${paths[0]}/}"
