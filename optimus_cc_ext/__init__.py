"""Optimus-CC on NVIDIA Megatron: compressed communication for 3D-parallel training (arXiv 2301.09830)."""

from typing import TYPE_CHECKING

from optimus_cc_ext._version import __version__
from optimus_cc_ext.config import OptimusConfig

if TYPE_CHECKING:
    from optimus_cc_ext.hooks import Installation
    from optimus_cc_ext.session import Session

__all__ = ["OptimusConfig", "__version__", "current_session", "install", "uninstall"]

_installation: "Installation | None" = None


def install(config: OptimusConfig | None = None) -> None:
    """Make Megatron compress its communication, in this process. A second call changes nothing.

    To be called before the model is built, and before Megatron parses its command line if `config` is None.

    Args:
        config: what to do, for a custom training loop; None: flags on Megatron's command line say it.

    Raises:
        UnsupportedMegatron: Megatron is missing, of an untested version, or a seam has moved.
    """
    global _installation
    if _installation is not None:
        return
    from optimus_cc_ext.hooks import Installation

    installation = Installation()
    installation.start(config)
    _installation = installation


def uninstall() -> None:
    """Take every wrap off Megatron again. Does nothing where none is on."""
    global _installation
    if _installation is not None:
        _installation.remove()
        _installation = None


def current_session() -> "Session | None":
    """The state of the installation in this process, once its configuration is known."""
    return _installation.session if _installation is not None else None
