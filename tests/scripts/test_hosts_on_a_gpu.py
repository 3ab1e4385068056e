"""Tests of hosts that share one GPU which need no GPU: start and end of CUDA's service, the list of missing runs, and
the table.
"""

import os
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import psutil
import pytest

from optimus_cc_ext.errors import OptimusError
from scripts.bench.cluster import __main__ as cluster
from scripts.bench.cluster import on_gpu
from scripts.bench.cluster.run import Iteration, Run
from scripts.experiments.models import MODELS, Layout, Training
from scripts.gpu_check import nccl
from scripts.hosts import gpus, launch
from tests.launches import launch as accepted
from tests.shell_scripts import ROOT

pytestmark = pytest.mark.ci

# -- CUDA's service ---------------------------------------------------------------------------------------------------

CONTROL = """#!/bin/sh
if [ "$1" = -d ]; then echo "started in $CUDA_MPS_PIPE_DIRECTORY" >> {log}; else echo "told to $(cat)" >> {log}; fi
exit {status}
"""
OWNER = """
import sys, time
from scripts.hosts import gpus
gpus.CLIENT = ""
with gpus.together() as together:
    print("inside", together, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Log of a program that stands for NVIDIA's, which this machine lacks."""
    monkeypatch.delenv(gpus.FOLDER, raising=False)
    monkeypatch.delenv("CUDA_MPS_LOG_DIRECTORY", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(gpus, "CLIENT", "")
    return _program(tmp_path, status=0)


def _program(folder: Path, status: int) -> Path:
    (program := folder / gpus.CONTROL).write_text(CONTROL.format(log=folder / "log", status=status))
    program.chmod(0o755)
    return folder / "log"


def test_the_service_runs_while_the_block_lasts_in_a_folder_of_its_own(control: Path) -> None:
    with gpus.together() as together:
        folder = os.environ[gpus.FOLDER]
        assert together and Path(folder).is_dir()
        with gpus.together() as inner:
            assert inner and os.environ[gpus.FOLDER] == folder, "an inner block uses the outer one's service"
    assert control.read_text().splitlines() == [f"started in {folder}", "told to quit"]
    assert gpus.FOLDER not in os.environ and not Path(folder).exists()


def test_where_there_is_no_service_a_line_says_that_ranks_take_turns(
    control: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _program(tmp_path, status=1)
    with gpus.together() as together:
        assert not together and gpus.FOLDER not in os.environ
    assert "the ranks take turns on the GPU, so that seconds say little: no MPS (no start)" in capfd.readouterr().out
    (tmp_path / gpus.CONTROL).unlink()
    with gpus.together() as together:
        assert not together
    assert f"no MPS ({gpus.CONTROL} is not on PATH)" in capfd.readouterr().out


def test_a_service_that_starts_and_refuses_all_ranks_is_ended_and_ranks_take_turns(
    control: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # This is what a service says whose server may not read the folder (bottlerocket-os/bottlerocket#4673).
    refused = "MPS client failed to connect to the MPS control daemon or the MPS server"
    monkeypatch.setattr(
        gpus, "CLIENT", f"import os; raise SystemExit({refused!r} if {gpus.FOLDER!r} in os.environ else 0)"
    )
    monkeypatch.setattr(gpus, "_START_SECONDS", 0.1)
    with gpus.together() as together:
        assert not together and gpus.FOLDER not in os.environ
    assert f"no MPS ({refused})" in capfd.readouterr().out and control.read_text().endswith("told to quit\n")


CUDA = """
int cuInit(unsigned flags) { return getenv("INIT") ? atoi(getenv("INIT")) : 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = context; return getenv("BUSY") ? 46 : 0; }
int cuGetErrorString(int error, const char **said) { *said = error == 46 ? "devices are busy" : 0; return 0; }
"""


def test_a_gpu_that_refuses_a_process_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's library is a stand-in, which the real program loads and calls."""
    (tmp_path / "cuda.c").write_text(f"#include <stdlib.h>\n{CUDA}")
    library = ["-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), str(tmp_path / "cuda.c")]
    subprocess.run(["cc", *library], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert gpus.refusal() == ""
    monkeypatch.setenv("BUSY", "1")
    assert gpus.refusal(0.1) == "CUDA says: devices are busy, 46"
    monkeypatch.setenv("INIT", "805")
    assert gpus.refusal(0.1) == "CUDA says: no reason, 805"
    monkeypatch.setattr(gpus, "CLIENT", "import time; time.sleep(60)")
    monkeypatch.setattr(gpus, "_ANSWER_SECONDS", 1.0)
    assert gpus.refusal(0.1) == "no answer within 1 s"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_no_daemon_is_left_behind_however_its_command_ends(control: Path, how: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "inside True\n"
        below = psutil.Process(owner.pid).children(recursive=True)
        owner.send_signal(how)
        owner.wait()
        assert below and not psutil.wait_procs(below, timeout=10)[1]
    assert control.read_text().splitlines()[-1] == "told to quit"


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(gpus.find_gpu().devices > 0, reason="there is a GPU")
def test_without_a_gpu_one_sentence_says_so_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.csv"
    words = ["--device", "gpu", "--output", str(tmp_path / "out"), "--rows", str(rows)]
    assert cluster.main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and "install " in said
    assert not rows.exists()


def test_too_little_memory_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    found = gpus.find_gpu()
    monkeypatch.setattr(gpus, "problem", lambda found: None)
    monkeypatch.setattr(gpus, "find_gpu", lambda: found.__class__("13.0", 13010, 1, 24 << 30, "/usr/bin/gcc"))
    monkeypatch.setattr(gpus, "CLIENT", "")
    gpus.require(24 << 30)
    with pytest.raises(OptimusError, match=r"24 GiB of the GPU's memory are free, and 60 are needed: end other"):
        gpus.require(60 << 30)
    monkeypatch.setattr(gpus, "CLIENT", "raise SystemExit('devices are busy')")
    monkeypatch.setattr(gpus, "_START_SECONDS", 0.1)
    with pytest.raises(
        OptimusError, match=r"no second process \(devices are busy\): `nvidia-smi -q -d COMPUTE` has to"
    ):
        gpus.require(24 << 30)


@pytest.mark.parametrize(
    ("last", "cure"),
    [
        ("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 41000", "NCCL refuses two ranks on one GPU"),
        (
            "Error while creating shared memory segment /dev/shm/nccl-WU88OE (size 9637888), error: No space left on "
            "device (28)", "docker run --shm-size=1g",
        ),
        ("Call to socket failed: Too many open files", "`ulimit -n` has to show 4096"),
    ],
)  # fmt: skip
def test_what_nccl_refuses_on_one_gpu_is_said_with_the_cure(last: str, cure: str, tmp_path: Path) -> None:
    log = tmp_path / "host0.txt"
    error = "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled system error"
    log.write_text(f"[rank1]: {error}\nLast error:\n{last}\n")
    said = str(launch._failure([0, 1], [log]))
    assert cure in said and said.endswith(f"(rank 1: {error})")


def test_models_of_a_gpu_and_of_the_cpu_are_not_mixed_up(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--device", "gpu", "--models", "tiny"], ["--models", "gpt-1b"]):
        with pytest.raises(SystemExit, match="2"):
            cluster.main(words)
        assert "give --device gpu for gpt-1b, llama-1b, moe-1b, and only for these" in capsys.readouterr().err


# -- runs that are left, and rows -------------------------------------------------------------------------------------


def test_a_model_keeps_its_depth_and_batch_on_every_layout() -> None:
    for name, text in ((each.model, each.layout) for slices in on_gpu.SLICES.values() for each in slices):
        layout = Layout.parsed(text)
        training = Training(model=on_gpu.fitted(MODELS[name], layout, dry=False), layout=layout)
        assert training.processes == 4 and training.global_batch == 32
        assert training.layers == 2 * MODELS[name].layers_per_stage
        tiny = on_gpu.fitted(MODELS[name], layout, dry=True)
        assert tiny.flags == MODELS[name].flags and tiny.hidden == 128 and tiny.layers_per_stage >= 1


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Rates of the runs that were asked for; each run reports its iterations at once, the third one fails half-way."""
    asked: list[list[str]] = []

    def train(run: Run, layout: Layout, flags: Any, folder: Path, plan: Any, **options: Any) -> None:
        asked.append(list(dict.fromkeys(plan.rates[plan.warm_up :])))
        for number, rate in enumerate(plan.rates, start=1):
            measured = number > plan.warm_up and rate == plan.rates[number - 2]
            traffic = {"between nodes": (8e6, 32e6)}
            run.iterations.append(Iteration(number, rate, measured, number / 10, 7.0, [5_000_000], 0, traffic))
            if len(asked) == 3 and number == len(plan.rates) - 1:
                raise launch.RunFailed("on purpose", folder)

    monkeypatch.setattr(on_gpu, "train", train)
    monkeypatch.setattr(on_gpu, "_machine", lambda needed: {"gpu": "H200", "driver": "580", "nccl": "2", "torch": "2"})
    monkeypatch.setattr(gpus, "CONTROL", "no-such-program")
    monkeypatch.setattr(launch, "_lines", lambda log: [])
    monkeypatch.delenv(on_gpu.QUEUES, raising=False)
    return asked


def test_a_slice_goes_on_where_the_last_one_stopped(tmp_path: Path, trained: list[list[str]]) -> None:
    options = Namespace(
        layouts=[], only=["picture", "queue"], rows=tmp_path / "rows.csv", output=tmp_path, dry_run_on_cpu=False,
        show=False, timeout=1,
    )  # fmt: skip
    with pytest.raises(launch.RunFailed):
        on_gpu.measure(options)
    rates = ["none", "10gbit", "5gbit", "1gbit"]
    assert trained == [rates] * 3
    rows = on_gpu.read_rows(options.rows, on_gpu.COLUMNS)
    assert [row["rate"] for row in rows] == [*rates, *rates, *rates[:3]], "a rate that was finished is kept"
    said = on_gpu.measure(options)
    assert trained[3:] == [["1gbit"], ["10gbit", "5gbit"]]
    assert "missing: CUDA_DEVICE_MAX_CONNECTIONS=1 python -m scripts.bench.cluster --device gpu --models gpt-1b" in said
    assert said.count("missing: ") == 2, "only what needs the variable is left"
    assert on_gpu.measure(options) == said and len(trained) == 5
    [row] = [row for row in rows if (row["variant"], row["rate"]) == ("vanilla", "5gbit")]
    assert (row["iterations"], row["fastest ms"], row["slowest ms"]) == ("4", "1700.0", "2000.0")
    assert (row["kernel MB"], row["gpu"]) == ("5.0", "H200")
    assert row["command"].endswith("--models gpt-1b --layouts pp2dp2z1 --variants vanilla --rates 5gbit")


def test_the_table_says_what_is_saved_of_what_free_coding_saves() -> None:
    each = on_gpu.Slice("gpt-1b", "pp2dp2z1", ("vanilla", "vanilla-bf16", "balanced", "free-coding"), ("10gbit",))
    seconds = {"vanilla": 2000.0, "vanilla-bf16": 1500.0, "balanced": 1100.0, "free-coding": 1000.0}
    rows = [
        dict.fromkeys(on_gpu.COLUMNS, "1") | each.key(name, "10gbit", "H200") | {"median ms": ms}
        for name, ms in seconds.items()
    ]
    (line,) = [line for line in on_gpu._shown([each], rows, dry=False).splitlines() if "| balanced |" in line]
    assert [cell.strip() for cell in line.split("|")][6:11] == ["1,100", "1 to 1", "0.55", "0.7333", "0.9"]
    other = on_gpu._shown(
        [each], [row | {"gpu": "H100"} if row["variant"] == "vanilla" else row for row in rows], dry=False
    )
    (line,) = [line for line in other.splitlines() if "| balanced |" in line]
    assert [cell.strip() for cell in line.split("|")][8:11] == ["-", "0.7333", "-"], "another GPU's row is not compared"
    dry = on_gpu._shown([each], rows, dry=True)
    assert dry.count("missing: python -m") == 4 and "1,100" not in dry


# -- the check `nccl` -------------------------------------------------------------------------------------------------


def test_every_training_is_compared_with_one_of_the_same_shape() -> None:
    for name, each in nccl.CONFIGURATIONS.items():
        assert not each.like or nccl.CONFIGURATIONS[each.like].long == each.long, name
        assert each.like or each.ours is None, f"{name} is compared with nothing"


@pytest.mark.parametrize(
    ("name", "measured", "said"),
    [
        ("everything off", {"same": True, "apart": 0.0, "spread": 0.0, "gap": 0.0}, ""),
        ("everything off", {"same": False, "apart": 1e-6, "spread": 0.0, "gap": 0.0}, "its bits are not those"),
        ("everything off", {"same": False, "apart": 0.0, "spread": 0.0, "gap": 0.0}, "its bits are not"),
        ("pass-through blocks", {"same": False, "apart": 2e-6, "spread": 1e-6, "gap": 0.0}, ""),
        ("pass-through blocks", {"same": False, "apart": 3e-6, "spread": 1e-6, "gap": 0.0}, "losses are 3e-06 apart"),
        ("balanced", {"same": False, "apart": 9.0, "spread": 0.0, "gap": -0.49}, ""),
        ("balanced", {"same": False, "apart": 0.0, "spread": 0.0, "gap": 0.51}, "0.510 % from that of vanilla, long"),
        ("balanced", {"same": False, "apart": 0.0, "spread": 0.0, "gap": float("nan")}, "nan % from"),
    ],
)  # fmt: skip
def test_bits_that_differ_and_losses_that_drift_apart_are_found(name: str, measured: Any, said: str) -> None:
    why = nccl.verdict(nccl.CONFIGURATIONS[name], **measured)
    assert said in why and bool(said) == bool(why)


# -- command lines ----------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("name", nccl.CONFIGURATIONS)
def test_megatron_accepts_every_training_of_the_check(name: str, tmp_path: Path) -> None:
    each = nccl.CONFIGURATIONS[name]
    words = f"{{all}} {nccl.WORDS['large']} {each.flags} {each.ours or ''} --train-iters 12"
    flags = words.format(**nccl.WORDS, folder=tmp_path, half=6).split()
    done = accepted(flags, tiny=False, env={"OPTIMUS_CC_NODE": f"ranks:{each.beside}"})
    assert done.accepted, done.output[-2000:]


PLANNED = {
    (each.model, each.layout, variant): each for slices in on_gpu.SLICES.values() for each in slices
    for variant in each.variants if variant != on_gpu.FREE
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("planned", PLANNED, ids=" ".join)
def test_megatron_accepts_every_planned_run(planned: tuple[str, str, str]) -> None:
    each, layout = PLANNED[planned], Layout.parsed(planned[1])
    training = Training(
        model=on_gpu.fitted(MODELS[each.model], layout, dry=False), layout=layout, iterations=20, schedule=200,
        evaluation_iterations=0, device="cuda",
    )  # fmt: skip
    ours = each.key(planned[2], "10gbit", "H200")["flags"].split()
    flags = [*training.flags(), *on_gpu._FLAGS.split(), str(training.model.vocabulary), *ours]
    done = accepted(flags, tiny=False, env={"OPTIMUS_CC_NODE": f"ranks:{layout.ranks_per_host}"})
    assert done.accepted, done.output[-2000:]
