# shellcheck shell=bash
# Sourced by the batch scripts that train, after common.sh: starts one on_node.sh per node, which runs a launcher of
# scripts/. A job that is preempted, requeued or near its time limit goes back into the queue, and so does one whose
# rank died, if it saved a checkpoint since it started.
# shellcheck disable=SC2154  # job, root, scripts, step and container are common.sh's and the batch script's

prepare() { # LAUNCHER FLAGS...: all checks of a script of scripts/ that takes --check and --dry-run, and its flags
  launcher="$1"
  shift
  [[ -n "${SLURM_JOB_NUM_NODES:-}" ]] || refuse "$job.sbatch" "this is not a job of Slurm's" "Use scripts/slurm/submit.sh"
  processes_of_a_node
  [[ "${RESTARTS:=3}" =~ ^[0-9]+$ ]] || refuse RESTARTS "'$RESTARTS' is not a whole number" "Give one, such as 3"
  use_network
  gpus_if_asked_for
  export NODE_CACHE="${NODE_CACHE:-/tmp}"
  use_image "$@"
  _launch --check "$@"
  # The flag --save wins over CHECKPOINT_DIR, and the launcher knows both.
  local words
  eval "words=($(_launch --dry-run "$@" 2>/dev/null))"
  folder="$(printf '%s\n' "${words[@]}" | sed -n '/^--save$/{n;p}; s/^--save=//p' | tail -n 1)"
  [[ -z "$folder" ]] || _refuse_if_owned
  [[ -z "${SUBMITTING:-}" || "${DOCTOR:-}" == no ]] || _ask_doctor "${words[@]}"
  checked

  export MASTER_ADDR="${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}"
  # The port follows from the job's number: jobs that share a node do not meet, nor do two starts of one job.
  export MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"
  export RUN_ID="${RUN_ID:-optimus-cc-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}}"
  own_resources
  step+=(--nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 --label)
  mark="$PWD/.interrupted-$SLURM_JOB_ID"
}

on_all_nodes() { # FLAGS...: the launcher's run; a dry run prints the step and the line that starts a node's ranks
  start "${step[@]}" "${container[@]}" "$scripts/slurm/on_node.sh" "$mark" "$scripts/$launcher" "$@" --exit-signal-handler ||
    return
  [[ -z "${DRY_RUN:-}" ]] || IN_IMAGE="${IMAGE:-}" _launch --dry-run "$@"
}

train() { # LAUNCHER FLAGS...
  prepare "$@"
  shift
  if [[ -n "${DRY_RUN:-}" ]]; then
    on_all_nodes "$@"
    return
  fi
  if [[ "$NODE_CACHE" == /tmp && "$(scontrol show config 2>/dev/null)" == *job_container/tmpfs* ]]; then
    echo "$job.sbatch: /tmp is this job's own here: kernels are compiled once for each job, unless NODE_CACHE names another folder"
  fi
  [[ -z "$folder" ]] || _claim
  rm -f "$mark"
  started="$PWD/.started-$SLURM_JOB_ID"
  touch "$started"
  trap 'rm -f "$started" "$mark"' EXIT

  echo "$job.sbatch: start ${SLURM_RESTART_COUNT:-0} of job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, master $MASTER_ADDR:$MASTER_PORT"
  status=0
  on_all_nodes "$@" || status=$?

  if [[ -e "$mark" && "$status" == 0 ]]; then
    rm -f "$mark"
    _requeue "saved; back into the queue"
  elif [[ "$status" != 0 ]]; then
    # The mark proves no stop here: if one node fails, srun ends the others with the same signal.
    rm -f "$mark"
    _restart_after_failure
  fi
  exit "$status"
}

_launch() { # CHECK-OR-DRY-RUN FLAGS...: runs the launcher's check on this machine
  NODES="$SLURM_JOB_NUM_NODES" MASTER_ADDR="${MASTER_ADDR:-later}" PROCESSES_PER_NODE="$processes" \
    "$root/scripts/$launcher" "$@" --exit-signal-handler
}

# Where the package can be imported, Megatron's own parser and ours judge the line that would start each node's ranks.
_ask_doctor() { # LINE...
  local python said
  local -x PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
  # shellcheck source=scripts/find_python.sh
  source "$root/scripts/find_python.sh"
  python="$(find_python "$root" 2>/dev/null)" || return 0
  "$python" -P -c 'import optimus_cc_ext.tools.cli, megatron.core' 2>/dev/null || return 0
  said="$("$python" -P -c 'from optimus_cc_ext.tools.cli import main; raise SystemExit(main())' doctor -- "$@" 2>&1)" ||
    refuse -- "doctor says: $(sed -n 's/^FAIL *//p' <<<"$said" | tr -s ' ' | paste -sd';')" "Mend the flags, or give DOCTOR=no"
}

# A folder of checkpoints belongs to one job at a time: two would go on from each other's weights.
_refuse_if_owned() {
  local other="" state
  [[ ! -f "$folder/owner-job.txt" ]] || read -r other <"$folder/owner-job.txt" || true
  [[ -n "$other" && "$other" != "$SLURM_JOB_ID" ]] || return 0
  # A job that waits for the owner claims the folder when it starts.
  [[ ! ",${DEPENDENCY:-}," =~ [:,](singleton|$other)[,:+?] ]] || return 0
  state="$(squeue -h -j "$other" -o %T 2>/dev/null)" || state=""
  [[ -z "$state" ]] ||
    refuse CHECKPOINT_DIR "job $other, which is $state, trains in '$folder'" \
      "Give another folder, or --dependency=afterany:$other to go on when it has ended"
}

_claim() {
  local owner="$folder/owner-job.txt" other old
  mkdir -p "$folder"
  until (set -o noclobber && echo "$SLURM_JOB_ID" >"$owner") 2>/dev/null; do
    read -r other <"$owner" || other=""
    [[ "$other" != "$SLURM_JOB_ID" ]] || return 0
    DEPENDENCY="" _refuse_if_owned
    # Only one job can move the file away. If it has changed meanwhile, another job's claim is put back.
    old="$owner.$SLURM_JOB_ID"
    mv -T "$owner" "$old" 2>/dev/null || continue
    [[ "$(<"$old")" == "$other" ]] || ln "$old" "$owner" 2>/dev/null || true
    rm -f "$old"
  done
}

_requeue() { # WHY
  # Slurm takes a job that ended by itself for finished, unless it is already requeued (then it is PENDING) or
  # cancelled; such a job is left alone.
  if [[ "$(scontrol --oneliner show job "$SLURM_JOB_ID")" == *" JobState=RUNNING "* ]]; then
    echo "$job.sbatch: $1"
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60 # until Slurm ends this script, lest the job be over before it is requeued
  fi
}

# A broken GPU or a lost link ends a rank, and with it the job. A checkpoint saved since the start is progress, so the
# next start goes on from there; without a new checkpoint it would end the same way again.
_restart_after_failure() {
  local failures count
  if [[ -z "$folder" || ! "$folder/latest_checkpointed_iteration.txt" -nt "$started" ]]; then
    echo "$job.sbatch: a rank failed (exit status $status) before a checkpoint was saved in this start: not started again"
    return 0
  fi
  # Slurm's own count includes preemptions and time limits.
  failures="$folder/failures-$SLURM_JOB_ID.txt"
  count="$(grep -c . "$failures" 2>/dev/null)" || count=0
  if ((count >= RESTARTS)); then
    echo "$job.sbatch: a rank failed (exit status $status), for the ${count}th time after RESTARTS=$RESTARTS: not started again"
    return 0
  fi
  echo "$(date -u +%FT%TZ) start ${SLURM_RESTART_COUNT:-0} ended with $status after iteration $(<"$folder/latest_checkpointed_iteration.txt")" >>"$failures"
  _requeue "a rank failed (exit status $status); restart $((count + 1)) of $RESTARTS goes on after iteration $(<"$folder/latest_checkpointed_iteration.txt")"
}
