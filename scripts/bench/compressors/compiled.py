"""Output of Triton's compiler for the codecs' kernels, for GPUs that need not be here: nothing runs on a GPU.

    python -m scripts.bench.compressors.compiled [--capability 80 90 100] [--align 16 2 1] [--only encode]
        [--format int4] [--trial]

For each kernel it prints registers and stack of a thread (spilled registers lie on the stack); instructions of a thread
for each of its values, the compiler's (PTX) and the processor's (SASS), where a loop over senders counts once; and the
number and width in bytes of a thread's loads and stores of global memory. With --trial it also prints the CPU-seconds
in which the trial's variants are compiled, with an empty cache and with a filled one. It needs Triton and no GPU.
"""

import argparse
import re
import resource
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from optimus_cc_ext.compressors.blocks import BlockLayout
from optimus_cc_ext.compressors.scratch import Scratch
from optimus_cc_ext.compressors.triton import blocks, launches, trial
from optimus_cc_ext.compressors.triton.blocks import TritonCodec
from optimus_cc_ext.report.table import Table

__all__ = ["compiling", "main"]

_DEVICES = count()
"""Numbers of pretended devices. Triton keeps compiled kernels by device, so a new device makes it look into its
cache.
"""

_WIDTHS = {"128": "16", "64": "8", "": "4", "U16": "2", "S16": "2", "U8": "1", "S8": "1"}
"""Bytes of a load or a store, by the part of the instruction's name that says the width."""

_SENDERS = 2
_FORMATS = ("int4", "int8", "fp8")

_COLUMNS = (
    "kernel", "sm", "align", "registers", "stack, B", "shared, B", "PTX / value", "SASS / value", "loads", "stores"
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Launch of one of the codecs' kernels, which is compiled and not run."""

    format: str
    dtype: torch.dtype
    align: int
    name: str
    launch: Callable[[TritonCodec, torch.Tensor, BlockLayout], None]


def _encode(codec: TritonCodec, values: torch.Tensor, layout: BlockLayout) -> None:
    codec.encode(values, layout, _messages(codec, values, layout))


def _decode(codec: TritonCodec, values: torch.Tensor, layout: BlockLayout) -> None:
    codec.decode(_messages(codec, values, layout), layout, values)


def _decode_onto(codec: TritonCodec, values: torch.Tensor, layout: BlockLayout) -> None:
    codec.decode_onto(_messages(codec, values, layout), layout, values, Scratch())


def _decode_add(codec: TritonCodec, values: torch.Tensor, layout: BlockLayout) -> None:
    codec.decode_add(_messages(codec, values, layout)[:1].repeat(_SENDERS, 1), layout, 0, values)


_WAYS = {
    "encode": (_encode, (torch.float32, torch.bfloat16)),
    "decode": (_decode, (torch.float32, torch.bfloat16)),
    "decode onto": (_decode_onto, (torch.bfloat16,)),
    "decode, add senders": (_decode_add, (torch.float32, torch.bfloat16)),
}
"""Operations of a codec, and the dtypes with which training calls them."""


def _messages(codec: TritonCodec, values: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    return torch.zeros(layout.messages, codec.message_bytes(layout, values.dtype), dtype=torch.uint8)


@contextmanager
def compiling(capability: int, cache: Path) -> Iterator[list[Any]]:
    """Make launches inside compile for GPUs of this capability (90: 9.0) instead of running; yield the compiled
    kernels.

    Args:
        cache: Triton's folder of compiled kernels.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    compiled: list[Any] = []
    run, device = JITFunction.run, next(_DEVICES)
    pretended = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: device,
        get_current_stream=lambda device=None: 0,
    )

    def compile_only(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> None:
        compiled.append(run(self, *args, warmup=True, **kwargs))

    with ExitStack() as patches:
        patches.enter_context(patch.dict("os.environ", TRITON_CACHE_DIR=str(cache)))
        patches.enter_context(patch.object(JITFunction, "run", compile_only))
        # The driver is replaced without set_active(), because reset_active() would need a GPU to return to.
        patches.enter_context(patch.object(driver, "_active", pretended))
        patches.enter_context(patch.object(blocks, "_taken", lambda values, messages: True))
        patches.enter_context(patch.object(launches, "takes_factors", lambda p, r: True))
        yield compiled


def _cases(options: argparse.Namespace) -> list[Case]:
    return [
        Case(format, dtype, align, name, launch)
        for format in options.format
        for name, (launch, dtypes) in _WAYS.items()
        for dtype in dtypes
        for align in options.align
        if options.only in ("", name)
    ]


def _row(case: Case, capability: int, cache: Path) -> tuple[str, ...]:
    signs = torch.ones(128)
    codec, values = TritonCodec(case.format, signs=signs), torch.zeros(1024, dtype=case.dtype)
    with compiling(capability, cache) as compiled:
        case.launch(codec, values, BlockLayout([[(case.align, 512)], [(512 + case.align, 256)]]))
    [kernel] = compiled
    lanes, numel = 32 * kernel.metadata.num_warps, blocks.ROWS * 128
    lines = _sass(kernel)
    used = _tool("cuobjdump", "--dump-resource-usage", kernel.asm["cubin"])
    registers, stack = (int(re.search(rf"{name}:(\d+)", used)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    ptx = sum(bool(re.match(r"\s+(@!?%p\d+ )?[a-z]+[\w.]* ", line)) for line in kernel.asm["ptx"].splitlines())
    return (
        f"{case.name}, {case.format}{', rotated' if codec.rotated else ''}, {str(case.dtype)[6:]}",
        *map(str, (capability, case.align, registers, stack, kernel.metadata.shared)),
        f"{ptx * lanes / numel:.1f}",
        f"{len(lines) * lanes / numel:.1f}",
        _widths(lines, "LDG"),
        _widths(lines, "STG"),
    )


def _sass(kernel: Any) -> list[str]:
    """Return the processor's instructions up to the last exit, after which only padding follows."""
    text = _tool("nvdisasm", "-c", kernel.asm["cubin"])
    found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[\dT]+ )?([A-Z][\w.]*)", text)
    found = [name for name in found if name != "NOP"]
    last = len(found) - 1 - found[::-1].index("EXIT")
    return found[: last + 1]


def _widths(instructions: Sequence[str], kind: str) -> str:
    """Return a thread's instructions of this kind, as number x bytes."""
    found: Counter[str] = Counter()
    for name in instructions:
        if name.split(".")[0] == kind:
            parts = set(name.split("."))
            found[next((_WIDTHS[part] for part in parts if part in _WIDTHS), "4")] += 1
    return " ".join(f"{times}x{width}" for width, times in sorted(found.items(), key=lambda item: -int(item[0]))) or "-"


def _tool(name: str, option: str, cubin: bytes) -> str:
    import triton

    program = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([program, option, file.name], check=True, capture_output=True, text=True).stdout


def _seconds(
    capability: int, ranks: Sequence[int], formats: Sequence[str], aligns: Sequence[int], cache: Path
) -> str:  # fmt: skip
    """Return the CPU-seconds, of this process and of compilers, in which the trial's kernels are compiled."""
    before = _used()
    with compiling(capability, cache) as compiled, patch.object(trial, "_agree", lambda equal, otherwise: None):
        failure = trial.failure(
            ranks, formats, torch.device("cpu"), (torch.float32, torch.bfloat16), rotations=[True], aligns=aligns
        )
    kernels = len({id(kernel) for kernel in compiled})
    return f"{kernels} kernels in {_used() - before:.1f} CPU-s" + (f", then {failure}" if failure else "")


def _used() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.compressors.compiled", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--capability",
        type=int,
        nargs="+",
        default=[80, 90, 100],
        help="compute capability of the GPU; 90: H100 (%(default)s)",
    )
    parser.add_argument("--align", type=int, nargs="+", default=[16, 2, 1], help="alignment of shards, in values")
    parser.add_argument("--format", nargs="+", default=_FORMATS, choices=_FORMATS, help="block formats to compile")
    parser.add_argument("--only", default="", choices=("", *_WAYS), help="compile only this operation of the codecs")
    parser.add_argument("--trial", action="store_true", help="compile the trial's variants as well")
    options = parser.parse_args(argv)
    if not launches.AVAILABLE or launches.INTERPRETED:
        parser.error("Triton is missing, too old, or interprets. Install 3.6 or newer, and unset TRITON_INTERPRET")
    with tempfile.TemporaryDirectory() as folder:
        cases = [(case, capability) for case in _cases(options) for capability in options.capability]
        print(Table(_COLUMNS, [_row(case, capability, Path(folder)) for case, capability in cases]).markdown())
        for capability in options.capability if options.trial else ():
            for name, ranks, formats, aligns in (
                ("blocks, shards at multiples of 16", (), ("int4", "int8"), (16,)),
                ("blocks, shards at multiples of 2", (), ("int4", "int8"), (2, 4, 8, 16)),
                ("low rank", (16, 64, 128), (), ()),
            ):
                cache = Path(folder, f"{name} {capability}")
                empty, filled = (_seconds(capability, ranks, formats, aligns, cache) for _ in range(2))
                print(f"trial, sm_{capability}, {name}: empty cache: {empty}; filled cache: {filled}", flush=True)


if __name__ == "__main__":
    main()
