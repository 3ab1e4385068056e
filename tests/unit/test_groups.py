"""Law: a process group of ours runs as the group whose work it takes over, and one function makes all of them."""

import ast
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from optimus_cc_ext.errors import OptimusError
from optimus_cc_ext.techniques import groups
from optimus_cc_ext.techniques.grid import Grid, RankPlace
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
    unbound = SimpleNamespace(bound_device_id=None)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: unbound)
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


@needs_nccl
def test_options_of_a_group_that_was_split_do_not_split_again(monkeypatch):
    class Split(dist.ProcessGroupNCCL.Options):
        """torch's options, which without a GPU cannot hold a real group to split; copies keep this one's."""

        split_from = None

        def __deepcopy__(self, memo):
            copied = Split()
            copied.split_from, copied.split_color = self.split_from, self.split_color
            return copied

    options = Split()
    options.split_from, options.split_color = object(), 5
    like = SimpleNamespace(_device_types=["cuda"], _get_backend=lambda _: SimpleNamespace(options=options))
    new = _made(monkeypatch, like)["pg_options"]
    plain = dist.ProcessGroupNCCL.Options()
    assert (new.split_from, new.split_color) == (plain.split_from, plain.split_color)
    assert options.split_color == 5


@pytest.fixture
def bound_default_group(monkeypatch):
    """Make a default group that is bound to a GPU, as `init_process_group(device_id=...)` does; return the splits."""
    splits = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    monkeypatch.setattr(dist.distributed_c10d, "_get_split_source", splits.append)
    yield splits
    dist.group.WORLD.bound_device_id = None
    dist.destroy_process_group()


def test_a_default_group_that_is_bound_to_a_device_is_not_split(bound_default_group):
    """In a split of NCCL's all ranks of the split group would have to take part; ours are made by members alone."""
    made = NewGroups(PLACES, dist.group.WORLD, None).alone()
    assert made.size() == 1 and bound_default_group == []
    assert dist.group.WORLD.bound_device_id == torch.device("cuda", 0), "it stays bound for all other groups"


def test_a_group_that_cannot_be_made_is_named_with_its_ranks(bound_default_group, monkeypatch):
    def refuse(*args, **kwargs):
        raise NotImplementedError("use_local_synchronization")

    monkeypatch.setattr(dist, "new_group", refuse)
    monkeypatch.setenv("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "1")
    said = r"OPTIMUS_CC_ALONE of ranks \[0\] cannot be made: use_local.*Unset TORCH_DISTRIBUTED_USE_TORCHCOMMS"
    with pytest.raises(OptimusError, match=said):
        NewGroups(PLACES, None, None).alone()
    assert dist.group.WORLD.bound_device_id == torch.device("cuda", 0)


@pytest.mark.parametrize(("backend", "device"), [("nccl", [3]), ("cpu:gloo,cuda:nccl", [3]), ("gloo", None)])
def test_the_meeting_of_ranks_names_the_device_where_nccl_runs_the_group(monkeypatch, backend, device):
    got = {}
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", dist.HashStore)
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    done = SimpleNamespace(is_completed=lambda: True, wait=lambda: None)
    monkeypatch.setattr(dist, "barrier", lambda **kwargs: got.update(kwargs) or done)
    pair = SimpleNamespace(size=lambda: 2)
    Grid(place=PLACES[0], stages=1, data_parallel=2, replica_group=pair).meet()
    assert (got["group"], got["device_ids"]) == (pair, device)


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
    assert makers == {"collectives/groups.py"}
