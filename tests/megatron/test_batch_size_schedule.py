"""Uneven stages and a batch size that grows: the number of micro-batches changes, and the rule for messages with it.

megatron-core 0.19.2 still parses `--rampup-batch-size`, but its training loop no longer looks at it; what changes the
batch size there is `--step-batch-size-schedule`.
"""

import sys

from tests.megatron.optimus_runs import relative_gap, run_optimus
from tests.megatron.test_compressed_messages import _ends, _expected, _install_recording
from tests.megatron.test_lossless_limits import FE, LOSSLESS_CB, TOLERANCE
from tests.megatron_runs import last_stage_losses, run_megatron

STAGES = 4
# 2, 1, none and 1 of 4 layers. From 12 sequences of 64 tokens on 6 sequences an iteration, from 24 on 8, in pairs.
FLAGS = (
    "--pipeline-model-parallel-size", "4", "--pipeline-model-parallel-layout", "Ett|t||tL",
    "--step-batch-size-schedule", "0:4 768:6 1536:8", "--train-iters", "7",
)  # fmt: skip
MICRO_BATCHES = [2, 2, 2, 3, 3, 4, 4]


def _without_a_fixed_batch_size() -> None:
    at = sys.argv.index("--global-batch-size")
    del sys.argv[at : at + 2]


def _install() -> None:
    _without_a_fixed_batch_size()
    _install_recording()


def test_compressed_messages_follow_the_number_of_micro_batches_and_uneven_stages_reproduce_vanilla():
    vanilla = last_stage_losses(run_megatron(STAGES, FLAGS, before=_without_a_fixed_batch_size))
    epilogue = [flag.replace("all", "epilogue") for flag in LOSSLESS_CB]
    runs = run_optimus((STAGES, FLAGS), [*epilogue, *FE], before=_install, probe=_ends)
    for receiving_stage in range(STAGES - 1):
        receiver, sender = runs[receiving_stage].probed, runs[receiving_stage + 1].probed
        rule = [_expected(STAGES, micro_batches, receiving_stage) for micro_batches in MICRO_BATCHES]
        assert receiver["received"][0] == rule
        assert sender["sent"][0] == rule
    assert relative_gap(last_stage_losses(runs), vanilla) < TOLERANCE
