"""Check of a job's nodes before it trains: torchrun starts it on each of them, as scripts/slurm/preflight.sbatch says.

Every node reports its faults. Then each node exchanges data with one neighbour, all pairs at once, and the layout's
process groups that span nodes reduce, and exchange all to all. NCCL's own lines say which transport it took. Rank 0
prints a table and writes the JSON that `optimus-cc plan --cluster` reads.
"""

import argparse
import contextlib
import fcntl
import json
import os
import re
import resource
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.placement import Placement, placement_line

MEGABYTES = {"cuda": 64, "cpu": 4}
TRIES = 5
DOCTORS_SECONDS = 240
SIOCGIFADDR = 0x8915
LEAST_MEMLOCK = 64 << 20
"""Bytes that a process must be able to lock, because InfiniBand's queue pairs live in locked memory."""


def works_on_gpus(asked: str) -> bool:
    """Return whether GPUs are checked: those that were asked for, even if this node has none."""
    return asked == "cuda" or (asked != "cpu" and torch.cuda.is_available())


def addressed(names: Iterable[str]) -> list[str]:
    """Return those interfaces that have an address: gloo and NCCL cannot use another."""
    six = Path("/proc/net/if_inet6")
    found = {line.split()[-1] for line in six.read_text().splitlines()} if six.exists() else set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for name in names:
            with contextlib.suppress(OSError):
                fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()))
                found.add(name)
    return sorted(found)


def node_faults(interface: str, on_gpus: bool) -> list[str]:
    """Return a sentence for each fault of this node that would end or slow training."""
    found, node = [], socket.gethostname()
    there = sorted(path.name for path in Path("/sys/class/net").iterdir())
    with_address = addressed(there)
    for name in filter(None, interface.split(",")):
        if name not in with_address:
            what = f"'{name}' on {node} has no address" if name in there else f"{node} has no interface '{name}'"
            found.append(f"NETWORK_INTERFACE: {what}. Give one of {', '.join(with_address)}.")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if on_gpus and locked != resource.RLIM_INFINITY and locked < LEAST_MEMLOCK:
        found.append(
            f"memlock: {node} lets a process lock {locked >> 10} KB. Raise it for slurmd (LimitMEMLOCK=infinity)."
        )
    if on_gpus and not shutil.which("nvidia-smi"):
        found.append(f"driver: {node} has no nvidia-smi. Install NVIDIA's driver there, or leave the node out.")
    elif on_gpus and not torch.cuda.is_available():
        found.append(
            f"GPUs: PyTorch sees none on {node}. Compare nvidia-smi there with torch.version.cuda, "
            f"{torch.version.cuda or 'which is a build without CUDA'}."
        )
    return found


def active_ports(folder: Path = Path("/sys/class/infiniband")) -> dict[str, str]:
    """Return the ports of InfiniBand and RoCE that are up, with layer and rate, such as "InfiniBand 400 Gb/sec"."""
    ports = {}
    for port in sorted(folder.glob("*/ports/*")):
        state, layer, rate = ((port / name).read_text().strip() for name in ("state", "link_layer", "rate"))
        if "ACTIVE" in state:
            ports[f"{port.parent.parent.name}:{port.name}"] = f"{layer} {rate.partition(' (')[0]}"
    return ports


def transport(lines: Iterable[str]) -> str:
    """Return what carries NCCL's messages between nodes by its own lines (NCCL_DEBUG=INFO): IB, Socket or a plugin's
    name; empty if they do not say.

    Older versions look at sockets before they take IB, so a network that is only looked at counts least.
    """
    looked_at = chosen = ""
    for line in lines:
        if match := re.search(r"NCCL INFO NET/(\w+) ?: Using ", line):
            looked_at = match[1]
        elif match := re.search(r"NCCL INFO (?:Using network (\S.*?)\s*$|Channel .* via NET/([^/\s]+))", line):
            chosen = match[1] or match[2]
    return chosen or looked_at


def slow_path(node: str, took: str, ports: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """Return a sentence if NCCL took sockets although a faster port is up, and nobody asked it to; else nothing."""
    asked = environment.get("NCCL_IB_DISABLE") == "1" or environment.get("NCCL_NET", "").lower() == "socket"
    if took != "Socket" or not ports or asked:
        return ""
    up = ", ".join(f"{port} ({what})" for port, what in ports.items())
    return (
        f"network: NCCL took sockets on {node}, where {up} is up. Look for NET/IB in NCCL_DEBUG=INFO's lines (is "
        "libibverbs in the image? does NCCL_IB_HCA name the port?), or set NCCL_IB_DISABLE=1 if sockets are meant."
    )


def network_name(took: str, ports: Mapping[str, str], interface: str) -> str:
    """Return a name for the measured network, such as "IB over 8 x InfiniBand 400 Gb/sec"."""
    if took == "Socket" or not ports:
        return f"{took or 'gloo'}{f' over {interface}' if interface else ''}"
    return f"{took} over " + ", ".join(
        f"{list(ports.values()).count(what)} x {what}" for what in sorted({*ports.values()})
    )


def doctor_says() -> str:
    """Return the failures that `optimus-cc doctor` reports about this node; empty if it passes."""
    program = "from optimus_cc_ext.tools.cli import main; raise SystemExit(main(['doctor']))"
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DOCTORS_SECONDS)
    except subprocess.TimeoutExpired:
        return (
            f"doctor: {socket.gethostname()}: it did not end within {DOCTORS_SECONDS} s. Is the Python environment on "
            "a slow file system, or the node busy?"
        )
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


def groups(placement: Placement, rank: int, device: torch.device) -> dict[str, tuple[float, float]]:
    """Return the bytes per second of an all-reduce, as a ring moves them, and of those that an all-to-all sends out of
    this rank's node, for each kind of group that spans nodes.
    """
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
        values = values[: values.numel() // size * size]
        into, here = torch.empty_like(values), rank // placement.ranks_per_node
        away = sum(other // placement.ranks_per_node != here for other in dist.get_process_group_ranks(mine))
        exchanged = seconds(
            lambda mine=mine, values=values, into=into: dist.all_to_all_single(into, values, group=mine), device
        )
        found[kind] = 2 * (size - 1) / size * values.nbytes / taken, away / size * values.nbytes / exchanged
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
        for place, name in enumerate(("all-reduce", "all-to-all, out of a node")):
            slowest = min(everyone, key=lambda rank: rank["groups"][kind][place])
            rate = slowest["groups"][kind][place]
            lines.append(f"{kind}-parallel {name}: at least {rate / 1e9:.2f} GB/s a rank ({slowest['host']})")
    lines.append(f"network: {cluster['network']}")
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
    on_gpus = works_on_gpus(os.environ.get("OPTIMUS_CC_DEVICE", ""))
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
    said = Path(tempfile.gettempdir(), f"preflight-nccl-{os.getpid()}.txt")
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(said)}
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
        "took": transport(said.read_text(errors="replace").splitlines()) if said.exists() else "",
    }  # fmt: skip
    said.unlink(missing_ok=True)
    ports = active_ports()
    mine["slow"] = slow_path(mine["host"], mine["took"], ports, os.environ) if local == 0 else ""
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
        rate = min(rate for rate in rates if rate)
        cluster = {
            "gpu": known[0] if known else "H100", "network": network_name(mine["took"], ports, asked.interface),
            "gpus_per_node": per_node, "node_rate": rate, "hop": statistics.median(latencies),
        }  # fmt: skip
        if exchanged := [other for one in everyone for _, other in one["groups"].values() if other]:
            cluster["all_to_all_share"] = min(1.0, per_node * min(exchanged) / rate)
        print("\n".join(f"preflight: {line}" for line in report(everyone, placement, cluster)), flush=True)
        if not known:
            print(f"preflight: {name or 'a CPU'} is planned as an H100; --gpu A100 says otherwise", flush=True)
        Path(asked.output).write_text(json.dumps(cluster, indent=1) + "\n")
        print(f"preflight: optimus-cc plan --cluster {asked.output} reads what was measured", flush=True)
    slow = [one["slow"] for one in everyone if one["slow"]]
    if rank == 0:
        print("\n".join(f"preflight: error: {fault}" for fault in slow), end="\n" * bool(slow), flush=True)
    dist.destroy_process_group()
    return int(bool(slow))


if __name__ == "__main__":
    sys.exit(main())
