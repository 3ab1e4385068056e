"""Decisions of the wrap around Megatron's all-to-all of tokens: which calls it takes over, and what it counts."""

from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.collectives.nodes import Node
from optimus_cc_ext.config.classes import EXPERT_DISPATCH, EXPERT_GRADIENT
from optimus_cc_ext.config.presets import Layout
from optimus_cc_ext.hooks import token_dispatcher
from optimus_cc_ext.hooks.steps import _without_messages
from optimus_cc_ext.metrics.traffic import Traffic
from optimus_cc_ext.techniques import expert_rows
from optimus_cc_ext.techniques.grid import Grid, RankPlace
from optimus_cc_ext.techniques.session import Session

LAYOUT = Layout(stages=1, data_parallel=4, tied_embeddings=False, expert_parallel=4, row_width=256)
GROUP = SimpleNamespace(size=lambda: 4, rank=lambda: 1)
BOTH = {"expert_dispatch_format": "int8", "expert_gradient_format": "int8"}
RECEIVED, SENT = numpy.array([1, 2, 3, 4]), numpy.array([5, 6, 7, 8])


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return the exchanges that the wrap takes over, with their arguments."""
    calls: list[tuple[Any, ...]] = []
    exchange = SimpleNamespace(apply=lambda *arguments: calls.append(arguments) or "ours")
    monkeypatch.setattr(token_dispatcher, "RowExchange", exchange)
    monkeypatch.setattr(expert_rows.dist, "get_process_group_ranks", lambda group: [0, 1, 2, 3])
    return calls


def session_of(nodes: str = "aabb", **config: Any) -> Session:
    """Return the session of rank 1 of four ranks that share the experts, on nodes that are named by letters."""
    session = Session(OptimusConfig(**config))
    places = [
        RankPlace(rank=rank, stage=0, tensor_rank=0, node=Node(node), experts=(0, 1, 2, 3))
        for rank, node in enumerate(nodes)
    ]
    grid = Grid(place=places[1], stages=1, data_parallel=4, expert_group=GROUP)  # type: ignore[arg-type]
    for technique in session.rows:
        technique.place(grid, LAYOUT, SimpleNamespace(places=places))  # type: ignore[arg-type]
    return session


def called(session: Session | None, tensor: torch.Tensor, splits: bool = True, group: Any = GROUP) -> str:
    """Return who exchanged the tensor: "ours" or "vanilla"."""
    sessions = SimpleNamespace(with_experts_on=lambda _: session)
    (_, wrap), *_ = token_dispatcher.wraps(sessions)  # type: ignore[arg-type]
    split = (RECEIVED, SENT) if splits else (None, None)
    return str(wrap(lambda *_, **__: "vanilla")(group, tensor, *split, use_nccl_stream=True))


def tokens(width: int = 256, rows: int = 26) -> torch.Tensor:
    return torch.ones(rows, width, requires_grad=True)


def test_tokens_are_taken_over_and_all_else_stays_megatrons(taken: list[Any]) -> None:
    session = session_of(**BOTH)
    assert called(session, tokens()) == "ours"
    [(rows, forward, backward, there, back)] = taken
    assert rows.shape == (26, 256) and [forward, backward] == session.rows
    way = there.__self__
    assert (there, back) == (way.spread, way.collect)
    assert way._group is GROUP and (way._received, way._sent) == ([1, 2, 3, 4], [5, 6, 7, 8])
    assert called(None, tokens()) == "vanilla", "no pass is open: evaluation, or a model without a handle"
    assert called(session, torch.ones(26, requires_grad=True)) == "vanilla", "probabilities"
    assert called(session, torch.ones(26, 1, requires_grad=True)) == "vanilla", "probabilities of another shape"
    assert called(session, tokens(384)) == "vanilla", "another width than a token's"
    assert called(session, tokens(), group=SimpleNamespace(size=lambda: 1)) == "vanilla", "one rank"
    assert called(session_of(), tokens()) == "vanilla", "every class is off"
    assert len(taken) == 1


@pytest.mark.parametrize("field", BOTH)
def test_one_direction_is_enough_to_take_tokens_over(taken: list[Any], field: str) -> None:
    assert called(session_of(**{field: "int8"}), tokens()) == "ours"


def counted(traffic: Traffic) -> list[tuple[int, int]]:
    return [traffic.total()[each] for each in (EXPERT_DISPATCH, EXPERT_GRADIENT)] + [traffic.leaving]


def test_bytes_are_counted_by_destination_and_what_stays_on_the_rank_is_not_sent(taken: list[Any]) -> None:
    session = session_of(**BOTH)
    called(session, tokens())
    # To the other ranks go 5 + 7 + 8 rows, back come 1 + 3 + 4; ranks 2 and 3 are on another node.
    dense, coded = 256 * 4, 2 * 130
    leaving = (15 + 7) * dense, (15 + 7) * coded
    assert counted(session.traffic) == [(20 * dense, 20 * coded), (8 * dense, 8 * coded), leaving]
    called(session, torch.ones(26, requires_grad=True))
    assert counted(session.traffic)[0] == (20 * (dense + 4), 20 * (coded + 4)), "probabilities belong to their tokens"


def test_a_rank_whose_experts_got_no_token_counts_the_gradients_that_it_sends_back(taken: list[Any]) -> None:
    for config, row in ((BOTH, 260), ({}, 1024)):
        session = session_of(**config)
        called(session, torch.empty(0, 256, requires_grad=True))
        assert counted(session.traffic)[1] == (8 * 1024, 8 * row)


def test_with_capacity_padding_all_parts_are_equal_and_without_gradients_nothing_travels_back(taken: list[Any]) -> None:
    session = session_of(**BOTH)
    with torch.no_grad():
        called(session, tokens(rows=32), splits=False)
    assert counted(session.traffic)[:2] == [(24 * 1024, 24 * 260), (0, 0)]
    assert taken[0][-1].__self__._sent is None
    assert session.rows[0].seen


@pytest.mark.parametrize("nodes, expected", [("aaaa", "vanilla"), ("aaab", "ours")])
def test_a_preset_leaves_tokens_dense_inside_a_node_and_a_flag_of_the_class_does_not(
    taken: list[Any], nodes: str, expected: str
) -> None:
    assert called(session_of(nodes, only_between_nodes="expert_dispatch,expert_gradient", **BOTH), tokens()) == expected
    assert called(session_of(nodes, **BOTH), tokens()) == "ours"


@pytest.mark.parametrize("seen", [False, True])
def test_a_step_whose_tokens_passed_outside_of_the_wrap_is_refused(taken: list[Any], seen: bool) -> None:
    session = session_of(**BOTH)
    session.step.passes, session.step.reduced = 1, True
    for rows in session.rows:
        rows.expected = True
    session.embedding.group = None
    if seen:
        called(session, tokens())
    reason = _without_messages(session)
    assert (reason is None) is seen
    assert seen or "no token was exchanged among experts" in str(reason)
    for rows in session.rows:
        rows.expected = False
    assert _without_messages(session) is None, "this rank has no layer with experts"


@pytest.mark.parametrize("rows, least", [(1, 1), (128, 128), (129, 64), (4096, 128)])
def test_errors_are_measured_on_128_rows_of_an_exchange_at_most(
    taken: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, rows: int, least: int
) -> None:
    dispatch = session_of(**BOTH).rows[0]
    codec, measured = dispatch.codec, list[int]()
    assert codec is not None
    monkeypatch.setattr(dispatch.gauge, "note", lambda values, error: measured.append(len(values)))
    values = torch.randn(rows, 256)
    dispatch.gauge.begin(True)
    dispatch._measure(codec, values, codec.encode_rows(values))
    assert least <= measured[0] <= 128
