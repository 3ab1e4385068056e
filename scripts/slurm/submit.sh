#!/usr/bin/env bash
# Checks a job on this machine, then hands it to sbatch: anything misspelt, missing or unfitting is refused here.
#
#   scripts/slurm/submit.sh JOB [--dry-run] [VARIABLE=value ...] [options of sbatch ...] [-- flags of the job ...]
#
#   scripts/slurm/submit.sh pretrain MODEL=2.5b TENSOR_PARALLEL=8 PIPELINE_PARALLEL=4 DATA_PATH=... TOKENIZER_MODEL=... \
#     --nodes=16 --gpus-per-node=8 -- --bf16 --optimus-cc balanced
#   scripts/slurm/submit.sh paper table2/2.5b-cb IMAGE=optimus-cc.sqsh --gpus-per-node=8
#
# JOB is build_image, prepare_data, preflight, pretrain, paper or evaluate; `submit.sh JOB --help` explains its
# variables, which can be set in the environment just as well. --dry-run, on either side of --, prints the lines of
# sbatch, srun and torchrun that would run, and submits nothing. Sbatch's own variables hold, above all
#   SBATCH_ACCOUNT  SBATCH_PARTITION  SBATCH_QOS      account, partition and quality of service
# Call this script on a file system that all nodes share; the job runs in the current folder.
#   OPTIMUS_CC_ROOT     the repository, if not this script's
#   OPTIMUS_CC_DEVICE   cpu: no GPU is looked for
set -euo pipefail
root="${OPTIMUS_CC_ROOT:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)}"
here="$root/scripts/slurm"

fail() { # WHAT REASON CURE
  printf 'submit.sh: error: %s: %s. %s.\n' "$@" >&2
  exit 2
}

job="${1:-}"
case "$job" in
  build_image | prepare_data | preflight | pretrain | paper | evaluate) shift ;;
  *)
    # shellcheck source=scripts/help.sh
    source "$root/scripts/help.sh"
    print_help "$here/submit.sh"
    [[ "$job" == --help || "$job" == -h ]] || exit 2
    exit 0
    ;;
esac
# shellcheck source=scripts/slurm/common.sh
source "$here/common.sh"

options=() nodes="" dry_run=""
gpus="${SBATCH_GPUS_PER_NODE:-${SBATCH_GRES:-}}" # such as 8, h100:8, gpu:8,nvme:1
all_gpus="${SBATCH_GPUS:-}"                      # number for all nodes together
# The experiment's name stands right behind the job's; it is the first of the batch script's own words.
experiment=() one_node=""
if [[ "$job" == paper && "${1:-}" == */* && "$1" != *=* ]]; then
  experiment=("$1")
  # 335M is the artifact's functionality check, for one machine.
  ! grep -qs '^model 335m' "$root/scripts/paper/$1.sh" || one_node=yes
  shift
fi
understand() { # OPTION VALUE: reads the options of sbatch on which the layout depends
  case "$1" in
    -N | --nodes) nodes="$2" ;;
    -G | --gpus) all_gpus="$2" ;;
    *) gpus="$2" ;;
  esac
}
number_of() { # GPUS: prints 8 for h100:8 and for gpu:8,nvme:1; nothing without a number
  [[ ! "${1#*gpu:}" =~ ^([^:]*:)?([0-9]+)(,|$) ]] || echo "${BASH_REMATCH[2]}"
}
while (($# > 0)); do
  case "$1" in
    --)
      shift
      break
      ;;
    --help | -h)
      print_help "$here/$job.sbatch"
      exit 0
      ;;
    [A-Z]*=*)
      name="${1%%=*}"
      if ! known_variables | grep -x "$name" >/dev/null && [[ ! "$name" =~ $others ]]; then
        nearly="$(misspelt "$(known_variables)" "$name")"
        fail "$name" "it is not a variable of this job" "${nearly:+Write ${nearly#* }; }--help lists them"
      fi
      export "${1?}"
      ;;
    --dry-run) dry_run=yes ;;
    --nodes=* | --gpus-per-node=* | --gres=* | --gpus=*)
      options+=("$1")
      understand "${1%%=*}" "${1#*=}"
      ;;
    -N | --nodes | --gpus-per-node | --gres | -G | --gpus)
      options+=("$1" "${2:-}")
      understand "$1" "${2:-}"
      shift
      ;;
    *) options+=("$1") ;;
  esac
  shift
done

flags=("${experiment[@]}")
for word in "$@"; do
  [[ "$word" == --dry-run ]] && dry_run=yes || flags+=("$word")
done

file="$here/$job.sbatch"
if [[ -z "$nodes" && -n "$one_node" ]]; then
  nodes=1
  options+=(--nodes=1)
fi
[[ -n "$nodes" ]] || nodes="$(sed -n 's/^#SBATCH --nodes=//p' "$file")"
nodes="${nodes%%-*}" # the least number of a range
export OPTIMUS_CC_ROOT="$root"
gpus="$(number_of "$gpus")" all_gpus="$(number_of "$all_gpus")"
if [[ -z "$gpus" && -n "$all_gpus" ]]; then
  ((all_gpus % nodes == 0)) ||
    fail --gpus "$all_gpus GPUs are not the same number on each of $nodes nodes" "Give a multiple, or --gpus-per-node"
  gpus=$((all_gpus / nodes))
fi
submit=(sbatch --export=ALL "${options[@]}" "$file" "${flags[@]}")
if [[ -n "$dry_run" ]]; then
  printf -v line ' %q' "${submit[@]}"
  echo "${line# }"
  # The job's number and first node are not known yet; placeholders stand for them.
  export DRY_RUN=yes SLURM_JOB_ID=0 SLURM_JOB_NODELIST=FIRST_NODE MASTER_ADDR="${MASTER_ADDR:-FIRST_NODE}"
fi
# These variables stand for those that Slurm sets in the job.
SUBMITTING=yes SLURM_JOB_NUM_NODES="$nodes" SLURM_GPUS_ON_NODE="$gpus" bash "$file" "${flags[@]}"
[[ -z "$dry_run" ]] || exit 0
echo "submit.sh: $job as checked here, account ${SBATCH_ACCOUNT:-(your default)}, partition ${SBATCH_PARTITION:-(the default)}" >&2
exec "${submit[@]}"
