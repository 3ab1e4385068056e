# shellcheck shell=bash
# Settings that all experiments of the paper share; sourced by the files in table2/, figure10/, figure11/ and figure12/.
#
#   scripts/paper/table2/2.5b-cb.sh [--scale paper|tiny] [--dry-run] [further flags]
#
#   --scale paper   the paper's model, layout and schedule: 16 nodes of 8 GPUs; 335M: one node of 8 (default, or SCALE)
#   --scale tiny    the same techniques on a tiny model: 4 processes on one machine, on a CPU too, about a minute
#   --dry-run       print the command and start nothing
#
# Variables of scripts/pretrain_gpt.sh hold: NODE_LIST, or MASTER_ADDR and NODE_RANK, give the nodes; the data are
# DATA_PATH, VOCAB_FILE and MERGE_FILE (data/gpt2_text_document, data/gpt2-vocab.json and data/gpt2-merges.txt in the
# repository by default; DATA_PATH=mock suffices to measure time or memory). Variables that you set override the
# paper's values: PIPELINE_PARALLEL, NODES and so on.
# RESULTS is the folder for each experiment's folder of logs and checkpoints (results/paper, or results/paper-tiny).
set -euo pipefail
paper_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
# shellcheck source=scripts/find_python.sh
source "$paper_root/scripts/find_python.sh"
paper_workspace="$(find_workspace "$paper_root")"

# --- the functions that an experiment's file calls

paper_model=""
paper_kind="" paper_iterations=0 tiny_iterations=0
paper_messages=epilogue
paper_techniques=()
paper_flags=()
# Selective stage compression needs replicas, so 4 processes make 2 stages of 2 replicas.
tiny_stages=2

model() { # 335m, 2.5b or 8.3b
  paper_model="$1"
}

techniques() { # of cb, lep, fe, sc
  paper_techniques=("$@")
}

# Table 2, figure 9, and the checkpoints of tables 3 and 4.
pretraining() { paper_kind=pretraining paper_iterations=230000 tiny_iterations=8; }

# Figure 10: the time of an iteration.
breakdown() { paper_kind=breakdown paper_iterations=10 tiny_iterations=8; }

# Figure 11: are the errors of compression orthogonal to the differences between activations, and 0 on average?
error_statistics() {
  paper_kind=error_statistics paper_iterations=1000 tiny_iterations=12 tiny_stages=4
  paper_messages=all
  paper_flags+=(--compression-error-statistics)
}

# Figure 12: peak memory.
memory() {
  paper_kind=memory paper_iterations=10 tiny_iterations=3 tiny_stages=4
  paper_flags+=(--log-memory-interval 1)
}

# --- running an experiment

_refuse() { # SUBJECT REASON CURE
  printf '%s: error: %s: %s. %s.\n' "$(basename "$0")" "$1" "$2" "$3" >&2
  exit 2
}

_paper_scale() {
  local layers hidden heads
  case "$paper_model" in
    335m) layers=24 hidden=1024 heads=16 ;;
    2.5b) layers=52 hidden=1920 heads=24 ;;
    8.3b) layers=72 hidden=3072 heads=24 ;;
  esac
  export NUM_LAYERS="${NUM_LAYERS:-$layers}" HIDDEN_SIZE="${HIDDEN_SIZE:-$hidden}" NUM_HEADS="${NUM_HEADS:-$heads}"
  export SEQ_LENGTH="${SEQ_LENGTH:-1024}"
  export MICRO_BATCH_SIZE="${MICRO_BATCH_SIZE:-8}" GLOBAL_BATCH_SIZE="${GLOBAL_BATCH_SIZE:-512}"
  export PROCESSES_PER_NODE="${PROCESSES_PER_NODE:-8}"
  if [[ "$paper_model" == 335m ]]; then
    # 335M is the artifact's functionality check, for one machine of 8 GPUs.
    export TENSOR_PARALLEL="${TENSOR_PARALLEL:-2}" PIPELINE_PARALLEL="${PIPELINE_PARALLEL:-2}"
  else
    export TENSOR_PARALLEL="${TENSOR_PARALLEL:-8}" PIPELINE_PARALLEL="${PIPELINE_PARALLEL:-4}"
    [[ -n "${NODE_LIST:-}" ]] || export NODES="${NODES:-16}"
  fi
  export DATA_PATH="${DATA_PATH:-$paper_workspace/data/gpt2_text_document}"
  export VOCAB_FILE="${VOCAB_FILE:-$paper_workspace/data/gpt2-vocab.json}"
  export MERGE_FILE="${MERGE_FILE:-$paper_workspace/data/gpt2-merges.txt}"
  export TRAIN_ITERS="${TRAIN_ITERS:-$paper_iterations}" LR="${LR:-0.00015}"
  compression_rank=16 dp_compression_rank=128
  schedule=(--lr-decay-iters 320000 --eval-interval 100 --eval-iters 10)
}

# This model is as small as every technique allows: its matrices are larger than their factors, its epilogue is shorter
# than the iteration, and the learning rate's warm-up ends within the run.
_tiny_scale() {
  local layers hidden
  case "$paper_model" in
    335m) layers=4 hidden=64 ;;
    2.5b) layers=4 hidden=96 ;;
    8.3b) layers=8 hidden=96 ;;
  esac
  export NUM_LAYERS=$layers HIDDEN_SIZE=$hidden NUM_HEADS=4 SEQ_LENGTH=64
  export MICRO_BATCH_SIZE=2 GLOBAL_BATCH_SIZE=16
  export TENSOR_PARALLEL=1 PIPELINE_PARALLEL=$tiny_stages
  if [[ -z "${SLURM_JOB_ID:-}" ]]; then
    export PROCESSES_PER_NODE=4 NODES=1
    unset NODE_LIST NODE_RANK
  fi
  # The model's shape is given above; MODEL=tiny adds the vocabulary of the made-up tokens.
  export MODEL=tiny DATA_PATH="${DATA_PATH:-mock}"
  export TRAIN_ITERS="${TRAIN_ITERS:-$tiny_iterations}" LR=0.001
  compression_rank=4 dp_compression_rank=16
  schedule=(--lr-decay-iters 320 --eval-interval 4 --eval-iters 1 --num-workers 0)
}

_technique_flags() {
  local technique lazy=(--no-lazy-error-propagation)
  [[ " ${paper_techniques[*]} " != *" lep "* ]] || lazy=(--lazy-error-propagation --residual-across-iterations carry)
  for technique in "${paper_techniques[@]}"; do
    case "$technique" in
      cb)
        flags+=(--compressed-backprop --compressed-backprop-rank "$compression_rank")
        flags+=(--compressed-backprop-messages "$paper_messages" "${lazy[@]}")
        ;;
      lep) ;; # a property of cb
      fe) flags+=(--fused-embedding-sync) ;;
      sc)
        # The first 75 % of 4 stages are 3, of 2 stages both.
        flags+=(--dp-compression --dp-compression-rank "$dp_compression_rank" --dp-compression-warmup 0.0)
        flags+=(--dp-error-feedback --dp-compression-stages $(((3 * PIPELINE_PARALLEL + 3) / 4)))
        ;;
      *) _refuse "$technique" "not a technique" "Give some of cb, lep, fe, sc" ;;
    esac
  done
}

# Weights and Adam's two moments in fp32 take 12 bytes a parameter.
_checkpoint_gigabytes() {
  awk -v l="$NUM_LAYERS" -v h="$HIDDEN_SIZE" 'BEGIN { print 12 * (12 * l * h * h + 50304 * h) / 1e9 }'
}

# Seconds of an iteration are vanilla's, as `optimus-cc plan --cluster paper` predicts them for the paper's layout.
_describe() { # EXPERIMENT: prints its name, nodes, iterations, GPU hours and TB on disk
  local seconds checkpoints=1
  case "$paper_model" in
    335m) seconds=1.73 ;;
    2.5b) seconds=1.69 ;;
    8.3b) seconds=4.02 ;;
  esac
  [[ "$paper_kind" != pretraining ]] || checkpoints=$((TRAIN_ITERS / 10000 + 1))
  awk -v name="$1" -v nodes="${NODES:-1}" -v gpus="$((${NODES:-1} * PROCESSES_PER_NODE))" -v n="$TRAIN_ITERS" -v s="$seconds" \
    -v gb="$(_checkpoint_gigabytes)" -v kept="$checkpoints" \
    'BEGIN { printf "%-26s %5d %10d %10.1f %8.2f\n", name, nodes, n, n * s * gpus / 3600, kept * gb / 1000 }'
}

# Of 230 checkpoints those of every 10,000 iterations stay, and the last; a deleted one takes its state along.
_keep_few_checkpoints() {
  local interval="${SAVE_INTERVAL:-1000}" retained
  [[ "$interval" =~ ^[1-9][0-9]*$ ]] || return 0 # the launcher refuses it
  retained=$(((10000 + interval - 1) / interval * interval))
  flags+=(--save-retain-interval "$retained")
  awk -v gb="$(_checkpoint_gigabytes)" -v n="$((TRAIN_ITERS / retained + 1))" -v every="$retained" \
    'BEGIN { printf "a checkpoint of every %d iterations is kept: %d of about %.0f GB, %.1f TB in all\n", every, n, gb, gb * n / 1000 }' >&2
}

run() { # the experiment's command line
  local scale="${SCALE:-paper}" dry_run=false check=false describe=false experiment folder log command
  local further=() flags=() schedule=() compression_rank dp_compression_rank watched=()
  while [[ $# -gt 0 ]]; do
    case "$1" in
      --scale)
        [[ $# -ge 2 ]] || _refuse --scale "it needs a value" "Give paper or tiny"
        scale="$2"
        shift
        ;;
      --scale=*) scale="${1#*=}" ;;
      --dry-run) dry_run=true ;;
      --check) check=true ;;
      --describe) describe=true ;;
      --help | -h)
        sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$paper_root/scripts/paper/common.sh"
        exit 0
        ;;
      *) further+=("$1") ;;
    esac
    shift
  done
  experiment="$(basename "$(dirname "$0")")/$(basename "$0" .sh)"
  export MODEL="$paper_model"
  case "$scale" in
    paper) _paper_scale ;;
    tiny) _tiny_scale ;;
    *) _refuse --scale "'$scale' is not known" "Give paper or tiny" ;;
  esac
  if $describe; then
    _describe "$experiment"
    return
  fi
  RESULTS="${RESULTS:-$paper_workspace/results/paper$([[ $scale == paper ]] || echo "-$scale")}"
  folder="$RESULTS/$experiment"

  flags=("${schedule[@]}" --lr-decay-style cosine --min-lr 1.0e-5 --lr-warmup-fraction .01)
  flags+=(--weight-decay 1e-2 --clip-grad 1.0 --log-interval 1)
  flags+=(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1)
  _technique_flags
  # Megatron writes an index of the data at the start, so experiments that start together must not share its folder.
  [[ "${DATA_PATH:-mock}" == mock || " ${further[*]}" == *" --data-cache-path"* ]] ||
    flags+=(--data-cache-path "$folder/data-cache")
  if [[ "$paper_kind" == pretraining && "$scale" == paper && " ${further[*]}" != *" --save-retain-interval"* ]]; then
    _keep_few_checkpoints
  fi
  flags+=("${paper_flags[@]}" "${further[@]}")

  if [[ "$paper_kind" == pretraining ]]; then
    export CHECKPOINT_DIR="${CHECKPOINT_DIR:-$folder/checkpoints}"
  else
    # Experiments that measure time or memory train a few iterations, from the start each time.
    export CHECKPOINT_DIR=none
  fi
  if $check; then
    exec "$paper_root/scripts/pretrain_gpt.sh" --check "${flags[@]}"
  fi
  if $dry_run; then
    # --dry-run prints the command without a cluster.
    [[ "${NODES:-1}" == 1 ]] || export MASTER_ADDR="${MASTER_ADDR:-node0}"
    exec "$paper_root/scripts/pretrain_gpt.sh" --dry-run "${flags[@]}"
  fi
  # The check comes before a folder is made: it ends the script if a variable cannot be used.
  command="$("$paper_root/scripts/pretrain_gpt.sh" --dry-run "${flags[@]}" 2>/dev/null)" ||
    exec "$paper_root/scripts/pretrain_gpt.sh" --dry-run "${flags[@]}"

  mkdir -p "$folder"
  log="$folder/log$([[ "${NODES:-1}" == 1 && -z "${NODE_LIST:-}" ]] || echo "-$(uname -n)").txt"
  # A resumed run appends to its log.
  [[ "$paper_kind" == pretraining ]] || : >"$log"
  printf '$ %s\n' "$command" >>"$log"
  if [[ "$paper_kind" == memory ]]; then
    watched=("$(find_python "$paper_root")" "$paper_root/scripts/paper/peak_memory.py")
  fi
  # With exec the cluster's signals reach the training, and its exit status reaches the cluster.
  exec "${watched[@]}" "$paper_root/scripts/pretrain_gpt.sh" "${flags[@]}" > >(tee -a "$log") 2>&1
}
