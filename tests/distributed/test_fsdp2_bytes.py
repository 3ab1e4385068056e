"""Bytes that leave a host when FSDP2 reduces in few bits, by the kernel's counters: four hosts of one rank, or, with
hybrid sharding, two hosts of two.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from optimus_cc_ext import fsdp2
from optimus_cc_ext.compressors.formats import BLOCK
from tests.distributed.hosts import enter, namespaces, needs_root, sent_bytes
from tests.forked_ranks import run_ranks

pytestmark = [needs_root, pytest.mark.full]

RANKS, LAYERS, WIDTH = 4, 3, 1024
MATRICES, VECTORS = LAYERS * WIDTH**2, LAYERS * WIDTH
ROUNDS = 3
"""Number of steps, whose smallest count is taken: on a busy machine TCP sends segments again."""


class SendsNothing:
    """Reduce-scatter that leaves the output as it is."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(*size, dtype=dtype, device=device)

    def __call__(self, **given: Any) -> None:
        pass


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    with namespaces(RANKS) as names:
        yield names


def _measure(hosts: list[str]) -> dict[str, int]:
    """Return the bytes that leave this rank's host in a step, by dtype and format of the reduction."""
    enter(hosts[int(os.environ["RANK"])])
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for way in ("nothing", "int8", "int4"):
            model = _sharded(dtype)
            if way == "nothing":
                for each in model:
                    each.set_custom_reduce_scatter(SendsNothing())
                    each.set_force_sum_reduction_for_comms(True)
            else:
                fsdp2.compress(model, way)
            found[f"{dtype} {way}"] = _sent_in_a_step(model)
    return found


def _measure_hybrid(hosts: list[str]) -> dict[str, int]:
    """Return the bytes that leave this rank's host in a step of a model that is sharded over the host's two ranks."""
    enter(hosts[int(os.environ["RANK"]) // 2])
    grid = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("replicate", "shard"))
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for way in ("nothing", "int8"):
            model = _sharded(dtype, grid["shard"])
            if way != "nothing":
                fsdp2.compress(model, way, replicas=grid["replicate"])
            found[f"{dtype} {way}"] = _sent_in_a_step(model)
    return found


def _sharded(dtype: torch.dtype, mesh: DeviceMesh | None = None) -> Any:
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    for each in (*model, model):
        fully_shard(each, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
    return model


def _sent_in_a_step(model: nn.Module) -> int:
    rounds = []
    for _ in range(1 + ROUNDS):  # gloo makes its connections on first use, which is not counted
        dist.barrier()
        before = sent_bytes()
        dist.barrier()
        model(torch.randn(2, WIDTH)).sum().backward()
        dist.barrier()
        rounds.append(sent_bytes() - before)
    return min(rounds[1:])


def test_the_exchange_sends_a_quarter_of_a_ring_in_fp32_and_half_of_one_in_bf16(hosts: list[str]) -> None:
    """FSDP2's gathers are in both runs, and cancel out. A block has a scale of two bytes; vectors are sent as they are,
    by gloo's all-reduce.
    """
    sent = run_ranks(RANKS, _measure, hosts, timeout=300)[0]
    others = (RANKS - 1) / RANKS
    for dtype in (torch.float32, torch.bfloat16):
        ring = (MATRICES + VECTORS) * dtype.itemsize * others
        for way, bits in (("int8", 8), ("int4", 4)):
            ours = sent[f"{dtype} {way}"] - sent[f"{dtype} nothing"]
            formula = MATRICES * (bits / 8 + 2 / BLOCK) * others + 2 * VECTORS * dtype.itemsize * others
            print(
                f"{dtype}, {way}: {ours / 1e6:.3f} MB, {ours / ring:.4f} of a ring, {ours / formula:.4f} of the formula"
            )
            assert ours == pytest.approx(formula, rel=0.03)
            assert ours < bits / 8 * {4: 0.27, 2: 0.53}[dtype.itemsize] * ring


def test_hybrid_the_hook_sends_a_quarter_of_a_ring_in_fp32_between_hosts_and_half_of_one_in_bf16(
    hosts: list[str],
) -> None:
    """Each of a host's two ranks sends half of its row to its replica, and gets the other half's sum back."""
    sent = run_ranks(RANKS, _measure_hybrid, hosts, env={"OPTIMUS_CC_NODE": "ranks:2"}, timeout=300)[0]
    for dtype in (torch.float32, torch.bfloat16):
        ring = (MATRICES + VECTORS) * dtype.itemsize
        ours = sent[f"{dtype} int8"] - sent[f"{dtype} nothing"]
        formula = MATRICES * (1 + 2 / BLOCK) + VECTORS * dtype.itemsize
        print(f"{dtype}: {ours / 1e6:.3f} MB, {ours / ring:.4f} of a ring, {ours / formula:.4f} of the formula")
        assert ours == pytest.approx(formula, rel=0.03)
        assert ours < {4: 0.27, 2: 0.53}[dtype.itemsize] * ring
