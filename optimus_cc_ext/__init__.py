"""Optimus-CC on NVIDIA Megatron: compressed communication for 3D-parallel training (arXiv 2301.09830).

This folder holds the entry points and the Python API; each subfolder's docstring says what the folder is for.
tests/unit/test_house.py checks which folder may import which. Start reading at `startup.py` for a launch, at `api.py`
for a custom loop, and at docs/develop/how-it-works.md for the way of a gradient through the code.
"""

from typing import TYPE_CHECKING, Any

from optimus_cc_ext._version import __version__
from optimus_cc_ext.api import compress, pad_buckets
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.errors import FlagError, OptimusError, RanksDisagree, UnfitState, UnsupportedMegatron

if TYPE_CHECKING:
    from optimus_cc_ext.hooks import Handle

__all__ = [
    "FlagError",
    "Handle",
    "OptimusConfig",
    "OptimusError",
    "RanksDisagree",
    "UnfitState",
    "UnsupportedMegatron",
    "__version__",
    "compress",
    "pad_buckets",
]


def __getattr__(name: str) -> Any:
    """Import `Handle`, a type for annotations, at its first use: it needs torch, and most commands do not."""
    if name == "Handle":
        from optimus_cc_ext.hooks import Handle

        return Handle
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
