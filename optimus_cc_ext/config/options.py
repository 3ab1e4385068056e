"""The declaration of an option: one dataclass field holds everything about the command-line flag of its name.

`option` declares type, default, help and range; `optimus_cc_ext.config.flags` builds the parser from them. A dataclass
of options validates itself, without knowing the layout of the run.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from optimus_cc_ext.errors import FlagError

GONE_FORMATS = {"fp8": ("fp8 is gone, because int8 has a fourth of its error in as many bytes", "Give int8")}
"""Formats of earlier versions, each with the reason and the cure of its refusal."""


class Values(NamedTuple):
    """The values that a field takes, and the refusal of others, in which `{}` stands for the value."""

    metavar: str | None = None
    allows: Callable[[Any], bool] = lambda value: True
    reason: str = ""
    cure: str = ""


RANK = Values("R", lambda rank: rank >= 1, "a rank of {} sends nothing", "Give a whole number of at least 1")
FRACTION = Values(
    "F",
    lambda fraction: 0.0 <= fraction <= 1.0,  # the comparison is also false for NaN
    "{} is not a fraction of the training iterations",
    "Give a number from 0 to 1",
)
STAGES = Values(
    "{all,auto,N}",
    lambda stages: stages in ("all", "auto") or (isinstance(stages, int) and stages >= 1),
    "{!r} does not name pipeline stages",
    "Give 'all', 'auto' or a number of at least 1",
)


class Follows(NamedTuple):
    """The default of a field that follows from the format of its class of traffic."""

    format: str
    """The name of the field of the format."""

    low_rank: Any
    """The field's default if the format is low-rank."""

    others: Any
    """The field's default for every format but low-rank."""


def option[T](
    default: T, help: str | None, values: Values | None = None, *, shown_default: str = "",
    follows: Follows | None = None, low_rank_only: bool = False,
    said: Mapping[Any, str] = types.MappingProxyType({}),
) -> T:  # fmt: skip
    """Declare a field and its flag.

    Args:
        default: the field's value if the flag is not given.
        help: the flag's help text; None hides the flag and the field.
        values: the values that the field takes; None: all values of its type.
        shown_default: the default as `--help` writes it.
        follows: the source of the field's value if that is None.
        low_rank_only: true if the option has no effect on other formats than low-rank.
        said: text about the field in the log line about the techniques, by value; the key None stands for all other
            values, `{}` for the value.
    """
    metadata = {
        "help": help, "values": values, "shown_default": shown_default, "follows": follows,
        "low_rank_only": low_rank_only, "said": said,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=metadata, repr=help is not None)


def flag_of(name: str) -> str:
    """Return the flag of a field, without the leading underscore of fields that only tests set."""
    return "--" + name.lstrip("_").replace("_", "-")


def default_of(field: "dataclasses.Field[Any]") -> str:
    """Return a flag's default as `--help` and the documents write it."""
    if (follows := field.metadata["follows"]) is not None:
        return f"{_in_words(follows.low_rank)} for low-rank, else {_in_words(follows.others)}"
    return field.metadata["shown_default"] or _in_words(field.default)


def _in_words(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def type_of(field: "dataclasses.Field[Any]") -> Any:
    """Return a field's type, without the None that only stands for a default that follows from other fields."""
    parts = [part for part in typing.get_args(field.type) if part is not types.NoneType]
    return (
        parts[0] if typing.get_origin(field.type) in (types.UnionType, typing.Union) and len(parts) == 1 else field.type
    )


def literals_of(kind: Any) -> tuple[str, ...]:
    """Return the literal words among the values of a field's type."""
    parts = typing.get_args(kind)
    return parts if typing.get_origin(kind) is Literal else tuple(word for part in parts for word in literals_of(part))


def values_of(field: "dataclasses.Field[Any]") -> Values:
    """Return the values that a field takes: those it declares, or else the literal words of its type."""
    words = ", ".join(literals_of(field.type))
    choice = Values(None, literals_of(field.type).__contains__, f"{{!r}} is not one of {words}", f"Give one of {words}")
    return field.metadata["values"] or (choice if words else Values())


def _is_of_type(value: Any, kind: Any) -> bool:
    """Return whether `value` is of type `kind`, without literals: bool is no int, and int is a float."""
    if parts := typing.get_args(kind):
        return any(_is_of_type(value, part) for part in parts)
    return type(value) in ((int, float) if kind is float else (kind,))


class Options:
    """The base of dataclasses of options, which refuses values out of range and names their flags."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, values = getattr(self, field.name), values_of(field)
            if not literals_of(field.type) and not _is_of_type(value, field.type):
                kind = type_of(field).__name__
                raise FlagError(flag_of(field.name), f"{value!r} is not of type {kind}", f"Give a value of type {kind}")
            if literals_of(field.type) and isinstance(value, str) and value in GONE_FORMATS:
                raise FlagError(flag_of(field.name), *GONE_FORMATS[value])
            if not values.allows(value):
                raise FlagError(flag_of(field.name), values.reason.format(value), values.cure)


def completed[T](options: type[T]) -> type[T]:
    """Let a frozen dataclass of options be built from few arguments, by filling in the fields that follow from others.

    A field that is None and follows from a format gets the default for that format.
    """
    store: Callable[..., None] = options.__init__
    fields = dataclasses.fields(options)  # type: ignore[arg-type]
    defaults = {field.name: field.default for field in fields}

    @functools.wraps(store)
    def init(self: T, **given: Any) -> None:
        values = defaults | given
        for field in fields:
            follows = field.metadata["follows"]
            if follows is not None and values[field.name] is None:
                values[field.name] = follows.low_rank if values[follows.format] == "low-rank" else follows.others
        try:
            store(self, **values)
        except FlagError as error:
            # Python programs see the field's name; the command line names the flag as it was written.
            raise error.naming_fields() from None

    options.__init__ = init  # type: ignore[method-assign, assignment]
    helps = "".join(f"\n    {f.name}: {f.metadata['help']}" for f in fields if f.metadata["help"])
    options.__doc__ = f"{options.__doc__}\n\nFields:{helps}"
    return options
