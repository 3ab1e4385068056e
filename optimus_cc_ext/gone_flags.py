"""Flags of the Megatron (v2.5) that the published artifact was built on and that today's no longer knows.

One table says what becomes of each: translated into today's flags, dropped because it is the only behaviour
left, or refused. Whatever it is, the user reads it in one line.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from optimus_cc_ext.errors import FlagError

__all__ = ["GONE_FLAGS", "GoneFlag", "add_gone_flags", "take_notes"]

_NOTES = "optimus_cc_gone_flags"


@dataclass(frozen=True)
class GoneFlag:
    """One flag that is gone: `becomes` maps its value to today's fields, `because` is the line that is said."""

    spelling: str
    because: str
    becomes: Callable[[Any], Mapping[str, Any]] = lambda value: {}
    parse: Callable[[str], Any] = str
    accepts: tuple[str, ...] | None = None
    """The only values that can be honoured; None: any."""

    switch: bool = False


GONE_FLAGS = (
    GoneFlag("--data-impl", "the memory-mapped dataset is the only one today", accepts=("mmap", "infer")),
    GoneFlag("--DDP-impl", "Megatron's own DDP is what is used today", accepts=("local",)),
    GoneFlag(
        "--activations-checkpoint-method",
        "--recompute-granularity full --recompute-method with the same value",
        lambda value: {"recompute_granularity": "full", "recompute_method": value, "recompute_num_layers": 1},
        accepts=("uniform", "block"),
    ),
    GoneFlag(
        "--activations-checkpoint-num-layers",
        "--recompute-num-layers with the same value",
        lambda value: {"recompute_num_layers": value},
        parse=int,
    ),
    GoneFlag("--experiment_name", "a label that nothing reads; name --tensorboard-dir or --save instead"),
    GoneFlag("--save_json_log", "losses and traffic go to --tensorboard-dir", switch=True),
    GoneFlag("--save_json_path", "losses and traffic go to --tensorboard-dir"),
    GoneFlag("--grad_comp_type", "PowerSGD is the compressor", accepts=("PowerSGD",)),
    GoneFlag("--inter_grad_comp_type", "PowerSGD is the compressor", accepts=("PowerSGD",)),
)


class _Gone(argparse.Action):
    """Stores what a gone flag stands for, and the line that is said about it."""

    def __init__(self, option_strings: list[str], dest: str, gone: GoneFlag, help: str) -> None:
        nargs = 0 if gone.switch else None
        super().__init__(option_strings, dest, nargs=nargs, default=argparse.SUPPRESS, type=gone.parse, help=help)
        self._gone = gone

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        gone, value = self._gone, "" if self._gone.switch else values
        if gone.accepts is not None and value not in gone.accepts:
            refusal = FlagError(
                gone.spelling,
                f"{value!r} is gone from Megatron ({gone.because})",
                f"Leave the flag out, or give {' or '.join(gone.accepts)}",
            )
            parser.error(str(refusal))
        fields = gone.becomes(value)
        for name, field in fields.items():
            # An own --activations-checkpoint-num-layers wins over the 1 that the method implies, in any order.
            if name == "recompute_num_layers" and len(fields) > 1 and getattr(namespace, name, None) is not None:
                continue
            setattr(namespace, name, field)
        verb = "translated" if fields else "dropped"
        notes = getattr(namespace, _NOTES, [])
        setattr(namespace, _NOTES, [*notes, f"{gone.spelling} {value}".strip() + f": {verb}: {gone.because}"])


def add_gone_flags(parser: argparse.ArgumentParser) -> None:
    """Let `parser` accept every flag of the table that it does not know by itself."""
    for gone in GONE_FLAGS:
        if gone.spelling not in parser._option_string_actions:
            parser.add_argument(gone.spelling, action=_Gone, gone=gone, dest=_NOTES, help=argparse.SUPPRESS)


def take_notes(args: argparse.Namespace) -> list[str]:
    """The lines to say about gone flags in `args`; they are taken off the namespace."""
    notes: list[str] = getattr(args, _NOTES, [])
    if hasattr(args, _NOTES):
        delattr(args, _NOTES)
    return notes
