#!/usr/bin/env bash
# Runs all experiments of the paper, one after the other, then makes their tables and figures.
#
#   scripts/paper/all.sh [--scale paper|tiny] [--only PATTERN] [--dry-run] [further flags of Megatron and Optimus-CC]
#
#   --only PATTERN   only experiments whose name fits, such as 'figure10/*' or '*/335m-*'
#
# If an experiment fails, the others run all the same; the failed ones are named at the end, with exit status 1.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
# shellcheck source=scripts/find_python.sh
source "$root/scripts/find_python.sh"

scale="${SCALE:-paper}" pattern='*' dry_run=()
further=()
while [[ $# -gt 0 ]]; do
  case "$1" in
    --scale=* | --only=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" && continue ;;
    --scale | --only)
      [[ $# -ge 2 ]] || {
        echo "all.sh: error: $1: it needs a value. See --help." >&2
        exit 2
      }
      if [[ "$1" == --scale ]]; then scale="$2"; else pattern="$2"; fi
      shift
      ;;
    --dry-run) dry_run=(--dry-run) ;;
    --help | -h)
      sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *) further+=("$1") ;;
  esac
  shift
done
[[ "$scale" == paper || "$scale" == tiny ]] || {
  echo "all.sh: error: --scale: '$scale' is not known. Give paper or tiny." >&2
  exit 2
}
results="${RESULTS:-$(find_workspace "$root")/results/paper$([[ $scale == paper ]] || echo "-$scale")}"

if [[ "$scale" == paper && ${#dry_run[@]} -eq 0 && -z "${SLURM_JOB_ID:-}${NODE_LIST:-}" ]] && command -v sbatch >/dev/null; then
  echo "all.sh: error: --scale paper: this machine is none of the cluster's nodes, and sbatch is on PATH." \
    "Submit the experiments: scripts/slurm/submit.sh paper all$([[ $pattern == '*' ]] || echo " --only '$pattern'") --gpus-per-node=8" >&2
  exit 2
fi

failed=() matching=0
attempt() { # NAME COMMAND...
  # shellcheck disable=SC2053  # a pattern is meant
  [[ "$1" == $pattern ]] || return 0
  matching=$((matching + 1))
  echo "== $1" >&2
  "${@:2}" </dev/null || failed+=("$1")
}
for file in "$root"/scripts/paper/{table2,figure10,figure11,figure12}/*.sh; do
  name="${file#"$root/scripts/paper/"}"
  attempt "${name%.sh}" "$file" --scale "$scale" "${dry_run[@]}" "${further[@]}"
done
# With -P Python ignores a folder named scripts in the current folder.
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
figure14=("$(find_python "$root")" -P -m scripts.paper.figure14 --scale "$scale" --results "$results")
if [[ ${#dry_run[@]} -gt 0 ]]; then
  figure14=(echo "${figure14[*]@Q}")
fi
attempt figure14 "${figure14[@]}"
[[ "$matching" -gt 0 ]] || {
  echo "all.sh: error: --only: no experiment fits '$pattern'. Names are such as table2/2.5b-cb." >&2
  exit 2
}
if [[ ${#dry_run[@]} -eq 0 ]]; then
  "$(find_python "$root")" -P -m scripts.paper.collect --scale "$scale" --results "$results" || failed+=(collect)
fi
if [[ ${#failed[@]} -gt 0 ]]; then
  printf 'failed: %s\n' "${failed[*]}" >&2
  exit 1
fi
