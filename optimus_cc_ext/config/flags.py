"""The group "Optimus-CC" in Megatron's parser, and the conversion of parsed flags into a `Request`.

Every flag defaults to None, so that "not given" can be told from "given": an individual flag overrides a preset, and
two spellings of one option must not be mixed.
"""

import argparse
import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from optimus_cc_ext.config.artifact import ARTIFACT_DEFAULTS, add_artifact_flags, given_artifact_flags
from optimus_cc_ext.config.classes import CLASSES
from optimus_cc_ext.config.optimus_config import OptimusConfig
from optimus_cc_ext.config.options import GONE_FORMATS, default_of, flag_of, literals_of, option, type_of, values_of
from optimus_cc_ext.errors import FlagError

PRESETS = ("paper", "balanced", "exact")
"""The presets of `--optimus-cc`; the flag alone selects the first one."""

_PREFIX = "optimus_cc_"


@dataclass(frozen=True)
class Request:
    """The options that a command line asks for, before the layout of the run is known.

    `explicit` holds the fields of `OptimusConfig` that were given one by one, or follow from the artifact's defaults,
    and the switches of classes, by the classes' names;
    `preset` is the one of `PRESETS` that `--optimus-cc` names; `spelling` maps a field to the flag that gave it;
    `artifact` is true if the command line uses the published artifact's names.
    """

    explicit: Mapping[str, Any]
    spelling: Mapping[str, str]
    preset: str | None = None
    artifact: bool = False


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group "Optimus-CC" to `parser`: a flag for each field, and the published artifact's names."""
    group = parser.add_argument_group("Optimus-CC", "Compression of 3D-parallel traffic (arXiv 2301.09830).")
    group.add_argument(
        "--optimus-cc",
        dest="optimus_cc_preset",
        nargs="?",
        const=PRESETS[0],
        choices=PRESETS,
        help="Preset, as far as the layout allows it; individual flags override it. balanced (recommended) puts "
        "vanilla Megatron's loss first: activations, their gradients, the tied embedding and data-parallel gradients "
        "in int8, the distributed optimizer's parameters in exact differences, if a trial in the run says that it "
        "saves time. exact keeps vanilla's bits: it has these differences alone, and fuses the tied embedding's sums, "
        "with the distributed optimizer. paper "
        "(--optimus-cc alone) is --compressed-backprop, --fused-embedding-sync, and --dp-compression on the first "
        "75 %% of the pipeline stages, with their defaults.",
    )
    for field in flag_fields():
        text = field.metadata["help"]
        group.add_argument(
            flag_of(field.name),
            dest=_PREFIX + field.name,
            default=None,
            help=f"{text} (default: {default_of(field)})" if text else argparse.SUPPRESS,
            **_parsing(field),
        )
    add_artifact_flags(group)
    return parser


def flag_fields() -> Iterator["dataclasses.Field[Any]"]:
    """Yield the fields that have a flag, in the order of `--help`; the switch of a class comes before its format."""
    switches = {traffic.format_field: traffic for traffic in CLASSES if traffic.switch}
    for field in dataclasses.fields(OptimusConfig):
        if (traffic := switches.get(field.name)) is not None:
            switch: Any = option(False, traffic.switch)
            switch.name, switch.type = traffic.name, bool
            yield switch
        yield field


def _parsing(field: "dataclasses.Field[Any]") -> dict[str, Any]:
    """Return the keyword arguments with which argparse parses a field's flag."""
    kind, words = type_of(field), literals_of(field.type)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(kind) is typing.Literal:
        return {"choices": words, "type": _known_word}

    def word_or_number(text: str) -> Any:
        return text if text in words else int(text)

    word_or_number.__name__ = f"{', '.join(words)} or int"
    return {"type": word_or_number if words else kind, "metavar": values_of(field).metavar}


def _known_word(word: str) -> str:
    """Return a word of the command line. Raises ArgumentTypeError if it names a format of earlier versions."""
    if word in GONE_FORMATS:
        raise argparse.ArgumentTypeError("{}. {}.".format(*GONE_FORMATS[word]))
    return word


def request_from(args: argparse.Namespace) -> Request:
    """Read the requested options out of the parsed arguments.

    Raises:
        FlagError: one option was given in both spellings, or the artifact's names together with `--optimus-cc`.
    """
    values = {field.name: getattr(args, _PREFIX + field.name, None) for field in flag_fields()}
    given = {name: value for name, value in values.items() if value is not None}
    spelling = {name: flag_of(name) for name in given}
    preset = getattr(args, "optimus_cc_preset", None)
    artifact = given_artifact_flags(args)
    if not artifact:
        return Request(given, spelling, preset)

    for flag, _ in artifact:
        if twice := [name for name in flag.fields if name in given]:
            reason = f"it is the published artifact's name for {flag_of(twice[0])}, which is given too"
            raise FlagError(flag.spelling, reason, "Give one of the two")
    if preset:
        reason = f"the preset cannot be combined with the published artifact's names ({artifact[0][0].spelling})"
        raise FlagError("--optimus-cc", reason, "Give either the preset or the artifact's flags")
    asked, spelled = dict(ARTIFACT_DEFAULTS), dict[str, str]()
    for flag, value in artifact:
        if flag.needs is None or flag.needs in [other.spelling for other, _ in artifact]:
            asked |= dict.fromkeys(flag.fields, value)
            spelled |= dict.fromkeys(flag.fields, flag.spelling)
    return Request(asked | given, spelled | spelling, artifact=True)
