"""Optimus-CC on NVIDIA Megatron: compressed communication for 3D-parallel training (arXiv 2301.09830)."""

from optimus_cc_ext._version import __version__
from optimus_cc_ext.api import (
    begin_step,
    collect_metrics,
    current_session,
    end_step,
    install,
    load_state_dict,
    preset,
    state_dict,
    uninstall,
)
from optimus_cc_ext.config import OptimusConfig

__all__ = [
    "OptimusConfig",
    "__version__",
    "begin_step",
    "collect_metrics",
    "current_session",
    "end_step",
    "install",
    "load_state_dict",
    "preset",
    "state_dict",
    "uninstall",
]
