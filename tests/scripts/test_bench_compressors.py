"""The compressors' benchmark at a tiny scale, and its refusal to time wrong results."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from optimus_cc_ext.compressors.fast import fast_codec
from optimus_cc_ext.compressors.formats import FORMATS
from optimus_cc_ext.compressors.low_rank import FastLowRank
from optimus_cc_ext.compressors.triton import blocks, launches
from optimus_cc_ext.compressors.triton.blocks import TritonCodec
from scripts.bench.compressors import compiled
from scripts.bench.compressors.__main__ import main
from scripts.bench.compressors.bucket import one_process
from scripts.bench.compressors.sections import FORMAT_CASES, check_basis, check_bucket, check_format
from scripts.bench.compressors.timing import in_turn
from scripts.bench.compressors.variants import VARIANTS, applied
from tests.formats import every, lossy
from tests.shell_scripts import ROOT

TINY = ("--device", "cpu", "--scale", "tiny", "--threads", "1", "--repeats", "1")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.bench.compressors", *arguments]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=200)


@pytest.mark.full
def test_every_section_is_measured_and_the_page_says_what_was_not(tmp_path: Path) -> None:
    measured = tmp_path / "with a blank"
    ended = run(*TINY, "--results", str(measured))
    assert ended.returncode == 0, ended.stderr
    assert "missing, because it needs a GPU: python -m scripts.bench.compressors --device cuda --only k" in ended.stdout
    found = json.loads((measured / "compressors-cpu.json").read_text())
    rows = found["rows"]
    assert found["machine"]["scale"] == "tiny" and found["machine"]["threads"] == "1"
    works = {row["section"]: {each["work"] for each in rows if each["section"] == row["section"]} for row in rows}
    assert works == {
        "kernels": {"ours", "torch, eager", "torch, compiled"},
        "projections": {"ours", "torch, eager", "torch, compiled"},
        "codecs": {"ours", "graph, ours", "torch, eager"},
        "slices": {
            "ours, compress", "ours, decompress", "reference, compress", "reference, decompress",
            "hook, compress and decompress",
        },
        "orthogonalization": {"ours", "ours in fp64", "hook's _orthogonalize", "LAPACK or cuSOLVER QR"},
        "bucket": {"ours", "hook, batched", "hook, as by default"},
        "formats": {
            f"{name}, {part}"
            for name in FORMAT_CASES
            for part in ("encode", "decode and add")
        },
    }  # fmt: skip
    rates = [row for row in rows if row["section"] == "codecs" and row["ms"] is not None]
    assert rates and all(row["GB/s"] > 0 and row["GB/s of a copy"] > 0 for row in rates)
    starts = {row["case"].rsplit(" ", 1)[1] for row in rows if row["section"] == "codecs"}
    assert starts == {"16", "8", "4", "2", "1", "2048"}, "alignments, and the width of rows"
    missing = {row["work"] for row in rows if row["ms"] is None}
    assert missing == {"ours", "graph, ours", "torch, compiled"}, "of the kernels, what needs a GPU"
    ours = [row for row in rows if row["work"] == "ours, compress"]
    assert [row["rank"] for row in ours] == 3 * list(range(8, 41, 4))
    assert all(row["floor, ms"] > 0 and row["ms"] > 0 for row in ours)
    page = (measured / "compressors-cpu.md").read_text()
    assert "## capture\n\nnot measured" in page
    assert re.search(r"!\[.*: rank 8 to 40, Gbit/s [\d.]+ to [\d.]+.*\]\(compressors-cpu-slices\.svg\)", page)
    assert (measured / "compressors-cpu-slices.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["--device", "cpu", "--repeats", "0"], "--repeats 0: at least 1 is needed"),
        (["--device", "cpu", "--threads", "-1"], "--threads -1: at least 1 is needed"),
        (["--device", "cpu", "--only", "capture"], "a CUDA graph needs a GPU. Give --device cuda"),
        (["--device", "cpu", "--only", "everything"], "invalid choice: 'everything'"),
        (["--device", "cpu", "--case", "8.3b"], "--case 8.3b: only slices and codecs have such cases"),
        (
            ["--device", "cpu", "--threads", "1", "--only", "slices", "--case", "9b"],
            "--case 9b: no case of slices contains it",
        ),
        ([], "--device"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--results", str(tmp_path)])
    assert reason in capsys.readouterr().err


@pytest.mark.full
def test_one_slice_can_be_asked_for(tmp_path: Path) -> None:
    ended = run(*TINY, "--results", str(tmp_path), "--only", "slices", "--case", "8.3b, 128 x 384, rank 16")
    assert ended.returncode == 0, ended.stderr
    rows = json.loads((tmp_path / "compressors-cpu.json").read_text())["rows"]
    assert {row["case"] for row in rows} == {"8.3b, 128 x 384, rank 16"} and len(rows) == 5


def test_contenders_take_turns() -> None:
    done: list[str] = []
    taken = in_turn({"one": lambda: done.append("one"), "other": lambda: done.append("other")}, rounds=2, seconds=0.0)
    assert [len(each.times) for each in taken.values()] == [2, 2]
    turns = [work for place, work in enumerate(done) if done[place - 1 : place] != [work]]
    assert turns == ["one", "other", "one", "other"]


def test_a_bucket_that_loses_gradient_is_not_timed() -> None:
    class Forgetful(FastLowRank):
        def project_sum(self, matrices: torch.Tensor, *others: Any, total: torch.Tensor, out: torch.Tensor) -> None:
            super().project_sum(matrices, *others, total=total, out=out)
            total.mul_(0.99)

    class Blind(FastLowRank):
        def back_project(self, matrices: torch.Tensor, p: torch.Tensor, out: Any = None) -> torch.Tensor:
            return super().back_project(matrices, p, out=out).mul_(0.99)

    shapes, cpu = ((24, 32), (40, 16)), torch.device("cpu")
    with one_process(cpu) as group:
        check_bucket(FastLowRank(), shapes, cpu, 4, group)
        with pytest.raises(SystemExit, match=r"bucket of \(24, 32\): 2\.0e-02 lost"):
            check_bucket(Forgetful(), shapes, cpu, 4, group)
        with pytest.raises(SystemExit, match="off the hook"):
            check_bucket(Blind(), shapes, cpu, 4, group)


@pytest.mark.full
def test_the_hooks_threads_end_no_group() -> None:
    # In a process of its own, which is aborted where a thread ends its own group: within 20 groups, as a rule.
    program = (
        "import torch\n"
        "from scripts.bench.compressors.bucket import Bucket, hook, one_process\n"
        "cpu = torch.device('cpu')\n"
        "bucket = Bucket.random(1, ((24, 32), (40, 16)), 8, cpu, 1)\n"
        "for _ in range(200):\n"
        "    with one_process(cpu):\n"
        "        hook(bucket, 4, batched=True)()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True, capture_output=True, timeout=200)
    assert ended.returncode == 0, ended.stderr[-300:]


def test_a_basis_that_is_none_is_not_timed() -> None:
    p = torch.randn(2, 30, 4, generator=torch.Generator().manual_seed(1))
    basis = torch.linalg.qr(p).Q
    check_basis(p, basis, "p")
    for wrong in (basis * (1 + 1e-5), torch.linalg.qr(p + 1e-4).Q, torch.full_like(p, torch.nan)):
        with pytest.raises(SystemExit, match="orthogonalisation of p"):
            check_basis(p, wrong, "p")


def test_every_format_that_leaves_something_out_is_timed() -> None:
    assert {(format, rotated) for format, rotated, _ in FORMAT_CASES.values()} == set(every(lossy(FORMATS)))


def test_a_format_that_loses_what_it_should_not_is_not_timed() -> None:
    values = torch.randn(1 << 16, generator=torch.Generator().manual_seed(1))
    check_format(fast_codec("int8", seed=1, rotated=True), values, FORMATS["int8"].gaussian_error, "int8")
    with pytest.raises(SystemExit, match=r"int4: an error of 0\.11\d+, not of 0\.0065"):
        check_format(fast_codec("int4", seed=1, rotated=True), values, 0.0065, "int4")


@pytest.mark.skipif(not launches.AVAILABLE or launches.INTERPRETED, reason="needs Triton's compiler")
@pytest.mark.full
def test_kernels_are_compiled_for_gpus_that_are_not_there(capsys) -> None:
    compiled.main(["--capability", "90", "--align", "16", "1", "--format", "int4", "--only", "decode onto"])
    _, _, wide, narrow = (line.split(" | ") for line in capsys.readouterr().out.strip().splitlines())
    assert wide[:3] == ["| decode onto, int4, rotated, bfloat16", "ours", "90"]
    registers, stack, *_, instructions = (float(cell) for cell in wide[4:9])
    assert 32 <= registers <= 255 and stack == 0 and 10 < instructions < 200
    assert "x16" in wide[-1] and "x2 |" in narrow[-1], "bf16, aligned to 16 values and to one"


@pytest.mark.ci
@pytest.mark.skipif(not launches.AVAILABLE or launches.INTERPRETED, reason="needs Triton's compiler")
def test_a_variant_reaches_the_compiler(tmp_path: Path) -> None:
    def metadata(name: str) -> Any:
        codec, values = TritonCodec("int8", signs=torch.ones(128)), torch.zeros(1024)
        with compiled.compiling(90, tmp_path) as kernels, applied(VARIANTS[name]):
            codec.encode_rows(values.view(1, -1))
        assert blocks.ROWS == 64, "it holds inside of the block only"
        return kernels[0].metadata

    ours, narrow = metadata("ours"), metadata("16 rows, 1 warps, 80 registers")
    assert (ours.num_warps, ours.maxnreg, narrow.num_warps, narrow.maxnreg) == (4, 128, 1, 80)
    assert narrow.shared < ours.shared


@pytest.mark.full
@pytest.mark.skipif(not launches.AVAILABLE or launches.INTERPRETED, reason="needs Triton's compiler")
def test_the_hosts_time_of_launches_is_measured_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    compiled.main(["--launches", "--capability", "90"])
    least, *ours = (line.split(": ") for line in capsys.readouterr().out.strip().splitlines())
    assert least[0] == "torch.bmm(out=) of one number" and len(ours) == 4
    for name, said in ours:
        assert 1 < float(said.split()[0]) < 5000, f"{name}: {said}"
