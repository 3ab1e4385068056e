"""Optimus-CC on NVIDIA Megatron: compressed communication for 3D-parallel training (arXiv 2301.09830).

This folder holds the entry points and the Python API; each subfolder's docstring says what the folder is for.
tests/unit/test_house.py checks which folder may import which. Start reading at `startup.py` for a launch, at `api.py`
for a custom loop, and at docs/how-it-works.md for the way of a gradient through the code.
"""

from optimus_cc_ext._version import __version__
from optimus_cc_ext.api import (
    begin_step,
    collect_metrics,
    compress,
    current_session,
    end_step,
    install,
    load_state_dict,
    preset,
    state_dict,
    uninstall,
)
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.errors import FlagError, OptimusError, RanksDisagree, UnfitState, UnsupportedMegatron

__all__ = [
    "FlagError",
    "OptimusConfig",
    "OptimusError",
    "RanksDisagree",
    "UnfitState",
    "UnsupportedMegatron",
    "__version__",
    "begin_step",
    "collect_metrics",
    "compress",
    "current_session",
    "end_step",
    "install",
    "load_state_dict",
    "preset",
    "state_dict",
    "uninstall",
]
