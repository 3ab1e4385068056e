#!/usr/bin/env bash
# Starts a Slurm of its own on this machine, with three nodes that are apart: each has a network with the interface
# ib0, a host name, a /tmp and processes of its own. Two of 16 CPUs pretend to have 4 and 2 GPUs, the third has none.
#   with_slurm.sh FOLDER
# FOLDER gets the configuration, key, state and logs; the nodes see the folder above it at its place. The file
# FOLDER/up appears when all nodes are idle. Until then, and afterwards, this script waits for its end; daemons, jobs,
# networks and cgroups end with it. The commands of a user run in the network and host name of the login node:
#   nsenter --target "$(<FOLDER/login.pid)" --net --uts sinfo
# Needs root, cgroups of version 1, and Debian's packages slurm-wlm, munge and iproute2. Exit status: 3 when Slurm did
# not start.
set -euo pipefail
folder="$(realpath "$1")" role="${2:-}" names="${3:-n$$}"
shared="$(dirname "$folder")" repository="$(realpath "$(dirname "$0")/../..")"
freezer=/sys/fs/cgroup/freezer
export SLURM_CONF="$folder/slurm.conf"

configure() {
  mkdir -p "$folder/state" "$folder/dev"
  chmod 0755 "$folder"
  (umask 077 && head -c 1024 /dev/urandom >"$folder/munge.key")
  local number
  for number in 0 1 2 3; do mknod "$folder/dev/nvidia$number" c 1 3; done
  printf '127.0.0.1 localhost\n10.77.0.1 login\n' >"$folder/hosts"
  for number in 1 2 3; do echo "10.77.0.1$number $names-$number" >>"$folder/hosts"; done
  printf 'CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nCgroupAutomount=no\n' >"$folder/cgroup.conf"
  cat >"$folder/gres.conf" <<END
NodeName=$names-1 Name=gpu Type=h100 File=$folder/dev/nvidia[0-3]
NodeName=$names-2 Name=gpu Type=h100 File=$folder/dev/nvidia[0-1]
END
  # cred_expire is also the number of seconds that a requeued job waits before it starts again; Slurm's default is 120.
  cat >"$folder/slurm.conf" <<END
ClusterName=tests
SlurmctldHost=login(10.77.0.1)
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
ProctrackType=proctrack/cgroup
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$folder/completed.txt
GresTypes=gpu
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
NodeName=$names-1 NodeAddr=10.77.0.11 CPUs=16 RealMemory=65536 Gres=gpu:h100:4
NodeName=$names-2 NodeAddr=10.77.0.12 CPUs=16 RealMemory=65536 Gres=gpu:h100:2
NodeName=$names-3 NodeAddr=10.77.0.13 CPUs=4 RealMemory=8192
PartitionName=main Nodes=$names-[1-2] Default=YES PriorityTier=1 GraceTime=120
PartitionName=urgent Nodes=$names-[1-2] PriorityTier=2 PreemptMode=OFF
PartitionName=short Nodes=$names-[1-2] MaxTime=02:00:00 PriorityTier=2 PreemptMode=OFF
PartitionName=cpu Nodes=$names-3
END
}

start() { # NAME COMMAND...
  local name="$1"
  shift
  "$@" >"$folder/$name.out" 2>&1 </dev/null &
}

apart=(unshare --uts --mount --pid --fork --kill-child --mount-proc)

login_node() { # starts the daemons and nodes, then waits for ever
  hostname login
  ip link set lo up
  ip link add switch type bridge
  ip addr add 10.77.0.1/24 dev switch
  ip link set switch up
  # With --force, because munged otherwise refuses a socket in a folder below a private one.
  start munged munged --foreground --force --socket="$folder/munge.socket" --key-file="$folder/munge.key" \
    --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" --seed-file="$folder/munged.seed"
  until [[ -S "$folder/munge.socket" ]]; do sleep 0.1; done
  start slurmctld slurmctld -D
  # The names of networks are seen by these processes alone.
  mkdir -p /run/netns
  mount -t tmpfs networks /run/netns
  local number node
  for number in 1 2 3; do
    node="$names-$number"
    ip netns add "$node"
    ip link add "port$number" type veth peer name ib0 netns "$node"
    ip link set "port$number" master switch up
    ip -n "$node" addr add "10.77.0.1$number/24" dev ib0
    ip -n "$node" link set ib0 up
    ip -n "$node" link set lo up
    start "slurmd-$node" ip netns exec "$node" "${apart[@]}" "$0" "$folder" node "$node"
  done
  until [[ "$(sinfo --noheader --partition=main,cpu --states=idle --format=%n 2>/dev/null | wc -l)" == 3 ]]; do sleep 0.2; done
  touch "$folder/up"
  wait
}

node() { # NAME: makes this process a node, and then its slurmd
  hostname "$1"
  mount --bind "$folder/hosts" /etc/hosts
  # `ip netns exec` mounts /sys anew.
  mount -t tmpfs cgroups /sys/fs/cgroup
  mkdir "$freezer"
  mount -t cgroup -o freezer freezer "$freezer"
  local own="$folder/tmp-$1" path
  mkdir -m 1777 "$own"
  for path in "$shared" "$repository"; do
    [[ "$path" == /tmp/* ]] || continue
    mkdir -p "$own${path#/tmp}"
    mount --rbind "$path" "$own${path#/tmp}"
  done
  mount --rbind "$own" /tmp
  exec slurmd -D -N "$1"
}

# shellcheck disable=SC2329  # by the trap
stop() {
  kill -KILL "$apart_pid" 2>/dev/null || true
  # Slurm leaves its cgroups, which can be removed once their last process has gone.
  for _ in {1..50}; do
    compgen -G "$freezer/slurm_$names-*" >/dev/null || return 0
    find "$freezer/slurm_$names"-* -depth -type d -exec rmdir {} + 2>/dev/null || sleep 0.1
  done
}

case "$role" in
  login) login_node ;;
  node) node "$names" ;;
  *)
    configure
    "${apart[@]}" --net "$0" "$folder" login "$names" &
    apart_pid=$!
    trap stop EXIT
    trap 'exit 143' TERM INT HUP
    echo "$apart_pid" >"$folder/login.pid"
    for _ in {1..300}; do
      [[ ! -e "$folder/up" ]] || break
      sleep 0.1
    done
    if [[ ! -e "$folder/up" ]]; then
      echo "with_slurm.sh: Slurm did not start within 30 seconds; its last words:" >&2
      tail -n 5 "$folder"/*.log "$folder"/*.out >&2
      exit 3
    fi
    wait
    ;;
esac
