#!/usr/bin/env bash
# GPT pretraining with Megatron and Optimus-CC, from one process to many nodes.
#
#   [VARIABLE=value ...] scripts/pretrain_gpt.sh [--dry-run | --check] [flags of Megatron and of Optimus-CC ...]
#
# Flags are passed on unchanged; a flag overrides the variable of the same meaning. For example
#
#   MODEL=tiny TRAIN_ITERS=20 PIPELINE_PARALLEL=2 PROCESSES_PER_NODE=4 scripts/pretrain_gpt.sh --optimus-cc balanced
#
# --dry-run prints the exact command, one line that can be pasted, and starts nothing; --check prints nothing, and only
# refuses what a start would refuse. --help prints this text.
#
# model
#   MODEL               tiny, 125m, 335m, 2.5b or 8.3b (125m)
#   NUM_LAYERS  HIDDEN_SIZE  NUM_HEADS  SEQ_LENGTH     sizes that replace the model's own
#   TRAIN_ITERS         iterations (1000)
#   MICRO_BATCH_SIZE    sequences of one forward pass (8; tiny: 2)
#   GLOBAL_BATCH_SIZE   sequences of one iteration, all replicas together (512; tiny: 16)
#   LR                  peak of the learning rate (1.5e-4), decayed by a cosine to --min-lr 1e-5
# data
#   DATA_PATH           prefix of Megatron's indexed dataset, or a blend as Megatron writes it; "mock" for made-up
#                       tokens (mock)
#   TOKENIZER_MODEL     folder of a Hugging Face tokenizer, such as `python -m optimus_cc_ext.tools.data` makes; or
#   VOCAB_FILE  MERGE_FILE                             of GPT-2's tokenizer
# checkpoints
#   CHECKPOINT_DIR      saved to, and resumed from if it holds a checkpoint; "none" to save nothing
#                       (checkpoints/gpt-MODEL-PRESET, in the current folder; without ours, PRESET is vanilla)
#   CONTINUE            yes: go on from a checkpoint of another shape or of other flags of compression
#   SAVE_INTERVAL       iterations between two checkpoints (1000)
# layout; data parallelism uses the ranks that tensor and pipeline parallelism leave
#   TENSOR_PARALLEL     (1)
#   PIPELINE_PARALLEL   (1)
#   PROCESSES_PER_NODE  (the GPUs of this machine; without any, as many as one replica of the model takes)
#   NODES               (the length of NODE_LIST, else 1)
# several nodes: start the same script on each of them, with
#   NODE_LIST           "host1 host2 ...", or with commas, or in Slurm's short form: gives NODES, MASTER_ADDR (the first)
#                       and NODE_RANK (the place of this host's name); or
#   MASTER_ADDR  MASTER_PORT    the first node, and a free port there (6000)
#   NODE_RANK           this node's number from 0; left out, torchrun's rendezvous gives the numbers out
#   RUN_ID              the rendezvous's name, the same on all nodes (optimus-cc; in Slurm job and restart)
#   ALLOW_TENSOR_ACROSS_NODES   yes: tensor-parallel groups may span nodes
# program
#   PROFILER            a command in front of one rank, such as "nsys profile -o trace"
#   PROFILED_RANK       that rank (0)
#   MEGATRON_LM         a Megatron-LM checkout, whose pretrain_gpt.py is run; without it the package's own entry
#
# Python is the one in .venv (scripts/setup_env.sh makes it), else `python` on PATH. Without a GPU, or with
# OPTIMUS_CC_DEVICE=cpu, it trains on the CPU.
set -euo pipefail
# The script stays in the current folder, because paths are the caller's.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
# shellcheck source=scripts/find_python.sh
source "$root/scripts/find_python.sh"
# shellcheck source=scripts/help.sh
source "$root/scripts/help.sh"
# shellcheck source=scripts/other_names.sh
source "$root/scripts/other_names.sh"

refuse() { # VARIABLE REASON CURE
  printf 'pretrain_gpt.sh: error: %s: %s. %s.\n' "$1" "$2" "$3" >&2
  exit 2
}

say() { printf 'pretrain_gpt.sh: %s\n' "$*" >&2; }

whole_number() { # VARIABLE LEAST [MOST]
  local value="${!1}"
  # No number here has ten digits, and bash's arithmetic overflows only at more.
  [[ "$value" =~ ^(0|[1-9][0-9]{0,9})$ ]] || refuse "$1" "'$value' is not a whole number" "Give one, such as $1=$2"
  ((value >= $2)) || refuse "$1" "$value is too small" "Give at least $2"
  [[ -z "${3:-}" ]] || ((value <= $3)) || refuse "$1" "$value is too large" "Give at most $3"
}

# --- the command line: three flags are ours, all others are passed on
dry_run=false check=false
flags=()
for argument in "$@"; do
  case "$argument" in
    --dry-run) dry_run=true ;;
    --check) check=true ;;
    --help | -h)
      print_help "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *) flags+=("$argument") ;;
  esac
done
case "${flags[0]:---}" in
  -*) ;;
  *) refuse "${flags[0]}" "a flag was expected" "The script to run is chosen with MEGATRON_LM=/path/to/checkout" ;;
esac

if read -r wrong right < <(misspelt "$(variables_of "${BASH_SOURCE[0]}")" "$(compgen -e)"); then
  refuse "$wrong" "it is not a variable of this script" "Write $right, or unset $wrong"
fi
if read -r wrong right < <(misspelt $'--dry-run\n--check\n--help' "$(printf '%s\n' "${flags[@]%%=*}")"); then
  refuse "$wrong" "it is not an option of this script" "Write $right"
fi

given() { # FLAG...: succeeds if one of these is among the user's flags
  local flag argument
  for flag in "$@"; do
    for argument in "${flags[@]}"; do
      [[ "$argument" != "$flag" && "$argument" != "$flag="* ]] || return 0
    done
  done
  return 1
}

arguments=()
value_of() { # FLAG: its value on the command line; the last one counts
  local place all=("${arguments[@]}" "${flags[@]}") value=1
  for place in "${!all[@]}"; do
    [[ "${all[place]}" != "$1" ]] || value="${all[place + 1]:-1}"
    [[ "${all[place]}" != "$1="* ]] || value="${all[place]#*=}"
  done
  echo "$value"
}

default() { # FLAG VALUE...: adds the flag unless the user gave it
  given "$1" || arguments+=("$@")
}

# --- model
MODEL="${MODEL:-125m}"
case "$MODEL" in
  tiny) shape=(4 64 4 64 2 16 500) ;;
  125m) shape=(12 768 12 1024 8 512 50256) ;;
  335m) shape=(24 1024 16 1024 8 512 50256) ;;
  2.5b) shape=(52 1920 24 1024 8 512 50256) ;;
  8.3b) shape=(72 3072 24 1024 8 512 50256) ;;
  *) refuse MODEL "'$MODEL' is not known" \
    "Give tiny, 125m, 335m, 2.5b or 8.3b, and NUM_LAYERS, HIDDEN_SIZE, NUM_HEADS for another shape" ;;
esac
NUM_LAYERS="${NUM_LAYERS:-${shape[0]}}"
HIDDEN_SIZE="${HIDDEN_SIZE:-${shape[1]}}"
NUM_HEADS="${NUM_HEADS:-${shape[2]}}"
SEQ_LENGTH="${SEQ_LENGTH:-${shape[3]}}"
MICRO_BATCH_SIZE="${MICRO_BATCH_SIZE:-${shape[4]}}"
GLOBAL_BATCH_SIZE="${GLOBAL_BATCH_SIZE:-${shape[5]}}"
TRAIN_ITERS="${TRAIN_ITERS:-1000}"
for name in NUM_LAYERS HIDDEN_SIZE NUM_HEADS SEQ_LENGTH MICRO_BATCH_SIZE GLOBAL_BATCH_SIZE TRAIN_ITERS; do
  whole_number "$name" 1
done
((HIDDEN_SIZE % NUM_HEADS == 0)) ||
  refuse NUM_HEADS "$NUM_HEADS heads do not divide HIDDEN_SIZE=$HIDDEN_SIZE" "Give a divisor"
LR="${LR:-1.5e-4}"
[[ "$LR" =~ ^([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$ ]] ||
  refuse LR "'$LR' is not a positive number" "Give one, such as LR=1.5e-4"

# --- layout
TENSOR_PARALLEL="${TENSOR_PARALLEL:-1}"
PIPELINE_PARALLEL="${PIPELINE_PARALLEL:-1}"
whole_number TENSOR_PARALLEL 1
whole_number PIPELINE_PARALLEL 1
model_processes=$((TENSOR_PARALLEL * PIPELINE_PARALLEL))

gpus() {
  if [[ "${OPTIMUS_CC_DEVICE:-}" == cpu ]]; then
    echo 0
  elif [[ -n "${CUDA_VISIBLE_DEVICES+set}" ]]; then
    # An empty or negative CUDA_VISIBLE_DEVICES hides all GPUs.
    tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '^[^-]' || true
  elif command -v nvidia-smi >/dev/null; then
    nvidia-smi -L 2>/dev/null </dev/null | grep -c '^GPU' || true
  else
    echo 0
  fi
}
PROCESSES_PER_NODE="${PROCESSES_PER_NODE:-$(gpus)}"
[[ "$PROCESSES_PER_NODE" != 0 ]] || PROCESSES_PER_NODE=$model_processes
whole_number PROCESSES_PER_NODE 1

# --- nodes
NODE_LIST="${NODE_LIST:-}"
asked_nodes="${NODES:-}$NODE_LIST"
if [[ "$NODE_LIST" == *"["* ]]; then # Slurm's short form
  compact="$(tr -s ' \n' ',' <<<"$NODE_LIST")" compact="${compact%,}"
  expanded="$(scontrol show hostnames "$compact" 2>/dev/null)" ||
    refuse NODE_LIST "'$NODE_LIST' is Slurm's short form, and scontrol does not expand it here" \
      "Give what \`scontrol show hostnames '$compact'\` prints where Slurm is"
  NODE_LIST="$expanded"
fi
read -r -a nodes <<<"${NODE_LIST//[,$'\n']/ }"
for name in "${nodes[@]}"; do
  [[ "$name" =~ ^[A-Za-z0-9._-]+$ ]] ||
    refuse NODE_LIST "'$name' is not the name of a host" "Give names alone; PROCESSES_PER_NODE is for all nodes"
done
twice="$(printf '%s\n' "${nodes[@]}" | sort | uniq -d | head -n 1)"
[[ -z "$twice" ]] || refuse NODE_LIST "it names '$twice' more than once" "Give each node once"
NODES="${NODES:-${#nodes[@]}}"
[[ "$NODES" != 0 || ${#nodes[@]} -ne 0 ]] || NODES=1
whole_number NODES 1
if [[ ${#nodes[@]} -gt 0 ]]; then
  ((NODES == ${#nodes[@]})) ||
    refuse NODES "it is $NODES, but NODE_LIST names ${#nodes[@]}" "Leave one of the two out"
  MASTER_ADDR="${MASTER_ADDR:-${nodes[0]}}"
  if [[ -z "${NODE_RANK:-}" && ${#nodes[@]} -gt 1 ]]; then
    here="$(uname -n)"
    for index in "${!nodes[@]}"; do
      [[ "${nodes[index]}" != "$here" && "${nodes[index]%%.*}" != "${here%%.*}" ]] || NODE_RANK="${NODE_RANK:-$index}"
    done
    # --dry-run shows the command on any host.
    [[ -n "${NODE_RANK:-}" || "$dry_run" == true ]] ||
      refuse NODE_LIST "this host, $here, is not in it" "Add it, or set NODE_RANK"
  fi
fi
MASTER_PORT="${MASTER_PORT:-6000}"
whole_number MASTER_PORT 1 65535
((NODES > 1)) || NODE_RANK="${NODE_RANK:-0}"
check_other_names "$asked_nodes"
if [[ -n "${PROFILED_RANK:-}" ]]; then whole_number PROFILED_RANK 0 $((NODES * PROCESSES_PER_NODE - 1)); fi
if ((NODES == 1)); then
  [[ "${NODE_RANK:-0}" == 0 ]] || refuse NODE_RANK "it is '$NODE_RANK', but there is one node" "Set NODES or NODE_LIST"
  # The rendezvous has a free port of this machine, so that several runs can share the machine.
  rendezvous=(--standalone)
else
  [[ -n "${MASTER_ADDR:-}" ]] ||
    refuse MASTER_ADDR "it is not set, and there are $NODES nodes" "Give the first node's name, or NODE_LIST"
  rendezvous=(--nnodes "$NODES")
  if [[ -n "${NODE_RANK:-}" ]]; then
    whole_number NODE_RANK 0 $((NODES - 1))
    rendezvous+=(--node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
  else
    rendezvous+=(--rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv-id "${RUN_ID:-optimus-cc}")
  fi
fi

if ! given --tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size; then
  processes=$((NODES * PROCESSES_PER_NODE))
  ((processes % model_processes == 0)) ||
    refuse PROCESSES_PER_NODE \
      "$NODES x $PROCESSES_PER_NODE processes cannot hold replicas of $TENSOR_PARALLEL x $PIPELINE_PARALLEL each" \
      "Make it, or NODES, a multiple; or change TENSOR_PARALLEL and PIPELINE_PARALLEL"
  ((NODES == 1 || PROCESSES_PER_NODE % TENSOR_PARALLEL == 0)) || [[ "${ALLOW_TENSOR_ACROSS_NODES:-}" == yes ]] ||
    refuse TENSOR_PARALLEL \
      "groups of $TENSOR_PARALLEL ranks cross nodes of $PROCESSES_PER_NODE, and every layer would wait for the network" \
      "Give a divisor of PROCESSES_PER_NODE, or ALLOW_TENSOR_ACROSS_NODES=yes"
  replicas=$((processes / model_processes))
  given --micro-batch-size --global-batch-size || ((GLOBAL_BATCH_SIZE % (MICRO_BATCH_SIZE * replicas) == 0)) ||
    refuse GLOBAL_BATCH_SIZE \
      "$GLOBAL_BATCH_SIZE is not a multiple of $replicas replicas x MICRO_BATCH_SIZE=$MICRO_BATCH_SIZE" \
      "Give a multiple of $((replicas * MICRO_BATCH_SIZE))"
fi

# --- program
program=(-m optimus_cc_ext)
if [[ -n "${MEGATRON_LM:-}" ]]; then
  [[ -f "$MEGATRON_LM/pretrain_gpt.py" ]] ||
    refuse MEGATRON_LM "there is no pretrain_gpt.py in '$MEGATRON_LM'" \
      "Give a Megatron-LM checkout, or unset it for the package's own entry"
  program+=("$MEGATRON_LM/pretrain_gpt.py")
fi
# A job in an image has its Python in there, so a check outside needs none.
if ! python="$(find_python "$root")"; then
  { [[ -n "${IMAGE:-}" ]] && { "$check" || "$dry_run"; }; } ||
    refuse PATH "there is no 'python' on it, and no .venv in $root that you may run" "Run scripts/setup_env.sh"
  python=python
fi
home="$root" python_there="$python"
if [[ -n "${IN_IMAGE:-}" ]]; then # a dry run shows the command that the image's own launcher makes
  home=/opt/optimus-cc python_there=python PYTHONPATH=""
  program=(-m optimus_cc_ext "${MEGATRON_LM:-/opt/megatron-lm}/pretrain_gpt.py")
fi

# --- flags
default --tensor-model-parallel-size "$TENSOR_PARALLEL"
default --pipeline-model-parallel-size "$PIPELINE_PARALLEL"
default --num-layers "$NUM_LAYERS"
default --hidden-size "$HIDDEN_SIZE"
default --num-attention-heads "$NUM_HEADS"
default --seq-length "$SEQ_LENGTH"
default --max-position-embeddings "$SEQ_LENGTH"
default --micro-batch-size "$MICRO_BATCH_SIZE"
default --global-batch-size "$GLOBAL_BATCH_SIZE"
given --train-samples || default --train-iters "$TRAIN_ITERS"
default --lr "$LR"
default --min-lr 1.0e-5
default --lr-decay-style cosine
given --lr-warmup-iters --lr-warmup-samples || default --lr-warmup-fraction .01
default --weight-decay 1e-2
default --clip-grad 1.0
default --log-interval 1
default --eval-interval 100
default --eval-iters 10

missing=()
needed() { # VARIABLE FILE
  [[ -e "$2" ]] || missing+=("$1" "$2")
}

DATA_PATH="${DATA_PATH:-mock}"
if ! given --mock-data --data-path --data-args-path --train-data-path --per-split-data-args-path; then
  if [[ "$DATA_PATH" == mock ]]; then
    say "made-up tokens are trained on (DATA_PATH=mock)"
    arguments+=(--mock-data)
    given --tokenizer-type || arguments+=(--tokenizer-type NullTokenizer --vocab-size "${shape[6]}")
  else
    read -r -a prefixes <<<"$DATA_PATH"
    for prefix in "${prefixes[@]}"; do
      # A blend of datasets has weights between the prefixes.
      [[ "$prefix" =~ ^[0-9.]+$ ]] || needed DATA_PATH "$prefix.idx"
    done
    [[ ${#prefixes[@]} == 1 || ! -e "$DATA_PATH.idx" ]] ||
      refuse DATA_PATH "'$DATA_PATH' has a space in it, and is taken for a blend" "Give a link without a space"
    arguments+=(--data-path "${prefixes[@]}")
    default --split 949,50,1
  fi
fi
if [[ "$DATA_PATH" != mock ]] && ! given --tokenizer-type; then
  if [[ -n "${TOKENIZER_MODEL:-}" ]]; then
    needed TOKENIZER_MODEL "$TOKENIZER_MODEL"
    arguments+=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER_MODEL")
  elif [[ -n "${VOCAB_FILE:-}" && -n "${MERGE_FILE:-}" ]]; then
    needed VOCAB_FILE "$VOCAB_FILE"
    needed MERGE_FILE "$MERGE_FILE"
    arguments+=(--tokenizer-type GPT2BPETokenizer --vocab-file "$VOCAB_FILE" --merge-file "$MERGE_FILE")
  else
    refuse TOKENIZER_MODEL "DATA_PATH is set, but no tokenizer" \
      "Give it, or VOCAB_FILE and MERGE_FILE, or --tokenizer-type with its own flags"
  fi
fi

# Two runs to be compared have a folder each, and a run with another preset does not start anew in silence.
preset=vanilla
if given --optimus-cc; then
  preset="$(value_of --optimus-cc)"
  [[ "$preset" != -* && "$preset" != 1 ]] || preset=paper
elif printf '%s\n' "${flags[@]}" | grep -qE -e "$compressing"; then
  preset=compressed
fi
if [[ -z "${CHECKPOINT_DIR:-}" ]]; then
  CHECKPOINT_DIR="$PWD/checkpoints/gpt-$MODEL-$preset"
  if [[ ! -f "$CHECKPOINT_DIR/latest_checkpointed_iteration.txt" ]]; then
    for other in "$PWD/checkpoints/gpt-$MODEL"{,-vanilla,-paper,-balanced,-compressed}; do
      [[ ! -f "$other/latest_checkpointed_iteration.txt" ]] ||
        refuse CHECKPOINT_DIR "it is not set, its default '$CHECKPOINT_DIR' holds no checkpoint, and '$other' does" \
          "CHECKPOINT_DIR=$other CONTINUE=yes goes on from it, CHECKPOINT_DIR=$CHECKPOINT_DIR starts anew"
    done
  fi
fi
if [[ "$CHECKPOINT_DIR" != none ]]; then
  SAVE_INTERVAL="${SAVE_INTERVAL:-1000}"
  whole_number SAVE_INTERVAL 1
  [[ ! -e "$CHECKPOINT_DIR" || -d "$CHECKPOINT_DIR" ]] ||
    refuse CHECKPOINT_DIR "'$CHECKPOINT_DIR' is not a folder" "Give a folder, or 'none' to save nothing"
  # The folder to save to is also the one to load from: Megatron goes on from a checkpoint in it, or else starts afresh.
  default --save "$CHECKPOINT_DIR"
  default --load "$CHECKPOINT_DIR"
  default --save-interval "$SAVE_INTERVAL"
fi
folder="$(value_of --save)"
if ! $dry_run && [[ "$folder" != 1 ]]; then
  above="$folder"
  until [[ -d "$above" ]]; do above="$(dirname -- "$above")"; done
  # Not `-w`: a file system that is full or read-only lets root ask.
  probe="$(mktemp -d "$above/.optimus-cc-XXXXXX" 2>/dev/null)" ||
    refuse CHECKPOINT_DIR "'$folder' cannot be made or written: $above takes no new folder" \
      "Give a folder where you may write, or 'none' to save nothing"
  rmdir "$probe"
fi

# A run that goes on has the model's shape and the compression of the one that it continues.
settings() {
  local word lines=()
  for word in "${arguments[@]/=/ }" "${flags[@]/=/ }"; do
    if [[ "$word" == --* ]]; then lines+=("$word"); else lines[-1]+=" $word"; fi
  done
  printf '%s\n' "${lines[@]}" | grep -E -e "$compressing" \
    -e '^--(num-layers|hidden-size|num-attention-heads|ffn-hidden-size|num-experts) ' | sort
}
record="$folder/trained-with.txt"
if ! $dry_run && [[ -f "$folder/latest_checkpointed_iteration.txt" && -f "$record" && "${CONTINUE:-}" != yes ]]; then
  differs="$(diff <(settings) "$record" | sed -n 's/^< /now /p; s/^> /then /p' | paste -sd';')" || true
  [[ -z "$differs" ]] ||
    refuse CHECKPOINT_DIR "the checkpoint in '$folder' was trained with other flags: $differs" \
      "Give another folder, or CONTINUE=yes to go on from it"
fi

# Each rank is bound to the processors and memory next to its GPU, if that works here; training needs no binding.
binding=()
bind_to_nodes() {
  local why=""
  if ! command -v numactl >/dev/null; then
    why="numactl is not on PATH"
  elif ! numactl --cpunodebind=0 --membind=0 true 2>/dev/null; then
    why="numactl fails here"
  elif [[ "$("$python" -m torch.distributed.run --help 2>/dev/null)" != *--numa-binding* ]]; then
    why="this torch has no --numa-binding"
  fi
  if [[ -z "$why" ]]; then binding=(--numa-binding=node); else say "ranks are not bound to their GPUs' processors: $why"; fi
}
if ! $check && ! $dry_run && [[ "$(gpus)" != 0 ]] && ! given --numa-binding; then bind_to_nodes; fi

command=(env "PYTHONPATH=$home${PYTHONPATH:+:$PYTHONPATH}")
# Megatron's overlap of communication relies on the order in which kernels were launched.
command+=("CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}")
command+=("$python_there" -m torch.distributed.run --nproc-per-node "$PROCESSES_PER_NODE" "${rendezvous[@]}" "${binding[@]}")
if [[ -n "${PROFILER:-}" ]]; then
  program=(--no-python "$home/scripts/profiled.sh" "$python_there" -u "${program[@]}")
fi
command+=("${program[@]}" "${arguments[@]}" "${flags[@]}")

# The placement of ranks on nodes decides which traffic leaves a node.
if ! $check && ((NODES * PROCESSES_PER_NODE > 1)); then
  mapping=()
  ! given --use-tp-pp-dp-mapping || mapping=(--use-tp-pp-dp-mapping)
  say "$(PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" "$python" -m optimus_cc_ext.tools.placement \
    --tensor "$(value_of --tensor-model-parallel-size)" --pipeline "$(value_of --pipeline-model-parallel-size)" \
    --context "$(value_of --context-parallel-size)" --world-size $((NODES * PROCESSES_PER_NODE)) \
    --ranks-per-node "$PROCESSES_PER_NODE" "${mapping[@]}" 2>/dev/null || echo "placement not known on this machine")"
fi

if $dry_run; then
  [[ ${#missing[@]} -eq 0 ]] || say "${missing[0]}: ${missing[1]} does not exist on this machine"
  printf -v line ' %q' "${command[@]}"
  printf '%s\n' "${line# }"
  exit 0
fi
[[ ${#missing[@]} -eq 0 ]] ||
  refuse "${missing[0]}" "${missing[1]} does not exist" "Give an existing one (DATA_PATH is without .bin and .idx)"
! $check || exit 0
if [[ "$CHECKPOINT_DIR" != none && -f "$CHECKPOINT_DIR/latest_checkpointed_iteration.txt" ]]; then
  say "resuming after iteration $(<"$CHECKPOINT_DIR/latest_checkpointed_iteration.txt") from $CHECKPOINT_DIR"
fi
if [[ "$folder" != 1 ]]; then
  mkdir -p "$folder"
  settings >"$record.$$"
  mv "$record.$$" "$record"
fi
# With exec signals reach torchrun itself.
exec "${command[@]}"
