"""Optimus-CC on NVIDIA Megatron: compressed communication for 3D-parallel training (arXiv 2301.09830).

This folder holds the entry points and the Python API; each subfolder's docstring says what the folder is for.
tests/unit/test_house.py checks which folder may import which. Start reading at `startup.py` for a launch, at `api.py`
for a custom loop, and at docs/develop/how-it-works.md for the way of a gradient through the code.
"""

import importlib
from typing import TYPE_CHECKING, Any

from optimus_cc_ext._version import __version__
from optimus_cc_ext.api import compress, pad_buckets
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.errors import FlagError, OptimusError, RanksDisagree, UnfitState, UnsupportedMegatron

if TYPE_CHECKING:
    from optimus_cc_ext.ddp import ddp_hook
    from optimus_cc_ext.hooks import Handle

_LATER = {"Handle": "optimus_cc_ext.hooks", "ddp_hook": "optimus_cc_ext.ddp"}
"""Names and their modules, which are imported at their first use: they need torch, and most commands do not."""

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
    "ddp_hook",
    "pad_buckets",
]


def __getattr__(name: str) -> Any:
    """Import a name of `_LATER`."""
    if name == "fsdp2":
        return importlib.import_module("optimus_cc_ext.fsdp2")
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
