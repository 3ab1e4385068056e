"""Buckets padded so that shards begin where kernels load 16 bytes at once: doctor, handles, checkpoints."""

import argparse
import logging
import os
from pathlib import Path

import pytest
import torch

import optimus_cc_ext
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.tools.doctor import _shards
from tests.forked_ranks import run_ranks
from tests.megatron import one_of_many, own_loops
from tests.megatron_runs import last_stage_losses, run_megatron

INT4 = OptimusConfig(dp_compression_format="int4")


@pytest.mark.parametrize(
    ("replicas", "padded", "config", "said"),
    [
        (16, False, INT4, None),
        (24, False, INT4, None),
        (64, False, INT4, "64 replicas' shards begin at multiples of 2 values: kernels need 4 times as many loads and "
         "stores in bf16, and 2 in fp32"),
        (256, False, INT4, "multiples of 1 values: kernels need 8 times as many loads and stores in bf16, and 4 in"),
        (256, True, INT4, None),
        (256, False, OptimusConfig(dp_compression_format="low-rank"), None),
    ],
)  # fmt: skip
def test_doctor_says_what_shards_at_odd_places_cost(replicas, padded, config, said) -> None:
    args = argparse.Namespace(
        use_distributed_optimizer=True, data_parallel_size=replicas, context_parallel_size=1,
        ddp_pad_buckets_for_high_nccl_busbw=padded,
    )  # fmt: skip
    found = [finding.state for finding in _shards(args, config)]
    assert (said is None and not found) or (said is not None and said in found[0])


def one_of_64_replicas(padded: bool) -> tuple[list[str], int]:
    """Return the lines about shards of a handle on fake process groups, and the number by which shards are aligned."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallelConfig

    os.environ["OPTIMUS_CC_NODE"] = "ranks:8"
    one_of_many.use_fake_groups()
    torch.distributed.init_process_group(rank=0, world_size=64)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    one_of_many.answer_for_all(64, 1, 1, odd_one=False)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    config = optimus_cc_ext.pad_buckets(config) if padded else config
    model, lines = own_loops.build(1, in_bf16=True, **vars(config)), list[str]()
    logger = logging.getLogger("optimus_cc_ext")
    logger.setLevel(logging.INFO)
    logger.addFilter(lambda record: bool(lines.append(record.getMessage())) or True)
    handle = optimus_cc_ext.compress(model, None, INT4)
    assert handle._session.grid is not None
    shards = {bucket.grad_data.numel() // 64 for group in model.bucket_groups for bucket in group.buckets}
    return [line for line in lines if "shards begin" in line], min(number & -number for number in shards)


def test_a_handle_says_the_cost_once_unless_one_call_before_ddp_padded_the_buckets() -> None:
    [(lines, multiple)] = run_ranks(1, one_of_64_replicas, False, timeout=200)
    assert len(lines) == 1 and "64 replicas' shards begin at multiples of 2 values" in lines[0]
    assert "(optimus_cc_ext.pad_buckets)" in lines[0] and "--" not in lines[0]
    assert multiple < 8
    [(lines, multiple)] = run_ranks(1, one_of_64_replicas, True, timeout=200)
    assert lines == [] and multiple >= 8


@pytest.mark.full
@pytest.mark.parametrize("format", ["torch", "torch_dist"])
def test_a_checkpoint_without_padding_goes_on_with_it_as_without_it(format: str, tmp_path: Path) -> None:
    """Megatron saves the optimizer's state without the padding. With 2 replicas sums have one order."""
    flags = f"--use-distributed-optimizer --bf16 --lr-decay-style constant --ckpt-format {format}".split()
    run_megatron(2, [*flags, "--train-iters", "2", "--save", str(tmp_path), "--save-interval", "2"])
    load = [*flags, "--load", str(tmp_path), "--override-opt_param-scheduler"]
    without, padded = (
        last_stage_losses(run_megatron(2, [*load, *more])) for more in ([], ["--ddp-pad-buckets-for-high-nccl-busbw"])
    )
    assert len(without) == 2 and padded == without
