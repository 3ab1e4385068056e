"""`optimus-cc doctor`: what is installed, which seams hold, and which flags would be refused, on this machine.

`optimus-cc files` says where scripts/ and patches/ are.
"""

import argparse
import contextlib
import importlib.metadata
import io
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optimus_cc_ext import __version__, cpu_runtime
from optimus_cc_ext.errors import FlagError, OptimusError, UnsupportedMegatron

__all__ = ["main", "shared_folder"]

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


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report."""

    subject: str
    state: str
    good: bool | None = None
    """None: for information."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status: 0, or 1 if something would not work."""
    parser = argparse.ArgumentParser(prog="optimus-cc", description=__doc__)
    parser.add_argument("--version", action="version", version=f"optimus-cc {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="check this machine, and flags that are to be used on it")
    doctor.add_argument("--world-size", type=int, default=1, help="number of processes that FLAGS are meant for")
    doctor.add_argument(
        "flags",
        nargs=argparse.REMAINDER,
        metavar="-- FLAGS",
        help="flags of a pretrain_gpt.py command line to check",
    )
    commands.add_parser("files", help="print the folder that holds scripts/ and patches/")
    options = parser.parse_args(argv)
    if options.command == "files":
        print(shared_folder())
        return 0
    flags = options.flags[1:] if options.flags[:1] == ["--"] else options.flags
    return _doctor(flags, options.world_size)


def shared_folder(package: Path = Path(__file__).parent) -> Path:
    """The folder of scripts/ and patches/: the checkout, or what setup.py installs of it inside of the package."""
    installed = package / "share"
    return installed if installed.is_dir() else package.parent


def _doctor(flags: list[str], world_size: int) -> int:
    findings = [Finding("python", platform.python_version()), *_packages()]
    try:
        findings.append(Finding("device", cpu_runtime.activate().removeprefix("optimus-cc: running on "), True))
        findings += _seams()
        if flags:
            findings += _flags(flags, world_size)
    except (OptimusError, RuntimeError, ValueError) as error:
        findings.append(Finding("this machine", str(error), False))
    _print(findings)
    return 1 if any(finding.good is False for finding in findings) else 0


def _packages() -> list[Finding]:
    findings = [Finding("optimus_cc_ext", __version__)]
    for name in PACKAGES:
        try:
            findings.append(Finding(name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding(name, "not installed"))
    return findings


def _seams() -> list[Finding]:
    from optimus_cc_ext.hooks.installation import all_seams
    from optimus_cc_ext.hooks.registry import check_version, megatron_version

    findings = []
    try:
        check_version()
        findings.append(Finding("megatron version", f"{megatron_version()} is supported", True))
    except UnsupportedMegatron as error:
        findings.append(Finding("megatron version", str(error), False))
    for seam in all_seams():
        try:
            seam.resolve()
            findings.append(Finding("seam " + seam.target, "holds", True))
        except UnsupportedMegatron as error:
            findings.append(Finding("seam " + seam.target, str(error), False))
    return findings


def _flags(flags: list[str], world_size: int) -> list[Finding]:
    """What argument validation would say, without starting anything."""
    from megatron.training import arguments

    from optimus_cc_ext.artifact import take_notes
    from optimus_cc_ext.hooks.arguments import prepare_parser, resolution_from
    from optimus_cc_ext.hooks.installation import describe

    parser = prepare_parser(arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    os.environ["WORLD_SIZE"] = str(world_size)
    args = parser.parse_args(flags)
    args.rank, args.world_size = 0, world_size
    model_size = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    args.data_parallel_size = max(1, world_size // (model_size * args.context_parallel_size))
    notes = [Finding("note", note) for note in take_notes(args)]
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints every argument
            arguments.validate_args(args)
    except Exception as error:
        # Ours can be checked all the same; only what Megatron derives from other flags is not known then.
        notes.append(Finding("note", f"not a complete command line, Megatron says: {error or repr(error)}"))
    try:
        resolution, _ = resolution_from(args)
    except FlagError as error:
        return [*notes, Finding("flags", str(error), False)]
    notes += [Finding("note", note) for note in resolution.notes]
    return [*notes, Finding("flags", describe(resolution.config), True)]


def _print(findings: list[Finding]) -> None:
    width = max(len(finding.subject) for finding in findings)
    marks = {True: "ok  ", False: "FAIL", None: "    "}
    for finding in findings:
        print(f"{marks[finding.good]} {finding.subject:<{width}}  {finding.state}")


if __name__ == "__main__":
    sys.exit(main())
