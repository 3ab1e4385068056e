"""Hosts of a test: network namespaces on one switch, which ranks enter and whose interfaces the kernel counts for."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

__all__ = ["enter", "namespaces", "needs_root", "sent_bytes"]

INTERFACE = "eth0"


def _why_not() -> str | None:
    if os.geteuid() != 0:
        return "network namespaces take root"
    if shutil.which("ip") is None:
        return "network namespaces take iproute2's `ip`"
    return None


needs_root = pytest.mark.skipif(_why_not() is not None, reason=_why_not() or "")


@contextmanager
def namespaces(count: int) -> Iterator[list[str]]:
    """Make `count` namespaces, each with one interface, on a switch in a namespace of its own; yield their names."""
    prefix = f"occ{os.getpid()}"
    switch, names = f"{prefix}-switch", [f"{prefix}-{host}" for host in range(count)]
    try:
        _ip(f"netns add {switch}")
        _ip(f"-n {switch} link add switch type bridge")
        _ip(f"-n {switch} link set switch up")
        for host, name in enumerate(names):
            _ip(f"netns add {name}")
            _ip(f"-n {switch} link add port{host} type veth peer name {INTERFACE} netns {name}")
            _ip(f"-n {switch} link set port{host} master switch up")
            _ip(f"-n {name} address add 10.77.0.{host + 1}/24 dev {INTERFACE}")
            for device in (INTERFACE, "lo"):
                _ip(f"-n {name} link set {device} up")
        yield names
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(line: str) -> None:
    done = subprocess.run(["ip", *line.split()], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no network namespaces here: ip {line}: {done.stderr.strip()}")


def enter(host: str) -> int:
    """Let this rank enter a host, and join the default group from there; return the rank."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # The rendezvous stays where the test is: a socket remains in the namespace in which it was opened.
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), ranks, is_master=False,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    with Path("/var/run/netns", host).open() as namespace:
        os.setns(namespace.fileno(), os.CLONE_NEWNET)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    return rank


def sent_bytes() -> int:
    """Return the bytes sent by this namespace's interface since it was made: the ninth number after its name."""
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if f"{INTERFACE}:" in line]
    return int(line.split(":")[1].split()[8])
