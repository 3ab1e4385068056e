"""Several ranks on one GPU: CUDA's multi-process service (MPS) lets the kernels of all ranks run at the same time.

NCCL refuses two ranks on one GPU only if both say that they are on one host: each rank has an NCCL_HOSTID of its own.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

from optimus_cc_ext.doctor.gpu import find_gpu, problem
from optimus_cc_ext.errors import OptimusError

CONTROL = "nvidia-cuda-mps-control"
FOLDER = "CUDA_MPS_PIPE_DIRECTORY"
"""Variable with the folder in which processes find the service."""

_KEEPER = f"timeout 9 {CONTROL} -d && echo started || exec echo no start; cat; echo quit | timeout 20 {CONTROL}"
"""Shell script that starts the service, and ends it when its own input ends. Its input is a pipe, which closes with the
command that holds the other end, however that command ends.
"""

_END_SECONDS, _FREE_SECONDS = 30.0, 60.0


@contextmanager
def together() -> Iterator[bool]:
    """Run MPS while the block lasts, for all processes that start in it; yield False, and say so, where there is none.

    An outer block, or the user, may have started the service already: it is used, and not ended.
    """
    if FOLDER in os.environ:
        yield True
        return
    with TemporaryDirectory(prefix="optimus-cc-mps-") as folder:
        variables = {FOLDER: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        why = "" if shutil.which(CONTROL) else f"{CONTROL} is not on PATH"
        with subprocess.Popen(
            ["sh", "-c", _KEEPER if not why else "cat"], env=os.environ | variables, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) as keeper:  # fmt: skip
            assert keeper.stdin is not None and keeper.stdout is not None
            if not why and (said := keeper.stdout.readline().strip()) != "started":
                why = said
            if why:
                print(f"the ranks take turns on the GPU, so that seconds say little: no MPS ({why})", flush=True)
            else:
                os.environ.update(variables)
            try:
                yield not why
            finally:
                for name in () if why else variables:
                    del os.environ[name]
                keeper.stdin.close()
                keeper.wait(_END_SECONDS)


def require_memory(needed: int) -> None:
    """Refuse a machine whose first GPU cannot be used, or has less than `needed` bytes free.

    Raises:
        OptimusError: it says what is missing, with the cure.
    """
    found = find_gpu()
    sizes = f"{found.free / 2**30:.0f} GiB of the GPU's memory are free, and {needed / 2**30:.0f} are needed"
    small = f"{sizes}: end other processes on the GPU, or train another model (--models)"
    if why := problem(found) or (small if found.free < needed else ""):
        raise OptimusError(why)


def until_free() -> None:
    """Wait until the GPU takes a new process again: for seconds after a client of MPS was killed, it refuses any."""
    deadline = time.monotonic() + _FREE_SECONDS
    command = [sys.executable, "-c", "import torch; torch.zeros(1, device='cuda')"]
    while subprocess.run(command, capture_output=True).returncode and time.monotonic() < deadline:
        time.sleep(1)
