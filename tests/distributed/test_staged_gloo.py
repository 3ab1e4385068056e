"""Backend of ranks that share a GPU, over CPU tensors: each operation gives gloo's bits, in the order of calls."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.devices.staged_gloo import NAME, register
from tests.forked_ranks import run_ranks

ADDED_UP = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
MOVED = (*ADDED_UP, torch.uint8, torch.bool, torch.float8_e4m3fn)
RANKS = 3


class Operations:
    """Operations on tensors of one dtype; `found` has the contents of the tensors that each of them writes."""

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        self.group, self.dtype, self.rank = group, dtype, dist.get_rank()
        # gloo itself sends neither bool nor fp8.
        self.sent_as = torch.uint8 if dtype.itemsize == 1 and dist.get_backend(group) == "gloo" else dtype
        self.found: dict[str, list[torch.Tensor]] = {}

    def values(self, *shape: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * seed + self.rank)
        return torch.randn(shape, generator=generator).mul_(8).to(self.dtype).view(self.sent_as)

    def run(self, name: str, written: list[torch.Tensor], operation: Callable[..., Any], *args: Any) -> None:
        operation(*args, group=self.group)
        # Tensors are compared as bytes, because NaN equals nothing and fp8 has no comparison.
        self.found[name] = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in written]

    def adding(self) -> None:
        for reduce_op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            one = self.values(5, 7)
            self.run(f"all-reduce {reduce_op}", [one], dist.all_reduce, one, reduce_op)
        part, whole = self.values(4, 3), self.values(4 * RANKS, 3)
        self.run("reduce-scatter", [part], dist.reduce_scatter_tensor, part, whole)
        part = self.values(6)
        self.run("reduce-scatter, a list", [part], dist.reduce_scatter, part, list(self.values(RANKS, 6).unbind()))
        one = self.values(9)
        self.run("reduce", [one] * (self.rank == 1), dist.reduce, one, 1)
        # The values are whole numbers, because gloo, which joins the tensors, adds them up in another order.
        several = [self.values(size).round() for size in (3, 8)]
        self.run("all-reduce, coalesced", several, coalesced, dist.all_reduce, [(tensor,) for tensor in several])

    def moving(self) -> None:
        one = self.values(3, 4).t()  # not contiguous
        self.run("broadcast", [one], dist.broadcast, one, 2)
        into, mine = list(self.values(RANKS, 5, seed=1).unbind()), self.values(5)
        self.run("all-gather", into, dist.all_gather, into, mine)
        whole = self.values(RANKS, 4)
        self.run("all-gather, in place", [whole], dist.all_gather_into_tensor, whole.view(-1), whole[self.rank])
        whole, mine = self.values(2 * RANKS, seed=1), self.values(2)
        self.run("all-gather, coalesced", [whole], coalesced, dist.all_gather_into_tensor, [(whole, mine)])
        # Rank s sends s + d + 1 rows to rank d.
        rows = [self.rank + other + 1 for other in range(RANKS)]
        whole, sent = self.values(sum(rows), 2, seed=1), self.values(sum(rows), 2)
        self.run("all-to-all", [whole], dist.all_to_all_single, whole, sent, rows, rows)
        into, mine = list(self.values(RANKS if self.rank == 0 else 0, 2, seed=1).unbind()), self.values(2)
        self.run("gather", into, dist.gather, mine, into or None, 0)
        part, given = self.values(2, seed=1), list(self.values(RANKS, 2).unbind()) if self.rank == 0 else None
        self.run("scatter", [part], dist.scatter, part, given, 0)
        received, sent = self.values(2, 3, seed=1), self.values(2, 3)
        self.run("batched messages", [received], ring, received, sent)


def coalesced(operation: Callable[..., Any], arguments: list[tuple], group: dist.ProcessGroup) -> None:
    with dist._coalescing_manager(group, async_ops=True) as handle:
        for each in arguments:
            operation(*each, group=group)
    handle.wait()


def ring(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Exchange two messages with the neighbours in a ring, both receives posted before any send."""
    after, before = (dist.get_rank() + 1) % RANKS, (dist.get_rank() - 1) % RANKS
    operations = [dist.P2POp(dist.irecv, each, before, group) for each in received]
    operations += [dist.P2POp(dist.isend, each, after, group) for each in sent]
    for request in dist.batch_isend_irecv(operations):
        request.wait()


def _compared() -> dict[str, bool]:
    register()
    dist.init_process_group(NAME)
    gloo, equal = dist.new_group(backend="gloo"), {}
    for dtype in MOVED:
        ours, theirs = (Operations(group, dtype) for group in (dist.group.WORLD, gloo))
        for operations in (ours, theirs):
            operations.moving()
            if dtype in ADDED_UP:
                operations.adding()
        for name, found in ours.found.items():
            equal[f"{name}, {dtype}"] = all(map(torch.equal, found, theirs.found[name]))
    return equal


def test_every_operation_leaves_what_gloos_does():
    for equal in run_ranks(RANKS, _compared, timeout=120):
        assert len(equal) == 8 * len(MOVED) + 6 * len(ADDED_UP)
        assert [name for name, is_equal in equal.items() if not is_equal] == []


def _order_and_averages() -> list[Any]:
    register()
    dist.init_process_group(NAME)
    group, rank = dist.new_group(), dist.get_rank()
    assert dist.get_backend(group) == NAME, "new groups are of the default group's kind"
    tensor = torch.full((4,), float(rank))
    first = dist.all_reduce(tensor, group=group, async_op=True)
    # The second operation starts before the first one is waited for: as with NCCL, it reads the first one's result.
    dist.all_reduce(tensor, group=group)
    first.wait()
    average, leaf = torch.tensor([float(rank)]), torch.zeros(3, requires_grad=True)
    dist.all_reduce(average, dist.ReduceOp.AVG, group=group)
    part = torch.empty(1)
    dist.reduce_scatter_tensor(part, torch.arange(2.0 * 1) + rank, dist.ReduceOp.AVG, group=group)
    # Megatron's receive buffers are leaves, and a tensor that autograd keeps may be reduced in place.
    dist.broadcast(leaf, 0, group=group)
    kept = torch.ones(3, requires_grad=True)
    product = kept * leaf
    dist.all_reduce(leaf, group=group)
    product.sum().backward()
    outs, ins = [torch.empty(n + 1) for n in range(2)], [torch.full((rank + 1,), float(d)) for d in range(2)]
    dist.all_to_all(outs, ins, group=group)
    objects: list[Any] = [None] * 2
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    dist.barrier(group)
    # A message arrives even if nobody waits for it on the sending side.
    if rank == 0:
        dist.isend(torch.arange(1000.0), 1)
    else:
        got = torch.empty(1000)
        dist.recv(got, 0)
        assert torch.equal(got, torch.arange(1000.0))
    dist.barrier()
    return [tensor.tolist(), average.item(), part.item(), [each.tolist() for each in outs], objects]


def test_collectives_happen_in_the_order_of_their_calls_and_averages_are_divided_sums():
    objects = [{"rank": 0}, {"rank": 1}]
    assert run_ranks(2, _order_and_averages, timeout=120) == [
        [[2.0] * 4, 0.5, 0.5, [[0.0], [0.0, 0.0]], objects],
        [[2.0] * 4, 0.5, 1.5, [[1.0], [1.0, 1.0]], objects],
    ]
