"""The block formats' kernels beside torch, eager and compiled, wherever a shard may begin, in GB/s."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from optimus_cc_ext.compressors.blocks import BlockLayout, Codec
from optimus_cc_ext.compressors.fast import fast_codec
from optimus_cc_ext.compressors.formats import BLOCK
from optimus_cc_ext.compressors.scratch import Scratch
from scripts.bench.compressors.timing import Work

__all__ = ["ALIGNMENTS", "cases", "check_compiled"]

ALIGNMENTS = (16, 8, 4, 2, 1)
"""Alignments of a shard: numbers of values of which its start is a multiple."""

ROW_WIDTH = 2048
"""Values of a row: the hidden size of Qwen3-30B."""

_FORMATS = (("int4", True), ("int8", True), ("fp8", False))
_SENDERS = 2

Works = Mapping[str, Work | None]


def cases(device: torch.device, numel: int, containing: str = "") -> Iterator[tuple[str, int, Works]]:
    """Yield (case, bytes that are read and written at least, works by contender) of `numel` values, a multiple of
    `ROW_WIDTH`, for the cases that contain a text.

    A work is None where it needs a GPU. Torch does not depend on the alignment, and is timed at its ends.
    """
    on_gpu = device.type == "cuda"
    for format, rotated in _FORMATS:
        ours = fast_codec(format, seed=1, rotated=rotated)
        torchs = Codec(format, signs=ours._signs)
        for dtype in (torch.float32, torch.bfloat16):
            values = torch.randn(numel + max(ALIGNMENTS), device=device).to(dtype)
            for align in ALIGNMENTS:
                layout = BlockLayout([[(align, numel)]])
                nbytes = ours.message_bytes(layout, dtype)
                message = torch.empty(_SENDERS, nbytes, dtype=torch.uint8, device=device)
                torchs.encode(values, layout, message[:1])
                message[1:].copy_(message[:1])
                held, plain = numel * dtype.itemsize, _plain(torchs, values[align : align + numel], message[0], layout)
                out = torch.zeros_like(values)
                steps: dict[str, tuple[int, Callable[[Codec], object]]] = {
                    "encode": (held + nbytes, partial(_encode, values, layout, message[:1].clone())),
                    "decode": (held + nbytes, partial(_decode, message[:1], layout, out)),
                    "decode onto": (2 * held + nbytes, partial(_decode_onto, message[:1], layout, out, Scratch())),
                    "add two senders": (held + 2 * nbytes, partial(_decode_add, message, layout, out)),
                }
                for name, (moved, step) in steps.items():
                    case = f"{format}, {name}, {str(dtype)[6:]}, shards at multiples of {align}"
                    if containing not in case:
                        continue
                    works: dict[str, Work | None] = {"ours": partial(step, ours) if on_gpu else None}
                    if align in (ALIGNMENTS[0], ALIGNMENTS[-1]):
                        works["torch, eager"] = partial(step, torchs)
                        works["torch, compiled"] = _compiled(plain[name]) if on_gpu else None
                    yield case, moved, works
            yield from _rows(ours, torchs, values[:numel].view(-1, ROW_WIDTH), containing)


def _rows(ours: Codec, torchs: Codec, rows: torch.Tensor, containing: str) -> Iterator[tuple[str, int, Works]]:
    """Yield the cases in which each row is encoded as a separate message, as the tokens of experts are."""
    message, on_gpu = torchs.encode_rows(rows), rows.device.type == "cuda"
    steps: dict[str, Callable[[Codec], object]] = {
        "encode": lambda codec: codec.encode_rows(rows),
        "decode": lambda codec: codec.decode_rows(message, rows.dtype),
    }
    for name, step in steps.items():
        case = f"{ours.format.name}, {name}, {str(rows.dtype)[6:]}, rows of {ROW_WIDTH}"
        if containing in case:
            works = {"ours": partial(step, ours) if on_gpu else None, "torch, eager": partial(step, torchs)}
            yield case, rows.nbytes + message.nbytes, works


def _encode(values: torch.Tensor, layout: BlockLayout, message: torch.Tensor, codec: Codec) -> None:
    codec.encode(values, layout, message)


def _decode(message: torch.Tensor, layout: BlockLayout, out: torch.Tensor, codec: Codec) -> None:
    codec.decode(message, layout, out)


def _decode_onto(
    message: torch.Tensor, layout: BlockLayout, out: torch.Tensor, scratch: Scratch, codec: Codec
) -> None:  # fmt: skip
    codec.decode_onto(message, layout, out, scratch)


def _decode_add(messages: torch.Tensor, layout: BlockLayout, out: torch.Tensor, codec: Codec) -> None:
    codec.decode_add(messages, layout, 0, out)


def _plain(codec: Codec, values: torch.Tensor, message: torch.Tensor, layout: BlockLayout) -> dict[str, Work]:
    """Return the steps as one expression of torch each, for its compiler; they move as many bytes."""
    rotation = codec.rotation(values.device) if codec.rotated else None
    largest, gain, bits = codec.format.largest, BLOCK if codec.rotated else 1, codec.format.bits
    assert largest is not None
    _, scales, codes = codec._split(message, layout, values.dtype)

    def encode() -> tuple[torch.Tensor, torch.Tensor]:
        x = values.view(-1, BLOCK).float()
        y = x if rotation is None else x @ rotation.T
        scale = (y.abs().amax(1) / (largest * gain)).bfloat16()
        x = (y / (scale.float()[:, None] * gain)).clamp(-largest, largest).nan_to_num(0.0)
        if codec.format.packing == "e4m3":
            return scale, x.to(torch.float8_e4m3fn)
        fields = x.round().to(torch.int8)
        return scale, fields if bits == 8 else (fields[:, : BLOCK // 2] + 8) | ((fields[:, BLOCK // 2 :] + 8) << 4)

    def one() -> torch.Tensor:
        if codec.format.packing == "e4m3":
            x = codes.view(torch.float8_e4m3fn).float()
        elif bits == 8:
            x = codes.view(torch.int8).float()
        else:
            x = torch.cat([codes & 15, codes >> 4], 1).float() - 8
        return (x if rotation is None else x @ rotation) * scales.float()[:, None]

    return {
        "encode": encode,
        "decode": lambda: one().to(values.dtype),
        "decode onto": lambda: values.view(-1, BLOCK) + one().to(values.dtype),
        "add two senders": lambda: (one() + one()).to(values.dtype),
    }


def _compiled(work: Work) -> Work:
    compiled = torch.compile(work)
    compiled()
    return compiled


def check_compiled(format: str, rotated: bool, numel: int = 1024) -> None:
    """Check, uncompiled, that the expressions for torch's compiler compute what the codec does.

    Raises:
        SystemExit: they do not.
    """
    codec = Codec(format, signs=torch.ones(BLOCK) if rotated else None)
    values, layout = torch.randn(numel), BlockLayout.of_one(numel)
    message = torch.empty(1, codec.message_bytes(layout, values.dtype), dtype=torch.uint8)
    codec.encode(values, layout, message)
    plain, out = _plain(codec, values, message[0], layout), torch.empty(numel)
    _, scales, codes = codec._split(message[0], layout, values.dtype)
    scale, fields = plain["encode"]()  # type: ignore[misc]
    codec.decode(message, layout, out)
    same = torch.equal(fields.view(torch.uint8), codes) and torch.equal(scale, scales)
    if not (same and torch.equal(plain["decode"]().flatten(), out)):  # type: ignore[attr-defined]
        raise SystemExit(f"{format}: the expressions for torch's compiler do not compute what the codec does")
