"""NVIDIA's driver: the newest CUDA that it supports, and whether PyTorch is built for a newer one."""

import ctypes


def newest_cuda() -> int | None:
    """Return the newest CUDA version that the driver supports, such as 12040 for 12.4; None: there is no driver."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return None if failed else version.value


def too_old(built_for: str | None, driver: int | None) -> str | None:
    """Return the sentence about a driver that is too old, with its cure; None: it is new enough, or there is none.

    Args:
        built_for: CUDA version that PyTorch was built for, such as 13.0; None: PyTorch for CPUs only.
        driver: the newest CUDA version that the driver supports, as `newest_cuda` returns it.
    """
    if built_for is None or driver is None or driver // 1000 >= int(built_for.split(".")[0]):
        return None
    known = f"{driver // 1000}.{driver % 1000 // 10}"
    return (
        f"the driver supports CUDA up to {known}, and PyTorch is built for {built_for}: update the driver, or "
        f"install a PyTorch for CUDA {known} or older"
    )
