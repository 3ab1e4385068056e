"""The epilogue's gradient messages, compared with 1F1B played out call by call.

The player knows nothing of warm-up lengths. A stage runs forward while it may have another micro-batch in flight (at
most P - stage of them, which bounds 1F1B's memory), otherwise backward; a transfer that can be combined with one of the
opposite direction over the same link is combined. The receiver is in its cooldown when a gradient comes in without an
activation going out: no computation is left that could hide the gradient.
"""

from dataclasses import dataclass, field

import pytest
import torch

from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.techniques.messages import LinkPlan
from optimus_cc_ext.techniques.schedule import NonInterleaved, is_epilogue


@dataclass(eq=False)
class Stage:
    """Pipeline stage with its own record of each gradient message: was no other message sent at the same time?"""

    limit: int
    activations: list[int] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)
    forwards: int = 0
    backwards: int = 0
    received_alone: list[bool] = field(default_factory=list)
    sent_alone: list[bool] = field(default_factory=list)


def play(stages: int, micro_batches: int) -> list[Stage]:
    """Run all micro-batches on all stages; return the stages. Fails if no stage can go on."""
    pipeline = [Stage(limit=stages - number) for number in range(stages)]
    pipeline[0].activations = list(range(micro_batches))
    while any(stage.backwards < micro_batches for stage in pipeline):
        moved = [step(pipeline, number, micro_batches) for number in range(stages)]
        assert any(moved), "the pipeline is stuck"
    return pipeline


def step(pipeline: list[Stage], number: int, micro_batches: int) -> bool:
    """Run one forward or one backward pass of a stage, if its input has arrived; return whether it ran."""
    stage, last = pipeline[number], number == len(pipeline) - 1
    in_flight = stage.forwards - stage.backwards
    if in_flight < stage.limit and stage.forwards < micro_batches:
        if not stage.activations:
            return False
        micro_batch = stage.activations.pop(0)
        stage.forwards += 1
        (stage.gradients if last else pipeline[number + 1].activations).append(micro_batch)
        return True
    if not stage.gradients:
        return False
    assert stage.gradients.pop(0) == stage.backwards, "gradients come in the order of their micro-batches"
    # The forward pass that filled the stage up sends its activation while this gradient comes in.
    stage.received_alone.append(in_flight < stage.limit)
    stage.backwards += 1
    if number > 0:
        # If a forward pass follows, its activation arrives while this gradient leaves.
        stage.sent_alone.append(stage.forwards == micro_batches)
        pipeline[number - 1].gradients.append(stage.backwards - 1)
    return True


@pytest.mark.parametrize("stages", range(2, 17))
def test_the_epilogue_is_the_receivers_cooldown_and_both_ends_agree_on_it(stages: int) -> None:
    for micro_batches in range(1, 40):
        pipeline = play(stages, micro_batches)
        for sender in range(1, stages):
            rule = [is_epilogue(stages, micro_batches, sender, message) for message in range(micro_batches)]
            assert rule == pipeline[sender - 1].received_alone, f"M={micro_batches}, {sender} -> {sender - 1}"
            assert rule == pipeline[sender].sent_alone


@pytest.mark.parametrize("messages", ["epilogue", "all"])
def test_a_link_compresses_the_messages_that_were_asked_for(messages: str) -> None:
    config = OptimusConfig(compressed_backprop_format="low-rank", compressed_backprop_messages=messages)  # type: ignore[arg-type]
    shape = torch.Size((256, 2, 256))
    for stages, micro_batches in ((2, 1), (2, 8), (4, 2), (4, 6), (8, 3), (8, 16)):
        for sender in range(1, stages):
            plan = LinkPlan(config, sending_stage=sender, receiving_stage=sender - 1)
            for index, message in enumerate(NonInterleaved(stages, micro_batches).messages(sender - 1)):
                expected = messages == "all" or is_epilogue(stages, micro_batches, sender, index)
                assert plan.compresses(message, shape) == expected
