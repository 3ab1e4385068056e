"""Wraps megatron/training/arguments.py: our flags in Megatron's parser, and their validation after Megatron's own."""

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any

from optimus_cc_ext import cpu_runtime
from optimus_cc_ext.artifact import add_gone_flags, take_notes
from optimus_cc_ext.errors import FlagError, exit_with, is_first_local_rank
from optimus_cc_ext.flags import add_flags, request_from
from optimus_cc_ext.hooks.refusals import refuse_unsupported
from optimus_cc_ext.hooks.registry import Seam
from optimus_cc_ext.resolve import Layout, Resolution, resolve

__all__ = ["layout_from", "prepare_parser", "resolution_from", "wraps"]

_MODULE = "megatron.training.arguments"
_IMPORTED_BY = ("megatron.training.initialize",)
"""In 0.17, where `pretrain()` initializes Megatron and parses by itself."""


def wraps(
    on_resolved: Callable[[Resolution, Layout], None],
) -> list[tuple[Seam, Callable[[Any], Any]]]:
    """The seams of this file, with what wraps them; `on_resolved` is called once the flags are valid."""

    def add_megatron_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def add(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            return prepare_parser(original(parser))

        return add

    def parse_args(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def parse(*args: Any, **kwargs: Any) -> Any:
            if any(argument.split("=")[0] == "--yaml-cfg" for argument in sys.argv):
                # Megatron then builds its arguments from the file alone and never calls validate_args.
                exit_with(FlagError("--yaml-cfg", "Optimus-CC cannot be set up from a YAML file", "Use flags"))
            return original(*args, **kwargs)

        return parse

    def validate_args(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def validate(args: argparse.Namespace, *rest: Any, **kwargs: Any) -> Any:
            notes = take_notes(args)
            result = original(args, *rest, **kwargs)
            try:
                resolution, layout = resolution_from(args)
            except FlagError as error:
                exit_with(error)
            if is_first_local_rank():
                for note in (*notes, *resolution.notes):
                    print(f"optimus-cc: {note}", flush=True)
            on_resolved(resolution, layout)
            return result

        return validate

    return [
        (Seam(f"{_MODULE}:add_megatron_arguments", ("parser",)), add_megatron_arguments),
        (Seam(f"{_MODULE}:parse_args", imported_by=_IMPORTED_BY), parse_args),
        (Seam(f"{_MODULE}:validate_args", ("args",), imported_by=_IMPORTED_BY), validate_args),
    ]


def prepare_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to Megatron's parser, and on a CPU the defaults that it needs there."""
    if cpu_runtime.is_active():
        cpu_runtime.apply_cpu_defaults(parser)
    _repair_help(parser)
    add_gone_flags(parser)
    return add_flags(parser)


def _repair_help(parser: argparse.ArgumentParser) -> None:
    """Let `--help` work: one of Megatron 0.19.2's own help texts has a bare per cent sign, on which argparse fails."""
    formatter = argparse.HelpFormatter(parser.prog)
    for action in parser._actions:
        try:
            formatter._expand_help(action)
        except (ValueError, TypeError, KeyError):
            action.help = (action.help or "").replace("%", "%%")


def resolution_from(args: argparse.Namespace) -> tuple[Resolution, Layout]:
    """What Megatron's validated arguments ask of us.

    Raises:
        FlagError: a flag cannot work, by itself, on this layout, or together with another of Megatron's options.
    """
    layout = layout_from(args)
    resolution = resolve(request_from(args), layout)
    refuse_unsupported(args, resolution.config)
    return resolution, layout


def layout_from(args: argparse.Namespace) -> Layout:
    """The facts about the run in Megatron's validated arguments."""
    return Layout(
        stages=args.pipeline_model_parallel_size,
        data_parallel=args.data_parallel_size,
        tied_embeddings=not args.untie_embeddings_and_output_weights,
        distributed_optimizer=args.use_distributed_optimizer,
        train_iters=args.train_iters,
        seed=args.seed,
    )
