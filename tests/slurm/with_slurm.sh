#!/usr/bin/env bash
# Runs a command inside a Slurm of its own: munged, slurmctld and two slurmd on this machine.
#   with_slurm.sh FOLDER COMMAND [ARGUMENTS...]
# FOLDER holds this Slurm's configuration, key, state and logs. Ports, socket and key are its own, so a Slurm of the
# system is neither seen nor disturbed. When the command ends, or this script is told to end, so do jobs and daemons.
# Needs root, and Debian's packages slurm-wlm and munge. Exit status: the command's; 3 when Slurm did not start.
set -euo pipefail
mkdir -p "$1"
folder="$(cd "$1" && pwd -P)"
shift
nodes=(n1 n2)
host="$(hostname -s)"

free_ports() { # COUNT: ports that nobody listens on; neither the kernel nor pretrain.sbatch gives these out
  local port count=0
  while ((count < $1)); do
    port=$((10000 + RANDOM % 10000))
    if ! (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
      echo "$port"
      count=$((count + 1))
    fi
  done
}
mapfile -t ports < <(free_ports $((1 + ${#nodes[@]})))

# proctrack/linuxproc, like cgroups and unlike pgid, finds torchrun's ranks, which have sessions of their own.
# cred_expire is also the number of seconds that a requeued job waits before it starts again; Slurm's default is 120.
cat >"$folder/slurm.conf" <<END
ClusterName=tests
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket,cred_expire=10
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmctldPidFile=$folder/slurmctld.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdSpoolDir=$folder/spool-%n
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmdLogFile=$folder/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$folder/completed.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,requeue_delay=0,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=120
MinJobAge=3600
ReturnToService=2
SlurmdTimeout=60
MpiDefault=none
SlurmdParameters=config_overrides
TaskProlog=$folder/task_prolog.sh
END
# Both nodes are this machine: ranks tell them apart by Slurm's number of the node.
cat >"$folder/task_prolog.sh" <<'END'
#!/bin/sh
echo "export OPTIMUS_CC_NODE=node$SLURM_NODEID"
END
chmod +x "$folder/task_prolog.sh"
number=0
for node in "${nodes[@]}"; do
  number=$((number + 1))
  echo "NodeName=$node NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[number]} CPUs=4 RealMemory=65536 State=UNKNOWN" >>"$folder/slurm.conf"
done
{
  echo "PartitionName=main Nodes=n[1-${#nodes[@]}] Default=YES State=UP PriorityTier=1 GraceTime=120"
  echo "PartitionName=urgent Nodes=n[1-${#nodes[@]}] State=UP PriorityTier=2 PreemptMode=OFF"
} >>"$folder/slurm.conf"
export SLURM_CONF="$folder/slurm.conf"

daemons=()
start() { # NAME COMMAND...
  local name="$1"
  shift
  "$@" >"$folder/$name.out" 2>&1 </dev/null &
  daemons+=($!)
}

# The daemons, steps and jobs of this Slurm are found by their environment, which has the path of its configuration.
# shellcheck disable=SC2329  # by stop
kill_all() {
  local environment
  while IFS= read -r environment; do
    environment="${environment%/environ}"
    kill -KILL "${environment#/proc/}" 2>/dev/null || true
  done < <(grep -lzsx "SLURM_CONF=$SLURM_CONF" /proc/[0-9]*/environ)
}

command_pid=""
# shellcheck disable=SC2329  # by the trap
stop() {
  trap '' TERM INT HUP
  [[ -z "$command_pid" ]] || kill -TERM "$command_pid" 2>/dev/null || true
  scancel --quiet --user=root 2>/dev/null || true
  ((${#daemons[@]} == 0)) || kill -TERM "${daemons[@]}" 2>/dev/null || true
  for _ in {1..30}; do
    [[ -n "$(jobs -pr)" ]] || break
    sleep 0.1
  done
  kill_all
}
trap stop EXIT
trap 'exit 143' TERM
trap 'exit 130' INT HUP

mkdir -p "$folder/state"
chmod 0755 "$folder"
(umask 077 && head -c 1024 /dev/urandom >"$folder/munge.key")
# With --force, because munged otherwise refuses a socket in a folder below a private one.
start munged munged --foreground --force --socket="$folder/munge.socket" --key-file="$folder/munge.key" \
  --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" --seed-file="$folder/munged.seed"
for _ in {1..100}; do
  [[ ! -S "$folder/munge.socket" ]] || break
  sleep 0.1
done
start slurmctld slurmctld -D -f "$SLURM_CONF"
for node in "${nodes[@]}"; do start "slurmd-$node" slurmd -D -N "$node" -f "$SLURM_CONF"; done

ready=""
for _ in {1..150}; do
  if [[ "$(sinfo --noheader --partition=main --states=idle --format=%D 2>/dev/null)" == "${#nodes[@]}" ]]; then
    ready=yes
    break
  fi
  sleep 0.2
done
if [[ -z "$ready" ]]; then
  echo "with_slurm.sh: Slurm did not start within 30 seconds; its last words:" >&2
  tail -n 5 "$folder"/*.log "$folder"/*.out >&2
  exit 3
fi

status=0
"$@" &
command_pid=$!
wait "$command_pid" || status=$?
command_pid=""
exit "$status"
