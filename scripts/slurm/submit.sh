#!/usr/bin/env bash
# Checks a job on this machine, then hands it to sbatch: anything misspelt, missing or unfitting is refused here.
#
#   scripts/slurm/submit.sh JOB [--dry-run] [VARIABLE=value ...] [options of sbatch ...] [-- flags of the job ...]
#
#   scripts/slurm/submit.sh pretrain MODEL=2.5b TENSOR_PARALLEL=8 PIPELINE_PARALLEL=4 DATA_PATH=... TOKENIZER_MODEL=... \
#     --nodes=16 --gpus-per-node=8 -- --bf16 --optimus-cc balanced
#   scripts/slurm/submit.sh paper table2/2.5b-cb IMAGE=optimus-cc.sqsh --gpus-per-node=8
#   scripts/slurm/submit.sh paper all [--only PATTERN] [--dry-run] ...     all experiments, with nodes, hours and disk
#   scripts/slurm/submit.sh paper collect ...                              their tables and pictures
#
# JOB is build_image, prepare_data, preflight, compare, pretrain, paper or evaluate; `submit.sh JOB --help` explains its
# variables, which can be set in the environment just as well. --dry-run, on either side of --, prints the lines of
# sbatch, srun and torchrun that would run, and submits nothing. Sbatch's own variables hold, above all
#   SBATCH_ACCOUNT  SBATCH_PARTITION  SBATCH_QOS      account, partition and quality of service
# Call this script on a file system that all nodes share; the job runs in the current folder.
#   OPTIMUS_CC_ROOT     the repository, if not this script's
#   OPTIMUS_CC_DEVICE   cpu: no GPU is looked for
#   DOCTOR              no: a training job's flags are not checked by optimus-cc doctor, which takes some 20 s
set -euo pipefail
root="${OPTIMUS_CC_ROOT:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)}"
here="$root/scripts/slurm"

fail() { # WHAT REASON CURE
  printf 'submit.sh: error: %s: %s. %s.\n' "$@" >&2
  exit 2
}

job="${1:-}"
case "$job" in
  build_image | prepare_data | preflight | compare | pretrain | paper | evaluate) shift ;;
  *)
    # shellcheck source=scripts/help.sh
    source "$root/scripts/help.sh"
    print_help "$here/submit.sh"
    [[ "$job" == --help || "$job" == -h ]] || exit 2
    exit 0
    ;;
esac
# Inside an allocation Slurm's variables describe that allocation; sbatch would pass them on, and srun obey them.
for name in "${!SLURM_@}" "${!SRUN_@}"; do
  [[ "$name" == SLURM_CONF || "$name" == SLURM_CLUSTERS ]] || unset "$name"
done
# shellcheck source=scripts/slurm/common.sh
source "$here/common.sh"

options=() nodes="" dry_run="" array="" logs=("${SBATCH_OUTPUT:-.}" "${SBATCH_ERROR:-.}")
gpus="${SBATCH_GPUS_PER_NODE:-${SBATCH_GRES:-}}" # such as 8, h100:8, gpu:8,nvme:1
all_gpus="${SBATCH_GPUS:-}"                      # number for all nodes together
unset SBATCH_GPUS                                # it goes on as a number for each node
limit="${SBATCH_TIMELIMIT:-}" partition="${SBATCH_PARTITION:-}" own_signal="${SBATCH_SIGNAL:-}"
# The experiment's name stands right behind the job's; it is the first of the batch script's own words.
experiment=() one_node=""
if [[ "$job" == paper && "${1:-}" == all ]]; then
  shift
  # shellcheck source=scripts/slurm/paper_all.sh
  source "$here/paper_all.sh"
  submit_all "$@"
  exit
fi
if [[ "$job" == paper && "${1:-}" == @(*/*|figure14|collect) && "$1" != *=* ]]; then
  experiment=("$1")
  # 335M is the artifact's functionality check, for one machine; figure 14 takes one GPU.
  [[ "$1" == */* ]] && ! grep -qs '^model 335m' "$root/scripts/paper/$1.sh" || one_node=yes
  shift
fi
understand() { # OPTION VALUE: reads the options of sbatch on which layout and time depend
  case "$1" in
    -N | --nodes) nodes="$2" ;;
    -G | --gpus) all_gpus="$2" ;;
    -t | --time) limit="$2" ;;
    -p | --partition) partition="$2" ;;
    --signal) own_signal="$2" ;;
    -d | --dependency) export DEPENDENCY="$2" ;;
    -o | --output | -e | --error) logs+=("$2") ;;
    *) gpus="$2" ;;
  esac
  [[ "$1" == -G || "$1" == --gpus ]] || options+=("${@:3}")
}
trains() { [[ "$job" == @(pretrain|paper|compare) ]]; }
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
    [a-z]*=*) # another word may be the value of an option of sbatch
      name="${1%%=*}" name="${name^^}"
      ! known_variables | grep -x "$name" >/dev/null ||
        fail "${1%%=*}" "it is not a variable of this job" "Write $name"
      options+=("$1")
      ;;
    --dry-run) dry_run=yes ;;
    -[NGtpnadoeD]?*) # short options with their values, such as -N16
      set -- "${1:0:2}" "${1:2}" "${@:2}"
      continue
      ;;
    --nodes=* | --gpus-per-node=* | --gres=* | --gpus=* | --time=* | --partition=* | --signal=* | --dependency=* | --output=* | --error=*)
      understand "${1%%=*}" "${1#*=}" "$1"
      ;;
    -N | --nodes | --gpus-per-node | --gres | -G | --gpus | -t | --time | -p | --partition | --signal | -d | --dependency | \
      -o | --output | -e | --error)
      understand "$1" "${2:-}" "$1" "${2:-}"
      shift
      ;;
    -n | --ntasks* | --gpus-per-task* | --gpus-per-socket*)
      { trains || [[ "$job" == preflight ]]; } && fail "$1" "the layout is --nodes and --gpus-per-node" "Give these instead"
      options+=("$1")
      ;;
    -a | --array*)
      array="$1"
      options+=("$1")
      ;;
    --export | --export=*)
      [[ "$1 ${2:-}" =~ ^--export[=\ ]ALL[,\ ] ]] || fail "$1" "the job would not get its variables" "Leave it out, or give ALL,NAME=value"
      options+=("$1")
      ;;
    -D | --chdir*) fail "$1" "the job runs in the folder where it was checked" "Call submit.sh in that folder" ;;
    *)
      [[ ! "$1" =~ $compressing && ! "$1" =~ $other_ours ]] ||
        fail "$1" "it is a flag of the program among the options of sbatch" "Give it after --"
      options+=("$1")
      ;;
  esac
  shift
done

array="${array:-${SBATCH_ARRAY_INX:+SBATCH_ARRAY_INX}}"
if [[ -n "$array" && "${CHECKPOINT_DIR:-}" != none ]] && trains; then
  fail "$array" "all tasks would train in one folder of checkpoints" \
    "Submit one job, which requeues itself at its time limit, or CHECKPOINT_DIR=none"
fi

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
  options+=("--gpus-per-node=$gpus")
fi
# The number that is checked here is the one that the batch script, its step and preflight use.
if [[ -n "$gpus" ]] && { trains || [[ "$job" == preflight ]]; }; then
  export PROCESSES_PER_NODE="${PROCESSES_PER_NODE:-$gpus}"
fi
[[ -w . ]] || fail "$PWD" "it is not yours to write to, and the job's log goes there" "Call submit.sh in another folder"
for log in "${logs[@]}"; do
  # Slurm makes no folder for a log, and a job without its log fails in silence.
  log_folder="$(dirname -- "$log")"
  [[ "$log_folder" == *%* || -w "$log" || -w "$log_folder" ]] ||
    fail "$log" "the job's log cannot be written: '$log_folder' is not a folder where you may write" "Make it first"
done

seconds_of() { # TIME: prints the seconds of a time in Slurm's form, nothing for no limit; fails if it is none
  local d=0 h=0 m=0 s=0
  case "${1,,}" in unlimited | infinite) return 0 ;; esac
  if [[ "$1" =~ ^([0-9]+)-([0-9]+)(:([0-9]+))?(:([0-9]+))?$ ]]; then
    d="${BASH_REMATCH[1]}" h="${BASH_REMATCH[2]}" m="${BASH_REMATCH[4]:-0}" s="${BASH_REMATCH[6]:-0}"
  elif [[ "$1" =~ ^([0-9]+):([0-9]+):([0-9]+)$ ]]; then
    h="${BASH_REMATCH[1]}" m="${BASH_REMATCH[2]}" s="${BASH_REMATCH[3]}"
  elif [[ "$1" =~ ^([0-9]+)(:([0-9]+))?$ ]]; then
    m="${BASH_REMATCH[1]}" s="${BASH_REMATCH[3]:-0}"
  else
    return 1
  fi
  echo $((((10#$d * 24 + 10#$h) * 60 + 10#$m) * 60 + 10#$s))
}
where="${partition:+partition }${partition:-the default partition}"
# Of several partitions, the job may start in any.
most="" most_seconds=0 most_nodes=0
if command -v sinfo >/dev/null; then
  while read -r name time count; do
    [[ -n "$partition" || "$name" == *"*" ]] || continue
    [[ ! "$count" =~ ^[0-9]+$ ]] || ((count <= most_nodes)) || most_nodes="$count"
    seconds="$(seconds_of "$time")" || continue
    ((${seconds:-999999999} <= most_seconds)) || most="$time" most_seconds="${seconds:-999999999}"
  done < <(sinfo -h ${partition:+-p "$partition"} -o '%P %l %D' 2>/dev/null)
fi
if trains || [[ "$job" == preflight ]]; then
  [[ "$most_nodes" == 0 || ! "$nodes" =~ ^[0-9]+$ ]] || ((nodes <= most_nodes)) ||
    fail --nodes "$nodes is more than the $most_nodes of $where" "Give --nodes=$most_nodes or less"
fi
if trains; then
  limit="${limit:-$(sed -n 's/^#SBATCH --time=//p' "$file")}"
  seconds="$(seconds_of "$limit")" ||
    fail --time "'$limit' is no time of Slurm's" "Give minutes, or hours:minutes:seconds, or days-hours"
  [[ -z "$most" ]] || ((${seconds:-999999999} <= most_seconds)) ||
    fail --time "$limit is more than $most, the limit of $where" "Give --time=$most or less"
  if [[ -z "$own_signal" && "$job" != compare ]]; then
    # Slurm's signal comes ahead of the limit: time to finish an iteration and to save.
    lead=$((${seconds:-1800} / 3))
    options=("--signal=USR1@$((lead < 600 ? lead : 600))" "${options[@]}")
  fi
  [[ -z "$seconds" || "$job" == compare ]] || ((seconds >= 900)) ||
    echo "submit.sh: warning: --time: $limit is less than 15 minutes: a third of it is left for saving" >&2
fi
submit=(sbatch --export=ALL "${options[@]}" "$file" "${flags[@]}")
if [[ -n "$dry_run" ]]; then
  printf -v line ' %q' "${submit[@]}"
  echo "${line# }"
  # The job's number and first node are not known yet; placeholders stand for them.
  export DRY_RUN=yes SLURM_JOB_ID=0 SLURM_JOB_NODELIST=FIRST_NODE MASTER_ADDR="${MASTER_ADDR:-FIRST_NODE}"
fi
# These variables stand for those that Slurm sets in the job.
SUBMITTING=yes SLURM_JOB_ID="${SLURM_JOB_ID:-0}" SLURM_JOB_NUM_NODES="$nodes" SLURM_GPUS_ON_NODE="$gpus" bash "$file" "${flags[@]}"
[[ -z "$dry_run" ]] || exit 0
"${submit[@]}"
echo "submit.sh: $job was submitted as checked here, to $where" >&2
