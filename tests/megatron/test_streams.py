"""Streams of a GPU, pretended on a CPU in Megatron's real loop: nothing races, and one queue costs no overlap."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from tests.megatron import interventions
from tests.megatron import runs as table
from tests.megatron.runs import BALANCED, INTERLEAVED, NO_DROPOUT, OVERLAPPED, PP2_DP2, SMALL_BUCKETS
from tests.megatron.specs import Layout, RunSpec, full, in_ci, uses
from tests.pretended_streams import pretend, report

FLAGS = f"{NO_DROPOUT} --bf16 {OVERLAPPED}"
DP2: Layout = (2, "")

# -- races ------------------------------------------------------------------------------------------------------------


def watched(
    name: str, ours: str | None, flags: str = SMALL_BUCKETS, *, layout: Layout = PP2_DP2, **rest: Any
) -> RunSpec:
    before = (pretend, *rest.pop("before", ()))
    return RunSpec(
        name=f"streams, {name}", layout=layout, ours=ours, before=before, probe=report,
        flags=f"{FLAGS} --global-batch-size 8 --train-iters 3 {flags}", **rest,
    )  # fmt: skip


STEPWISE = f"{INTERLEAVED} --ckpt-format torch"
# The exact gather is left out where it begins in the step, and other gathers deal shards in another way.
GATHERED = f"{BALANCED} {table.GATHER}"
IN_STEP = watched("gathered in the step", GATHERED, f"{STEPWISE} --overlap-param-gather-with-optimizer-step")
AFTER_STEP = watched("gathered after the step", GATHERED, STEPWISE)
TWO_LEVELS = watched("two levels", BALANCED, layout=(4, ""), before=(partial(interventions.nodes_of, 2),))
IN_SLICES = [
    watched(f"slices, {slots} slots", BALANCED, before=(partial(interventions.small_ring, 6 * slots, slots),))
    for slots in (1, 2, 3)
]


@uses(
    *map(full, IN_SLICES),
    full(watched("vanilla", None)),
    full(watched("balanced", BALANCED)),
    full(watched("blocks on all links", f"{table.BLOCKS_WITH_LEP} {table.FE} --fused-embedding-sync-format int8")),
    full(watched("low rank", table.LOSSY)),
    full(watched("measured", f"{BALANCED} --fused-embedding-sync-format int8 --compression-metrics")),
    full(IN_STEP),
    in_ci(TWO_LEVELS),
)
def test_each_access_waits_for_other_streams_and_each_scratch_memory_has_one_stream(runs):
    for rank in runs.ranks:
        assert rank.probed.faults == []
        assert rank.probed.counts["operators"] > 1000 and rank.probed.counts["collectives"] > 50
        assert [streams for streams in rank.probed.scratch if len(streams) > 1] == []
        assert runs.spec.ours is None or ("side",) in rank.probed.scratch


@uses(full(IN_STEP, AFTER_STEP))
def test_gathers_that_begin_in_the_optimizers_step_change_no_bit(runs):
    for ours, others in zip(*(run.ranks for run in runs), strict=True):
        assert (ours.losses, ours.weights) == (others.losses, others.weights)
        # Megatron has an optimizer for the first chunk and one for the others, and adds up the norm in another order.
        assert ours.grad_norms == pytest.approx(others.grad_norms, rel=2**-22)
        assert len(ours.weights) > 10 and ours.ours.traffic == others.ours.traffic


def without_join() -> None:
    from optimus_cc_ext.collectives.reducers import SideStream

    SideStream.join = lambda self: None  # type: ignore[method-assign]


def without_a_beginning() -> None:
    from optimus_cc_ext.collectives.reducers import SideStream

    @contextmanager
    def work(self: SideStream) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield

    SideStream.work = work  # type: ignore[method-assign]


def without(function: str, line: str) -> None:
    """Take a line out of a hook, which must have it."""
    from optimus_cc_ext.hooks import param_and_grad_buffer as module

    source = inspect.getsource(getattr(module, function))
    assert source.count(line) == 1, f"{function} has no line '{line}'"
    exec(source.replace(line, "pass"), vars(module))


MUTANTS: dict[str, Callable[[], None]] = {
    "reductions that nobody waits for": without_join,
    "reductions that wait for no gradient": without_a_beginning,
    "a gather beside Megatron's": partial(without, "_start_param_sync", "bucket_group.param_gather_handle.wait()"),
    "a reduction beside Megatron's": partial(without, "_start_grad_sync", "bucket_group.grad_reduce_handle.wait()"),
}


@uses(*(full(watched(name, BALANCED, layout=DP2, before=(mutant,))) for name, mutant in MUTANTS.items()))
def test_a_wait_that_is_missing_is_seen(runs):
    for rank in runs.ranks:
        assert rank.probed.counts["races"] > 0 and rank.probed.faults


# -- one queue of work, CUDA_DEVICE_MAX_CONNECTIONS=1 -----------------------------------------------------------------

MANY_QUEUES, VANILLAS = 1.07, 1.04
"""Most that one queue may cost `balanced`: times many queues, and times vanilla with one queue."""


def gathers_decoded_early() -> None:
    """Decode a gather on a side stream, as soon as its messages have arrived."""
    from optimus_cc_ext.collectives import reducers
    from optimus_cc_ext.techniques import param_gather

    side = reducers.SideStream(torch.device("cpu"))

    @torch.no_grad()
    def begin(self: Any, buckets: Any) -> None:
        with side.work():
            for shards in buckets:
                shards.start()
            for shards in buckets:
                shards.finish()

    param_gather.Gather.__init__ = begin  # type: ignore[method-assign]
    param_gather.Gather.wait = lambda self: side.join()  # type: ignore[method-assign]


def sums_added_up_early() -> None:
    """Add up a shard on the side stream when the next reduction begins."""
    from optimus_cc_ext.collectives.exchange import Exchange

    Exchange.sends_later = property(lambda self: True)  # type: ignore[method-assign]


def modelled(name: str, ours: str | None, *before: Callable[[], None]) -> RunSpec:
    """Model a network of which vanilla Megatron hides three quarters behind compute."""
    return RunSpec(
        name=f"modelled, {name}", layout=DP2, ours=ours, before=(partial(pretend, 300.0), *before), probe=report,
        flags=f"{FLAGS} {SMALL_BUCKETS} --num-layers 8 --global-batch-size 4 --train-iters 4",
    )  # fmt: skip


def last_step(run: Any) -> tuple[float, float]:
    """Return the modelled microseconds of the last step: with many queues, and with one."""
    before, end = run.ranks[0].probed.steps[-2:]
    return end[0] - before[0], end[1] - before[1]


MODELLED = modelled("vanilla", None), modelled("balanced", f"{BALANCED} --param-gather-format int8")


@uses(in_ci(*MODELLED))
def test_one_queue_of_work_costs_balanced_little(runs):
    (_, vanilla), (many, one) = map(last_step, runs)
    assert one <= MANY_QUEUES * many and one <= VANILLAS * vanilla


@uses(
    *(
        full(*MODELLED, modelled(mutant.__name__, MODELLED[1].ours, mutant))
        for mutant in (gathers_decoded_early, sums_added_up_early)
    )
)
def test_a_kernel_that_waits_for_messages_before_others_that_need_not_is_seen(runs):
    (_, vanilla), (_, ours), (many, one) = map(last_step, runs)
    assert one > ours and (one > MANY_QUEUES * many or one > VANILLAS * vanilla)
