"""Law: both ends agree. Ranks with different settings are told so at the start, and nothing hangs."""

import os

import pytest
import torch
import torch.distributed as dist

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.errors import RanksDisagree
from optimus_cc_ext.resolve import Layout
from optimus_cc_ext.session import Session
from optimus_cc_ext.techniques.grid import Grid, RankPlace
from tests.forked_ranks import run_ranks

LAYOUT = Layout(stages=2, data_parallel=1, tied_embeddings=True)


def _place(configs) -> str:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    session = Session(configs[rank])
    grid = Grid(
        place=RankPlace(rank=rank, stage=rank, tensor_rank=0), stages=2, data_parallel=1,
        pipeline_group=dist.group.WORLD,
    )  # fmt: skip
    try:
        return session.place(grid, LAYOUT) or "agreed"
    except RanksDisagree as error:
        return str(error)


@pytest.mark.parametrize(
    "other",
    [
        OptimusConfig(compressed_backprop=True, compressed_backprop_rank=8),
        OptimusConfig(compressed_backprop=True, compression_seed=7),
        OptimusConfig(),
    ],
    ids=["another rank", "another seed", "everything off"],
)
def test_different_settings_are_named_on_every_rank(other):
    configs = [OptimusConfig(compressed_backprop=True), other]
    for rank, message in enumerate(run_ranks(2, _place, configs, timeout=60)):
        assert f"rank {rank} and rank {1 - rank} run with different settings" in message
        assert "same flags" in message


CB = OptimusConfig(compressed_backprop=True)


def _place_with(config, replace) -> str | list[bool]:
    """What `place` says, with `replace(rank)` of what a machine is like; and whether kernels are used after it."""
    from optimus_cc_ext.compressors import fast
    from optimus_cc_ext.compressors.triton import launches, trial

    for target, name, value in replace(int(os.environ["RANK"]), fast, trial, launches):
        setattr(target, name, value)
    said = _place([config] * 2)
    return [said, launches.AVAILABLE]


def _other_gpu(rank, *modules):
    return [(torch.cuda, "is_available", lambda: True), (torch.cuda, "get_device_name", lambda: "AB"[rank])]


def _other_torch(rank, *modules):
    return [(torch, "__version__", f"2.1{rank}")]


def _no_compiler_on_rank_1(rank, compressors, trial, launches):
    return [
        (compressors, "_triton_applies", lambda: True),
        (torch.cuda, "current_device", lambda: 0),
        (trial, "failure", lambda *tried: "no C compiler" if rank == 1 else None),
    ]


@pytest.mark.parametrize("replace, what", [(_other_gpu, "processor A against B"), (_other_torch, "torch 2.10 against")])
def test_machines_whose_bits_differ_are_named_unless_nothing_is_compressed(replace, what):
    for said, _ in run_ranks(2, _place_with, CB, replace, timeout=60)[:1]:
        assert what in said and "rank 0 and rank 1" in said and "GPUs of one model" in said
    assert [said for said, _ in run_ranks(2, _place_with, OptimusConfig(), replace, timeout=60)] == ["agreed"] * 2


def test_kernels_that_one_rank_cannot_compile_are_used_on_none():
    pytest.importorskip("triton")
    for said, kernels_in_use in run_ranks(2, _place_with, CB, _no_compiler_on_rank_1, timeout=60):
        assert said.startswith("Triton's kernels do not work on rank 1 (no C compiler): all ranks compress with torch")
        assert not kernels_in_use


def test_equal_settings_agree():
    configs = [OptimusConfig(compressed_backprop=True, fused_embedding_sync=True)] * 2
    assert run_ranks(2, _place, configs, timeout=60) == ["agreed", "agreed"]
