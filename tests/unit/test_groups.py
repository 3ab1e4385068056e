"""Law: a process group of ours runs as the group whose work it takes over, and one function makes all of them."""

import ast
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from optimus_cc_ext.techniques import groups
from optimus_cc_ext.techniques.grid import RankPlace
from optimus_cc_ext.techniques.groups import NewGroups, communicator_bytes, communicator_line
from tests.unit.test_house import PACKAGE, SOURCES

needs_nccl = pytest.mark.skipif(not dist.is_nccl_available(), reason="this build of torch has no NCCL")
PLACES = [RankPlace(rank=0, stage=0, tensor_rank=0)]


def _replicas(wrapped: bool):
    """Make a stand-in for a data-parallel group that NCCL runs with limits; the options themselves are torch's own."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas, options.config.min_ctas, options.config.cga_cluster_size = 7, 3, 2
    options.config.net_name = "IB"
    options._timeout = timedelta(seconds=77)
    backend = SimpleNamespace(options=options)
    backend = SimpleNamespace(wrapped_pg=backend) if wrapped else backend
    return SimpleNamespace(_device_types=[torch.device("cuda")], _get_backend=lambda _: backend), options


def _made(monkeypatch, like, timeout=None):
    """Return the keyword arguments that torch gets for the group of this rank alone."""
    got = {}
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(groups, "names_of", lambda rank, more=0: more)
    monkeypatch.setattr(dist, "new_group", lambda ranks, **kwargs: got.update(kwargs, ranks=ranks))
    NewGroups(PLACES, like, timeout).alone()
    return got


@needs_nccl
@pytest.mark.parametrize("wrapped", [False, True])
def test_options_are_those_of_the_group_that_is_replaced(monkeypatch, wrapped):
    like, options = _replicas(wrapped)
    got = _made(monkeypatch, like, timedelta(minutes=10))
    new = got["pg_options"]
    limits = new.config.max_ctas, new.config.min_ctas, new.config.cga_cluster_size, new.config.net_name
    assert (limits, new.is_high_priority_stream) == ((7, 3, 2, "IB"), True)
    assert got["timeout"] == new._timeout == timedelta(seconds=77)
    assert got["group_desc"] == "OPTIMUS_CC_ALONE" and got["use_local_synchronization"]
    new.config.max_ctas = 1
    assert options.config.max_ctas == 7, "torch writes into the options that it is given"


def test_over_gloo_there_are_no_options_and_the_description_is_kept():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        made = NewGroups(PLACES, dist.group.WORLD, timedelta(seconds=55))
        alone = made.alone()
        assert (alone.size(), alone.group_desc) == (1, "OPTIMUS_CC_ALONE")
        assert alone._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=55)
        assert made.alone() is alone and made.line is None
    finally:
        dist.destroy_process_group()


def test_memory_is_counted_for_groups_of_several_ranks():
    assert [communicator_bytes(ranks) for ranks in (1, 2, 3, 2048)] == [0, 544 << 20, 688 << 20, 688 << 20]
    assert communicator_line({}) is None
    line = communicator_line({"OPTIMUS_CC_ALONE": 1, "OPTIMUS_CC_EMBEDDING": 16})
    assert "2 (OPTIMUS_CC_ALONE of 1 rank, OPTIMUS_CC_EMBEDDING of 16 ranks), up to 721 MB" in line


def test_no_other_place_makes_groups():
    makers = {
        path.relative_to(PACKAGE).as_posix()
        for path in SOURCES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("new_group", "split_group", "new_subgroups")
    }
    assert makers == {"techniques/groups.py"}
