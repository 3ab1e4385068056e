"""GB/s of the kernels that code blocks, wherever a shard may begin, and exact differences. Torch, and other choices for
the compiler, are timed beside them.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from optimus_cc_ext.compressors import exact
from optimus_cc_ext.compressors.blocks import BlockLayout, Codec
from optimus_cc_ext.compressors.fast import exact_kernels, fast_codec
from scripts.bench.compressors import compiled
from scripts.bench.compressors.timing import Work, captured
from scripts.bench.compressors.variants import VARIANTS, applied

__all__ = ["ALIGNMENTS", "cases", "compile_variants"]

ALIGNMENTS = (16, 8, 4, 2, 1)
"""Alignments of a shard: numbers of values of which its start is a multiple."""

ROW_WIDTH = 2048
"""Values of a row: the hidden size of Qwen3-30B."""

_FORMATS = ("int4", "int8")
_SENDERS = 2

Works = Mapping[str, Work | None]
Step = Callable[[Any], torch.Tensor]
"""Function that codes with a `Codec`, or with the kernels of exact differences; None stands for torch."""


def cases(device: torch.device, numel: int, containing: str, variants: bool) -> Iterator[tuple[str, int, Works]]:
    """Yield (case, bytes that are read and written at least, works by contender) of `numel` values, a multiple of
    `ROW_WIDTH`, for the cases that contain a text.

    A work is None where it needs a GPU. Torch does not depend on the alignment, and is timed at its ends; `variants`
    are timed where shards are aligned.
    """
    for format in _FORMATS:
        ours = fast_codec(format, seed=1, rotated=True)
        torchs = Codec(format, signs=ours._signs)
        for dtype in (torch.float32, torch.bfloat16):
            values = torch.randn(numel + max(ALIGNMENTS), device=device).to(dtype)
            for align in ALIGNMENTS:
                layout = BlockLayout([[(align, numel)]])
                nbytes = ours.message_bytes(layout, dtype)
                message = torch.empty(_SENDERS, nbytes, dtype=torch.uint8, device=device)
                torchs.encode(values, layout, message[:1])
                message[1:].copy_(message[:1])
                held, out = numel * dtype.itemsize, torch.zeros_like(values)
                steps: dict[str, tuple[int, Step]] = {
                    "encode": (held + nbytes, partial(_encode, values, layout, message[:1].clone())),
                    "decode": (held + nbytes, partial(_decode, message[:1], layout, out)),
                    "decode onto": (2 * held + nbytes, partial(_decode_onto, message[:1], layout, out)),
                    "add two senders": (held + 2 * nbytes, partial(_decode_add, message, layout, out)),
                }
                for name, (moved, step) in steps.items():
                    case = f"{format}, {name}, {str(dtype)[6:]}, shards at multiples of {align}"
                    if containing not in case:
                        continue
                    ends = {"torch, eager": partial(step, torchs)} if align in (ALIGNMENTS[0], ALIGNMENTS[-1]) else {}
                    yield case, moved, _ours(step, ours, device, variants and align == ALIGNMENTS[0], out) | ends
            yield from _rows(ours, torchs, values[:numel].view(-1, ROW_WIDTH), containing, variants)
    yield from _exact(device, numel, containing)


def _exact(device: torch.device, numel: int, containing: str) -> Iterator[tuple[str, int, Works]]:
    """Yield the cases of exact differences. The weights have a deviation of 0.02; a step moves them by about 3e-4."""
    weights = 0.02 * torch.randn(numel, device=device)
    old, new = weights.bfloat16(), (weights + 3e-4 * torch.randn(numel, device=device)).bfloat16()
    there, back = (torch.empty(exact.raw_bytes(numel), dtype=torch.uint8, device=device) for _ in range(2))
    nbytes, further = int(exact.encode(old, new, there)), int(exact.encode(new, old, back))
    values = old.clone()

    def encode(kernels: Any) -> torch.Tensor:
        return exact.encode(old, new, there, kernels)

    def decode(kernels: Any) -> torch.Tensor:
        exact.decode(there, values, kernels, raw=False)
        return exact.decode(back, values, kernels, raw=False)

    steps = {
        "encode": (2 * old.nbytes + nbytes, encode),
        "decode there and back": (4 * old.nbytes + nbytes + further, decode),
    }
    for name, (moved, step) in steps.items():
        case = f"exact, {name}, {8 * nbytes / numel:.1f} bits a value, shards at multiples of {ALIGNMENTS[0]}"
        if containing in case:
            yield case, moved, _ours(step, exact_kernels(), device, False, None) | {"torch, eager": partial(step, None)}
            if not torch.equal(values, old):
                raise SystemExit(f"{case}: other values than those that were encoded")


def _ours(
    step: Step, codec: Any, device: torch.device, variants: bool, out: torch.Tensor | None
) -> dict[str, Work | None]:  # fmt: skip
    """Return a step as it is, in a CUDA graph, in which the host's time does not count, and so in every variant."""
    names = [f"graph, {name}" for name in VARIANTS if variants or name == "ours"]
    if device.type != "cuda":
        return dict.fromkeys(["ours", *names])
    works: dict[str, Work | None] = {"ours": partial(step, codec)}
    results = []
    for name, chosen in zip(names, VARIANTS.values(), strict=False):
        with applied(chosen):
            try:
                if out is not None:
                    out.zero_()
                results.append(step(codec).clone())
                works[name] = captured(partial(step, codec))
            except Exception as error:  # errors of Triton's compiler and of CUDA, of many classes
                print(f"{name}: {error!r:.200}", file=sys.stderr)
                continue
        if not torch.equal(results[0], results[-1]):  # other instructions may round a rotation in another way
            print(f"{name}: other bits than ours")
    return works


def compile_variants() -> None:
    """Compile all variants on all cores, for this machine's GPU, into Triton's folder of compiled kernels, and print
    their registers and instructions.
    """
    from triton import knobs

    major, minor = torch.cuda.get_device_capability()
    words = f"--variants --align 16 --capability {major}{minor} --jobs {os.cpu_count()} --format".split()
    compiled.main([*words, *_FORMATS, "--cache", knobs.cache.dir])


def _rows(
    ours: Codec, torchs: Codec, rows: torch.Tensor, containing: str, variants: bool
) -> Iterator[tuple[str, int, Works]]:  # fmt: skip
    """Yield the cases in which each row is encoded as a separate message, as the tokens of experts are."""
    message = torchs.encode_rows(rows)
    steps: dict[str, Step] = {
        "encode": lambda codec: codec.encode_rows(rows),
        "decode": lambda codec: codec.decode_rows(message, rows.dtype),
    }
    for name, step in steps.items():
        case = f"{ours.format.name}, {name}, {str(rows.dtype)[6:]}, rows of {ROW_WIDTH}"
        if containing in case:
            works = _ours(step, ours, rows.device, variants, None) | {"torch, eager": partial(step, torchs)}
            yield case, rows.nbytes + message.nbytes, works


def _encode(values: torch.Tensor, layout: BlockLayout, message: torch.Tensor, codec: Codec) -> torch.Tensor:
    codec.encode(values, layout, message)
    return message


def _decode(message: torch.Tensor, layout: BlockLayout, out: torch.Tensor, codec: Codec) -> torch.Tensor:
    codec.decode(message, layout, out)
    return out


def _decode_onto(message: torch.Tensor, layout: BlockLayout, out: torch.Tensor, codec: Codec) -> torch.Tensor:
    codec.decode_onto(message, layout, out)
    return out


def _decode_add(messages: torch.Tensor, layout: BlockLayout, out: torch.Tensor, codec: Codec) -> torch.Tensor:
    codec.decode_add(messages, layout, 0, out)
    return out
