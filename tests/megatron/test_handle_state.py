"""Law: the state of a handle goes to the rank that it came from, on all ranks of the model or on none."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import optimus_cc_ext
from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.errors import UnfitState
from tests.forked_ranks import run_ranks
from tests.megatron import own_loops
from tests.megatron.test_kept_checkpoint import HERE, differences

LOW_RANK = OptimusConfig(
    compressed_backprop_format="low-rank", compressed_backprop_rank=2, compressed_backprop_messages="all",
    residual_across_iterations="carry", dp_compression_format="low-rank", dp_compression_rank=2,
    _force_compression=True,
    compression_state_dtype="bf16",
)  # fmt: skip


def trained(config: OptimusConfig = LOW_RANK, steps: int = 2, hidden: int = 16) -> Any:
    model = own_loops.build(2, hidden=hidden)
    optimizer = own_loops.optimizer_of(model)
    handle = optimus_cc_ext.compress(model, optimizer, config)
    for _ in range(steps):
        own_loops.pass_of(model)
        optimizer.step()
    return handle


def states_of_all(handle: Any) -> list[dict[str, Any]]:
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, handle.state_dict())
    return everyone


def refusals() -> tuple[dict[str, str], bool, bool]:
    """Return a handle's error for each state, and whether its own state was left unchanged."""
    own_loops.start(2)
    handle, rank = trained(), torch.distributed.get_rank()
    everyone = states_of_all(handle)
    own = everyone[rank]
    before = copy.deepcopy(own)
    wider = trained(hidden=32).state_dict()
    lower = trained(LOW_RANK.replace(dp_compression_rank=1)).state_dict()
    given: dict[str, Callable[[], Any]] = {
        "nothing": dict, "none": lambda: None, "the model's": handle._models[0].state_dict,
        "another rank's": lambda: everyone[(rank + 1) % 4], "another replica's": lambda: everyone[rank ^ 1],
        "one rank's": lambda: everyone[1] if rank == 0 else own, "wider": lambda: wider, "lower": lambda: lower,
        "damaged": lambda: own | {"dp_compression": {"states": {}}},
    }  # fmt: skip
    said = {}
    for name, state in given.items():
        with pytest.raises(UnfitState) as refused:
            handle.load_state_dict(state())
        said[name] = str(refused.value)
    with handle.step(), pytest.raises(UnfitState, match="a step is open"):
        handle.load_state_dict(own)
    unchanged = not differences(before, handle.state_dict())
    handle.load_state_dict(own)
    return said, unchanged, not differences(before, handle.state_dict())


def test_a_state_that_does_not_fit_is_refused_by_name_on_all_ranks_and_changes_nothing() -> None:
    ranks = run_ranks(4, refusals, timeout=120)
    for said, unchanged, loaded in ranks:
        assert unchanged and loaded
        assert said == ranks[0][0], "the same words on all ranks"
        assert all(line.startswith("load_state_dict: nothing is changed: rank 0: ") for line in said.values())
        for name, words in {
            "nothing": "it has no `iteration`", "none": "not what a handle's state_dict() returned",
            "the model's": "it has no `iteration`", "another rank's": "the replica of the rank is 0 here and 1 in",
            "another replica's": "the replica of the rank is 0 here and 1", "one rank's": "the replica of the rank is",
            "wider": "the hidden size is 16 here and 32", "lower": "dp_compression_rank is 2 here and 1 in the state",
            "damaged": "dp_compression: bucket 0",
        }.items():  # fmt: skip
            assert words in said[name], (name, said[name])


def of_8b301ab() -> list[str]:
    """Return how a handle's state differs from the kept one of an earlier commit, which does not name its rank."""
    own_loops.start(2)
    handle = trained(steps=1)
    folder = HERE / "checkpoints_of_8b301ab" / "low_rank" / "iter_0000003" / "optimus_cc"
    saved = torch.load(folder / f"rank_{torch.distributed.get_rank():05d}.pt", weights_only=True)
    assert "made_by" not in saved["state"]
    handle.load_state_dict(saved["state"])
    state = handle.state_dict()
    del state["made_by"]
    return differences(saved["state"], state)


def test_a_state_which_says_nothing_about_its_rank_is_taken_where_shapes_fit() -> None:
    assert run_ranks(4, of_8b301ab, timeout=90) == [[]] * 4
