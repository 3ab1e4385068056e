"""A rank that fails ends at once, whatever its child processes do with signals."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

FAILS = """
import signal, sys
from torch.utils.data import DataLoader
from optimus_cc_ext import startup
if sys.argv[1] == "install":
    startup.prepare()
# As Megatron's, with --exit-signal-handler.
handles = lambda _: signal.signal(signal.SIGTERM, lambda *_: None)
loading = iter(DataLoader(range(100), num_workers=1, worker_init_fn=handles))
next(loading)
raise RuntimeError("a lost connection")
"""


@pytest.mark.full
def test_a_process_that_fails_ends_although_its_data_loader_handles_sigterm(tmp_path: Path) -> None:
    def failing(install: str, seconds: float) -> int | None:
        with (tmp_path / "said").open("w") as said:
            process = subprocess.Popen(
                [sys.executable, "-c", FAILS, install],
                stderr=said, start_new_session=True, env={**os.environ, "OPTIMUS_CC_DEVICE": "cpu"},
            )  # fmt: skip
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    assert failing("do not", 20) is None
    assert failing("install", 60) == 1
    assert (tmp_path / "said").read_text().rstrip().endswith("RuntimeError: a lost connection")
