"""Nodes are distinguished as NCCL does, unless the user names them; groups of ranks sum in the levels that they
allow.
"""

import socket

import pytest

from optimus_cc_ext.collectives.nodes import Levels, Node, levels_of, nodes_line, ranks_per_node, this_node


def test_a_node_is_a_host_since_its_last_boot_or_what_nccl_takes_for_one_or_what_the_user_says() -> None:
    by_host, by_nccl = this_node(0, {}), this_node(0, {"NCCL_HOSTID": "a"})
    assert by_host.name.startswith(f"{socket.gethostname()} ") and by_host == this_node(5, {})
    assert by_nccl == Node("a", "a") != by_host
    assert this_node(0, {"NCCL_HOSTID": "a", "OPTIMUS_CC_NODE": "b"}) == Node("b", "a", chosen=True)


@pytest.mark.parametrize("size, nodes", [(1, [0, 1, 2, 3, 4]), (2, [0, 0, 1, 1, 2]), (8, [0] * 5)])
def test_one_variable_for_all_ranks_makes_nodes_of_consecutive_ranks(size: int, nodes: list[int]) -> None:
    names = [this_node(rank, {"OPTIMUS_CC_NODE": f"ranks:{size}"}).name for rank in range(5)]
    assert names == [f"ranks:{node}" for node in nodes]


def test_ranks_of_a_node_are_counted_by_its_name_or_are_those_that_one_agent_starts() -> None:
    agent = {"LOCAL_WORLD_SIZE": "4"}
    for chosen, expected in (("ranks:1", 1), ("ranks:3", 3), ("here", 4), (None, 4)):
        environment = agent | ({} if chosen is None else {"OPTIMUS_CC_NODE": chosen})
        nodes = [this_node(rank, environment) for rank in range(4)]
        assert ranks_per_node(nodes, environment) == expected, chosen
    assert ranks_per_node([this_node(0, {})], {}) == 0


@pytest.mark.parametrize("name", ["ranks", "ranks:", "ranks:0", "ranks:-1", "ranks:two"])
def test_every_other_value_is_a_name(name: str) -> None:
    assert {this_node(rank, {"OPTIMUS_CC_NODE": name}).name for rank in range(3)} == {name}


def test_a_line_says_that_nodes_are_not_machines() -> None:
    def line(*nodes: tuple[str, str]) -> str | None:
        return nodes_line([Node(name, machine, chosen=True) for name, machine in nodes])

    assert line(("x", "a"), ("y", "b"), ("x", "a")) is None
    assert line(("x", "a"), ("y", "a")) == "OPTIMUS_CC_NODE makes 2 nodes of 1 machine"
    assert line(("x", "a"), ("x", "b")) == "OPTIMUS_CC_NODE makes 1 node of 2 machines"
    assert line(("x", "a"), ("y", "b"), ("x", "b"), ("y", "a")) == "OPTIMUS_CC_NODE makes 2 nodes of 2 machines"


@pytest.mark.parametrize(
    "nodes, levels",
    [
        ("a", Levels()),
        ("aaaa", Levels(members=4)),
        ("ab", Levels(nodes=2)),
        ("abcd", Levels(nodes=4)),
        ("aabb", Levels(nodes=2, members=2)),
        ("bbbaaaccc", Levels(nodes=3, members=3)),
        ("aaab", Levels(nodes=2, reason="its nodes hold unequal numbers of its ranks")),
        ("aabbc", Levels(nodes=3, reason="its nodes hold unequal numbers of its ranks")),
        ("abab", Levels(nodes=2, reason="its ranks on a node do not follow each other")),
        ("abba", Levels(nodes=2, reason="its ranks on a node do not follow each other")),
    ],
)
def test_two_levels_where_each_of_several_nodes_holds_as_many_ranks_one_behind_the_other(
    nodes: str, levels: Levels
) -> None:
    assert levels_of(nodes) == levels
    assert levels.two is (levels.nodes > 1 and levels.members > 1)
    assert levels.inside is (len(set(nodes)) == 1)
