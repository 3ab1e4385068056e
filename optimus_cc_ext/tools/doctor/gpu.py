"""`optimus-cc doctor --gpu`: checks that this machine's GPU, driver and compiler can run the Triton kernels."""

import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass

from optimus_cc_ext.tools.cpu import driver
from optimus_cc_ext.tools.doctor.findings import Diagnosis, Finding
from optimus_cc_ext.tools.doctor.machine import kernels, packages

NEEDED_BYTES = 8 << 30
"""Largest GPU memory, in bytes, that `scripts/gpu_check.sh` uses."""

REFUSED = 2


@dataclass(frozen=True)
class FoundGpu:
    """The CUDA versions, GPUs, memory and compiler that `find_gpu` found on this machine."""

    built_for: str | None
    """CUDA version that PyTorch was built for, such as 13.0; None: PyTorch for CPUs only."""

    driver: int | None
    """Newest CUDA version that the driver supports, such as 12040 for 12.4; None: there is no driver."""

    devices: int
    free: int
    """Free bytes of the first GPU's memory."""

    compiler: str | None
    """Path of the C compiler that Triton would call."""


def problem(gpu: FoundGpu) -> str | None:
    """Return the reason why no kernel can run on this machine, and its cure; None if kernels can run."""
    if gpu.built_for is None:
        return "this PyTorch is built for CPUs only: install a PyTorch for CUDA"
    if gpu.driver is None:
        return "there is no NVIDIA driver: install one, or use a machine with a GPU"
    if (old := driver.too_old(gpu.built_for, gpu.driver)) is not None:
        return old
    if gpu.devices == 0:
        return "PyTorch sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES"
    if gpu.compiler is None:
        return "Triton finds no C compiler: install gcc, or name one in CC"
    if gpu.free < NEEDED_BYTES:
        return (
            f"{gpu.free / 2**30:.1f} GiB of the GPU's memory are free, and {NEEDED_BYTES >> 30} are needed: "
            "end other processes on this GPU, or choose another GPU with CUDA_VISIBLE_DEVICES"
        )
    return None


def find_gpu() -> FoundGpu:
    """Return this machine's GPU environment; never raises."""
    import torch

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # triton/runtime/build.py looks the compiler up in the same way.
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    free = 0
    with suppress(RuntimeError):  # a GPU in an exclusive compute mode that another process has gives no memory
        free = torch.cuda.mem_get_info(0)[0] if devices else 0
    return FoundGpu(torch.version.cuda, driver.newest_cuda(), devices, free, compiler)


def examine_gpu() -> Diagnosis:
    """Check the GPU, compile one kernel and compare its result with the reference; takes a minute at most."""
    why = problem(find_gpu())
    if why is not None:
        return Diagnosis(Finding("this machine", why, "FAIL"), REFUSED, packages())
    import torch

    properties, nccl = torch.cuda.get_device_properties(0), ".".join(map(str, torch.cuda.nccl.version()))
    findings = [
        Finding("GPU", f"{properties.name}, sm_{properties.major}{properties.minor}", "ok"),
        Finding("GPU memory", f"{properties.total_memory / 2**30:.0f} GiB", "ok"),
        Finding("NCCL", nccl),
        kernels(),
    ]
    started = time.monotonic()
    try:
        lost = _one_kernel()
    except Exception as error:  # compilers raise errors of many classes
        said = (str(error).splitlines() or [repr(error)])[-1]
        reason = f"a Triton kernel cannot be compiled or run ({said}): see docs/troubleshooting.md"
        return Diagnosis(Finding("this machine", reason, "FAIL"), REFUSED, [*findings, *packages()])
    seconds = time.monotonic() - started
    findings.append(Finding("first kernel", f"compiled and run in {seconds:.1f} s, relative error {lost:.1e}", "ok"))
    if not lost < 1e-5:
        reason = f"a Triton kernel's product has a relative error of {lost:.1e}: see docs/troubleshooting.md"
        verdict = Finding("this machine", reason, "FAIL")
        return Diagnosis(verdict, REFUSED, [*findings, *packages()])
    return Diagnosis(Finding("this machine", "the GPU runs the Triton kernels", "ok"), 0, [*findings, *packages()])


def _one_kernel() -> float:
    """Return the relative error of one matrix product by the Triton kernel."""
    import torch

    from optimus_cc_ext.compressors.fast import fast_compressor

    generator = torch.Generator().manual_seed(1)
    matrices, q = (torch.randn(1, 512, size, generator=generator).cuda() for size in (512, 16))
    exact = matrices.double() @ q.double()
    return float((fast_compressor().project(matrices, q) - exact).norm() / exact.norm())
