"""Differences of weights that leave training, to the bit: a copy elsewhere becomes the new model from few bytes.

    delta = deltas.encode(before, after)    # where the model is trained: lists of tensors, in the same order
    after = deltas.apply(copy, delta)       # wherever a copy of `before` is

If few values change, as in reinforcement learning at small learning rates, only the changed values and the distances
between their positions are sent. The caller transports the bytes.
"""

import struct
import zlib
from collections.abc import Buffer, Iterable
from itertools import accumulate, groupby
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from optimus_cc_ext.compressors import exact
from optimus_cc_ext.errors import OptimusError

_HEADER = struct.Struct("<8sIII")
"""Signature, number of tensors, and checksums of the old values and of all that follows the header."""

_PART = struct.Struct("<QQQ")
"""Header of a group of tensors: the number of its changed values, the bytes of their distances, or 0 if all values
follow, and the bytes of the values.
"""

_SIGNATURE = b"OCCdelt2"
_FEW = 1 / 6
"""Share of values below which only those that change are sent."""

_TOGETHER = 1 << 24
"""Bytes of tensors that are encoded together."""

_FARTHEST = 1 << 16
"""Distance at which a value counts as changed in any case, so that distances have 16 bits."""


def encode(old: Iterable[Tensor], new: Iterable[Tensor]) -> bytes:
    """Encode the change of tensors, which are of any shapes and dtypes.

    Raises:
        OptimusError: old and new tensors differ in number, shapes or dtypes, or all are the same memory; or one is no
            dense tensor.
    """
    before, after = _dense(old), _dense(new)
    kinds = [[(each.shape, each.dtype) for each in side] for side in (before, after)]
    if kinds[0] != kinds[1]:
        raise OptimusError("deltas.encode: old and new tensors differ in number, shapes or dtypes. Give both alike")
    shared = [one.data_ptr() == other.data_ptr() for one, other in zip(before, after, strict=True) if one.numel()]
    if shared and all(shared):
        raise OptimusError("deltas.encode: old and new tensors are the same memory. Give clones made before the step")
    checksum, body = 0, bytearray()
    for patterns, others in zip(map(_patterns, _groups(before)), map(_patterns, _groups(after)), strict=True):
        checksum = zlib.crc32(patterns.numpy(), checksum)
        changed = (patterns != others).numpy()
        changed[_FARTHEST - 1 :: _FARTHEST] = True
        places = np.flatnonzero(changed)
        near, where = b"", cast(Any, slice(None))
        if len(places) < _FEW * len(changed):
            gaps = torch.tensor((np.diff(places, prepend=-1) - 1).astype(np.uint16).view(np.int16))
            near, where = _message(torch.zeros_like(gaps), gaps), places
        values = _message(patterns[where], others[where])
        body += _PART.pack(len(places), len(near), len(values)) + near + values
    return _HEADER.pack(_SIGNATURE, len(before), checksum, zlib.crc32(body)) + body


def apply(old: Iterable[Tensor], delta: Buffer) -> list[Tensor]:
    """Return the new tensors, on the devices of the old ones, which stay as they are.

    Raises:
        OptimusError: `delta` is no complete message of `encode`, or was made from other values than `old`; or one of
            these is no dense tensor.
    """
    before, delta = _dense(old), bytes(delta)
    body = delta[_HEADER.size :]
    signature, number, checksum, of_body = _HEADER.unpack(delta[: _HEADER.size].ljust(_HEADER.size, b" "))
    if signature != _SIGNATURE or zlib.crc32(body) != of_body:
        raise OptimusError("deltas.apply: the bytes are damaged, or not those of deltas.encode. Send them again")
    patterns, found = list(map(_patterns, _groups(before))), 0
    for each in patterns:
        found = zlib.crc32(each.numpy(), found)
    if (len(before), found) != (number, checksum):
        raise OptimusError(
            "deltas.apply: the tensors are not those that the bytes were made from. Give the copy that the last delta "
            "has made, in the same order, or send the whole model once"
        )
    at = 0
    for each in patterns:
        number, *lengths = _PART.unpack_from(body, at)
        near, end = at + _PART.size + lengths[0], at + _PART.size + sum(lengths)
        where: Any = slice(None)
        if lengths[0]:
            _decode(body[at + _PART.size : near], gaps := torch.zeros(number, dtype=torch.int16))
            where = torch.from_numpy(np.cumsum(gaps.numpy().view(np.uint16) + np.int64(1)) - 1)
        _decode(body[near:end], values := each[where])
        each[where] = values
        at = end
    return [
        _halves((part if len(group) == 1 else part.clone()).view(torch.uint8)[: like.nbytes], like, together=True)
        .view(like.dtype).view(like.shape).to(like.device)
        for group, each in zip(_groups(before), patterns, strict=True)
        for like, part in zip(group, each.split([_padded(like.nbytes) // 2 for like in group]), strict=True)
    ]  # fmt: skip


def _dense(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors as a list, after checking that each holds its values as plain memory."""
    found = list(tensors)
    for each in found:
        strided = isinstance(each, Tensor) and each.layout is torch.strided
        memory = strided and not (each.is_meta or each.is_quantized or each.is_nested)
        if not memory or is_traceable_wrapper_subclass(each):
            raise OptimusError(
                f"deltas: {type(each).__name__} is no dense tensor. Give lists of dense tensors: of a DTensor its "
                "to_local(), of a quantized tensor its int_repr(), of a state_dict its values()"
            )
    return found


def _groups(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Return the groups of successive tensors that are encoded together: small ones cost more in calls than in work."""
    ends = accumulate(each.nbytes for each in tensors)
    return [list(group) for _, group in groupby(tensors, lambda _: next(ends) // _TOGETHER)]


def _padded(nbytes: int) -> int:
    """Return the bytes of a tensor in its group, in which any dtype may follow it."""
    return -(-nbytes // 16) * 16


def _patterns(group: list[Tensor]) -> Tensor:
    """Return a copy of the bytes of a group as flat int16 on the CPU, with zeros behind each tensor."""
    parts = []
    for each in group:
        data = _halves(each.detach().cpu().resolve_conj().contiguous().view(-1).view(torch.uint8), each)
        parts += [data, data.new_zeros(_padded(len(data)) - len(data))]
    return torch.cat(parts).view(torch.int16)


def _halves(data: Tensor, like: Tensor, *, together: bool = False) -> Tensor:
    """Return bytes of values wider than 16 bits with all low halves in front of all high ones, which change less; or
    `together` again.
    """
    if (count := like.element_size() // 2) < 2:
        return data
    rows = (count, -1) if together else (-1, count)
    return data.view(torch.int16).view(rows).t().reshape(-1).view(torch.uint8)


def _message(old: Tensor, new: Tensor) -> bytes:
    memory = torch.empty(exact.raw_bytes(len(new)) // 8 * 8, dtype=torch.uint8)
    nbytes = int(exact.encode(old, new, memory))
    if nbytes < exact.raw_bytes(len(new)):
        return memory[:nbytes].numpy().tobytes()
    return memory[: exact.HEADER].numpy().tobytes() + new.numpy().tobytes()


def _decode(message: bytes, values: Tensor) -> None:
    raw = len(message) == exact.raw_bytes(len(values))
    whole = exact.decode(torch.from_numpy(np.frombuffer(message, dtype=np.uint8).copy()), values, raw=raw)
    assert whole, "the checksums of all bytes were right"
