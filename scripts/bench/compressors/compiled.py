"""Output of Triton's compiler for the codecs' kernels, for GPUs that need not be here: nothing runs on a GPU.

    python -m scripts.bench.compressors.compiled [--capability 80 90 100] [--align 16 2 1] [--only encode]
        [--format int4] [--variants] [--jobs 4]
    python -m scripts.bench.compressors.compiled --launches

For each kernel it prints registers and stack of a thread (spilled registers lie on the stack); instructions of a thread
for each of its values, the compiler's (PTX) and the processor's (SASS), where a loop over senders counts once; and the
number and width in bytes of a thread's loads and stores of global memory. With --launches it prints the host's
microseconds from a call to the driver instead. It needs Triton and no GPU.
"""

import argparse
import re
import subprocess
import tempfile
import timeit
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from optimus_cc_ext.compressors.blocks import BlockLayout
from optimus_cc_ext.compressors.triton import blocks, launches
from optimus_cc_ext.compressors.triton.blocks import TritonCodec
from optimus_cc_ext.compressors.triton.low_rank import TritonLowRank
from optimus_cc_ext.tools.report.table import Table
from scripts.bench.compressors.variants import VARIANTS, applied

__all__ = ["compiling", "loops", "main", "stack"]

_DEVICES = count()
"""Numbers of pretended devices. Triton keeps compiled kernels by device, so a new device makes it look into its
cache.
"""

_WIDTHS = {"128": "16", "64": "8", "": "4", "U16": "2", "S16": "2", "U8": "1", "S8": "1"}
"""Bytes of a load or a store, by the part of the instruction's name that says the width."""

_SENDERS = 2
_FORMATS = ("int4", "int8")

_COLUMNS = (
    "kernel", "variant", "sm", "align", "registers", "stack, B", "shared, B", "PTX / value", "SASS / value", "loads",
    "stores",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Launch of one of the codecs' kernels, which is compiled and not run."""

    format: str
    dtype: torch.dtype
    align: int
    name: str
    launch: Callable[[TritonCodec, torch.Tensor, BlockLayout], None]
    variant: str


def _encode(codec: TritonCodec, values: torch.Tensor, layout: BlockLayout) -> None:
    codec.encode(values, layout, _messages(codec, values, layout))


def _decode(codec: TritonCodec, values: torch.Tensor, layout: BlockLayout) -> None:
    codec.decode(_messages(codec, values, layout), layout, values)


def _decode_onto(codec: TritonCodec, values: torch.Tensor, layout: BlockLayout) -> None:
    codec.decode_onto(_messages(codec, values, layout), layout, values)


def _decode_add(codec: TritonCodec, values: torch.Tensor, layout: BlockLayout) -> None:
    codec.decode_add(_messages(codec, values, layout)[:1].repeat(_SENDERS, 1), layout, 0, values)


def _encode_rows(codec: TritonCodec, values: torch.Tensor, layout: BlockLayout) -> None:
    codec.encode_rows(values.view(2, -1))


def _decode_rows(codec: TritonCodec, values: torch.Tensor, layout: BlockLayout) -> None:
    codec.decode_rows(torch.zeros(2, codec.row_bytes(512), dtype=torch.uint8), values.dtype)


_WAYS = {
    "encode": (_encode, (torch.float32, torch.bfloat16)),
    "decode": (_decode, (torch.float32, torch.bfloat16)),
    "decode onto": (_decode_onto, (torch.bfloat16,)),
    "decode, add senders": (_decode_add, (torch.float32, torch.bfloat16)),
    "encode rows": (_encode_rows, (torch.bfloat16,)),
    "decode rows": (_decode_rows, (torch.bfloat16,)),
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
        Case(format, dtype, align, name, launch, variant)
        for format in options.format
        for name, (launch, dtypes) in _WAYS.items()
        for dtype in dtypes
        for align in (options.align if "rows" not in name else options.align[:1])
        for variant in (VARIANTS if options.variants else ("ours",))
        if options.only in ("", name)
    ]


def _row(case: Case, capability: int, cache: Path) -> tuple[str, ...]:
    signs = torch.ones(128)
    codec, values = TritonCodec(case.format, signs=signs), torch.zeros(1024, dtype=case.dtype)
    with compiling(capability, cache) as compiled, applied(VARIANTS[case.variant]):
        case.launch(codec, values, BlockLayout([[(case.align, 512)], [(512 + case.align, 256)]]))
        numel = blocks.ROWS * 128
    [kernel] = compiled
    lanes = 32 * kernel.metadata.num_warps
    lines = _sass(kernel)
    ptx = sum(bool(re.match(r"\s+(@!?%p\d+ )?[a-z]+[\w.]* ", line)) for line in kernel.asm["ptx"].splitlines())
    return (
        f"{case.name}, {case.format}{', rotated' if codec.rotated else ''}, {str(case.dtype)[6:]}",
        case.variant,
        *map(str, (capability, case.align, _used(kernel, "REG"), stack(kernel), kernel.metadata.shared)),
        f"{ptx * lanes / numel:.1f}",
        f"{len(lines) * lanes / numel:.1f}",
        _widths(lines, "LDG"),
        _widths(lines, "STG"),
    )


def stack(kernel: Any) -> int:
    """Return the bytes of a thread's stack, on which spilled registers lie."""
    return _used(kernel, "STACK")


def _used(kernel: Any, name: str) -> int:
    used = _tool("cuobjdump", "--dump-resource-usage", kernel.asm["cubin"])
    return int(re.search(rf"{name}:(\d+)", used)[1])  # type: ignore[index]


def loops(kernel: Any) -> list[int]:
    """Return the number of the processor's instructions in the whole kernel, and in each of its loops."""
    labels, branches, at = {}, [], 0
    for line in _tool("nvdisasm", "-c", kernel.asm["cubin"]).splitlines():
        if label := re.match(r"\.(L_x_\d+):", line):
            labels[label[1]] = at
        at += bool(re.search(r"/\*[0-9a-f]{4,}\*/ +(?!NOP)", line))
        if branch := re.search(r"BRA `\(\.(L_x_\d+)\)", line):
            branches.append((branch[1], at))
    return [len(_sass(kernel)), *(end - labels[label] for label, end in branches if labels.get(label, end) < end)]


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


def _launches(capability: int, cache: Path) -> Iterator[str]:
    """Yield how many microseconds the host needs for each call. The launched kernels do nothing, so the time of the
    GPU's driver is not part of it.
    """
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    run = JITFunction.run
    idle = {
        "run": property(lambda self: lambda *args: None), "_init_handles": lambda self: None,
        "launch_metadata": lambda self, grid, stream, *args: None,
    }  # fmt: skip
    with compiling(capability, cache), ExitStack() as patches:
        for name, instead in idle.items():
            patches.enter_context(patch.object(CompiledKernel, name, instead))
        launched = patch.object(JITFunction, "run", lambda *args, warmup, **given: run(*args, warmup=False, **given))
        patches.enter_context(launched)
        codec, values = TritonCodec("int8", signs=torch.ones(128)), torch.zeros(4096, dtype=torch.bfloat16)
        layout, one, low = BlockLayout.of_one(4096), torch.zeros(1, 1, 1), TritonLowRank()
        message = _messages(codec, values, layout)
        m, q, p = torch.zeros(1, 1024, 3072), torch.zeros(1, 3072, 16), torch.zeros(1, 1024, 16)
        works: dict[str, Callable[[], object]] = {
            "torch.bmm(out=) of one number": lambda: torch.bmm(one, one, out=one),
            "encode, 1 launch": lambda: codec.encode(values, layout, message),
            "decode, 1 launch": lambda: codec.decode(message, layout, values),
            "sum and project, 2 launches": lambda: low.project_sum(m, m, q, total=m, out=p),
            "orthogonalize, 5 launches": lambda: low.orthogonalize(p, out=p),
        }
        least = 0.0
        for name, work in works.items():
            work()
            microseconds = 1e6 * min(timeit.repeat(work, number=100, repeat=40)) / 100
            least = least or microseconds
            yield f"{name}: {microseconds:.1f} us, {microseconds / least:.0f} times torch.bmm"


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
    parser.add_argument("--variants", action="store_true", help="compile also with other choices for the compiler")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes (%(default)s)")
    parser.add_argument("--cache", type=Path, help="Triton's folder of compiled kernels (default: one for this call)")
    parser.add_argument("--launches", action="store_true", help="measure the host's time of launches instead")
    options = parser.parse_args(argv)
    if not launches.AVAILABLE or launches.INTERPRETED:
        parser.error("Triton is missing, too old, or interprets. Install 3.6 or newer, and unset TRITON_INTERPRET")
    with tempfile.TemporaryDirectory() as folder:
        cache = options.cache or Path(folder)
        if options.launches:
            print(*_launches(options.capability[0], cache), sep="\n")
            return
        works = [(case, capability, cache) for case in _cases(options) for capability in options.capability]
        with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
            rows = list((pool.map if options.jobs > 1 else map)(_row, *zip(*works, strict=True)))
        print(Table(_COLUMNS, rows).markdown())


if __name__ == "__main__":
    main()
