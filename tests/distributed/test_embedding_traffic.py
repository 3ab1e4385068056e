"""Bytes that fused embedding synchronisation really sends, by the kernel's counters: 8 ranks on 8 hosts of their own.

The hosts are network namespaces on one switch, which takes root. P = 2 stages, D = 4 replicas.
"""

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import EMBEDDING
from optimus_cc_ext.techniques.fused_embedding_sync import FusedEmbeddingSync
from tests.distributed.hosts import enter, namespaces, needs_root, sent_bytes
from tests.embedding_bytes import embedding_bytes
from tests.forked_ranks import run_ranks

D = 4
V = 8 << 20
"""Bytes of the embedding's gradient: so many that the bytes of TCP, ARP and barriers do not matter."""

ROUNDS = 4
"""Number of rounds, whose smallest count is taken: on a busy machine acknowledgements come late, and TCP sends segments
again.
"""

pytestmark = needs_root


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    """Make a network of 2 D hosts, one for each rank."""
    with namespaces(2 * D) as names:
        yield names


def _synchronise(hosts: list[str], sharded: bool) -> tuple[int, int, bool]:
    """Return the bytes that a rank's interface sent unfused and fused, and whether all sums were right."""
    rank = enter(hosts[int(os.environ["RANK"])])
    stage, replica = divmod(rank, D)
    replicas = [dist.new_group([s * D + d for d in range(D)]) for s in range(2)][stage]
    pair = [dist.new_group([d, D + d]) for d in range(D)][replica]
    union = dist.new_group(list(range(2 * D)))

    technique = FusedEmbeddingSync(OptimusConfig(fused_embedding_sync=True), EMBEDDING)
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
        synchronise(gradient(V // 64))  # gloo makes its connections on first use, which is not counted
        rounds = []
        for _ in range(ROUNDS):
            whole = gradient(V)
            dist.barrier()
            before = sent_bytes()
            synchronise(whole)
            dist.barrier()
            rounds.append(sent_bytes() - before)
            right &= bool((shard_of(whole) == 2.0 ** (2 * D) - 1).all())
        sent.append(min(rounds))
    return sent[0], sent[1], right


@pytest.mark.ci
@pytest.mark.parametrize(
    "sharded", [pytest.param(False, marks=pytest.mark.full), True], ids=["whole gradients", "distributed optimizer"]
)
def test_fused_embedding_sync_sends_what_the_arithmetic_says(hosts, sharded):
    # V is the embedding's size. Sharded or not, the bytes are equal, because gloo's reduce-scatter moves as much as its
    # all-reduce: 1.5 V instead of 0.75 V.
    shares = (embedding_bytes(V // 4, D, fused=format) / V for format in (None, "dense"))
    expected = pytest.approx(tuple(shares), rel=0.02)
    for unfused, fused, right in run_ranks(2 * D, _synchronise, hosts, sharded, timeout=120):
        print(f"kernel's counters, V = {V / 2**20:.0f} MiB: {unfused / V:.3f} V -> {fused / V:.3f} V")
        assert right
        assert (unfused / V, fused / V) == expected
