"""Wraps megatron/training/arguments.py: our flags in Megatron's parser, and their validation after Megatron's own."""

import argparse
import difflib
import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from optimus_cc_ext.config.artifact import add_removed_flags, take_notes
from optimus_cc_ext.config.flags import add_flags, request_from
from optimus_cc_ext.config.presets import Layout, Resolution, resolve
from optimus_cc_ext.errors import FlagError, ends_the_run, exit_with
from optimus_cc_ext.hooks.facts import layout_from
from optimus_cc_ext.hooks.registry import Seam, check_one_megatron
from optimus_cc_ext.patching import around

_MODULE = "megatron.training.arguments"
_IMPORTED_BY = ("megatron.training.initialize",)
"""Modules that import Megatron's parsing functions by name: in 0.17, `pretrain()` initializes Megatron and parses by
itself."""


def wraps(
    on_resolved: Callable[[Callable[[Layout], Resolution], Layout], None],
) -> list[tuple[Seam, Callable[[Any], Any]]]:
    """Return the seams of this file, with their wraps; `on_resolved` is called once Megatron's flags are valid, with a
    function that resolves ours on a layout, and with the layout of the command line.
    """
    return [
        (Seam(f"{_MODULE}:add_megatron_arguments", ("parser",)), around(_add_arguments)),
        (Seam(f"{_MODULE}:parse_args", imported_by=_IMPORTED_BY), around(_parse)),
        (Seam(f"{_MODULE}:validate_args", ("args",), imported_by=_IMPORTED_BY), around(_validate, on_resolved)),
    ]


def _add_arguments(original: Callable[..., Any], parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    return prepare_parser(original(parser))


def bypassed() -> str | None:
    """Return the sentence that Megatron's validation, which would have read our flags, was replaced after our wrap;
    None: it was not, or none of our flags is given.
    """
    validate = importlib.import_module(_MODULE).validate_args
    ours = add_flags(argparse.ArgumentParser(allow_abbrev=False, add_help=False))._option_string_actions
    given = [word for word in sys.argv[1:] if word.split("=")[0] in ours]
    if not given or validate.__globals__.get("__name__") == around.__module__:
        return None
    return (
        f"{given[0]}: no effect: {validate.__module__}.{validate.__qualname__} has replaced {_MODULE}.validate_args "
        "after Optimus-CC had wrapped it, and does not call it. Make the replacement first, and call "
        "optimus_cc_ext.startup.prepare() after it"
    )


def _parse(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if any(argument.split("=")[0] == "--yaml-cfg" for argument in sys.argv):
        # With this flag Megatron builds its arguments from the file alone and never calls validate_args.
        exit_with(FlagError("--yaml-cfg", "Optimus-CC cannot be set up from a YAML file", "Use flags"))
    return original(*args, **kwargs)


def _validate(
    on_resolved: Callable[[Callable[[Layout], Resolution], Layout], None],
    original: Callable[..., Any],
    args: argparse.Namespace,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    with ends_the_run():
        check_one_megatron()
    notes = take_notes(args)
    try:
        result = original(args, *rest, **kwargs)
    except SystemExit as ended:
        # Megatron ends with exit() if a flag is no longer valid: with status 0, although nothing was trained.
        raise SystemExit(ended.code or 2) from None
    with ends_the_run():
        request = request_from(args)

        def resolved(layout: Layout) -> Resolution:
            resolution = resolve(request, layout, args)
            return replace(resolution, notes=(*notes, *resolution.notes))

        on_resolved(resolved, layout_from(args))
    return result


def prepare_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to Megatron's parser."""
    _repair_help(parser)
    add_removed_flags(parser)
    add_flags(parser)
    _suggest(parser)
    return parser


def _repair_help(parser: argparse.ArgumentParser) -> None:
    """Let `--help` work: one of Megatron 0.19.2's own help texts has a bare per cent sign, on which argparse fails."""
    formatter = argparse.HelpFormatter(parser.prog)
    for action in parser._actions:
        try:
            formatter._expand_help(action)
        except (ValueError, TypeError, KeyError):
            action.help = (action.help or "").replace("%", "%%")


def _suggest(parser: argparse.ArgumentParser) -> None:
    """Let errors of the parser suggest the nearest flags, and omit the usage, which has several hundred lines."""
    original = parser.error
    parser.usage = "%(prog)s <Megatron's flags> <Optimus-CC's flags>; --help lists them"

    def error(message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2].split()
        near = {
            word: difflib.get_close_matches(word.split("=")[0], parser._option_string_actions, 2)
            for word in unknown
            if word.startswith("--")
        }
        hints = [f"{word}: did you mean {' or '.join(flags)}?" for word, flags in near.items() if flags]
        if message.rstrip().endswith("unrecognized arguments:"):
            message += "an empty word. Remove blanks behind backslashes"
        original(". ".join([message, *hints]))

    parser.error = error  # type: ignore[method-assign]
