"""`optimus-cc doctor`: whether this machine, and a command line on it, would train.

`optimus-cc files` says where scripts/ and patches/ are.
`optimus-cc plan` predicts iteration times on a cluster that need not be there.
`optimus-cc report` shows what one run has logged, or two side by side.
"""

import argparse
import dataclasses
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from optimus_cc_ext._version import __version__
from optimus_cc_ext.config import OptimusConfig, flag_of
from optimus_cc_ext.config.flags import PRESETS
from optimus_cc_ext.doctor.findings import Diagnosis
from optimus_cc_ext.errors import run_command
from optimus_cc_ext.plan.command import add_arguments as plan_arguments
from optimus_cc_ext.plan.command import run as run_plan

__all__ = ["build_parser", "main", "shared_folder"]

_SCRIPT = """\
_optimus_cc() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]}} words="{commands}" flags="{flags}" before
  case $command in
{cases}
  esac
  [[ ${{COMP_WORDS[COMP_CWORD-1]}} != --optimus-cc ]] || flags="{presets}"
  [[ $command != doctor ]] || for before in "${{COMP_WORDS[@]:2:COMP_CWORD-2}}"; do
    # A launch line: our flags, and files, its script for one.
    [[ $before != -- ]] || {{ COMPREPLY=($(compgen -f -W "$flags" -- "$word")); return; }}
  done
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -F _optimus_cc optimus-cc"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status: 0, or what training would end with."""
    options = build_parser().parse_args(argv)
    if options.command == "plan":
        return run_plan(options)
    if options.command == "report":
        return run_command(lambda: _report(options))
    if options.command == "files":
        print(shared_folder())
        return 0
    if options.command == "completion":
        print(_completion(build_parser(), options.shell))
        return 0
    # Megatron's, about fused kernels that are not there: the verdict comes first.
    warnings.simplefilter("ignore")
    report = _examine(options)
    print(report.as_json() if options.json else "\n".join(report.lines()))
    return report.exit_code


def _examine(options: argparse.Namespace) -> Diagnosis:
    if options.gpu:
        from optimus_cc_ext.doctor.gpu import examine_gpu

        return examine_gpu()
    from optimus_cc_ext.doctor import examine

    words = options.flags[1:] if options.flags[:1] == ["--"] else options.flags
    return examine(words, options.world_size, options.ranks_per_node)


def build_parser() -> argparse.ArgumentParser:
    """The command line of `optimus-cc`."""
    parser = argparse.ArgumentParser(prog="optimus-cc", description=__doc__)
    parser.add_argument("--version", action="version", version=f"optimus-cc {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor",
        help="check this machine, and a command line that is to be used on it",
        description="Whether this machine, and a command line on it, would train. The exit status is what training "
        "would end with before its first iteration.",
    )
    doctor.add_argument("--world-size", type=int, help="number of processes that LINE is for, where it does not say so")
    doctor.add_argument("--ranks-per-node", type=int, help="processes on a node, where LINE does not say so (8)")
    doctor.add_argument("--gpu", action="store_true", help="only this machine's GPU: driver, compiler, a first kernel")
    doctor.add_argument("--json", action="store_true", help="print JSON, for programs")
    doctor.add_argument(
        "flags",
        nargs=argparse.REMAINDER,
        metavar="-- LINE",
        help="a whole launch line (torchrun ... pretrain_gpt.py ..., srun ...), or its flags alone",
    )
    plan_arguments(commands.add_parser("plan", help="what an iteration takes on a cluster, vanilla and compressed"))
    report = commands.add_parser(
        "report",
        help="what one run has logged, or two side by side, as a page with pictures",
        description="What a run has logged with --tensorboard-dir, with or without optimus_cc_ext: losses, traffic by "
        "class, errors, time, as index.html, CSV and pictures. Of two runs the second is held against the first.",
    )
    report.add_argument(
        "folders",
        type=Path,
        nargs="+",
        metavar="FOLDER",
        help="the --tensorboard-dir of a run, or a folder with its log*.txt",
    )
    report.add_argument(
        "--output", type=Path, default=Path("optimus-cc-report"), metavar="DIR", help="(default: %(default)s)"
    )
    commands.add_parser("files", help="print the folder that holds scripts/ and patches/")
    shells = commands.add_parser(
        "completion", help='print completion for a shell: eval "$(optimus-cc completion bash)"'
    )
    shells.add_argument("shell", choices=("bash", "zsh"))
    return parser


def _report(options: argparse.Namespace) -> None:
    # Here: it takes the extra `report`, which the other commands do not.
    from optimus_cc_ext.report.comparison import write_report

    write_report(options.folders, options.output)


def _completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return a script that completes our commands, and our training flags after `doctor --`; zsh takes bash's."""
    [commands] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    cases = "\n".join(f'    {name}) words="{_words(sub)}" ;;' for name, sub in commands.choices.items())
    flags = " ".join(
        ["--optimus-cc", *(flag_of(f.name) for f in dataclasses.fields(OptimusConfig) if f.metadata["help"])]
    )
    script = _SCRIPT.format(commands=_words(parser), cases=cases, flags=flags, presets=" ".join(PRESETS))
    return script if shell == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{script}"


def _words(parser: argparse.ArgumentParser) -> str:
    words = [word for action in parser._actions for word in (*action.option_strings, *(action.choices or ()))]
    return " ".join(words)


def shared_folder(package: Path = Path(__file__).parent) -> Path:
    """The folder of scripts/ and patches/: the checkout, or what setup.py installs of it inside of the package."""
    installed = package / "share"
    return installed if installed.is_dir() else package.parent


if __name__ == "__main__":
    sys.exit(main())
