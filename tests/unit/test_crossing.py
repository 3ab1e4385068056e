"""Traffic between nodes follows from the places of all ranks, and ranks that keep equal bits decide alike."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from optimus_cc_ext.collectives.nodes import Levels, Node, rdma_cards
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import CLASSES, PIPELINE_BACKWARD
from optimus_cc_ext.config.presets import Layout as RunLayout
from optimus_cc_ext.config.presets import share_of_copies
from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.placement import Placement
from optimus_cc_ext.techniques.crossing import (
    classes_inside,
    crossing_lines,
    exchange_lines,
    hops_between,
    levels_of_experts,
    levels_of_group,
    stays_dense,
)
from optimus_cc_ext.techniques.grid import RankPlace

EVERYTHING = {each.name for each in CLASSES}
PIPELINES = {"pipeline_forward", "compressed_backprop"}
GRADIENTS = {"dp_compression", "param_gather"}
EXPERTS = {"expert_dispatch", "expert_gradient"}
BALANCED = OptimusConfig(
    pipeline_forward_format="int8", compressed_backprop_format="int8", dp_compression_format="int4",
    fused_embedding_sync_format="int8", param_gather_format="int4", only_between_nodes=",".join(EVERYTHING),
)  # fmt: skip
INT4 = OptimusConfig(dp_compression_format="int4")


def on_nodes(
    nodes: str, *, tensor: int = 1, pipeline: int = 1, pipeline_before_data: bool = False, expert: int = 1
) -> list[RankPlace]:  # fmt: skip
    """Return the places of ranks in Megatron's order, on nodes that are named by letters: one for each rank."""
    data = len(nodes) // tensor // pipeline
    grid = Placement(
        tensor=tensor, data=data, pipeline=pipeline, pipeline_before_data=pipeline_before_data, expert=expert
    )
    places = []
    for ranks in grid.groups("pipeline"):
        for stage, rank in enumerate(ranks):
            members = next(group for group in grid.groups("tensor") if rank in group)
            places.append(
                RankPlace(
                    rank=rank, stage=stage, tensor_rank=members.index(rank), node=Node(nodes[rank]),
                    pipeline=tuple(ranks) if pipeline > 1 else (),
                    experts=tuple(grid.experts(rank)) if expert > 1 else (),
                )
            )  # fmt: skip
    return places


@pytest.mark.parametrize(
    "places, inside",
    [
        (on_nodes("aaaa", pipeline=2, expert=2), EVERYTHING),
        (on_nodes("aaaa", pipeline=2), EVERYTHING - EXPERTS),
        (on_nodes("aabb", expert=2), EXPERTS),
        (on_nodes("aabb", expert=4), set()),
        (on_nodes("abab", expert=2), set()),
        (on_nodes("aabb", pipeline=2), GRADIENTS),
        (on_nodes("abab", pipeline=2), PIPELINES),
        (on_nodes("abcd", pipeline=2), set()),
        (on_nodes("aabb", pipeline=2, pipeline_before_data=True), PIPELINES),
        (on_nodes("aaab", pipeline=2), set()),
        (on_nodes("aaaaaaaabbbbbbbb", tensor=4, pipeline=2), GRADIENTS),
        (on_nodes("aaaabbbb", tensor=2), set()),
        (on_nodes("aa"), GRADIENTS | {"fused_embedding_sync"}),
    ],
)
def test_a_class_stays_inside_if_nothing_of_it_leaves_a_node_on_any_rank(
    places: Sequence[RankPlace], inside: set[str]
) -> None:
    assert {each.name for each in classes_inside(places)} == inside


def test_a_hop_is_inside_for_all_tensor_parallel_ranks_or_for_none() -> None:
    # Ranks 0 and 1 are stage 0, ranks 2 and 3 stage 1. Rank 0 and rank 2 share a node, rank 1 and rank 3 do not.
    places = on_nodes("abac", tensor=2, pipeline=2)
    for stage, ranks in ((0, [0, 1]), (1, [2, 3])):
        for some, inside in ((ranks, False), (ranks[:1], True)):
            hops = hops_between(places, some, stage, 1 - stage)
            assert stays_dense(BALANCED, PIPELINE_BACKWARD, places, hops) is inside
            assert not stays_dense(BALANCED.replace(only_between_nodes=""), PIPELINE_BACKWARD, places, hops), (
                "the user asked for it"
            )


def test_the_groups_of_tensor_parallel_ranks_add_up_in_the_same_levels() -> None:
    alike, unlike = on_nodes("aaaabbbb", tensor=2), on_nodes("aaabbabb", tensor=2)
    for ranks in ([0, 2, 4, 6], [1, 3, 5, 7]):
        assert levels_of_group(alike, ranks) == Levels(nodes=2, members=2)
        found = levels_of_group(unlike, ranks)
        assert not found.two and "its tensor-parallel ranks lie on nodes in different ways" in found.reason
    assert levels_of_group(unlike, [0, 1, 3, 4]) == Levels(nodes=2, members=2), "experts have groups of their own"


def test_lines_say_what_is_left_dense_and_what_is_compressed_all_the_same() -> None:
    assert list(crossing_lines(BALANCED, on_nodes("abcd", pipeline=2))) == []
    (line,) = crossing_lines(BALANCED, on_nodes("aaaa", pipeline=2))
    assert line.startswith("left dense, because nothing of it leaves a node: pipeline forward, ")
    (line,) = crossing_lines(INT4, on_nodes("aaaa"))
    assert line.startswith("compressed as asked for, although nothing of it leaves a node: DP gradients")
    lines = list(crossing_lines(BALANCED, on_nodes("aabb", pipeline=4)))
    assert "2 of 3 hops between stages stay inside a node, and are left dense" in lines


def test_lines_say_in_how_many_levels_gradients_are_added_up_and_why() -> None:
    (line,) = crossing_lines(INT4, on_nodes("aabb"))
    assert line.startswith("data-parallel gradients in two levels: 2 replicas on each of 2 nodes")
    (line,) = crossing_lines(INT4, on_nodes("aaab"))
    assert line == "data-parallel gradients in one level, because its nodes hold unequal numbers of its ranks"
    assert list(crossing_lines(INT4.replace(dp_compression_levels="one"), on_nodes("aabb"))) == []


@pytest.mark.parametrize(
    "nodes, says",
    [
        ("aabb", None),
        ("abcd", "the dense sums of an instance cross nodes: it has 2 replicas, and a node holds 1 of them"),
        ("aaaabbbb", None),
        ("aabbccdd", ". --num-distributed-optimizer-instances 4 makes each node an instance"),
        ("aaaaaaaabbbbbbbb", "instances share nodes: a node holds 8 replicas and sends 2 sums"),
    ],
)
def test_a_line_says_if_an_instance_of_the_distributed_optimizer_is_not_a_node(nodes: str, says: str | None) -> None:
    instances = 4 if len(nodes) == 16 else 2
    first, *more = crossing_lines(INT4, on_nodes(nodes), instances)
    assert f"in the levels of {instances} distributed-optimizer instances: {len(nodes) // instances} replicas" in first
    assert [says is not None and says in line for line in more] == ([] if says is None else [True])
    assert list(crossing_lines(INT4.replace(dp_compression_levels="one"), on_nodes("aabb"), 2))[1:] == [
        "--dp-compression-levels: no effect: --num-distributed-optimizer-instances sets the levels"
    ]


def test_parameters_are_gathered_inside_an_instance_of_the_distributed_optimizer() -> None:
    assert {each.name for each in classes_inside(on_nodes("aabb"), 2)} == {"param_gather"}
    assert not classes_inside(on_nodes("abcd"), 2)


@pytest.mark.parametrize(
    "nodes, reason", [("abcd", "no node holds two replicas"), ("aaab", "unequal numbers"), ("aa", "no node holds two")]
)
def test_two_levels_are_refused_where_no_group_has_them(nodes: str, reason: str) -> None:
    with pytest.raises(FlagError, match=f"--dp-compression-levels: two levels are not possible: .*{reason}"):
        list(crossing_lines(INT4.replace(dp_compression_levels="two"), on_nodes(nodes)))


EIGHT = {"expert_dispatch_format": "int8"}
ONCE = {"expert_exchange": "once-a-node"}


def with_experts(routing: tuple[int, int, int] = (32, 8, 8), **facts: Any) -> RunLayout:
    return RunLayout(stages=1, data_parallel=4, tied_embeddings=False, expert_parallel=4, routing=routing, **facts)


@pytest.mark.parametrize(
    ("routing", "nodes", "share"),
    [
        ((8, 2, 2), 2, 0.79), ((8, 2, 2), 4, 0.93), ((4, 2, 2), 2, 0.83), ((128, 8, 8), 4, 0.45),
        ((128, 1, 1), 4, 1.0), ((128, 8, 8), 2, 0.25), ((8, 4, 8), 4, 0.39), ((2, 2, 2), 2, 1.0),
        ((8, 4, 8), 16, 0.75), ((2, 1, 4), 4, 0.47),  # a group of experts spans two nodes
    ],
)  # fmt: skip
def test_the_share_of_copies_that_is_sent_once_a_node(routing: tuple[int, int, int], nodes: int, share: float) -> None:
    assert share_of_copies(routing, nodes) == pytest.approx(share, abs=0.005)
    pool, picks, top = routing
    chosen = list(combinations(range(pool), picks)) if nodes <= pool <= 8 else []
    touched = [len({one * nodes // pool for one in each}) for each in chosen]
    if touched:
        assert share_of_copies(routing, nodes) == pytest.approx(sum(touched) / len(touched) / top)


@pytest.mark.parametrize(
    ("nodes", "config", "layout", "reason"),
    [
        ("aabb", EIGHT, with_experts(), None),
        ("aabb", {"expert_gradient_format": "int8"}, with_experts(), None),
        ("aabb", ONCE, with_experts((8, 1, 1)), None),
        ("aabb", {}, with_experts(), ""),
        ("aabb", EIGHT | {"expert_exchange": "direct"}, with_experts(), ""),
        ("aaaa", EIGHT, with_experts(), "all of a group's ranks share a node"),
        ("abcd", EIGHT, with_experts(), "a node holds one of a group's ranks"),
        ("aaab", EIGHT, with_experts(), "its nodes hold unequal numbers of its ranks"),
        ("abab", EIGHT, with_experts(), "its ranks on a node do not follow each other"),
        ("aabb", EIGHT, with_experts((8, 1, 1)), "a token once a node is 1.00 of its copies for 2 nodes, above 0.85"),
        ("aabb", EIGHT, with_experts((1, 1, 4)), None),
        ("aabb", EIGHT, with_experts(direct="--some-flag moves rows"), "--some-flag moves rows"),
        ("aabbcccc", EIGHT, with_experts(), "the groups of experts lie on nodes in different ways"),
        ("aabb", EIGHT, with_experts((0, 0, 0)), ""),
    ],
)
def test_tokens_go_once_a_node_where_that_is_possible_and_saves(
    nodes: str, config: dict[str, Any], layout: RunLayout, reason: str | None
) -> None:
    places, chosen = on_nodes(nodes, expert=4), OptimusConfig(**config)
    levels = levels_of_experts(chosen, places, layout)
    assert levels.two is (reason is None) and levels.reason == (reason or "")
    lines = list(exchange_lines(chosen, places, layout))
    if reason is None:
        assert len(lines) == 1 and lines[0].startswith("tokens leave a node once: 2 nodes of 2 ranks each")
    else:
        assert lines == ([f"tokens go direct to each expert: {reason}"] if reason and nodes != "aaaa" else [])
    if reason and "0.85" not in reason:
        with pytest.raises(FlagError, match="--expert-exchange: tokens cannot go once a node: ") as refused:
            levels_of_experts(OptimusConfig(**ONCE), places, layout)
        assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("nodes", "config", "cards", "said"),
    [
        ("aabb", EIGHT, 0, None),
        ("aabb", EIGHT, 1, "with so few cards alltoall is planned to be faster, if tokens go once a node in 8 bits"),
        ("aabb", {"expert_gradient_format": "int8"}, 2, "it is planned to be faster than alltoall in 8 bits"),
        ("aabb", {}, 2, None),
        ("aaaa", EIGHT, 2, None),
    ],
)
def test_a_line_names_the_faster_dispatcher_where_a_node_has_rdma(
    nodes: str, config: dict[str, Any], cards: int, said: str | None
) -> None:
    found = list(exchange_lines(OptimusConfig(**config), on_nodes(nodes, expert=4), with_experts(), cards))
    about = [line for line in found if "HybridEP" in line]
    assert len(about) == (said is not None)
    assert said is None or (said in about[0] and f"a node has {cards} network cards with RDMA for 2 ranks" in about[0])


def test_cards_with_rdma_are_those_with_an_active_port(tmp_path: Path) -> None:
    for card, port, state in (("mlx5_0", 1, "4: ACTIVE"), ("mlx5_0", 2, "4: ACTIVE"), ("mlx5_1", 1, "1: DOWN")):
        place = tmp_path / card / "ports" / str(port)
        place.mkdir(parents=True)
        (place / "state").write_text(f"{state}\n")
    assert rdma_cards(tmp_path) == 1 and rdma_cards(tmp_path / "none") == 0
