"""CB with interleaved 1F1B: the rule against a simulation, and against what real runs do."""

import itertools

import pytest

from optimus_cc_ext.techniques.schedule import Interleaved
from tests.forked_ranks import run_ranks
from tests.megatron.optimus_runs import relative_gap, run_optimus
from tests.megatron.test_compressed_messages import ITERATIONS, _ends, _install_recording
from tests.megatron.test_lossless_limits import FE, LOSSLESS_CB, LOSSLESS_SC, TOLERANCE, TWENTY
from tests.megatron_runs import last_stage_losses, run_megatron

NUMBERS = [
    (stages, chunks, micro_batches, group)
    for stages, chunks in itertools.product(range(2, 9), (2, 3, 4))
    for group in (stages, 2 * stages)
    for micro_batches in range(stages, 4 * stages + 1, stages)
    if micro_batches % group in (0, stages)
]


def _schedules(numbers: list[tuple[int, int, int, int]]) -> list[tuple[Interleaved, list[tuple[int, int]]]]:
    """Ours and Megatron's own table, for all numbers; in a rank, where Megatron is imported."""
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    from optimus_cc_ext.hooks.schedules import interleaved_schedule

    return [
        (interleaved_schedule(stages, chunks, m, group), get_schedule_table(m, chunks, group))
        for stages, chunks, m, group in numbers
    ]


def test_every_link_delivers_in_order_what_the_receivers_passes_wait_for():
    (schedules,) = run_ranks(1, _schedules, NUMBERS)
    for (stages, chunks, micro_batches, _), (schedule, table) in zip(NUMBERS, schedules, strict=True):
        backward = [(micro_batch, chunks - 1 - chunk) for micro_batch, chunk in table]
        for receiver in range(stages):
            sender = (receiver + 1) % stages
            wrap = sender == 0
            # The sender ends a pass of (micro-batch, chunk) by sending to the same chunk of the stage before, or over
            # the wrap link to the chunk before; its very first layers send nothing.
            sent = [(mb, chunk - 1 if wrap else chunk) for mb, chunk in backward if not (wrap and chunk == 0)]
            needed = [(mb, chunk) for mb, chunk in backward if not (wrap and chunk == chunks - 1)]
            assert sent == needed, "first in, first out"
            messages = schedule.messages(receiver)
            assert [message.chunk for message in messages] == [chunk for _, chunk in needed]
            assert len(messages) == micro_batches * (chunks - 1 if wrap else chunks)

            # Simulate the receiver: warm-up passes forward, then one forward and one backward, then only backward.
            total, warmup = micro_batches * chunks, schedule.warmups[receiver]
            in_cooldown = {needed_by for k, needed_by in enumerate(backward) if warmup + k >= total}
            assert [message.epilogue for message in messages] == [key in in_cooldown for key in needed]


LAYOUTS = [
    # stages, layers, micro-batches, flags: PP2 and PP4 with two chunks of one layer each
    (2, 4, 4, []),
    (4, 8, 8, []),
    (4, 8, 4, ["--no-overlap-p2p-communication"]),
]


@pytest.mark.parametrize(("stages", "layers", "micro_batches", "flags"), LAYOUTS)
def test_real_runs_follow_the_rule_on_both_ends_and_lep_loses_nothing(stages, layers, micro_batches, flags):
    layout = (stages, ["--pipeline-model-parallel-size", str(stages), "--num-layers", str(layers)])
    options = ["--num-layers-per-virtual-pipeline-stage", "1", "--global-batch-size", str(2 * micro_batches), *flags]
    options += [
        "--train-iters",
        str(ITERATIONS),
        "--compressed-backprop",
        "--no-compression-forecast",
        "--compressed-backprop-rank",
        "4",
    ]
    ends = [run.probed for run in run_optimus(layout, options, before=_install_recording, probe=_ends)]
    ((schedule, _),) = run_ranks(1, _schedules, [(stages, 2, micro_batches, stages)])[0]
    for receiving_stage in range(stages):
        receiver, sender = ends[receiving_stage], ends[(receiving_stage + 1) % stages]
        rule = [[message.epilogue for message in schedule.messages(receiving_stage)]] * ITERATIONS
        assert receiver["received"][0] == rule
        assert sender["sent"][0] == rule
        if not any(rule[0]):
            continue
        offered, got = sender["sent"][1], receiver["received"][1]
        missing = offered - got - sum(sender["residual"]).view_as(offered)
        assert missing.abs().max() < 1e-5 * offered.abs().max()  # rounding of a few fp32 sums


def test_all_three_at_full_rank_reproduce_vanilla():
    flags = ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1", *TWENTY]
    vanilla = last_stage_losses(run_megatron(4, flags))
    runs = run_optimus((4, flags), [*LOSSLESS_CB, *LOSSLESS_SC, *FE])
    assert relative_gap(last_stage_losses(runs), vanilla) < TOLERANCE
    copies = {copy for run in runs for copy in run.probed["tied"]}
    assert len(copies) == 1, "first and last stage, all replicas: one embedding"
