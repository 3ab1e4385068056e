"""Everything of Megatron that the extension needs: the seams that it wraps, the attributes that it reads, and whether
both are as expected in the Megatron of this process.
"""

import importlib.util
import os
from collections.abc import Callable
from typing import Any

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.errors import UnsupportedMegatron
from optimus_cc_ext.hooks import (
    arguments,
    checkpointing,
    distrib_optimizer,
    distributed_data_parallel,
    finalize_model_grads,
    p2p_communication,
    schedules,
    token_dispatcher,
    training,
)
from optimus_cc_ext.hooks.attributes import ATTRIBUTES, lacking
from optimus_cc_ext.hooks.registry import TESTED, UNSUPPORTED_MEGATRON_VARIABLE, Seam, cure, megatron_version
from optimus_cc_ext.hooks.sessions import Sessions
from optimus_cc_ext.techniques.session import Session

__all__ = ["check_megatron", "loop_wraps", "parts_of_megatron", "shared_wraps"]

_Wraps = list[tuple[Seam, Callable[[Any], Any]]]


def shared_wraps(sessions: Sessions) -> _Wraps:
    """Return the seams that models of all kinds share, with their wraps."""
    return [
        *p2p_communication.wraps(sessions),
        *schedules.wraps(sessions),
        *finalize_model_grads.wraps(sessions),
        *distrib_optimizer.wraps(sessions),
        *token_dispatcher.wraps(sessions),
    ]


def loop_wraps(attach: Callable[[Any], None], session: Session) -> _Wraps:
    """Return the seams of Megatron's own training loop, with their wraps."""
    loop = [*training.wraps(session), *checkpointing.wraps(session)]
    return [*distributed_data_parallel.wraps(attach), *(wrap for wrap in loop if _importable(wrap[0].target))]


def parts_of_megatron(package: str = "megatron") -> dict[str, str | None]:
    """Return every seam and every attribute that some configuration needs, with the reason why it does not hold; None:
    it does.

    Args:
        package: only those of modules inside this package.
    """
    session = Session(OptimusConfig())
    wraps = [*arguments.wraps(lambda *_: None), *shared_wraps(Sessions()), *loop_wraps(print, session)]
    found: dict[str, str | None] = {}
    for seam, _ in wraps:
        if seam.target.startswith(package) and _importable(seam.target):
            found[f"seam {seam.target}"] = _reason(seam)
    for owner, names in ATTRIBUTES.items():
        if owner.startswith(package) and _importable(owner):
            try:
                missing = dict.fromkeys(lacking(owner, names), "")
            except (ImportError, AttributeError) as error:
                missing = dict.fromkeys(names, f" ({error})")
            for name in names:
                said = f"megatron-core {megatron_version()}: {owner} has no {name}{missing.get(name)}. {cure()}"
                found[f"attribute {owner}.{name}"] = said if name in missing else None
    return found


def check_megatron(package: str = "megatron") -> str | None:
    """Check the version of Megatron, and every part that we need, before the first of them is wrapped.

    Returns:
        the line to log about a version that was not tested; None: it was.

    Raises:
        UnsupportedMegatron: a part does not hold, or the version lies outside of those that were tested and
            OPTIMUS_CC_UNSUPPORTED_MEGATRON does not allow it.
    """
    from packaging.version import Version

    version, tested = megatron_version(), f"tested: {', '.join(TESTED)}"
    parts = parts_of_megatron(package)
    reasons = [reason for reason in parts.values() if reason is not None]
    holds = f"{len(parts) - len(reasons)} of the {len(parts)} functions and attributes that Optimus-CC needs hold there"
    outside = not Version(TESTED[0]) <= Version(version) <= Version(TESTED[-1])
    if outside and os.environ.get(UNSUPPORTED_MEGATRON_VARIABLE) != "1":
        raise UnsupportedMegatron(
            f"megatron-core {version} is not supported ({tested}); {holds}. {cure()}, or set "
            f"{UNSUPPORTED_MEGATRON_VARIABLE}=1 to try it untested"
        )
    if reasons:
        raise UnsupportedMegatron(f"{reasons[0]}; {holds}" if len(reasons) > 1 else reasons[0])
    return None if version in TESTED else f"megatron-core {version} was not tested ({tested}), but {holds}"


def _reason(seam: Seam) -> str | None:
    try:
        seam.resolve()
    except UnsupportedMegatron as error:
        return str(error)
    return None


def _importable(target: str) -> bool:
    """Return whether the package of a target is installed: custom training loops work without megatron.training."""
    package = ".".join(target.split(":")[0].split(".")[:2])
    return importlib.util.find_spec(package) is not None
