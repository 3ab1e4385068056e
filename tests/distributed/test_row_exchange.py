"""Tokens of experts over two real ranks: what arrives is the codec's round trip, in the format of its direction."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.collectives.nodes import Node
from optimus_cc_ext.compressors.blocks import Codec
from optimus_cc_ext.config.presets import Layout
from optimus_cc_ext.hooks import token_dispatcher
from optimus_cc_ext.techniques.grid import Grid, RankPlace
from optimus_cc_ext.techniques.session import Session
from tests.forked_ranks import run_ranks

WIDTH = 256
SENT = ((2, 3), (0, 4))
"""Rows from each rank to each rank: rank 1 sends none to rank 0."""


def session_of(config: dict[str, Any]) -> Session:
    session = Session(OptimusConfig(**config))
    places = [
        RankPlace(rank=rank, stage=0, tensor_rank=0, node=Node(name), experts=(0, 1)) for rank, name in enumerate("ab")
    ]
    group: Any = dist.group.WORLD
    grid = Grid(place=places[dist.get_rank()], stages=1, data_parallel=2, expert_group=group)
    layout = Layout(stages=1, data_parallel=2, tied_embeddings=False, expert_parallel=2, row_width=WIDTH)
    for technique in session.rows:
        technique.place(grid, layout, SimpleNamespace(places=places))  # type: ignore[arg-type]
    return session


def rows_of(rank: int, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(10 * seed + rank))


def exchanged(config: dict[str, Any]) -> dict[str, Any]:
    """Exchange rows and their gradients through the wrap of Megatron's function."""
    dist.init_process_group("gloo")
    rank, session = dist.get_rank(), session_of(config)
    (_, wrap), *_ = token_dispatcher.wraps(SimpleNamespace(with_experts_on=lambda _: session))  # type: ignore[arg-type]
    received, sent = [SENT[other][rank] for other in (0, 1)], list(SENT[rank])
    rows = rows_of(rank, sum(sent)).requires_grad_()
    arrived = wrap(None)(dist.group.WORLD, rows, received, sent)
    arrived.backward(rows_of(rank, sum(received), seed=1))
    return {"node": type(arrived.grad_fn).__name__, "arrived": arrived.detach(), "gradient": rows.grad}


def as_coded(rows: torch.Tensor, codec: Codec | None) -> torch.Tensor:
    return rows if codec is None else codec.decode_rows(codec.encode_rows(rows), rows.dtype)


@pytest.mark.parametrize(
    ("forward", "backward"), [("int8", "int4"), ("dense", "int8"), ("int8", "dense"), ("int4", "int8")]
)
def test_each_direction_sends_every_row_in_its_own_format(forward: str, backward: str) -> None:
    config = {"expert_dispatch_format": forward, "expert_gradient_format": backward}
    found = run_ranks(2, exchanged, config)
    session = Session(OptimusConfig(**config))
    codecs = [technique.new_codec() for technique in session.rows]
    parts = [rows_of(rank, sum(SENT[rank])).split(list(SENT[rank])) for rank in (0, 1)]
    arriving = [[SENT[other][rank] for other in (0, 1)] for rank in (0, 1)]
    gradients = [rows_of(rank, sum(arriving[rank]), seed=1).split(arriving[rank]) for rank in (0, 1)]
    for rank, of_rank in enumerate(found):
        # A row is coded alone, so coding before the exchange equals coding after it, also of rows that stay on a rank.
        assert torch.equal(of_rank["arrived"], as_coded(torch.cat([part[rank] for part in parts]), codecs[0]))
        assert torch.equal(of_rank["gradient"], as_coded(torch.cat([part[rank] for part in gradients]), codecs[1]))
        assert of_rank["node"] == "RowExchangeBackward", "Megatron orders its shared experts by this node"
