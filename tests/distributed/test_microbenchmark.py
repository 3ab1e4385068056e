"""A microbenchmark times what training does: messages and gradients of any shape, changed by nothing, in seconds."""

import torch
import torch.distributed as dist

from optimus_cc_ext.compressors import FastLowRank
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.forecast import microbenchmark
from optimus_cc_ext.techniques.compressed_backprop import LinkPlan
from tests.forked_ranks import run_ranks

CONFIG = OptimusConfig(compressed_backprop=True, dp_compression=True, dp_compression_rank=4)
SHAPES = [(24, 8), (8, 8), (24, 8), (8, 32)]


def _measure() -> list[float]:
    dist.init_process_group("gloo")
    random_state = torch.get_rng_state()
    matrices = [torch.ones(shape) for shape in SHAPES]  # each in a storage of its own
    keep = {
        "alone": dist.group.WORLD, "compressor": FastLowRank(), "config": CONFIG, "state_dtype": torch.float32,
    }  # fmt: skip
    seconds = [microbenchmark.time_gradients(matrices, **keep), microbenchmark.time_gradients([], **keep)]
    microbenchmark._SAMPLE_BYTES = 1  # one matrix stands for all
    seconds.append(microbenchmark.time_gradients(matrices, **keep))
    plan = LinkPlan(config=CONFIG, sending_stage=1, receiving_stage=0, seed=1)
    seconds += microbenchmark.time_message(plan, torch.empty(64, 2, 32), FastLowRank())
    assert all(bool((matrix == 1).all()) for matrix in matrices)
    assert torch.equal(torch.get_rng_state(), random_state)
    return seconds


def test_a_microbenchmark_takes_time_of_its_own_and_leaves_everything_as_it_was():
    [[all_of_them, none, scaled, compress, decompress, remember]] = run_ranks(1, _measure, timeout=60)
    assert none == 0 and min(all_of_them, scaled, compress, decompress, remember) > 0
    assert max(all_of_them, scaled, compress, decompress, remember) < 10
