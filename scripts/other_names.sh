# shellcheck shell=bash
# Sourced by pretrain_gpt.sh. Names of nodes, ranks and sizes in the scripts and clusters of others: none may be ignored
# without a word, because a node that is not told of the others trains alone, into the same checkpoints.

# Our variable, /the flag that overrides it, or a flag alone; then names of others for the same.
# shellcheck disable=SC2034  # by check_other_names
other_names='NODES NNODES NNODE NUM_NODES N_NODES NODE_NUM NODE_COUNT NUM_HOSTS NUM_MACHINES MLP_WORKER_NUM PET_NNODES
NODES SKYPILOT_NUM_NODES AZUREML_NODE_COUNT
NODE_RANK SKYPILOT_NODE_RANK
NODE_RANK RANK GROUP_RANK HOST_RANK MACHINE_RANK NODE_INDEX MLP_ROLE_INDEX PET_NODE_RANK
NODE_LIST HOSTFILE HOST_FILE HOSTS HOST_LIST HOSTLIST NODELIST NODES_LIST
MASTER_ADDR MASTER_IP MASTER_HOST MASTER_NODE HEAD_NODE HEAD_NODE_IP MAIN_PROCESS_IP MLP_WORKER_0_HOST PET_MASTER_ADDR
MASTER_PORT MAIN_PROCESS_PORT MLP_WORKER_0_PORT PET_MASTER_PORT
PROCESSES_PER_NODE GPUS_PER_NODE GPU_PER_NODE NUM_GPUS_PER_NODE NGPUS_PER_NODE NPROC_PER_NODE PROC_PER_NODE
PROCESSES_PER_NODE NUM_GPUS N_GPUS NGPUS NGPU GPU_NUM GPUS_NUM GPU_COUNT GPUS DEVICES_PER_NODE LOCAL_WORLD_SIZE
PROCESSES_PER_NODE MLP_WORKER_GPU PET_NPROC_PER_NODE NUM_TRAINERS SKYPILOT_NUM_GPUS_PER_NODE SM_NUM_GPUS
TENSOR_PARALLEL/--tensor-model-parallel-size TP TP_SIZE TENSOR_PARALLEL_SIZE TENSOR_MODEL_PARALLEL_SIZE MP MP_SIZE
PIPELINE_PARALLEL/--pipeline-model-parallel-size PP PP_SIZE PIPELINE_PARALLEL_SIZE PIPELINE_MODEL_PARALLEL_SIZE
--context-parallel-size CP CP_SIZE CONTEXT_PARALLEL CONTEXT_PARALLEL_SIZE
--expert-model-parallel-size EP EP_SIZE EXPERT_PARALLEL EXPERT_PARALLEL_SIZE EXPERT_MODEL_PARALLEL_SIZE
--expert-tensor-parallel-size ETP ETP_SIZE EXPERT_TENSOR_PARALLEL_SIZE
--num-layers-per-virtual-pipeline-stage VP VPP VP_SIZE NUM_LAYERS_PER_VIRTUAL_PIPELINE_STAGE
MICRO_BATCH_SIZE/--micro-batch-size MBS MICRO_BATCH MICRO_BS BATCH_SIZE_PER_GPU
GLOBAL_BATCH_SIZE/--global-batch-size GBS GLOBAL_BATCH GLOBAL_BS BATCH_SIZE TRAIN_BATCH_SIZE
MODEL MODEL_SIZE
NUM_LAYERS/--num-layers NLAYERS N_LAYERS N_LAYER NUM_LAYER LAYERS NUM_HIDDEN_LAYERS
HIDDEN_SIZE/--hidden-size HIDDEN HIDDEN_DIM D_MODEL
NUM_HEADS/--num-attention-heads NHEADS N_HEADS N_HEAD NUM_ATTN_HEADS NUM_ATTENTION_HEADS
SEQ_LENGTH/--seq-length SEQ_LEN SEQLEN SEQUENCE_LENGTH MAX_SEQ_LEN MAX_SEQ_LENGTH
--ffn-hidden-size FFN_HIDDEN_SIZE INTERMEDIATE_SIZE
--num-query-groups NUM_QUERY_GROUPS NUM_KEY_VALUE_HEADS NUM_KV_HEADS
--num-experts NUM_EXPERTS
TRAIN_ITERS/--train-iters MAX_STEPS NUM_STEPS TRAIN_STEPS TRAIN_ITERATIONS
--train-samples TRAIN_SAMPLES
LR/--lr LEARNING_RATE
CHECKPOINT_DIR/--save CHECKPOINT_PATH CKPT_PATH CKPT_DIR SAVE_PATH SAVE_DIR
DATA_PATH/--data-path DATASET_PATH
TOKENIZER_MODEL/--tokenizer-model TOKENIZER_PATH'

check_other_names() { # ASKED: NODES and NODE_LIST as they were given
  local asked="$1" ours names name value world=$((NODES * PROCESSES_PER_NODE))
  for name in SLURM_STEP_NUM_TASKS OMPI_COMM_WORLD_SIZE PMI_SIZE MV2_COMM_WORLD_SIZE; do
    [[ ! "${!name:-}" =~ ^[0-9]+$ || "${!name:-}" -le $NODES ]] ||
      refuse "$name" "this script was started ${!name} times, but NODES is $NODES, and each start is a whole node's" \
        "Start it once on each node, and set NODES"
  done
  [[ -z "${LOCAL_RANK:-}" ]] ||
    refuse LOCAL_RANK "a launcher of ranks started this script, which starts torchrun itself" \
      "Start it once on each node, or unset LOCAL_RANK"
  for name in SLURM_NNODES PBS_NUM_NODES WORLD_SIZE; do
    [[ -n "$asked" || "${!name:-1}" == 1 ]] ||
      refuse "$name" "it is '${!name}', but NODES is not set" "Set NODES (1: this machine alone) and PROCESSES_PER_NODE"
  done
  for name in WORLD_SIZE NUM_PROCESSES; do
    [[ "${!name:-$world}" == "$world" || "${!name}" == "$NODES" ]] ||
      refuse "$name" "it is '${!name}', but $NODES x $PROCESSES_PER_NODE processes are started" \
        "Set NODES and PROCESSES_PER_NODE, or unset $name"
  done
  case "${asked:-${MASTER_ADDR:-localhost}}" in
    "$asked" | localhost | 127.* | ::1 | "$(uname -n)" | "$(uname -n | cut -d. -f1)") ;;
    *) refuse MASTER_ADDR "it is '$MASTER_ADDR', but NODES is not set" "Set NODES (1: this machine alone)" ;;
  esac
  while read -r ours names; do
    value="$(layout_value "$ours")" ours="${ours%%/*}"
    for name in $names; do
      [[ -z "${!name:-}" || "${!name}" == "$value" ]] ||
        refuse "$name" "it is '${!name}', but $ours is ${value:-not set}" "Give $ours=${!name}, or unset $name"
    done
  done <<<"$other_names"
  value=$((world / $(layout_value --context-parallel-size) / $(layout_value TENSOR_PARALLEL/--tensor-model-parallel-size) / \
    $(layout_value PIPELINE_PARALLEL/--pipeline-model-parallel-size)))
  for name in DP DP_SIZE DATA_PARALLEL DATA_PARALLEL_SIZE; do
    [[ "${!name:-$value}" == "$value" ]] ||
      refuse "$name" "it is '${!name}', but the layout leaves $value replicas" "Change the layout, or unset $name"
  done
}

layout_value() { # VARIABLE, VARIABLE/FLAG or FLAG: what holds here
  local flag="${1#*/}" variable="${1%%/*}"
  if [[ "$flag" == -* ]] && given "$flag"; then
    value_of "$flag"
  elif [[ "$variable" != -* ]]; then
    echo "${!variable:-}"
  elif [[ "$variable" == *-parallel-size ]]; then
    echo 1
  fi
}
