#!/usr/bin/env bash
# Runs COMMAND as one node's share of a Slurm step, and turns Slurm's signals into Megatron's "save, then end".
#   on_node.sh MARK COMMAND [ARGUMENTS...]          (pretrain.sbatch starts one on each node)
# MARK is a file that node 0 makes when it was told to stop, so that the batch script can tell a stop from the end.
# Exit status: COMMAND's.
#
# Slurm sends SIGTERM on preemption, requeueing and cancelling, SIGUSR1 some minutes ahead of the time limit. With
# proctrack/cgroup only this script receives it, with other plugins every process of the step. Two things follow:
# - Only the ranks may act on it. torchrun would hand SIGTERM on and kill the ranks 30 seconds later, a checkpoint
#   half written; so it and everything else is started with both signals ignored, and Megatron's own handler
#   (--exit-signal-handler) makes the exception in the ranks and their data loaders.
# - The ranks have to be sent SIGTERM from here. Those that have it from Slurm, too, only set a flag twice.
set -euo pipefail
mark="$1"
shift
export NODES="${SLURM_NNODES:-1}" NODE_RANK="${SLURM_NODEID:-0}"
# This variable marks this node's ranks among all processes of the machine.
export OPTIMUS_CC_STEP="${SLURM_JOB_ID:-0}.${SLURM_STEP_ID:-0}.$NODE_RANK.$$"
# torchrun's option --signals-to-handle gets a list without SIGTERM. An older torchrun must be spared the signal.
export PET_SIGNALS_TO_HANDLE=SIGINT,SIGQUIT

# Kernels that Triton and Inductor compile stay on the node, in a folder that only this user can write, for the next
# start. On a home folder that all nodes share every rank would write the same files at once.
cache="${NODE_CACHE:-/tmp}/optimus-cc-$(id -u)"
# Another job may have just made the folder. mkdir then fails, which is an error only if the folder is still missing.
reason="$(mkdir -m 700 "$cache" 2>&1)" || [[ -d "$cache" ]] || echo "$reason" >&2
if [[ ! -d "$cache" || ! -O "$cache" ]]; then
  echo "on_node.sh: error: NODE_CACHE: '$cache' on $(uname -n) is not yours to write to. Set NODE_CACHE to a folder of the nodes where you may write." >&2
  exit 2
fi
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$cache/triton}" TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$cache/inductor}"
# What a killed rank leaves, such as the sockets of multiprocessing, is removed at the job's next start. A socket's path
# has at most 107 characters.
if [[ -n "${SLURM_JOB_ID:-}" ]] && ((${#cache} < 60)); then
  export TMPDIR="$cache/tmp-$SLURM_JOB_ID"
  rm -rf "$TMPDIR"
  mkdir -m 700 "$TMPDIR"
  trap 'rm -rf "$TMPDIR"' EXIT
fi
# A rank that dies must not fill the working folder with its memory.
ulimit -c 0

told=" "
stop_ranks() { # sends SIGTERM once to each rank that has its handler
  local environment process caught
  while IFS= read -r environment; do
    process="${environment%/environ}"
    caught="$(sed -n 's/^SigCgt:[[:space:]]*//p' "$process/status" 2>/dev/null)" || true
    # torchrun gives LOCAL_RANK to the ranks, and has none itself. Bit 14 is SIGTERM: without a handler the signal would be
    # lost, or end what a rank has spawned, such as the server of a save; at the end of Python it would end the rank.
    if [[ "$told" != *" $process "* ]] && ((0x${caught:-0} & 1 << 14)) && grep -qzsx 'LOCAL_RANK=[0-9]*' "$environment"; then
      told+="$process "
      kill -TERM "${process#/proc/}" 2>/dev/null || true
    fi
  done < <(grep -lzsx "OPTIMUS_CC_STEP=$OPTIMUS_CC_STEP" /proc/[0-9]*/environ)
}

# Processes started from here inherit ignored signals; the trap set afterwards is this shell's alone.
signalled=""
trap '' TERM USR1
"$@" &
command_pid=$!
trap 'signalled=yes; [[ "$NODE_RANK" != 0 ]] || touch "$mark"' TERM USR1

# A signal ends `wait` before the command has ended. It may come before the ranks have their handlers, as with a time
# limit of two minutes; so they are looked at every few seconds.
status=0 second=0
wait "$command_pid" || status=$?
while [[ -n "$signalled" && -n "$(jobs -pr)" ]]; do
  ((second++ % ${REPEAT_SECONDS:-5} != 0)) || stop_ranks
  sleep 1 || true
done
if [[ -n "$signalled" ]]; then
  status=0
  wait "$command_pid" || status=$?
fi
exit "$status"
