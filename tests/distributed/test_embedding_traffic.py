"""Bytes that fused embedding synchronisation really sends, by the kernel's counters: 8 ranks on 8 hosts of their own.

The hosts are network namespaces on one switch, which takes root. P = 2 stages, D = 4 replicas.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from optimus_cc_ext.techniques.fused_embedding_sync import FusedEmbeddingSync, fused_bytes, unfused_bytes
from tests.forked_ranks import run_ranks

D = 4
V = 8 << 20
"""Bytes of the embedding's gradient: so many that those of TCP, ARP and barriers do not matter."""

ROUNDS = 4
"""Number of rounds, whose smallest count is taken: on a busy machine acknowledgements come late, and TCP sends segments
again.
"""

INTERFACE = "eth0"


def _why_not() -> str | None:
    if os.geteuid() != 0:
        return "network namespaces take root"
    if shutil.which("ip") is None:
        return "network namespaces take iproute2's `ip`"
    return None


pytestmark = pytest.mark.skipif(_why_not() is not None, reason=_why_not() or "")


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    """Make 2 D namespaces, each with one interface, on a switch in a namespace of its own; yield their names."""
    prefix = f"occ{os.getpid()}"
    switch, names = f"{prefix}-switch", [f"{prefix}-{host}" for host in range(2 * D)]
    try:
        _ip(f"netns add {switch}")
        _ip(f"-n {switch} link add switch type bridge")
        _ip(f"-n {switch} link set switch up")
        for host, name in enumerate(names):
            _ip(f"netns add {name}")
            _ip(f"-n {switch} link add port{host} type veth peer name {INTERFACE} netns {name}")
            _ip(f"-n {switch} link set port{host} master switch up")
            _ip(f"-n {name} address add 10.77.0.{host + 1}/24 dev {INTERFACE}")
            _ip(f"-n {name} link set {INTERFACE} up")
        yield names
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(line: str) -> None:
    done = subprocess.run(["ip", *line.split()], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no network namespaces here: ip {line}: {done.stderr.strip()}")


def _synchronise(hosts: list[str], sharded: bool) -> tuple[int, int, bool]:
    """Return the bytes that a rank's interface sent unfused and fused, and whether all sums were right."""
    rank = int(os.environ["RANK"])
    # The rendezvous stays in the test's network namespace, because its socket was opened there.
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2 * D, is_master=False,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    with Path("/var/run/netns", hosts[rank]).open() as host:
        os.setns(host.fileno(), os.CLONE_NEWNET)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2 * D, timeout=timedelta(seconds=60))
    stage, replica = divmod(rank, D)
    replicas = [dist.new_group([s * D + d for d in range(D)]) for s in range(2)][stage]
    pair = [dist.new_group([d, D + d]) for d in range(D)][replica]
    union = dist.new_group(list(range(2 * D)))

    technique = FusedEmbeddingSync()
    technique.join(pair if sharded else union, sharded=sharded)

    def gradient(nbytes: int) -> torch.Tensor:
        return torch.full((nbytes // 4,), 2.0**rank)

    def shard_of(whole: torch.Tensor) -> torch.Tensor:
        return whole.view(D, -1)[replica]

    def unfused(whole: torch.Tensor) -> None:
        if sharded:
            dist.reduce_scatter_tensor(shard_of(whole), whole, group=replicas)
        else:
            dist.all_reduce(whole, group=replicas)
        dist.all_reduce(whole, group=pair)

    def fused(whole: torch.Tensor) -> None:
        if sharded:
            dist.reduce_scatter_tensor(shard_of(whole), whole, group=replicas)
            technique.reduce(shard_of(whole))
        else:
            technique.reduce(whole)

    sent, right = [], True
    for synchronise in (unfused, fused):
        synchronise(gradient(V // 64))  # connections are made on first use
        rounds = []
        for _ in range(ROUNDS):
            whole = gradient(V)
            dist.barrier()
            before = _sent_bytes()
            synchronise(whole)
            dist.barrier()
            rounds.append(_sent_bytes() - before)
            right &= bool((shard_of(whole) == 2.0 ** (2 * D) - 1).all())
        sent.append(min(rounds))
    return sent[0], sent[1], right


def _sent_bytes() -> int:
    """Return the bytes sent by this namespace's interface since it was made: the ninth number after its name."""
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if f"{INTERFACE}:" in line]
    return int(line.split(":")[1].split()[8])


@pytest.mark.parametrize("sharded", [False, True], ids=["whole gradients", "distributed optimizer"])
def test_fused_embedding_sync_sends_what_the_arithmetic_says(hosts, sharded):
    # The sharded case has the same bytes, because gloo's reduce-scatter moves as much as its all-reduce: 1.5 V instead
    # of 0.75 V.
    expected = pytest.approx((unfused_bytes(V, D) / V, fused_bytes(V, D) / V), rel=0.02)
    for unfused, fused, right in run_ranks(2 * D, _synchronise, hosts, sharded, timeout=120):
        print(f"kernel's counters, V = {V / 2**20:.0f} MiB: {unfused / V:.3f} V -> {fused / V:.3f} V")
        assert right
        assert (unfused / V, fused / V) == expected
