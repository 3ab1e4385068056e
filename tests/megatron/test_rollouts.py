"""Law: a training loop that generates in between gets a handle's memory and process groups back, and loses nothing."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch

import optimus_cc_ext
from optimus_cc_ext import OptimusConfig
from tests.forked_ranks import run_ranks
from tests.megatron import own_loops
from tests.megatron.recording import hash_of

STEPS = 4
INT8 = OptimusConfig(
    compressed_backprop_format="int8", dp_compression_format="int8", fused_embedding_sync_format="int8",
)  # fmt: skip
LOW_RANK = OptimusConfig(
    compressed_backprop_format="low-rank", compressed_backprop_rank=2, compressed_backprop_messages="all",
    residual_across_iterations="carry", dp_compression_format="low-rank", dp_compression_rank=2,
    dp_compression_warmup=0.3,
    _force_compression=True,
)  # fmt: skip


def groups() -> int:
    return len(torch.distributed.distributed_c10d._world.pg_map)


def trained(config: OptimusConfig, generates: bool) -> tuple[str, int, bool]:
    """Return the hash of the parameters, the steps of the handle, and whether each rollout began without a trace of
    it.
    """
    before, model = groups(), own_loops.build(2)
    optimizer = own_loops.optimizer_of(model)
    handle, gone = optimus_cc_ext.compress(model, optimizer, config, train_iters=STEPS), True
    for batch in range(STEPS):
        own_loops.pass_of(model, batch=batch)
        optimizer.step()
        if generates:
            state, session = copy.deepcopy(handle.state_dict()), weakref.ref(handle._session)
            handle.remove()
            del handle
            gc.collect()
            gone &= session() is None and groups() == before
            own_loops.pass_of(model, batch=9, forward_only=True)
            handle = optimus_cc_ext.compress(model, optimizer, config, train_iters=STEPS)
            handle.load_state_dict(state)
    steps = handle.state_dict()["iteration"]
    handle.remove()
    return "".join(hash_of(parameter.data) for parameter in model.parameters()), steps, gone


def with_rollouts_and_without(config: OptimusConfig) -> tuple[Any, Any]:
    own_loops.start(2)
    return trained(config, True), trained(config, False)


@pytest.mark.parametrize("config", [pytest.param(INT8, marks=pytest.mark.ci), LOW_RANK], ids=["int8", "low rank"])
def test_a_handle_that_makes_room_for_every_rollout_trains_to_the_bit_as_one_that_stays(config: OptimusConfig) -> None:
    for generating, staying in run_ranks(4, with_rollouts_and_without, config, timeout=150):
        assert generating == staying
        assert generating[1:] == (STEPS, True), "its memory and groups were given back"


def dropped(keeping: bool) -> list[int]:
    """Return the number of process groups with each of three models, made one after the other and never removed.

    Args:
        keeping: True if rank 0 keeps its models and handles.
    """
    own_loops.start(2)
    found, kept = [], []
    for _ in range(3):
        model = own_loops.build(2)
        optimizer = own_loops.optimizer_of(model)
        handle = optimus_cc_ext.compress(model, optimizer, INT8)
        own_loops.pass_of(model)
        optimizer.step()
        found.append(groups())
        if keeping and torch.distributed.get_rank() == 0:
            kept.append((model, handle))
        del model, optimizer, handle
    return found


@pytest.mark.ci
def test_groups_of_dropped_models_are_freed_where_all_their_ranks_dropped_them() -> None:
    for found in run_ranks(4, dropped, False, timeout=150):
        # A dropped model may live until the pass of the next one has run, and its groups one compress() longer.
        assert found[1] == found[2], "groups do not add up"
    kept, *others = run_ranks(4, dropped, True, timeout=150)
    assert kept == sorted(set(kept)), "a rank that keeps its models keeps their groups"
    for found in others:  # what the first rank is in stays, because NCCL may wait for it; a rank's own group goes
        assert found == sorted(set(found)) and found[-1] - found[0] < kept[-1] - kept[0]
