"""Check of a job's nodes before it trains: torchrun starts it on each of them, as scripts/slurm/preflight.sbatch says.

Every node reports its faults. Then each node exchanges data with one neighbour, all pairs at once, and the layout's
process groups that span nodes reduce. Rank 0 prints a table and writes the JSON that `optimus-cc plan --cluster` reads.
"""

import argparse
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.placement import Placement, placement_line

MEGABYTES = {"cuda": 64, "cpu": 4}
TRIES = 5
LEAST_MEMLOCK = 64 << 20
"""Bytes that a process must be able to lock, because InfiniBand's queue pairs live in locked memory."""


def node_faults(interface: str, on_gpus: bool) -> list[str]:
    """Return a sentence for each fault of this node that would end or slow training."""
    found, node = [], socket.gethostname()
    there = sorted(path.name for path in Path("/sys/class/net").iterdir())
    if interface and interface not in there:
        found.append(f"NETWORK_INTERFACE: {node} has no interface '{interface}'. Give one of {', '.join(there)}.")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if on_gpus and locked != resource.RLIM_INFINITY and locked < LEAST_MEMLOCK:
        found.append(
            f"memlock: {node} lets a process lock {locked >> 10} KB. Raise it for slurmd (LimitMEMLOCK=infinity)."
        )
    if on_gpus and not shutil.which("nvidia-smi"):
        found.append(f"driver: {node} has no nvidia-smi. Install NVIDIA's driver there, or leave the node out.")
    return found


def doctor_says() -> str:
    """Return the failures that `optimus-cc doctor` reports about this node; empty if it passes."""
    program = "from optimus_cc_ext.tools.cli import main; raise SystemExit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    failed = [line.strip() for line in done.stdout.splitlines() if "FAIL" in line]
    return (
        f"doctor: {socket.gethostname()}: {'; '.join(failed) or done.stderr.strip()[-300:]}" if done.returncode else ""
    )


def driver() -> str:
    """Return the version of NVIDIA's driver, or "none"."""
    if not shutil.which("nvidia-smi"):
        return "none"
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True).stdout.split("\n")[0] or "none"


def seconds(transfer: Callable[[], Any], device: torch.device) -> float:
    """Return the median seconds of a transfer, after one transfer that makes connections."""
    times = []
    for _ in range(TRIES + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        transfer()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def exchange(peer: int, nbytes: int, device: torch.device) -> Callable[[], None]:
    """Return a function that sends `nbytes` to rank `peer` and receives as many."""
    out, into = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))

    def transfer() -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, out, peer), dist.P2POp(dist.irecv, into, peer)]):
            work.wait()

    return transfer


def neighbours(node: int, nodes: int, local: int, per_node: int, device: torch.device) -> dict[str, float]:
    """Return the bytes per second, and the latency in seconds, from this rank to its peer on the neighbouring node."""
    peer_node = node ^ 1
    if peer_node >= nodes:  # the last of an odd number of nodes has no neighbour
        return {}
    peer, nbytes = peer_node * per_node + local, MEGABYTES[device.type] << 20
    latency = seconds(exchange(peer, 1, device), device)
    return {"latency": latency, "rate": nbytes / seconds(exchange(peer, nbytes, device), device)}


def groups(placement: Placement, rank: int, device: torch.device) -> dict[str, float]:
    """Return the bytes per second of an all-reduce, as a ring moves them, for each kind of group that spans nodes."""
    found = {}
    for kind in ("data", "pipeline", "tensor"):
        if placement.size(kind) == 1 or placement.stays_inside(kind):
            continue
        for ranks in placement.groups(kind):
            group = dist.new_group(ranks)
            if rank in ranks:
                mine, size = group, len(ranks)
        values = torch.zeros((MEGABYTES[device.type] << 20) // 4, device=device)
        taken = seconds(lambda mine=mine, values=values: dist.all_reduce(values, group=mine), device)
        found[kind] = 2 * (size - 1) / size * values.nbytes / taken
    return found


def report(everyone: list[dict[str, Any]], placement: Placement, cluster: dict[str, Any]) -> list[str]:
    """Return the lines of the table: one for each node, then the groups, then the cluster's rate and latency."""
    lines = [placement_line(placement)]
    per_node = placement.ranks_per_node
    for first in range(0, len(everyone), per_node):
        ranks = everyone[first : first + per_node]
        rate = sum(rank["neighbour"].get("rate", 0.0) for rank in ranks)
        shown = f"{rate / 1e9:.2f} GB/s to its neighbour" if rate else "no neighbour"
        lines.append(f"{ranks[0]['host']}: driver {ranks[0]['driver']}, {shown}")
    for kind in everyone[0]["groups"]:
        slowest = min(everyone, key=lambda rank: rank["groups"][kind])
        lines.append(
            f"{kind}-parallel all-reduce: at least {slowest['groups'][kind] / 1e9:.2f} GB/s ({slowest['host']})"
        )
    lines.append(f"a node sends {cluster['node_rate'] / 1e9:.2f} GB/s, a hop takes {cluster['hop'] * 1e6:.0f} us")
    return lines


def main() -> int:
    """Run the checks on this rank; return 1, on all ranks alike, if a node has a fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("tensor", "pipeline"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--use-tp-pp-dp-mapping", action="store_true")
    parser.add_argument("--interface", default="")
    parser.add_argument("--output", default="preflight.json")
    parser.add_argument("--gpu", default="", help="A100 or H100, if the name of the device does not say which")
    asked = parser.parse_args()
    rank, world, per_node, local = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK")
    )
    on_gpus = torch.cuda.is_available() and os.environ.get("OPTIMUS_CC_DEVICE") != "cpu"
    faults = node_faults(asked.interface, on_gpus)
    if not faults and local == 0 and (said := doctor_says()):
        faults = [said]
    if faults and local > 0:
        # torchrun ends a node's ranks when the first one ends, which has to be the rank that prints the faults
        time.sleep(5)
    if faults:
        if local == 0:
            print("\n".join(f"preflight: error: {fault}" for fault in faults), flush=True)
        return 1
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    placement = Placement(
        tensor=asked.tensor, pipeline=asked.pipeline, data=world // (asked.tensor * asked.pipeline),
        ranks_per_node=per_node, pipeline_before_data=asked.use_tp_pp_dp_mapping,
    )  # fmt: skip
    mine = {
        "host": socket.gethostname(), "driver": driver(), "groups": groups(placement, rank, device),
        "neighbour": neighbours(rank // per_node, world // per_node, local, per_node, device),
    }  # fmt: skip
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, mine)
    if rank == 0:
        rates = [
            sum(one["neighbour"].get("rate", 0.0) for one in everyone[first : first + per_node])
            for first in range(0, world, per_node)
        ]
        if not any(rates):
            print("preflight: one node: nothing crosses a network, so there is nothing to measure", flush=True)
            return 0
        name = torch.cuda.get_device_name(device) if on_gpus else ""
        known = [gpu for gpu in ("A100", "H100") if gpu in (asked.gpu or name)]
        latencies = [one["neighbour"]["latency"] for one in everyone if one["neighbour"]]
        cluster = {
            "gpu": known[0] if known else "H100", "network": "100gbe", "gpus_per_node": per_node,
            "node_rate": min(rate for rate in rates if rate), "hop": statistics.median(latencies),
        }  # fmt: skip
        print("\n".join(f"preflight: {line}" for line in report(everyone, placement, cluster)), flush=True)
        if not known:
            print(f"preflight: {name or 'a CPU'} is planned as an H100; --gpu A100 says otherwise", flush=True)
        Path(asked.output).write_text(json.dumps(cluster, indent=1) + "\n")
        print(f"preflight: optimus-cc plan --cluster {asked.output} reads what was measured", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
