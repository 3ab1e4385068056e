"""Command line of `optimus-cc`: doctor, plan, patch, report and files."""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from optimus_cc_ext._version import __version__
from optimus_cc_ext.errors import run_command
from optimus_cc_ext.tools.doctor.findings import Diagnosis
from optimus_cc_ext.tools.doctor.machine import seams_in_brief
from optimus_cc_ext.tools.doctor.target import TARGETS
from optimus_cc_ext.tools.patch.command import add_arguments as patch_arguments
from optimus_cc_ext.tools.patch.command import run as run_patch
from optimus_cc_ext.tools.plan.command import add_arguments as plan_arguments
from optimus_cc_ext.tools.plan.command import run as run_plan


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console script; return the exit status: 0, or for doctor the status that training would end with."""
    options = build_parser().parse_args(argv)
    if options.command == "plan":
        return run_plan(options)
    if options.command == "patch":
        return run_command(lambda: run_patch(options, seams_in_brief))
    if options.command == "report":
        return run_command(lambda: _report(options))
    if options.command == "files":
        print(shared_folder())
        return 0
    return run_command(lambda: _doctor(options))


def _doctor(options: argparse.Namespace) -> int:
    # Silence Megatron's warnings about missing fused kernels, because the verdict has to come first.
    warnings.simplefilter("ignore")
    report = _examine(options)
    print(report.as_json() if options.json else "\n".join(report.lines()))
    return report.exit_code


def _examine(options: argparse.Namespace) -> Diagnosis:
    if options.gpu:
        from optimus_cc_ext.tools.doctor.gpu import examine_gpu

        return examine_gpu()
    from optimus_cc_ext.tools.doctor import examine

    words = options.flags[1:] if options.flags[:1] == ["--"] else options.flags
    return examine(words, options.world_size, options.ranks_per_node, options.target)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="optimus-cc",
        description="Tools for Megatron training with compressed traffic. Training itself takes --optimus-cc and the "
        "flags of docs/flags.md.",
    )
    parser.add_argument("--version", action="version", version=f"optimus-cc {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor",
        help="check whether this machine and a launch line would train, and estimate traffic and memory",
        description="Check whether this machine, or a launch line on the target, would train; estimate traffic and "
        "memory. It needs no GPU and starts nothing. The exit status is 0, or the status with which training would end "
        "on the target before its first iteration.",
    )
    doctor.add_argument("--world-size", type=int, help="world size of the run, if LINE does not give it (default: 1)")
    doctor.add_argument("--ranks-per-node", type=int, help="ranks per node, if LINE does not give them (default: 8)")
    doctor.add_argument(
        "--target",
        choices=TARGETS,
        help="machine that will train: this one, on its GPU or CPU, or a kind of GPU (default: here if PyTorch sees a "
        "GPU and OPTIMUS_CC_DEVICE is not cpu, otherwise h100)",
    )
    doctor.add_argument(
        "--gpu", action="store_true", help="check this machine's GPU only: driver, compiler, one compiled kernel"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON instead of lines")
    doctor.add_argument(
        "flags",
        nargs=argparse.REMAINDER,
        metavar="-- LINE",
        help="the launch line to check (torchrun ... pretrain_gpt.py ..., or srun ...), with variables in front of it "
        "(env A=1 torchrun ...), or only its flags",
    )
    plan_arguments(
        commands.add_parser(
            "plan",
            help="predict the seconds per iteration on a cluster, vanilla and compressed",
            description="Predict the seconds per iteration of a GPT on a cluster, with vanilla Megatron and with each "
            "technique and format, from published measurements. Needs neither the cluster nor a GPU.",
        )
    )
    patch_arguments(
        commands.add_parser(
            "patch",
            help="let plain torchrun of any fork's entry script load Optimus-CC, or undo this",
            description="Put a block ahead of the first import of an entry script that leads to Megatron, so that "
            "plain torchrun of the script knows --optimus-cc; or take the block out, or print the state.",
        )
    )
    report = commands.add_parser(
        "report",
        help="show the log of one run, or of two runs side by side, as a page with pictures",
        description="Show the losses, traffic by class, compression errors and seconds of a run, with or without "
        "optimus_cc_ext, as index.html, CSV and pictures. If two runs are given, the second is compared with the "
        "first.",
    )
    report.add_argument(
        "folders",
        type=Path,
        nargs="+",
        metavar="FOLDER",
        help="the --tensorboard-dir of a run, or a folder with its log*.txt; seconds need the run's "
        "--log-timers-to-tensorboard",
    )
    report.add_argument(
        "--output",
        type=Path,
        default=Path("optimus-cc-report"),
        metavar="DIR",
        help="folder to write, replaced if it holds a report (default: %(default)s)",
    )
    commands.add_parser("files", help="print the folder that contains scripts/ and patches/")
    return parser


def _report(options: argparse.Namespace) -> None:
    from optimus_cc_ext.tools.report.comparison import write_report

    write_report(options.folders, options.output)


def shared_folder(package: Path = Path(__file__).parents[1]) -> Path:
    """Return the folder of scripts/ and patches/: the checkout, or the copy that setup.py installs in the package."""
    installed = package / "share"
    return installed if installed.is_dir() else package.parent


if __name__ == "__main__":
    sys.exit(main())
