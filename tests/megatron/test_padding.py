"""Buckets padded so that shards begin where kernels load 16 bytes at once: what doctor says, and checkpoints."""

import argparse
from pathlib import Path

import pytest

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.doctor import _shards
from tests.megatron_runs import last_stage_losses, run_megatron

INT4 = OptimusConfig(dp_compression=True, dp_compression_format="int4")


@pytest.mark.parametrize(
    ("replicas", "padded", "config", "said"),
    [
        (16, False, INT4, None),
        (24, False, INT4, None),
        (64, False, INT4, "64 replicas' shards begin at multiples of 2 values: kernels need 4 times as many loads and "
         "stores in bf16, and 2 in fp32"),
        (256, False, INT4, "multiples of 1 values: kernels need 8 times as many loads and stores in bf16, and 4 in"),
        (256, True, INT4, None),
        (256, False, OptimusConfig(dp_compression=True), None),
    ],
)  # fmt: skip
def test_doctor_says_what_shards_at_odd_places_cost(replicas, padded, config, said) -> None:
    args = argparse.Namespace(
        use_distributed_optimizer=True, data_parallel_size=replicas, context_parallel_size=1,
        ddp_pad_buckets_for_high_nccl_busbw=padded,
    )  # fmt: skip
    found = [finding.state for finding in _shards(args, config)]
    assert (said is None and not found) or (said is not None and said in found[0])


@pytest.mark.full
@pytest.mark.parametrize("format", ["torch", "torch_dist"])
def test_a_checkpoint_without_padding_goes_on_with_it_as_without_it(format: str, tmp_path: Path) -> None:
    """Megatron saves the optimizer's state without the padding. 2 replicas, so that sums have one order."""
    flags = f"--use-distributed-optimizer --bf16 --lr-decay-style constant --ckpt-format {format}".split()
    run_megatron(2, [*flags, "--train-iters", "2", "--save", str(tmp_path), "--save-interval", "2"])
    load = [*flags, "--load", str(tmp_path), "--override-opt_param-scheduler"]
    without, padded = (
        last_stage_losses(run_megatron(2, [*load, *more])) for more in ([], ["--ddp-pad-buckets-for-high-nccl-busbw"])
    )
    assert len(without) == 2 and padded == without
