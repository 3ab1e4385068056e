"""Checks of a GPU machine: the claim of each, and the rows that it measures. A claim that is false ends with
SystemExit.

Without a GPU the same code runs over gloo, torch and Triton's interpreter; a figure that needs a GPU is None.
"""

import importlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["CHECKS", "TOTAL", "Check", "Setting"]

Row = dict[str, Any]
TOTAL = 480
"""Seconds for all checks together, with the examination of the GPU before them."""


@dataclass(frozen=True)
class Setting:
    """Settings from the GPU check's command line."""

    dry: bool
    output: Path

    @property
    def device(self) -> torch.device:
        """Device of the checks."""
        return torch.device("cpu" if self.dry else "cuda")


@dataclass(frozen=True)
class Check:
    """Check that runs in a process of its own."""

    claim: str
    run: Callable[[Setting], Iterator[Row]]
    limit: int
    """Limit in seconds; all checks that are not `long` may take `TOTAL` together."""

    long: bool = False
    """True if the check runs with `--long` only, for longer than `TOTAL`."""

    interpreted: bool = False
    """True if Triton's interpreter runs the kernels in a dry run."""


def _function(module: str, function: str) -> Callable[[Setting], Iterator[Row]]:
    # The check's module is imported when it runs, because the process that starts the checks has to name first what the
    # machine lacks.
    return lambda setting: getattr(importlib.import_module(f"scripts.gpu_check.{module}"), function)(setting.device)


def bench(setting: Setting) -> Iterator[Row]:
    """Run sections of the compressors' bench, whose files lie beside the check's page."""
    from scripts.bench.compressors.__main__ import main

    scale, sections = "tiny" if setting.dry else "paper", ("formats", "bucket", "kernels", "orthogonalization")
    words = f"--device {setting.device.type} --repeats 2 --threads 1 --scale {scale} --results"
    main([*words.split(), str(setting.output), "--only", *sections])
    yield {"see": f"compressors-{setting.device.type}.md"}


def capture(setting: Setting) -> Iterator[Row]:
    """Run the bench's section "capture"."""
    if setting.dry:
        yield {"case": "graphs at ranks 16, 64, 128", "ms": None}
        return
    from scripts.bench.compressors.sections import SECTIONS
    from scripts.bench.compressors.sections import Setting as Bench

    yield from SECTIONS["capture"](Bench(setting.device, tiny=False, repeats=2))


def nccl(setting: Setting) -> Iterator[Row]:
    """Train all configurations of the check `nccl`, whose log lies beside the check's page."""
    from scripts.gpu_check.nccl import check

    yield from check(setting.output / "nccl", tiny=setting.dry)


def study(setting: Setting) -> Iterator[Row]:
    """Run the study of a GPT of 131 million parameters (docs/evidence.md); its page lies beside the check's."""
    from optimus_cc_ext.tools.report.record import read_logs

    folder, variants = setting.output / "study-131m", ("vanilla", "balanced", "int8-forward", "paper")
    iterations, evaluations = (2, 1) if setting.dry else (240, 16)
    words = f"--variants {','.join(variants)} --iterations {iterations} --evaluations {evaluations} --max-mb 40"
    _study(setting, folder, [*words.split(), *([] if setting.dry else ["--common", STUDIED_MODEL, "--timeout", "20"])])
    for name in variants:
        record = read_logs(folder / "runs" / f"{name}-seed1")
        seconds = None if setting.dry else record.seconds.median
        yield {"variant": name, "training loss": record.training.last, "seconds per iteration": seconds}


STUDIED_MODEL = (
    "--num-layers 18 --hidden-size 768 --num-attention-heads 12 --seq-length 512 --max-position-embeddings 512 "
    "--init-method-std 0.0361 --micro-batch-size 4 --global-batch-size 64"
)


def _study(setting: Setting, folder: Path, words: list[str]) -> None:
    from scripts.study.__main__ import main

    os.environ.setdefault("OPTIMUS_CC_DEVICE", "shared-gpu")
    shutil.rmtree(folder, ignore_errors=True)  # the study does not repeat runs whose results exist
    if main([*words, "--seeds", "1", "--output", str(folder), *(["--tiny"] if setting.dry else [])]):
        raise SystemExit(f"a run failed: {folder}/runs/*/log.txt")


CHECKS = {
    "kernels": Check(
        "Low-rank, block and exact kernels give the reference's results in bf16, fp16 and fp32.",
        _function("kernels", "check"), 90, interpreted=True,
    ),
    "capture": Check(
        "A step at ranks 16, 64 and 128 waits for nothing, and a CUDA graph of it gives the same bits.", capture, 60
    ),
    "reduction": Check(
        "Beside a busy main stream, the hook's reduction over NCCL leaves the bits that one in line leaves.",
        _function("world_of_one", "reduction"), 45,
    ),
    "messages": Check(
        "Of 100 messages the sender remembers, to the bit, what the receiver lacks.",
        _function("world_of_one", "messages"), 45,
    ),
    "nccl": Check(
        "Four ranks on one GPU train over NCCL: all switched off and pass-through blocks to vanilla's bits, balanced, "
        "experts, two levels and interleaved stages within 0.5 % of vanilla's loss, and a checkpoint resumes.",
        nccl, 210,
    ),
    "bench": Check("The compressors' seconds beside what the machine allows.", bench, 140),
    "study": Check(
        "131 million parameters train in vanilla and with balanced, int8-forward and paper.", study, 6000, long=True
    ),
}  # fmt: skip
