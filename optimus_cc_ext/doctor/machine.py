"""What is installed here, which Megatron would be imported, and whether its seams hold."""

import importlib.metadata
import importlib.util
import platform
import sys
from pathlib import Path

from optimus_cc_ext import __version__
from optimus_cc_ext.doctor.findings import Finding
from optimus_cc_ext.errors import UnsupportedMegatron

__all__ = ["find_checkout", "packages", "seams"]

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
    """Let Megatron be imported from where training would: the current folder, or the script's before it."""
    folders = [Path.cwd()] if script is None else [Path.cwd(), Path(script).resolve().parent]
    for folder in folders:
        if (folder / "megatron" / "core").is_dir() and str(folder) not in sys.path:
            sys.path.insert(0, str(folder))


def packages() -> list[Finding]:
    """Versions of what matters."""
    found = [Finding("python", platform.python_version()), Finding("optimus_cc_ext", __version__)]
    for name in PACKAGES:
        try:
            found.append(Finding(name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            found.append(Finding(name, "not installed"))
    return found


def seams() -> list[Finding]:
    """Megatron's version, and each attribute of it that is wrapped."""
    from optimus_cc_ext.hooks.installation import all_seams
    from optimus_cc_ext.hooks.registry import check_version, megatron_version

    found = []
    spec = importlib.util.find_spec("megatron.core")
    if spec is not None and spec.origin is not None:
        found.append(Finding("megatron.core from", str(Path(spec.origin).parent)))
    try:
        check_version()
        found.append(Finding("megatron version", f"{megatron_version()} is supported", "ok"))
    except UnsupportedMegatron as error:
        found.append(Finding("megatron version", str(error), "FAIL"))
    for seam in all_seams():
        try:
            seam.resolve()
            found.append(Finding("seam " + seam.target, "holds", "ok"))
        except UnsupportedMegatron as error:
            found.append(Finding("seam " + seam.target, str(error), "FAIL"))
    return found
