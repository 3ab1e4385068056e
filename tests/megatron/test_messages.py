"""Laws "both ends agree" and "what is remembered is what was sent": CB's messages in Megatron's own schedules.

The rules themselves are pure functions, tested against simulations (tests/unit/test_epilogue.py, and here against
Megatron's table for interleaving); runs show that Megatron does what the rules expect.
"""

import itertools

from optimus_cc_ext.techniques.schedule import Interleaved
from tests.forked_ranks import run_ranks
from tests.megatron import runs as table
from tests.megatron.specs import Run, full, uses
from tests.megatron_runs import MegatronRun, last_stage_losses, relative_gap

NUMBERS = [
    (stages, chunks, micro_batches, group)
    for stages, chunks in itertools.product(range(2, 9), (2, 3, 4))
    for group in (stages, 2 * stages)
    for micro_batches in range(stages, 4 * stages + 1, stages)
    if micro_batches % group in (0, stages)
]


def schedules(numbers: list[tuple[int, int, int, int]]) -> list[tuple[Interleaved, list[tuple[int, int]]]]:
    """Return our schedule and Megatron's own table for each entry of `numbers`. Call it on a rank: it imports
    Megatron.
    """
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    from optimus_cc_ext.hooks.schedules import interleaved_schedule

    return [
        (interleaved_schedule(stages, chunks, m, group), get_schedule_table(m, chunks, group))
        for stages, chunks, m, group in numbers
    ]


def test_every_interleaved_link_delivers_in_order_what_the_receivers_passes_wait_for():
    (found,) = run_ranks(1, schedules, NUMBERS)
    for (stages, chunks, micro_batches, _), (schedule, order) in zip(NUMBERS, found, strict=True):
        backward = [(micro_batch, chunks - 1 - chunk) for micro_batch, chunk in order]
        for receiver in range(stages):
            sender = (receiver + 1) % stages
            wrap = sender == 0
            # After a pass of (micro-batch, chunk), the sender sends to the same chunk of the stage before, or over the
            # wrap link to the chunk before; the model's first layers send nothing.
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


def epilogue(stages: int, micro_batches: int, receiving_stage: int) -> list[bool]:
    """Return the epilogue independently of the code under test: the receiver's last messages, one for each warm-up
    pass.
    """
    warmup = min(stages - 1 - receiving_stage, micro_batches)
    return [False] * (micro_batches - warmup) + [True] * warmup


def links(run: Run) -> list[tuple[int, MegatronRun, MegatronRun]]:
    """Return every link: the receiving stage, its rank, and the rank that sends."""
    places = run.by_place()
    stages = 1 + max(stage for stage, _, _ in places)
    wraps = table.INTERLEAVED in run.spec.flags
    return [
        (stage, rank, places[(stage + 1) % stages, tensor_rank, data_rank])
        for (stage, tensor_rank, data_rank), rank in places.items()
        if wraps or stage < stages - 1
    ]


def assert_nothing_is_lost(receiver: MegatronRun, sender: MegatronRun) -> None:
    sent, got = sender.messages["sent"], receiver.messages["received"].total
    offered, left = sent.total, sent.left
    # The tolerance is the rounding of up to 9 fp32 sums and one final subtraction, relative to the summed gradients.
    assert (offered - got - left).abs().max() < 1e-5 * offered.abs().max()
    assert left.abs().max() > 1e-3 * offered.abs().max(), "rank 4 must leave something out"


@uses(table.LOSSY_RUN, full(table.UNBATCHED))
def test_epilogue_messages_follow_the_rule_on_both_ends_and_lep_loses_nothing(runs):
    stages, steps = (2, 8) if runs.spec is table.LOSSY_RUN else (4, 3)
    micro_batches = 4
    for stage, receiver, sender in links(runs):
        rule = [epilogue(stages, micro_batches, stage)] * steps
        assert receiver.messages["received"].history == rule
        assert sender.messages["sent"].history == rule
        assert_nothing_is_lost(receiver, sender)


@uses(table.INTERLEAVED_RUN)
def test_interleaved_runs_follow_the_rule_on_both_ends_and_lep_loses_nothing(runs):
    ((schedule, _),) = run_ranks(1, schedules, [(4, 2, 4, 4)])[0]
    for stage, receiver, sender in links(runs):
        rule = [[message.epilogue for message in schedule.messages(stage)]] * 3
        assert receiver.messages["received"].history == rule
        assert sender.messages["sent"].history == rule
        if any(rule[0]):
            assert_nothing_is_lost(receiver, sender)


@uses(table.SAVED)
def test_where_all_messages_are_asked_for_lep_loses_nothing_either(runs):
    for _, receiver, sender in links(runs):
        assert receiver.messages["received"].history == sender.messages["sent"].history == [[True] * 2] * 8
        assert_nothing_is_lost(receiver, sender)


@uses(full(table.GROWING, table.GROWING_LIMIT.run))
def test_messages_follow_the_number_of_micro_batches_and_uneven_stages_reproduce_vanilla(runs):
    vanilla, ours = runs
    for stage, receiver, sender in links(ours):
        rule = [epilogue(4, micro_batches, stage) for micro_batches in table.GROWING_MICRO_BATCHES]
        assert receiver.messages["received"].history == rule
        assert sender.messages["sent"].history == rule
    assert relative_gap(last_stage_losses(ours.ranks), last_stage_losses(vanilla.ranks)) < table.TOLERANCE


@uses((table.VANILLA, table.WARMUPS))
def test_warmups_are_vanilla_to_the_bit_and_compression_follows_on_both_ends(runs):
    vanilla, ours = runs
    for stage, receiver, sender in links(ours):
        rule = [[False] * 4] * 4 + [epilogue(2, 4, stage)] * 4
        assert receiver.messages["received"].history == sender.messages["sent"].history == rule
    expected, losses = last_stage_losses(vanilla.ranks), last_stage_losses(ours.ranks)
    # An iteration's loss shows the updates before it: four uncompressed ones for the first five losses.
    assert losses[:5] == expected[:5]
    assert losses[5] != expected[5]
    assert ours.ranks[0].grad_norms[:4] == vanilla.ranks[0].grad_norms[:4]
    assert ours.ranks[0].grad_norms[4] != vanilla.ranks[0].grad_norms[4]
