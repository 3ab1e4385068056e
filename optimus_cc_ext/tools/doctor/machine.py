"""Findings about this machine: installed packages, the Megatron that would be imported, and the functions
that we wrap.
"""

import importlib.metadata
import platform
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from optimus_cc_ext._version import __version__
from optimus_cc_ext.errors import UnsupportedMegatron, require_megatron, require_torch
from optimus_cc_ext.tools.doctor.findings import Finding

PACKAGES = (
    "torch",
    "megatron-core",
    "transformer-engine",
    "apex",
    "triton",
    "tokenizers",
    "transformers",
    "tensorboard",
)


def find_checkout(script: str | None) -> None:
    """Make Megatron importable from where training would import it: the current folder, or the script's folder before
    it.
    """
    folders = [Path.cwd()] if script is None else [Path.cwd(), Path(script).resolve().parent]
    for folder in folders:
        if (folder / "megatron" / "core").is_dir() and str(folder) not in sys.path:
            sys.path.insert(0, str(folder))


def packages() -> list[Finding]:
    """Return the versions of the packages that training depends on."""
    found = {"python": platform.python_version(), "optimus_cc_ext": __version__}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return [Finding(name, state, group="packages") for name, state in found.items()]


def kernels() -> Finding:
    """Report whether this machine's Triton can compile the kernels, or else which torch release has a
    Triton that can.
    """
    from optimus_cc_ext.compressors.triton import launches

    if launches.AVAILABLE:
        return Finding("Triton's kernels", f"Triton {launches.triton.__version__} runs them on GPUs", "ok")
    return Finding("Triton's kernels", f"torch operators replace them on GPUs. {launches.lacking()}", "warn")


def seams() -> list[Finding]:
    """Return Megatron's version, a finding for each function of Megatron that we wrap, and one for all attributes that
    we read, or for each that is missing.
    """
    from optimus_cc_ext.hooks.launching import all_seams, parts_of_megatron
    from optimus_cc_ext.hooks.parts import check_megatron
    from optimus_cc_ext.hooks.registry import megatron_version

    found = []
    spec = find_spec("megatron.core")
    if spec is not None and spec.origin is not None:
        found.append(Finding("megatron.core from", str(Path(spec.origin).parent)))
    try:
        line = check_megatron(all_seams())
        said = line or f"{megatron_version()} is supported"
        found.append(Finding("megatron version", said, "warn" if line else "ok"))
    except UnsupportedMegatron as error:
        found.append(Finding("megatron version", str(error), "FAIL"))
    parts = parts_of_megatron()
    if any(reason is not None and found[-1].state.startswith(reason) for reason in parts.values()):
        found.pop()  # the part that does not hold has a finding of its own
    attributes = [name for name, reason in parts.items() if name.startswith("attribute ") and reason is None]
    for name, reason in parts.items():
        if name not in attributes:
            group: Literal["", "seams"] = "seams" if name.startswith("seam ") else ""
            found.append(Finding(name, reason or "is as expected", "FAIL" if reason else "ok", group))
    return [*found, Finding("attributes", f"{len(attributes)} that are read are as expected", "ok")]


def seams_in_brief(shown: int = 3) -> tuple[list[str], bool]:
    """Return the findings of `seams` as lines, with how many seams hold and at most `shown` of those that are missing;
    and whether all hold.
    """
    require_torch()
    require_megatron()
    found = seams()
    wrapped = [each for each in found if each.subject.startswith("seam ")]
    lacking = [each for each in found if each.mark == "FAIL"]
    told = [each for each in found if each not in wrapped + lacking]
    lines = [f"{each.subject}: {each.state}" for each in told + lacking[:shown]]
    if len(lacking) > shown:
        lines.append(f"and {len(lacking) - shown} more that do not hold, which optimus-cc doctor lists")
    lines.append(f"seams: {sum(each.mark == 'ok' for each in wrapped)} of {len(wrapped)} are as expected")
    return lines, not lacking
