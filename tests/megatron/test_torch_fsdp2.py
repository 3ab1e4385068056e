"""Megatron's --use-torch-fsdp2: its gradients in few bits by the flag of their format, and by no preset."""

import os

import pytest

from tests.megatron import runs as table
from tests.megatron.specs import RunSpec, uses
from tests.megatron_runs import last_stage_losses, relative_gap

pytestmark = pytest.mark.ci

FLAGS = "--use-torch-fsdp2 --untie-embeddings-and-output-weights --ckpt-format torch_dist"


def several_queues() -> None:
    """Megatron refuses FSDP2 beside a single queue of work for kernels."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"


VANILLA = RunSpec(name="FSDP2", layout=(2, ""), flags=f"{FLAGS} {table.SHORT}", before=(several_queues,))
BY_PRESET = VANILLA.but("FSDP2, balanced", ours="--optimus-cc balanced")
INT8 = VANILLA.but("FSDP2, int8", ours="--dp-compression-format int8")
INT4_BF16 = VANILLA.but("FSDP2, int4, bf16", flags="--bf16", ours="--optimus-cc balanced --dp-compression-format int4")
LOW_RANK = VANILLA.but("FSDP2, low rank", ours=table.SC4, ends=True)


@uses((VANILLA, BY_PRESET))
def test_a_preset_leaves_the_gradients_of_fsdp2_dense_with_a_line_that_names_the_flag(runs):
    vanilla, ours = runs
    for theirs, mine in zip(vanilla.ranks, ours.ranks, strict=True):
        assert mine.losses == theirs.losses and mine.weights == theirs.weights
    (line,) = [line for line in ours.said if "--use-torch-fsdp2" in line]
    assert "FSDP2 reduces the gradients of each micro-batch by themselves" in line


@uses((VANILLA, INT8))
def test_in_int8_the_losses_stay_within_a_thousandth(runs):
    vanilla, ours = runs
    assert "FSDP2 reduces gradients in int8, those of each micro-batch by themselves" in ours.said
    assert 0 < relative_gap(last_stage_losses(ours.ranks), last_stage_losses(vanilla.ranks)) < 1e-3


@uses(INT4_BF16)
def test_a_flag_beside_a_preset_compresses_bf16_gradients(runs):
    assert "FSDP2 reduces gradients in int4, those of each micro-batch by themselves" in runs.said
    assert len(last_stage_losses(runs.ranks)) == 8


@uses(LOW_RANK)
def test_low_rank_is_refused_by_name(runs):
    for rank in runs.ranks:
        said = "\n".join(rank.printed)
        assert rank.ended == 2 and "--use-torch-fsdp2" in said and "Give --dp-compression-format int8 or int4" in said
