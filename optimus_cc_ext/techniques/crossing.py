"""Rules about the traffic that leaves a node: pure functions of the places of all ranks of a model.

Ranks that have to keep equal bits decide alike. So the hops of all tensor-parallel ranks of a stage are compressed, or
none of them; the data-parallel groups of these ranks add up in the same levels; and all stages gather parameters in the
same way, since the first and the last stage may hold a tied embedding.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from optimus_cc_ext.collectives.nodes import ONE_LEVEL, Levels, levels_of
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import CLASSES, TrafficClass, classes_among
from optimus_cc_ext.config.presets import Layout, share_of_copies, too_many_copies
from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.techniques.grid import RankPlace


def stays_dense(
    config: OptimusConfig, traffic: TrafficClass, places: Sequence[RankPlace], groups: Iterable[Collection[int]]
) -> bool:  # fmt: skip
    """Return whether traffic among each of these groups of ranks is left dense: a preset alone asks for it, and no
    group leaves a node.
    """
    nodes = _nodes(places)
    return config.is_dense_inside(traffic) and all(len({nodes[rank] for rank in ranks}) <= 1 for ranks in groups)


def hops_between(
    places: Sequence[RankPlace], tensor_ranks: Iterable[int], stage: int, other: int
) -> list[tuple[int, int]]:  # fmt: skip
    """Return the pairs of ranks of `stage` and `other` in the pipelines of `tensor_ranks`."""
    pipelines = {place.rank: place.pipeline for place in places}
    return [(pipelines[rank][stage], pipelines[rank][other]) for rank in tensor_ranks]


def leaving_roles(places: Sequence[RankPlace], rank: int, stage: int) -> frozenset[str]:
    """Return the roles of messages, `send_prev` and `send_next`, that leave the node of `rank`, which holds `stage`."""
    nodes = _nodes(places)
    pipeline = next((place.pipeline for place in places if place.rank == rank), ())
    peers = {role: pipeline[(stage + step) % len(pipeline)] for role, step in _STEPS.items()} if pipeline else {}
    return frozenset(role for role, peer in peers.items() if nodes[peer] != nodes[rank])


_STEPS = {"send_prev": -1, "send_next": 1}


def levels_of_group(places: Sequence[RankPlace], ranks: Sequence[int]) -> Levels:
    """Return the levels in which a group of ranks adds up gradients.

    A data-parallel group has one level if the groups of its tensor-parallel neighbours have other levels: these groups
    replicate some parameters, which have to stay equal.
    """
    found, nodes = _levels_of_replicas(places), _nodes(places)
    return found[tuple(ranks)] if tuple(ranks) in found else levels_of([nodes[rank] for rank in ranks])


def _levels_of_replicas(places: Sequence[RankPlace]) -> dict[tuple[int, ...], Levels]:
    """Return the levels of all data-parallel groups, by their ranks."""
    nodes = _nodes(places)
    by_stage: dict[int, dict[tuple[int, ...], Levels]] = defaultdict(dict)
    for (stage, _), ranks in _replicas(places).items():
        by_stage[stage][tuple(ranks)] = levels_of([nodes[rank] for rank in ranks])
    found: dict[tuple[int, ...], Levels] = {}
    for levels in by_stage.values():
        unlike = len(set(levels.values())) > 1
        one = Levels(nodes=max(each.nodes for each in levels.values()), reason=_UNLIKE)
        found |= dict.fromkeys(levels, one) if unlike else levels
    return found


_UNLIKE = "the groups of its tensor-parallel ranks lie on nodes in different ways"


def classes_inside(places: Sequence[RankPlace], instances: int = 1) -> frozenset[TrafficClass]:
    """Return the classes of traffic of which nothing leaves a node, on any rank of the model.

    Args:
        instances: number of the distributed optimizer's instances, runs of consecutive replicas, inside of which
            parameters are gathered.
    """
    nodes, replicas = _nodes(places), _replicas(places)
    last = max(stage for stage, _ in replicas)
    groups: dict[str, list[Sequence[int]]] = {
        "pipeline": list(_hops(places)),
        "replicas": list(replicas.values()),
        "owners": [run for ranks in replicas.values() for run in _runs(ranks, instances)],
        "ends": [[*replicas[0, tensor], *replicas[last, tensor]] for stage, tensor in replicas if stage == 0],
        "experts": [place.experts for place in places],
    }
    inside = {name for name, found in groups.items() if found and all(len({nodes[r] for r in g}) == 1 for g in found)}
    return frozenset(classes_among(*inside))


def left_dense(config: OptimusConfig, places: Sequence[RankPlace], instances: int = 1) -> frozenset[TrafficClass]:
    """Return the classes that a preset alone asks for and that stay dense, because nothing of them leaves a node."""
    return frozenset(filter(config.is_dense_inside, classes_inside(places, instances)))


def crossing_lines(config: OptimusConfig, places: Sequence[RankPlace], instances: int = 1) -> Iterator[str]:
    """Yield the log lines about traffic that stays inside nodes, and about levels; `instances` is the number of
    instances of the distributed optimizer.

    Raises:
        FlagError: the flag asks for two levels, and no group of replicas has nodes of two replicas or more.
    """
    inside = classes_inside(places, instances)
    for dense, line in (
        (True, "left dense, because nothing of it leaves a node"),
        (False, "compressed as asked for, although nothing of it leaves a node"),
    ):
        named = [t.tag for t in CLASSES if t in inside and config.is_on(t) and config.is_dense_inside(t) is dense]
        if named:
            yield f"{line}: {', '.join(named)}"
    nodes, hops = _nodes(places), list(_hops(places))
    staying = sum(nodes[one] == nodes[other] for one, other in hops)
    if any(map(config.is_dense_inside, classes_among("pipeline"))) and 0 < staying < len(hops):
        yield f"{staying} of {len(hops)} hops between stages stay inside a node, and are left dense"
    if instances > 1 and config.sums_in_blocks:
        yield from _instance_lines(config, places, instances)
        return
    if config.dp_compression_levels == "one" or not config.sums_in_blocks:
        return
    levels = list(dict.fromkeys(_levels_of_replicas(places).values()))
    if config.dp_compression_levels == "two" and not any(each.two for each in levels):
        reasons = ", ".join(dict.fromkeys(each.reason or "no node holds two replicas" for each in levels))
        raise FlagError("--dp-compression-levels", f"two levels are not possible: {reasons}", "Leave it out")
    for each in levels:
        if each.line is not None:
            yield f"data-parallel gradients in {each.line}"


def levels_of_sums(config: OptimusConfig, places: Sequence[RankPlace], instances: int = 1) -> str | None:
    """Return the levels in which gradients are added up in blocks, in words; None: none are added up in blocks.

    Other levels add the same gradients up in another order, and round them elsewhere.
    """
    if not config.sums_in_blocks:
        return None
    if instances > 1:
        return f"{instances} distributed-optimizer instances"
    found = _levels_of_replicas(places).values() if config.dp_compression_levels != "one" else ()
    said = (f"{each.nodes} nodes of {each.members} replicas" if each.two else "one level" for each in found)
    return " and ".join(dict.fromkeys(said)) or "one level"


def _instance_lines(config: OptimusConfig, places: Sequence[RankPlace], instances: int) -> Iterator[str]:
    """Yield the log lines about the levels of several instances of the distributed optimizer."""
    nodes, (ranks, *_) = _nodes(places), _replicas(places).values()
    first, *_ = _runs(ranks, instances)
    yield (
        f"data-parallel gradients in the levels of {instances} distributed-optimizer instances: {len(first)} replicas "
        "of an instance are summed dense, and the sums of instances are sent compressed"
    )
    if config.dp_compression_levels != "auto":
        yield f"--dp-compression-levels: no effect: {_INSTANCES} sets the levels"
    beside = sum(nodes[rank] == nodes[ranks[0]] for rank in ranks)
    if len({nodes[rank] for rank in first}) > 1:
        cure = f". {_INSTANCES} {len(ranks) // beside} makes each node an instance" if len(ranks) % beside == 0 else ""
        yield (
            f"the dense sums of an instance cross nodes: it has {len(first)} replicas, and a node holds {beside} of "
            f"them{cure}"
        )
    elif beside > len(first):
        yield (
            f"instances share nodes: a node holds {beside} replicas and sends {beside // len(first)} sums to each of "
            f"the others. {_INSTANCES} {len(ranks) // beside} makes each node an instance, which sends one"
        )


def levels_of_experts(config: OptimusConfig, places: Sequence[RankPlace], layout: Layout) -> Levels:
    """Return the nodes among which experts' tokens go once; one level, with the reason, if they go direct.

    Raises:
        FlagError: once a node was asked for, and is not possible.
    """
    nodes, groups = _nodes(places), dict.fromkeys(place.experts for place in places)
    found = list(dict.fromkeys(levels_of([nodes[rank] for rank in group]) for group in groups if group))
    if not found or config.expert_exchange == "direct" or not any(map(config.is_on, classes_among("experts"))):
        return ONE_LEVEL
    levels, (*_, top) = found[0], layout.routing
    reason, once = layout.direct or levels.reason, config.expert_exchange == "once-a-node"
    if len(found) > 1 or len(levels_on := {len(set(map(nodes.get, group))) for group in groups}) > 1:
        reason = reason or "the groups of experts lie on nodes in different ways"
    elif not levels.two and not reason:
        reason = "all of a group's ranks share a node" if levels_on == {1} else "a node holds one of a group's ranks"
    if not reason and not once and top:
        reason = too_many_copies(layout.routing, levels.nodes)
    if reason and once:
        raise FlagError("--expert-exchange", f"tokens cannot go once a node: {reason}", "Give auto or direct")
    return replace(levels, members=1, reason=reason) if reason or not top else levels


def exchange_lines(
    config: OptimusConfig, places: Sequence[RankPlace], layout: Layout, cards: int = 0
) -> Iterator[str]:  # fmt: skip
    """Yield the log lines about the way of experts' tokens; none if none of them leaves a node, or is compressed.

    Args:
        cards: the number of network cards with RDMA of this rank's node.
    """
    levels = levels_of_experts(config, places, layout)
    if levels.two:
        share = share_of_copies(layout.routing, levels.nodes)
        yield (
            f"tokens leave a node once: {levels.nodes} nodes of {levels.members} ranks each share the experts, and "
            f"{share:.2f} of the copies are sent between them if experts get equally many. The second hop, inside a "
            "node, counts as sent, too"
        )
    elif levels.reason and not levels.inside:
        yield f"tokens go direct to each expert: {levels.reason}"
    tokens = classes_among("experts")
    if cards and any(map(config.is_on, tokens)) and not classes_inside(places).issuperset(tokens):
        most = max(Counter(place.node.name for place in places).values())
        few = "with so few cards alltoall is planned to be faster, if tokens go once a node in 8 bits"
        faster = few if cards < most else "it is planned to be faster than alltoall in 8 bits"
        yield (
            f"a node has {cards} network cards with RDMA for {most} ranks, so that HybridEP may run "
            "(--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep): "
            f"{faster}. optimus-cc plan compares them"
        )


_INSTANCES = "--num-distributed-optimizer-instances"


def _runs(ranks: Sequence[int], instances: int) -> list[Sequence[int]]:
    """Return the ranks of each instance of the distributed optimizer, of which Megatron makes runs of equal length."""
    size = len(ranks) // instances
    return [ranks[start : start + size] for start in range(0, len(ranks), size)]


def _nodes(places: Sequence[RankPlace]) -> dict[int, str]:
    return {place.rank: place.node.name for place in places}


def _replicas(places: Sequence[RankPlace]) -> dict[tuple[int, int], list[int]]:
    """Return the ranks of each data-parallel group, by stage and tensor-parallel rank."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place in sorted(places, key=lambda place: place.rank):
        found[place.stage, place.tensor_rank].append(place.rank)
    return dict(found)


def _hops(places: Sequence[RankPlace]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of ranks of neighbouring stages, in all pipelines."""
    for pipeline in dict.fromkeys(place.pipeline for place in places):
        yield from pairwise(pipeline)
