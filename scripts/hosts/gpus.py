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

from optimus_cc_ext.errors import OptimusError
from optimus_cc_ext.tools.doctor.gpu import find_gpu, problem

CONTROL = "nvidia-cuda-mps-control"
FOLDER = "CUDA_MPS_PIPE_DIRECTORY"
"""Variable with the folder in which processes find the service."""

_KEEPER = f"timeout 9 {CONTROL} -d && echo started || exec echo no start; cat; echo quit | timeout 20 {CONTROL}"
"""Shell script that starts the service, and ends it when its own input ends. Its input is a pipe, which closes with the
command that holds the other end, however that command ends.
"""

CLIENT = """
import ctypes
cuda, context, said = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_char_p()
if error := cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0):
    cuda.cuGetErrorString(error, ctypes.byref(said))
    raise SystemExit(f"CUDA says: {(said.value or b'no reason').decode()}, {error}")
"""
"""Program that takes the first GPU as a rank does, in 0.3 s because it does without PyTorch."""

_END_SECONDS, _FREE_SECONDS, _START_SECONDS, _ANSWER_SECONDS = 30.0, 60.0, 10.0, 20.0


@contextmanager
def together() -> Iterator[bool]:
    """Run MPS while the block lasts, for all processes that start in it; yield False, and say so, where it does not
    work.

    An outer block, or the user, may have started the service already: it is used, and not ended.
    """
    if FOLDER in os.environ:
        yield True
        return
    with (
        TemporaryDirectory(prefix="optimus-cc-mps-") as folder,
        _service({FOLDER: folder, "CUDA_MPS_LOG_DIRECTORY": folder}) as why,
    ):
        if why:
            print(f"the ranks take turns on the GPU, so that seconds say little: no MPS ({why})", flush=True)
        yield not why


@contextmanager
def _service(variables: dict[str, str]) -> Iterator[str]:
    """Run the service with these variables, which processes that start in the block have; yield why it does not work,
    or an empty text.
    """
    if shutil.which(CONTROL) is None:
        yield f"{CONTROL} is not on PATH"
        return
    with subprocess.Popen(
        ["sh", "-c", _KEEPER], env=os.environ | variables, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as keeper:  # fmt: skip
        assert keeper.stdin is not None and keeper.stdout is not None
        said = keeper.stdout.readline().strip()
        os.environ |= variables
        try:
            # A service that starts may refuse all clients all the same, for example in a container.
            why = refusal(_START_SECONDS) if said == "started" else said
            if why:
                _drop(variables)
            yield why
        finally:
            _drop(variables)
            keeper.stdin.close()
            keeper.wait(_END_SECONDS)


def _drop(variables: dict[str, str]) -> None:
    for name in variables:
        os.environ.pop(name, None)


def require(needed: int) -> None:
    """Refuse a machine whose first GPU takes one process only, or has fewer than `needed` free bytes.

    Raises:
        OptimusError: it says what is missing, with the cure.
    """
    found = find_gpu()
    sizes = f"{found.free / 2**30:.0f} GiB of the GPU's memory are free, and {needed / 2**30:.0f} are needed"
    small = f"{sizes}: end other processes on the GPU, or train another model (--models)"
    if why := problem(found) or (small if found.free < needed else ""):
        raise OptimusError(why)
    # This process holds the GPU since `find_gpu`, so in an exclusive compute mode the GPU refuses any other.
    if why := refusal(_START_SECONDS):
        raise OptimusError(
            f"the GPU takes no second process ({why}): `nvidia-smi -q -d COMPUTE` has to show the compute mode Default,"
            f" which root sets with `nvidia-smi -c DEFAULT`, and a service in {FOLDER} has to answer"
        )


def refusal(seconds: float = _FREE_SECONDS) -> str:
    """Wait until the first GPU takes a new process, `seconds` at most; return why it still refuses one, or an empty
    text.

    After a client of MPS was killed, the GPU refuses any for seconds.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            client = [sys.executable, "-c", CLIENT]
            done = subprocess.run(client, capture_output=True, text=True, timeout=_ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            return f"no answer within {_ANSWER_SECONDS:.0f} s"
        if done.returncode == 0:
            return ""
        if time.monotonic() > deadline:
            return (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
        time.sleep(1)
