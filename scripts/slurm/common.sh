# shellcheck shell=bash
# Sourced by the batch scripts and submit.sh, where `job` is the job's name and `root` the repository. All that a batch
# script refuses ahead of `checked`, submit.sh refuses, too: it runs the script on the login node with SUBMITTING=yes.
# shellcheck source=scripts/help.sh
source "${root:?}/scripts/help.sh"

refuse() { # WHAT REASON CURE
  printf '%s.sbatch: error: %s: %s. %s.\n' "${job:?}" "$@" >&2
  exit 2
}

# Variables of other programs that submit.sh passes on, and those that override an image's own; none is a path.
# shellcheck disable=SC2034  # by submit.sh
others='^(NCCL|GLOO|UCX|TORCH|PYTORCH|TRITON|NVTE|CUDA|OMP|MKL|HF|WANDB|OPTIMUS_CC|SBATCH)_'
into_images='(NCCL|GLOO|UCX|TORCH_NCCL|NVTE|OMP|OPTIMUS_CC)_.*|CUDA_DEVICE_MAX_CONNECTIONS|PYTORCH_CUDA_ALLOC_CONF'
into_images+='|HF_HOME|NODE_CACHE|TRITON_CACHE_DIR|TORCHINDUCTOR_CACHE_DIR|NVIDIA_VISIBLE_DEVICES'
# Variables that name programs, libraries and packages of this machine: an image has its own, which these would break.
not_into_images=(PYTHONPATH PYTHONHOME CC CXX LD_PRELOAD)

known_variables() {
  variables_of "$root/scripts/slurm/submit.sh" "$root/scripts/slurm/$job.sbatch"
  case "$job" in
    paper | compare) variables_of "$root/scripts/slurm/pretrain.sbatch" "$root/scripts/pretrain_gpt.sh" ;;
    pretrain) variables_of "$root/scripts/pretrain_gpt.sh" ;;
  esac
}

checked() { # ends the checks before a job; only submit.sh --dry-run goes on, and starts nothing
  [[ -z "${SUBMITTING:-}" || -n "${DRY_RUN:-}" ]] || exit 0
}

start() { # COMMAND ARGUMENTS...: runs the job's command; a dry run prints it as one line that can be pasted
  if [[ -z "${DRY_RUN:-}" ]]; then
    "$@"
  else
    local line
    printf -v line ' %q' "$@"
    echo "${line# }"
  fi
}

check_command_line() { # FLAGS OF THE JOB...
  local wrong right flag
  if [[ "${1:-}" == --help || "${1:-}" == -h ]]; then
    print_help "$root/scripts/slurm/$job.sbatch"
    exit 0
  fi
  if read -r wrong right < <(misspelt "$(known_variables)" "$(compgen -e)"); then
    refuse "$wrong" "it is not a variable of this job" "Write $right, or unset $wrong"
  fi
  for flag in "$@"; do
    case "${flag%%=*}" in
      --nodes | --partition | --account | --qos | --time | --mem | --gres | --gpus | --gpus-per-node | --cpus-per-task)
        refuse "$flag" "it is an option of sbatch's, among the job's own flags" "Give it ahead of them"
        ;;
    esac
  done
}

# --- the image
folders=("$PWD")
mount_folder() { # PATH: mounts the folder that holds it, or the nearest existing one above; fails at /
  local folder known
  folder="$(realpath -ms -- "$1")"
  until [[ -d "$folder" ]]; do folder="$(dirname "$folder")"; done
  [[ "$folder" != / ]] || return 1
  for known in "${folders[@]}"; do
    [[ "$folder/" != "$known/"* ]] || return 0
  done
  folders+=("$folder")
}

# Hugging Face's snapshots, for example, are links to files in a folder beside them.
mount_links_of() { # PATH: mounts the folders to which PATH, or links in it, lead
  local link
  while IFS= read -r link; do
    mount_folder "$(dirname "$(realpath -m -- "$link")")" || true
  done < <(find "$1" -maxdepth 1 -type l 2>/dev/null | head -n 200)
}

# `step` is Slurm's srun with its options, `container` the words that run a command in the image, and `scripts` the
# folder of the repository's scripts there.
# shellcheck disable=SC2034  # by the batch scripts
step=(srun) container=() scripts="$root/scripts"
use_image() { # FLAGS OF THE JOB...: mounts the absolute paths among the flags, and the folders of variables
  [[ -n "${IMAGE:-}" ]] || return 0
  # shellcheck disable=SC2034
  scripts=/opt/optimus-cc/scripts
  case "$IMAGE" in
    /* | ./* | ../* | *.sqsh | *.sif)
      [[ -e "$IMAGE" ]] || refuse IMAGE "there is no '$IMAGE'" "Build it (submit.sh build_image), or give its path"
      # Pyxis takes a name without a slash for an image in a registry.
      IMAGE="$(realpath -s -- "$IMAGE")"
      ;;
  esac
  local name word paths
  for name in CHECKPOINT_DIR RESULTS TOKENIZER_MODEL VOCAB_FILE MERGE_FILE MEGATRON_LM CHECKPOINT MODEL_OUTPUT TEXT HF_HOME \
    DATA_PATH; do
    paths=("${!name:-}")
    [[ "$name" != DATA_PATH ]] || read -r -a paths <<<"${DATA_PATH:-}" # a blend: weights and prefixes
    for word in "${paths[@]}"; do
      [[ "$word" != */* ]] || mount_folder "$word" ||
        refuse "$name" "no folder above '$word' exists" "Give one on the file system that all nodes share"
      [[ "$word" != */* ]] || mount_links_of "$word"
    done
  done
  for word in "$@"; do
    [[ "${word#--*=}" != /* ]] || mount_folder "${word#--*=}" || true
  done
  [[ -z "${NODE_CACHE:-}" ]] || mount_folder "$NODE_CACHE" || true
  # Enroot's hook for GPUs ends the job on a node without GPUs.
  [[ -n "${SLURM_GPUS_ON_NODE:-}${NVIDIA_VISIBLE_DEVICES+set}" ]] || export NVIDIA_VISIBLE_DEVICES=void
  # Apptainer mounts the home folder: packages in ~/.local would override the image's.
  local clean=(env)
  for name in "${not_into_images[@]}"; do
    [[ ",${IMAGE_ENV:-}," == *",$name,"* ]] || clean+=(-u "$name")
  done
  clean+=(PYTHONNOUSERSITE=1)
  if [[ "$IMAGE" == *.sif ]]; then
    # shellcheck disable=SC2034
    container=(apptainer exec --nv --pwd "$PWD" --bind "$(mounts)" "$IMAGE" "${clean[@]}")
    return 0
  fi
  # shellcheck disable=SC2034
  container=("${clean[@]}")
  ! command -v srun >/dev/null || [[ "$(srun --help 2>&1)" == *--container-image* ]] ||
    refuse IMAGE "srun has no --container-image here: Pyxis is not installed" \
      "Build a .sif, for Apptainer, or where only the nodes have Pyxis use plain sbatch"
  step+=(--container-image="$IMAGE" --container-mounts="$(mounts twice)" --container-workdir="$PWD")
  # An image's own setting would override one from outside.
  local set_here asked="${IMAGE_ENV:-}"
  set_here="$(compgen -e | grep -E -x -e "$(known_variables | paste -sd'|')" -e "$into_images" -e "${asked//,/|}" |
    grep -v -x -e IMAGE -e IMAGE_ENV | paste -sd,)" || true
  [[ -z "$set_here" ]] || step+=(--container-env="$set_here")
}

# shellcheck disable=SC2034  # by the batch scripts
use_python() { # sets `python`: the image's, or that of this machine, which then finds the repository's package
  python=python
  [[ -z "${IMAGE:-}" ]] || return 0
  # shellcheck source=scripts/find_python.sh
  source "$root/scripts/find_python.sh"
  python="$(find_python "$root")" ||
    refuse PATH "there is no 'python' on it, and no .venv in $root that you may run" "Run scripts/setup_env.sh, or set IMAGE"
  export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
}

mounts() { # [twice]: prints the folders; twice: also the folder inside the image, which is the same
  local all=("${folders[@]}") given
  IFS=, read -r -a given <<<"${IMAGE_MOUNTS:-}"
  local path
  for path in "${given[@]}"; do all+=("$path"); done
  for path in "${all[@]}"; do
    [[ -z "${1:-}" || "$path" == *:* ]] || path="$path:$path"
    printf '%s\n' "$path"
  done | paste -sd,
}

number_of() { # GPUS: prints 8 for h100:8 and for gpu:8,nvme:1; nothing without a number
  [[ ! "${1#*gpu:}" =~ ^([^:]*:)?([0-9]+)(,|$) ]] || echo "${BASH_REMATCH[2]}"
}

try_writing() { # VARIABLE: refuses a path that cannot be made, before the job has worked for it
  local above="${!1}" probe
  until [[ -d "$above" ]]; do above="$(dirname -- "$above")"; done
  # Not `-w`, which lets root write to any file system.
  probe="$(mktemp -d "$above/.optimus-cc-XXXXXX" 2>/dev/null)" ||
    refuse "$1" "'${!1}' cannot be made: $above takes no new folder" "Give one where you may write"
  rmdir "$probe"
}

use_network() { # NETWORK_INTERFACE names the network; without it NCCL and gloo choose for themselves
  [[ -n "${NETWORK_INTERFACE:-}" ]] || return 0
  [[ "$NETWORK_INTERFACE" =~ ^[A-Za-z0-9][^\ ^=]*$ ]] ||
    refuse NETWORK_INTERFACE "'$NETWORK_INTERFACE' is not a name, and gloo takes no patterns" "Name the interface, as ip link does"
  export NCCL_SOCKET_IFNAME="$NETWORK_INTERFACE" GLOO_SOCKET_IFNAME="$NETWORK_INTERFACE"
}

# A node on which PyTorch sees none of the GPUs that were asked for must not work on its CPUs.
gpus_if_asked_for() {
  [[ -z "${SLURM_GPUS_ON_NODE:-}" ]] || export OPTIMUS_CC_DEVICE="${OPTIMUS_CC_DEVICE:-cuda}"
}

# On a whole node the batch script sees all GPUs, and the step those that were asked for.
processes_of_a_node() { # sets `processes`
  processes="${PROCESSES_PER_NODE:-$(number_of "${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}")}"
  [[ -n "${PROCESSES_PER_NODE:-}${SLURM_GPUS_PER_NODE:-}" || -z "${SLURM_GPUS:-}" ]] ||
    refuse --gpus "nodes may get unequal numbers of them" "Give --gpus-per-node"
  [[ -n "$processes" || -z "${SUBMITTING:-}" ]] ||
    refuse PROCESSES_PER_NODE "neither it nor --gpus-per-node is given" "Give one, the former for nodes without GPUs"
}

# A rank that dies must not fill the working folder with its memory.
ulimit -c 0

# --- resources: the step gets all of the job's. Since Slurm 22.05 srun asks for one CPU a task by default.
own_resources() {
  # Variables of an allocation in which this job was submitted come along; srun would take its step's shape from them.
  local name
  for name in "${!SRUN_@}"; do unset "$name"; done
  export SRUN_CPUS_PER_TASK
  SRUN_CPUS_PER_TASK="$(least_cpus)"
  [[ -n "${SLURM_MEM_PER_CPU:-}${SLURM_MEM_PER_GPU:-}" ]] || step+=(--mem=0)
}

least_cpus() { # prints the fewest CPUs of a node of the job: SLURM_JOB_CPUS_PER_NODE is like 64(x3),32
  tr ',' '\n' <<<"${SLURM_JOB_CPUS_PER_NODE:-1}" | cut -d'(' -f1 | sort -n | head -n 1
}
