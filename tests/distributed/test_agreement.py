"""Law: both ends agree. Ranks with different settings are told so at the start, and nothing hangs."""

import pytest
import torch.distributed as dist

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.errors import RanksDisagree
from optimus_cc_ext.resolve import Layout
from optimus_cc_ext.session import Session
from optimus_cc_ext.techniques.grid import Grid, RankPlace
from tests.forked_ranks import run_ranks

LAYOUT = Layout(stages=2, data_parallel=1, tied_embeddings=True)


def _place(configs) -> str:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    session = Session(configs[rank])
    grid = Grid(
        place=RankPlace(rank=rank, stage=rank, tensor_rank=0), stages=2, data_parallel=1,
        pipeline_group=dist.group.WORLD,
    )  # fmt: skip
    try:
        session.place(grid, LAYOUT)
    except RanksDisagree as error:
        return str(error)
    return "agreed"


@pytest.mark.parametrize(
    "other",
    [
        OptimusConfig(compressed_backprop=True, compressed_backprop_rank=8),
        OptimusConfig(compressed_backprop=True, compression_seed=7),
        OptimusConfig(),
    ],
    ids=["another rank", "another seed", "everything off"],
)
def test_different_settings_are_named_on_every_rank(other):
    configs = [OptimusConfig(compressed_backprop=True), other]
    for rank, message in enumerate(run_ranks(2, _place, configs, timeout=60)):
        assert f"rank {rank} and rank {1 - rank} run with different settings" in message
        assert "same flags" in message


def test_equal_settings_agree():
    configs = [OptimusConfig(compressed_backprop=True, fused_embedding_sync=True)] * 2
    assert run_ranks(2, _place, configs, timeout=60) == ["agreed", "agreed"]
