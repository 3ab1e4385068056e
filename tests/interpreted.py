"""Triton's kernels in its interpreter: in a separate process, because Triton reads its environment when it is
imported.
"""

import os
import subprocess
import sys

__all__ = ["assert_holds_in_tritons_interpreter"]


def assert_holds_in_tritons_interpreter(file: str, tests: str, timeout: float = 280) -> None:
    """Assert that there are tests in `file` whose names contain `tests`, and that they pass in the interpreter."""
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", tests, file],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout
