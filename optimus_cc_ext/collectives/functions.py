"""Sums and gathers in few bits with the names, the arguments, the order and the results of torch.distributed's own.

Nothing here has state across calls. Plans and codecs are kept for the tensors that were used last; they hold numbers
and tables of kernels, and no process group. Messages come from torch's allocator.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import batched, chain
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.collectives.exchange import ExchangePlan
from optimus_cc_ext.collectives.groups import Groups, names_of, new_group
from optimus_cc_ext.collectives.messages import AllGather, BlockCodecs, Formats, Tools
from optimus_cc_ext.collectives.nodes import ONE_LEVEL, Levels, levels_of, this_node
from optimus_cc_ext.collectives.ranges import Range
from optimus_cc_ext.compressors.fast import fast_codec
from optimus_cc_ext.compressors.formats import SUM_FORMAT, format_named

Group = dist.ProcessGroup | Groups | None

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

SEED = 1234
"""Seed of the random signs by which blocks are rotated: the same on all ranks, which have to agree."""


class Work:
    """Handle of a collective that has been started; `wait` finishes it."""

    def __init__(self, finish: Callable[[], None], device: torch.device) -> None:
        self._finish: Callable[[], None] | None = finish
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def wait(self) -> bool:
        """Let later work on the current stream see the result; without a GPU, wait for it. Return True, as torch does.

        All ranks wait for their handles in the same order, because a sum sends its second messages here.
        """
        finish, self._finish = self._finish, None
        if finish is None:
            return True
        if self._stream is None:
            finish()
            return True
        with torch.cuda.stream(self._stream):  # the stream that made the messages, and that alone uses its codec
            finish()
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return True


def all_reduce(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Group = None, async_op: bool = False, *, format: str,
    coded: Sequence[Range] | None = None,
) -> Work | None:  # fmt: skip
    """Sum a tensor over all ranks of a group, in place; afterwards it has the same bits on all of them.

    Args:
        tensor (Tensor): Input and output of the collective; contiguous, of any shape, in fp32, bf16 or fp16.
        op (optional): ``torch.distributed.ReduceOp.SUM`` or ``AVG``.
        group (ProcessGroup or result of ``levels``, optional): The group to work on. If None, the default group.
        async_op (bool, optional): Whether this should only be started; the result is there after ``wait()``.
        format (str): Block format of the values on their way to the rank that adds them up: "int8" or "int4". Sums come
            back in "int8".
        coded (sequence, optional): Ranges of the flat tensor, as (start, length) in ascending order, whose values
            travel in this format; all others travel as they are. No block crosses the end of a range. If None, one
            range has all values.

    Returns:
        A handle with ``wait()`` if async_op is True. None if it is not, or if this rank is not in the group.

    Raises:
        ValueError: op, dtype or format is another one, or the tensor is not contiguous.
    """
    groups = _groups_of(group)
    if groups is None:
        return None
    _check("all_reduce", op, tensor)
    ranks, flat = groups.whole.size(), tensor.view(-1)
    ranges, sums = _ranges("all_reduce", coded, flat), _format_of_sums(format)
    plan = _plan(flat.numel(), ranges, flat.dtype, ranks, False, groups.levels, groups.place, format, sums)
    exchange = plan.bind(groups, Tools(device=flat.device, codecs=_codecs(flat.device, plan.formats)))
    exchange.start(flat)

    def finish() -> None:
        exchange.finish()
        _average(flat, op, ranks)

    return _result(finish, flat.device, async_op)


def reduce_scatter_tensor(
    output: torch.Tensor, input: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Group = None,
    async_op: bool = False, *, format: str, coded: Sequence[Range] | None = None,
) -> Work | None:  # fmt: skip
    """Sum a tensor over all ranks of a group, and give each rank its part of the sum.

    The own part of ``input`` is never rounded, and the sum is not rounded to few bits.

    Args:
        output (Tensor): Receives part d of the sum on rank d; it may be a view of ``input``.
        input (Tensor): Tensor to be summed, as long as the outputs of all ranks together. Afterwards it is as before.
        op, group, async_op, coded: As in ``all_reduce``.
        format (str): Block format of the values on their way to the rank that adds them up: "int8" or "int4".

    Returns:
        A handle with ``wait()`` if async_op is True. None if it is not, or if this rank is not in the group.

    Raises:
        ValueError: op, dtype or format is another one, a tensor is not contiguous, or the lengths do not fit.
    """
    groups = _groups_of(group)
    if groups is None:
        return None
    _check("reduce_scatter_tensor", op, input, output)
    ranks = groups.whole.size()
    if input.numel() != output.numel() * ranks:
        raise ValueError(
            f"reduce_scatter_tensor: input tensor must be the same size as output size times world size: it has "
            f"{input.numel()} values, not {output.numel()} times {ranks}"
        )
    flat = input.view(-1)
    if groups.levels.two:
        flat = flat.clone()  # a node's sums are added up in place
    ranges = _ranges("reduce_scatter_tensor", coded, flat)
    plan = _plan(flat.numel(), ranges, flat.dtype, ranks, True, groups.levels, groups.place, format, format)
    exchange = plan.bind(groups, Tools(device=flat.device, codecs=_codecs(flat.device, plan.formats)))
    start, length = groups.own_range(flat.numel())
    own = flat[start : start + length]  # the only part that changes in one level
    before = own.clone()
    exchange.start(flat)

    def finish() -> None:
        exchange.finish()
        total = _average(own, op, ranks).clone()
        own.copy_(before)
        output.view(-1).copy_(total)  # it may be a view of the own part

    return _result(finish, flat.device, async_op)


def all_gather_into_tensor(
    output: torch.Tensor, input: torch.Tensor, group: Group = None, async_op: bool = False, *, format: str
) -> Work | None:
    """Gather a tensor from all ranks of a group into one tensor, which has the same bits on all of them.

    So the own part is decoded from its message like the others. Levels make no difference here.

    Args:
        output (Tensor): Receives the input of rank d as its part d.
        input (Tensor): Tensor to be gathered from this rank; it may be a view of ``output``.
        group, async_op: As in ``all_reduce``.
        format (str): Block format of the values: "int8" or "int4".

    Returns:
        A handle with ``wait()`` if async_op is True. None if it is not, or if this rank is not in the group.

    Raises:
        ValueError: dtype or format is another one, a tensor is not contiguous, or the lengths do not fit.
    """
    groups = _groups_of(group)
    if groups is None:
        return None
    _check("all_gather_into_tensor", dist.ReduceOp.SUM, input, output)
    rank, ranks = groups.whole.rank(), groups.whole.size()
    if output.numel() != input.numel() * ranks:
        raise ValueError(
            f"all_gather_into_tensor: output tensor size must be equal to world_size times input tensor size: it has "
            f"{output.numel()} values, not {ranks} times {input.numel()}"
        )
    plan = _plan(output.numel(), _ranges("", None, output), output.dtype, ranks, True, ONE_LEVEL, 0, format, format)
    codec, nbytes = _codecs(output.device, plan.formats).gradients, plan.message_bytes[0]
    messages = torch.zeros(ranks, nbytes, dtype=torch.uint8, device=output.device)
    (layout,), (own,) = plan.layouts, plan.own_layouts(rank, (rank * input.numel(),))
    gather = AllGather(own, groups.whole, codec, "all_gather_into_tensor in few bits")
    with torch.no_grad():
        gather.encode(input.view(-1), messages[rank])
        if messages.numel():
            gather.start(messages, messages[rank])

    def finish() -> None:
        gather.wait()
        codec.decode(messages, layout, output.view(-1))

    return _result(finish, output.device, async_op)


def levels(
    group: dist.ProcessGroup | None = None,
    inside: dist.ProcessGroup | None = None,
    between: dist.ProcessGroup | None = None,
) -> Groups | None:
    """Find the levels in which a group adds up: exactly inside a node, and in few bits between nodes.

    All ranks of the group call this once, before they use the result as ``group`` of the collectives.

    Args:
        group (ProcessGroup, optional): The group to work on. If None, the default group.
        inside (ProcessGroup, optional): The ranks of the group on this rank's node. If None, ranks on one host are on
            one node, and the groups are made here, if all hosts have equally many ranks that follow each other.
        between (ProcessGroup, optional): One rank of each node, those with this rank's place. From a 2-D mesh whose
            rows are nodes give both.

    Raises:
        ValueError: one of `inside` and `between` is missing, or the group's ranks are not their rows and columns.
    """
    whole = group or dist.group.WORLD
    if whole is None or dist.get_rank(whole) < 0:
        return None
    ranks, index = dist.get_process_group_ranks(whole), whole.rank()
    if inside is not None and between is not None:
        members = inside.size()
        first, place = index // members * members, index % members
        given = [dist.get_process_group_ranks(each) for each in (inside, between)]
        if given != [ranks[first : first + members], ranks[place::members]]:
            raise ValueError(
                f"levels: of the ranks {ranks}, inside has {given[0]} and between {given[1]}, which are not a row and "
                "a column. Give the groups of a 2-D mesh whose rows are nodes"
            )
        found = Levels(nodes=len(ranks) // members, members=members)
        return Groups(whole, found, inside, between, members) if found.two else Groups(whole, beside=members)
    if inside is not None or between is not None:
        raise ValueError("levels: inside and between belong together. Give both, or neither")
    facts: list[Any] = [None] * len(ranks)
    dist.all_gather_object(facts, (this_node(dist.get_rank()).name, names_of(dist.get_rank())), group=whole)
    nodes, names = [node for node, _ in facts], max(number for _, number in facts) + 1
    found, beside = levels_of(nodes), nodes.count(nodes[index])
    if not found.two:
        return Groups(whole, beside=beside)
    names_of(dist.get_rank(), more=names - names_of(dist.get_rank()))
    place, first = index % found.members, index // found.members * found.members
    inside, between = (
        new_group(chosen, name=f"optimus_cc/{names}/{kind}/{chosen[0]}", like=whole, description=f"OPTIMUS_CC_{kind}")
        for kind, chosen in (("NODE", ranks[first : first + found.members]), ("RAIL", ranks[place :: found.members]))
    )
    return Groups(whole, found, inside, between, beside)


def _groups_of(group: Group) -> Groups | None:
    """Return the groups of a collective; None if this rank is in none, which is then done, as in torch."""
    if isinstance(group, Groups):
        return group
    whole = group or dist.group.WORLD
    return None if whole is None or dist.get_rank(whole) < 0 else Groups(whole)


def _check(name: str, op: Any, tensor: torch.Tensor, other: torch.Tensor | None = None) -> None:
    """Refuse what no collective of this module can do."""
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise ValueError(f"{name}: {op} is not possible in few bits. Give SUM or AVG, or call torch.distributed's own")
    for each in (tensor, tensor if other is None else other):
        if each.dtype not in DTYPES or each.dtype != tensor.dtype:
            found = each.dtype if each.dtype == tensor.dtype else f"{tensor.dtype} and {each.dtype}"
            raise ValueError(f"{name}: {found} is not possible in few bits. Give one of {', '.join(map(str, DTYPES))}")
        if not each.is_contiguous():
            raise ValueError(f"{name}: tensors must be contiguous. Call contiguous() before")


def _format_of_sums(format: str) -> str:
    """Return the format of sums on their way back; a format that loses nothing is also theirs."""
    return format if format_named(format).largest is None else SUM_FORMAT


def _ranges(name: str, coded: Sequence[Range] | None, tensor: torch.Tensor) -> tuple[Range, ...]:
    """Return the ranges of a tensor that are encoded.

    Raises:
        ValueError: they are not in ascending order, they overlap, or they leave the tensor.
    """
    ranges = ((0, tensor.numel()),) if coded is None else tuple(coded)
    edges = [0, *chain.from_iterable((start, start + length) for start, length in ranges), tensor.numel()]
    if edges != sorted(edges):
        raise ValueError(f"{name}: coded must be ascending ranges inside of the tensor's {tensor.numel()} values")
    return ranges


@lru_cache(maxsize=128)
def _plan(
    numel: int, coded: tuple[Range, ...], dtype: torch.dtype, ranks: int, sharded: bool, levels: Levels, place: int,
    format: str, sums: str,
) -> ExchangePlan:  # fmt: skip
    edges = [0, *chain.from_iterable((start, start + length) for start, length in coded), numel]
    dense = [(start, end - start) for start, end in batched(edges, 2) if start < end]
    return ExchangePlan(
        numel=numel, coded=coded, dense=dense, dtype=dtype, ranks=ranks, sharded=sharded, formats=Formats(format, sums),
        levels=levels, place=place,
    )  # fmt: skip


def _codecs(device: torch.device, formats: Formats) -> BlockCodecs:
    """Return the codecs of the current stream, which alone may use their scratch memory."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _codecs_of(device, stream, formats)


@lru_cache(maxsize=16)
def _codecs_of(device: torch.device, stream: int, formats: Formats) -> BlockCodecs:
    return BlockCodecs(*(fast_codec(name, seed=SEED, rotated=True) for name in formats))


def _average(total: torch.Tensor, op: Any, ranks: int) -> torch.Tensor:
    """Divide a sum by the number of ranks, in place, if their average was asked for."""
    return total.div_(ranks) if op == dist.ReduceOp.AVG else total


def _result(finish: Callable[[], None], device: torch.device, async_op: bool) -> Work | None:
    """Return the handle of a collective, or finish it."""
    work = Work(torch.no_grad()(finish), device)
    if async_op:
        return work
    work.wait()
    return None
