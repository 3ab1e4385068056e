"""Triton's kernels in its interpreter: in a process of its own, for Triton reads its environment when imported."""

import os
import subprocess
import sys

__all__ = ["assert_holds_in_tritons_interpreter"]


def assert_holds_in_tritons_interpreter(file: str, tests: str) -> None:
    """The tests of `file` whose names contain `tests` pass there, and there are some."""
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", tests, file],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout
