"""Law: both ends agree. Ranks with different settings get an error at the start, and no rank hangs."""

import datetime
import os
import socket

import pytest
import torch
import torch.distributed as dist

from optimus_cc_ext.collectives.nodes import VARIABLE
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.presets import Layout
from optimus_cc_ext.errors import FlagError, RanksDisagree
from optimus_cc_ext.techniques.grid import Grid, RankPlace
from optimus_cc_ext.techniques.session import Session
from tests.forked_ranks import run_ranks

LAYOUT = Layout(stages=2, data_parallel=1, tied_embeddings=True)


def _place(configs) -> str:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    session = Session(configs[rank])
    grid = Grid(
        place=RankPlace(rank=rank, stage=rank, tensor_rank=0), stages=2, data_parallel=1,
        pipeline_group=dist.group.WORLD, timeout=datetime.timedelta(seconds=5),
    )  # fmt: skip
    try:
        return "; ".join(line for line in session.place(grid, LAYOUT) if VARIABLE not in line) or "agreed"
    except (FlagError, RanksDisagree) as error:
        return str(error)


CB = OptimusConfig(compressed_backprop_format="low-rank")


@pytest.mark.parametrize(
    ("other", "different"),
    [
        ({"compressed_backprop_rank": 8}, "--compressed-backprop-rank 16 against 8"),
        ({"compression_seed": 7}, "--compression-seed 1234 against 7"),
    ],
    ids=["another rank", "another seed"],
)
def test_the_first_pair_with_different_settings_is_named_with_what_differs_and_nothing_else(other, different):
    said = f"rank 0 and rank 1 run with different settings: {different}. Start all ranks with the same flags."
    assert run_ranks(2, _place, [CB, CB.replace(**other)], timeout=60) == [said] * 2


@pytest.mark.ci
def test_a_rank_with_everything_off_waits_for_nobody_and_the_others_name_it_in_time():
    said, of_other = run_ranks(2, _place, [CB, OptimusConfig()], timeout=60)
    assert of_other == "agreed"
    assert said.startswith("rank 0 waited in vain for rank 1 to compress the same model")
    assert "leave every technique off" in said and "same flags" in said


def _place_with(config, replace) -> str | list[bool]:
    """Return what `place` says with a machine that `replace(rank)` describes, and whether kernels are used after it."""
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
        (compressors, "_has_gpu", lambda: True),
        (torch.cuda, "current_device", lambda: 0),
        (trial, "failure", lambda *tried: "no C compiler" if rank == 1 else None),
    ]


@pytest.mark.parametrize(
    "replace, what",
    [(_other_gpu, "processor A against B"), pytest.param(_other_torch, "torch 2.10 against", marks=pytest.mark.ci)],
)
def test_machines_whose_bits_differ_are_named_unless_nothing_is_compressed(replace, what):
    for said, _ in run_ranks(2, _place_with, CB, replace, timeout=60)[:1]:
        assert what in said and "rank 0 and rank 1" in said and "GPUs of one model" in said
    assert [said for said, _ in run_ranks(2, _place_with, OptimusConfig(), replace, timeout=60)] == ["agreed"] * 2


def test_kernels_that_one_rank_cannot_compile_are_used_on_none(tmp_path):
    pytest.importorskip("triton")
    node = {"NODE_CACHE": str(tmp_path)}
    where = f"Triton's kernels do not work on rank 1 on {socket.gethostname()} (no C compiler)"
    for said, kernels_in_use in run_ranks(2, _place_with, CB, _no_compiler_on_rank_1, timeout=60, env=node):
        assert said.startswith(f"{where}: all ranks compress with torch, which takes longer. Give every node a GPU, ")
        assert not kernels_in_use
    required = CB.replace(require_triton=True)
    for said, _ in run_ranks(2, _place_with, required, _no_compiler_on_rank_1, timeout=60, env=node):
        assert said.startswith(f"--require-triton: {where}. Give every node a GPU, ")


def test_a_run_that_requires_triton_ends_on_all_ranks_where_there_is_no_gpu():
    for said in run_ranks(2, _place, [CB.replace(require_triton=True)] * 2, timeout=60):
        assert said.startswith("--require-triton: Triton's kernels do not work on rank 0 on ")
        assert "(there is no GPU) and on 1 more" in said


def test_a_folder_for_compiled_kernels_that_cannot_be_written_is_named_with_rank_and_host(tmp_path):
    (tmp_path / "file").touch()
    node = {"NODE_CACHE": str(tmp_path / "file")}
    for said, kernels_in_use in run_ranks(2, _place_with, CB, _no_compiler_on_rank_1, timeout=60, env=node):
        host = socket.gethostname()
        assert f"on rank 0 on {host} (NODE_CACHE: {tmp_path / 'file'}/optimus-cc-" in said and " on 1 more" in said
        assert not kernels_in_use


def _node_of_rank_0_alone() -> str:
    os.environ[VARIABLE] = "a" if os.environ["RANK"] == "0" else ""
    return _place([CB] * 2)


def test_a_node_that_only_some_ranks_name_is_refused_on_all():
    for rank, said in enumerate(run_ranks(2, _node_of_rank_0_alone, timeout=60)):
        assert said.startswith("OPTIMUS_CC_NODE is set on rank 0 and not on rank 1"), rank


def test_equal_settings_agree():
    configs = [OptimusConfig(compressed_backprop_format="low-rank", fused_embedding_sync=True)] * 2
    assert run_ranks(2, _place, configs, timeout=60) == ["agreed", "agreed"]


def _place_two_of_three(config) -> list[str] | str:
    """Place a model on ranks 0 and 1, with rank 0 in more process groups than rank 1; return the result or the
    error.
    """
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    rank = dist.get_rank()
    of_model = dist.new_group([0, 1])
    for _ in range(3):
        dist.new_group([0])
    if rank == 2:
        return "no model"
    session = Session(config)
    grid = Grid(
        place=RankPlace(rank=rank, stage=rank, tensor_rank=0), stages=2, data_parallel=1, pipeline_group=of_model
    )
    session.place(grid, LAYOUT)
    gradient = torch.full((4, 2), 1.0 + rank)
    session.embedding.reduce(gradient)
    assert session.alone is not None and session.alone.size() == 1
    return gradient.tolist()


def test_only_the_ranks_of_the_model_agree_and_make_groups_however_many_groups_they_have():
    sums = [[3.0, 3.0]] * 4
    found = run_ranks(3, _place_two_of_three, OptimusConfig(fused_embedding_sync=True), timeout=60)
    assert found == [sums, sums, "no model"]


def _models_that_come_and_go(config) -> tuple[list[list[list[float]]], list[int]]:
    """Make models on ranks 0 and 1, on 1 and 2, and so on in turn: their numbers of groups are never equal."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    pairs, rank = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (1, 2))}, dist.get_rank()
    sums, groups = [], []
    for turn in range(6):
        ranks = ((0, 1), (1, 2))[turn % 2]
        if rank not in ranks:
            continue
        session, stage = Session(config), ranks.index(rank)
        place = RankPlace(rank=rank, stage=stage, tensor_rank=0)
        session.place(Grid(place=place, stages=2, data_parallel=1, pipeline_group=pairs[ranks]), LAYOUT)
        gradient = torch.full((2, 2), 1.0 + stage)
        session.embedding.reduce(gradient)
        sums.append(gradient.tolist())
        session.new_groups.close()
        groups.append(len(dist.distributed_c10d._world.pg_map))
    return sums, groups


def test_models_that_come_and_go_leave_no_group_and_their_ranks_find_each_other():
    for rank, (sums, groups) in enumerate(
        run_ranks(3, _models_that_come_and_go, OptimusConfig(fused_embedding_sync=True), timeout=60)
    ):
        times = 6 if rank == 1 else 3
        assert sums == [[[3.0, 3.0]] * 2] * times
        assert len(groups) == times and len(set(groups)) == 1
