"""Rows in two hops over real ranks: as a plain all-to-all sends them, and added up on the way back as by hand."""

import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from optimus_cc_ext.collectives import two_hops
from optimus_cc_ext.collectives.groups import Groups
from optimus_cc_ext.collectives.nodes import Levels
from optimus_cc_ext.collectives.two_hops import Numbers, TwoHops, _from_bits, _to_bits
from optimus_cc_ext.compressors.fast import fast_codec
from optimus_cc_ext.errors import OptimusError
from optimus_cc_ext.techniques.expert_rows import RowExchange
from tests.forked_ranks import run_ranks

WIDTH = 128
KINDS = [
    "even", "uneven", "a node without tokens", "a rank without tokens", "capacity", "a rank that has no token",
    "any number",
]  # fmt: skip


class Dense:
    tag = "rows"

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def decode(self, message: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return message


class Coded:
    tag = "coded rows"

    def __init__(self) -> None:
        self.codec = fast_codec("int8", seed=1, rotated=True)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return self.codec.encode_rows(rows)

    def decode(self, message: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.codec.decode_rows(message, dtype)


def routing_of(rank: int, ranks: int, members: int, experts: int, top: int, kind: str) -> torch.Tensor:
    """Return the experts of a rank's tokens, (tokens, experts)."""
    generator = torch.Generator().manual_seed(1000 * rank + experts + top)
    tokens = 0 if kind == KINDS[5] and rank == 1 else 11 + (5 * rank if kind == "uneven" else 0)
    logits = torch.randn(tokens, experts, generator=generator)
    if kind == "uneven":
        logits[:, :2] += 2
    empty = {KINDS[2]: experts * members // ranks, KINDS[3]: experts // ranks}.get(kind, 0)
    if experts - empty >= top:
        logits[:, :empty] -= 100
    routing = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, logits.topk(top, 1).indices, True)
    chosen = torch.rand(tokens, experts, generator=generator) > 0.3
    return {"capacity": routing & chosen, "any number": chosen}.get(kind, routing)


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def groups_of(members: int, limit: timedelta | None = None) -> Groups:
    """Return the world as nodes of `members` ranks, whose exchanges have a time limit."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    nodes = [dist.new_group(range(first, first + members), limit) for first in range(0, ranks, members)]
    rails = [dist.new_group(range(place, ranks, members), limit) for place in range(members)]
    whole: Any = dist.group.WORLD
    levels = Levels(nodes=ranks // members, members=members)
    return Groups(whole, levels, nodes[rank // members], rails[rank % members], members)


def way_of(routing: torch.Tensor, arriving: list[int], groups: Groups) -> TwoHops:
    splits = routing.sum(0).view(dist.get_world_size(), -1).sum(1)
    numbers = Numbers(routing, splits, groups)
    numbers.to_host()
    return TwoHops(numbers, int(routing.sum()), arriving)


def arriving_at(rank: int, routings: list[torch.Tensor]) -> list[int]:
    own = routings[0].shape[1] // len(routings)
    return [int(routing[:, rank * own : (rank + 1) * own].sum()) for routing in routings]


def there_and_back(members: int, cases: list[tuple[int, int, str, torch.dtype, bool]]) -> list[Any]:
    """Return what arrives at this rank's experts, and what comes back of results that are the squares of rows."""
    dist.init_process_group("gloo")
    rank, ranks, groups, found = dist.get_rank(), dist.get_world_size(), groups_of(members), []
    for experts, top, kind, dtype, coded in cases:
        routings = [routing_of(each, ranks, members, experts, top, kind) for each in range(ranks)]
        way = way_of(routings[rank], arriving_at(rank, routings), groups)
        coding = Coded() if coded else Dense()
        tokens = values(rank, (routings[rank].shape[0], WIDTH), dtype)
        rows = tokens[routings[rank].T.nonzero()[:, 1]]
        arrived = way.spread(rows, coding)
        returned = way.collect(arrived * arrived + values(rank, tuple(arrived.shape), dtype), coding)
        found.append((arrived, returned))
    return found


def by_hand(members: int, case: tuple[int, int, str, torch.dtype, bool], ranks: int) -> tuple[list[Any], list[Any]]:
    """Return what each rank gets there and back, one row after the other."""
    experts, top, kind, dtype, coded = case
    own, coding = experts // ranks, Coded() if coded else Dense()
    routings = [routing_of(rank, ranks, members, experts, top, kind) for rank in range(ranks)]
    tokens = [values(rank, (routing.shape[0], WIDTH), dtype) for rank, routing in enumerate(routings)]
    tokens = [coding.decode(coding.encode(each), dtype) for each in tokens]
    order = [
        [
            (source, token, expert)
            for source, routing in enumerate(routings)
            for expert in range(rank * own, (rank + 1) * own)
            for token in routing[:, expert].nonzero().flatten().tolist()
        ]
        for rank in range(ranks)
    ]
    arrived = [torch.stack([tokens[s][t] for s, t, _ in each]) if each else torch.empty(0, WIDTH) for each in order]
    results: dict[tuple[int, int, int], torch.Tensor] = {}
    for rank, each in enumerate(order):
        answers = arrived[rank].to(dtype) ** 2 + values(rank, tuple(arrived[rank].shape), dtype)
        results |= dict(zip(each, answers, strict=True))
    returned = []
    for source, routing in enumerate(routings):
        rows = []
        sums: dict[tuple[int, int], torch.Tensor] = {}
        for expert in range(experts):
            node = expert // (own * members)
            for token in routing[:, expert].nonzero().flatten().tolist():
                result = results[source, token, expert].to(torch.promote_types(dtype, torch.float32))
                key, is_first = (token, node), (token, node) not in sums
                sums[key] = result if is_first else sums[key] + result
                rows.append(key if is_first else None)
        coded_sums = {
            key: coding.decode(coding.encode(each.to(dtype).unsqueeze(0)), dtype)[0] for key, each in sums.items()
        }
        zero = torch.zeros(WIDTH, dtype=dtype)
        returned.append(torch.stack([zero if key is None else coded_sums[key] for key in rows]) if rows else None)
    return arrived, returned


def cases_of(ranks: int) -> list[tuple[int, int, str, torch.dtype, bool]]:
    kinds = [(kind, dtype, False) for kind in KINDS for dtype in (torch.float64, torch.bfloat16)]
    kinds += [("uneven", torch.bfloat16, True), (KINDS[5], torch.float32, True)]
    return [(experts, top, *kind) for experts, top in ((ranks, 2), (2 * ranks, 1), (4 * ranks, 8)) for kind in kinds]


@pytest.mark.parametrize(
    ("ranks", "members"),
    [(4, 2), pytest.param(4, 1, marks=pytest.mark.ci), pytest.param(8, 4, marks=pytest.mark.full),
     pytest.param(8, 2, marks=pytest.mark.full)],
)  # fmt: skip
def test_rows_arrive_as_by_a_plain_all_to_all_and_sums_of_nodes_come_back(ranks: int, members: int) -> None:
    cases = cases_of(ranks)
    found = run_ranks(ranks, there_and_back, members, cases)
    for index, case in enumerate(cases):
        arrived, returned = by_hand(members, case, ranks)
        for rank in range(ranks):
            there, back = found[rank][index]
            assert torch.equal(there, arrived[rank].to(case[3])), case
            if returned[rank] is None:
                assert back.shape == (0, WIDTH)
            elif case[4]:  # The last place of a rotated value depends on how many rows are coded at once.
                error = (back - returned[rank]).float().abs().mean() / returned[rank].float().abs().mean()
                assert error < 1e-3, "coding loses six times as much"
            else:
                assert torch.equal(back, returned[rank]), case


def matrices(members: int, experts: int, top: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's rows of two matrices in fp64: of spread, and of collect."""
    dist.init_process_group("gloo")
    rank, ranks, groups = dist.get_rank(), dist.get_world_size(), groups_of(members)
    routings = [routing_of(each, ranks, members, experts, top, kind) for each in range(ranks)]
    way = way_of(routings[rank], arriving_at(rank, routings), groups)
    columns = [[int(each.sum()) for each in routings], [sum(arriving_at(each, routings)) for each in range(ranks)]]
    found = []
    for numbers, send in zip(columns, (way.spread, way.collect), strict=True):
        unit = torch.eye(sum(numbers), dtype=torch.float64)
        found.append(send(unit[sum(numbers[:rank]) : sum(numbers[: rank + 1])], Dense()))
    return found[0], found[1]


@pytest.mark.parametrize("kind", ["uneven", "capacity"])
def test_each_direction_is_the_transpose_of_the_other(kind: str) -> None:
    found = run_ranks(4, matrices, 2, 8, 2, kind)
    spread, collect = (torch.cat([of_rank[which] for of_rank in found]) for which in (0, 1))
    assert torch.equal(spread, collect.T) and bool(spread.any())


def gradients(members: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return autograd's gradient of a loss with respect to this rank's rows, and that of small changes, in fp64."""
    dist.init_process_group("gloo")
    rank, groups, dense = dist.get_rank(), groups_of(members), Dense()
    routings = [routing_of(each, 4, members, 8, 2, "even")[:3] for each in range(4)]
    way = way_of(routings[rank], arriving_at(rank, routings), groups)
    tokens = values(rank, (3, 2), torch.float64)
    codings: Any = (dense, dense)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        rows = tokens[routings[rank].T.nonzero()[:, 1]]
        arrived = RowExchange.apply(rows, *codings, way.spread, way.collect)
        results = torch.tanh(arrived * values(rank + 9, tuple(arrived.shape), torch.float64))
        returned = RowExchange.apply(results, *codings, way.collect, way.spread)
        summed = torch.zeros_like(tokens).index_add(0, routings[rank].T.nonzero()[:, 1], returned)
        return (torch.tanh(summed) * torch.arange(1.0, 7.0, dtype=torch.float64).view(3, 2)).sum()

    leaf = tokens.clone().requires_grad_()
    loss_of(leaf).backward()
    numeric, step = torch.zeros_like(tokens), 1e-5
    for changing in range(4):
        for index in range(tokens.numel()):
            change = torch.zeros_like(tokens)
            change.view(-1)[index] = step if changing == rank else 0.0
            both = torch.stack([loss_of(tokens + change).detach(), loss_of(tokens - change).detach()])
            dist.all_reduce(both)
            if changing == rank:
                numeric.view(-1)[index] = (both[0] - both[1]) / (2 * step)
    return leaf.grad, numeric  # type: ignore[return-value]


def test_gradients_of_a_dispatch_and_a_combine_are_those_of_small_changes() -> None:
    for exact, numeric in run_ranks(4, gradients, 2):
        assert exact.abs().min() > 0
        torch.testing.assert_close(exact, numeric, rtol=1e-7, atol=1e-8)


def with_a_wrong_count() -> str:
    """Let rank 1 believe in one row more than comes; return what each rank says."""
    dist.init_process_group("gloo")
    rank, groups = dist.get_rank(), groups_of(2, timedelta(seconds=5))
    routings = [routing_of(each, 4, 2, 8, 2, "even") for each in range(4)]
    splits = routings[rank].sum(0).view(4, -1).sum(1)
    numbers = Numbers(routings[rank], splits, groups)
    numbers.host[:, 1] += rank == 1
    try:
        way = TwoHops(numbers, int(routings[rank].sum()), arriving_at(rank, routings))
        way.spread(torch.zeros(int(routings[rank].sum()), WIDTH), Dense())
    except OptimusError as error:
        return str(error)
    return ""


@pytest.mark.ci
def test_a_count_that_is_changed_on_one_rank_ends_with_the_purpose_and_the_ranks() -> None:
    said = run_ranks(4, with_a_wrong_count, timeout=60)
    assert any("failed among ranks [1, 3]" in each and "tokens' experts" in each for each in said), said


def freed_during_the_copy() -> bool:
    """Return whether the device's numbers are gone while a stream copies them to the host."""
    dist.init_process_group("gloo")
    copied = list[weakref.ref[torch.Tensor]]()

    def copy(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        copied.append(weakref.ref(tensor))
        return tensor.clone()

    routing = routing_of(dist.get_rank(), 4, 2, 8, 2, "even")
    numbers = Numbers(routing, routing.sum(0).view(4, -1).sum(1), groups_of(2))
    torch.Tensor.to = copy  # type: ignore[assignment, method-assign]
    numbers.to_host()
    return copied[0]() is None


def test_numbers_on_the_device_live_as_long_as_their_copy_to_the_host_runs() -> None:
    assert not any(run_ranks(4, freed_during_the_copy))


def test_bits_of_experts_come_back_from_their_bytes() -> None:
    for experts in (1, 7, 8, 33):
        chosen = torch.rand(5, experts, generator=torch.Generator().manual_seed(experts)) > 0.5
        bits = _to_bits(chosen)
        assert bits.shape == (5, -(-experts // 8)) and torch.equal(_from_bits(bits, experts), chosen)
        assert _from_bits(_to_bits(chosen[:0]), experts).shape == (0, experts)


def test_bytes_are_those_of_the_rows_that_each_hop_sends_to_other_ranks() -> None:
    found = run_ranks(4, bytes_sent, 2)
    for counted, sent in found:
        assert counted == sent


def bytes_sent(members: int) -> tuple[list[Any], list[Any]]:
    """Return the bytes that a way counts, and those of all its exchanges: (sent, leaving) of spread and of collect."""
    dist.init_process_group("gloo")
    rank, groups, seen = dist.get_rank(), groups_of(members), list[tuple[bool, int]]()
    start = two_hops.start_all_to_all

    def watched(out: Any, tensor: Any, group: Any, purpose: str, received: Any = None, sent: Any = None) -> Any:
        parts = sent or [tensor.shape[0] // group.size()] * group.size()
        row = tensor[0:1].nbytes if tensor.shape[0] else 0
        seen.append((group is groups.rail, row * (sum(parts) - parts[group.rank()])))
        return start(out, tensor, group, purpose, received, sent)

    two_hops.start_all_to_all = watched  # type: ignore[assignment]
    routings = [routing_of(each, 4, members, 8, 2, "uneven") for each in range(4)]
    way = way_of(routings[rank], arriving_at(rank, routings), groups)
    found = []
    for send, numel in ((way.spread, int(routings[rank].sum())), (way.collect, sum(arriving_at(rank, routings)))):
        send(torch.zeros(numel, WIDTH, dtype=torch.bfloat16), Coded())
        found.append((sum(nbytes for _, nbytes in seen), sum(nbytes for leaves, nbytes in seen if leaves)))
        seen.clear()
    return [way.nbytes(130, 256, spread=True, first=True), way.nbytes(130, 256, spread=False)], found
