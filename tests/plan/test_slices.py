"""Bounds of message buffers in a plan: slices have a latency each, and a bound that costs much gets a line."""

from argparse import ArgumentParser

import pytest

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.tools.plan.command import add_arguments, asked_of, plan_of
from optimus_cc_ext.tools.plan.hardware import cluster_of
from optimus_cc_ext.tools.plan.memory import SLICES_COST, enough_memory, memory, slicing
from optimus_cc_ext.tools.plan.model import Job
from optimus_cc_ext.tools.plan.seconds import Group, all_to_all
from optimus_cc_ext.tools.plan.shapes import MODELS
from optimus_cc_ext.tools.plan.sums import LAUNCH

CLUSTER = cluster_of("h100-200gbe")
JOB = Job(model=MODELS["8.3b"], gpus=128, tp=8, pp=4, micro_batch=8, batch=512)
INT8 = OptimusConfig(dp_compression_format="int8")


def test_slices_cost_the_latency_and_the_kernels_of_each_but_the_first() -> None:
    assert slicing(CLUSTER, JOB, OptimusConfig()) == slicing(CLUSTER, JOB, INT8.replace(message_memory=10**6)) == 0
    costs = [slicing(CLUSTER, JOB, INT8.replace(message_memory=bound)) for bound in (256, 64, 16, 4)]
    assert costs == sorted(costs) and costs[0] > 0
    # Four replicas on four nodes; a slice's latency is that of an all-to-all of hardly any bytes.
    values, group = JOB.stage_parameters + JOB.embedding_share, Group(4, 1, 8)
    slices = 2 * 8.125 / 8 * values / (4e6 / 4)
    latency = all_to_all(CLUSTER, group, 1.0) + 2 * LAUNCH
    assert costs[-1] == pytest.approx(slices * latency, rel=0.2), "a slot has room for a padded slice"


def test_the_bound_that_would_be_enough_is_the_next_one_that_costs_little() -> None:
    for bound in (1, 4, 16):
        enough = enough_memory(CLUSTER, JOB, INT8.replace(message_memory=bound), seconds := 0.5)
        costs = [
            slicing(CLUSTER, JOB, INT8.replace(message_memory=each)) / seconds for each in (bound, enough or bound)
        ]
        assert (enough is None) == (costs[0] <= SLICES_COST) and costs[-1] <= SLICES_COST
    assert enough_memory(CLUSTER, JOB, INT8, 10.0) is None


def _planned(bound: int) -> list[str]:
    add_arguments(parser := ArgumentParser())
    words = "--cluster h100-200gbe --nodes 16 --model llama3-8b -- --tensor-model-parallel-size 4 --sequence-parallel"
    ours = f"--attention-backend flash --use-distributed-optimizer --optimus-cc balanced --message-memory {bound}"
    return plan_of(asked_of(parser.parse_args(f"{words} {ours}".split()))).lines


def test_a_bound_that_costs_much_gets_a_line_with_the_one_that_would_be_enough() -> None:
    # A slot of the exact gather has room for raw values, four times as large as its messages are.
    [line] = [line for line in _planned(4) if "slices of" in line]
    assert line.startswith("yours: slices of --message-memory 4 cost up to") and "; 128 would be enough for 5 %" in line
    for bound in (128, 256):
        assert not [line for line in _planned(bound) if "slices of" in line]


def test_a_bound_below_one_block_of_all_replicas_is_refused_with_the_smallest_that_works() -> None:
    wide = JOB.replace(gpus=32 * 4096, batch=4096 * 8)
    with pytest.raises(FlagError, match=r"one block to each of 4096 ranks need 5.24 MB. Give at least 6"):
        memory(wide, INT8.replace(message_memory=5, dp_compression_levels="one"))
    assert memory(wide, INT8.replace(message_memory=6, dp_compression_levels="one"))
