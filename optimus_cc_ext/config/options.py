"""A field of the configuration is all there is to know of the command-line flag of its name.

`option` declares type, default, help and range; `optimus_cc_ext.config.flags` makes the parser from it. A dataclass
of options validates itself, without knowing the cluster.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from optimus_cc_ext.errors import FlagError

__all__ = ["FRACTION", "RANK", "STAGES", "Follows", "Options", "Values", "completed", "default_of", "flag_of",
           "literals_of", "option", "type_of", "values_of"]  # fmt: skip


class Values(NamedTuple):
    """The values that a field takes, and how others are refused; `{}` is the value."""

    metavar: str | None = None
    allows: Callable[[Any], bool] = lambda value: True
    reason: str = ""
    cure: str = ""


RANK = Values("R", lambda rank: rank >= 1, "a rank of {} leaves nothing to send", "Give a whole number of at least 1")
FRACTION = Values(
    "F",
    lambda fraction: 0.0 <= fraction <= 1.0,  # NaN is not, either
    "{} is not a fraction of the training iterations",
    "Give a number from 0 to 1",
)
STAGES = Values(
    "{all,auto,N}",
    lambda stages: stages in ("all", "auto") or (isinstance(stages, int) and stages >= 1),
    "{!r} names no stages",
    "Give 'all', 'auto' or a number of at least 1",
)


class Follows(NamedTuple):
    """The default of a field that follows from the format of its class of traffic."""

    format: str
    """The field of the format."""

    low_rank: Any
    """The default beside low-rank."""

    others: Any
    """The default beside every other format."""


def option[T](
    default: T, help: str | None, values: Values | None = None, *, shown_default: str = "",
    follows: Follows | None = None, switched_by: str = "", low_rank_only: bool = False,
    said: Mapping[Any, str] = types.MappingProxyType({}),
) -> T:  # fmt: skip
    """Declare a field and its flag.

    Args:
        default: its value where nothing is given.
        help: what the flag does; None: one that is not shown.
        values: which values it takes; None: all of its type.
        shown_default: how `--help` writes the default.
        follows: where its value comes from if that is None.
        switched_by: for the switch of a class of traffic: the field of the format, which wins over the switch.
        low_rank_only: whether it means nothing to other formats than low-rank.
        said: by value, its part in the line that says what is switched on; None stands for all other values, `{}` for
            the value.
    """
    metadata = {
        "help": help, "values": values, "shown_default": shown_default, "follows": follows, "switched_by": switched_by,
        "low_rank_only": low_rank_only, "said": said,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=metadata)


def flag_of(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


def default_of(field: "dataclasses.Field[Any]") -> str:
    """Return a flag's default as `--help` and the documents say it."""
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
    """Return the words among the values of a field's type."""
    parts = typing.get_args(kind)
    return parts if typing.get_origin(kind) is Literal else tuple(word for part in parts for word in literals_of(part))


def values_of(field: "dataclasses.Field[Any]") -> Values:
    """Return which values a field takes: what it says of them itself, or else the words of its type."""
    words = ", ".join(literals_of(field.type))
    choice = Values(None, literals_of(field.type).__contains__, f"{{!r}} is not one of {words}", f"Give one of {words}")
    return field.metadata["values"] or (choice if words else Values())


class Options:
    """The base of dataclasses of options: refuses what is out of range, by the name of its flag."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, values = getattr(self, field.name), values_of(field)
            if not values.allows(value):
                raise FlagError(flag_of(field.name), values.reason.format(value), values.cure)


def completed[T](options: type[T]) -> type[T]:
    """Let a frozen dataclass of options be made from few arguments: those that follow from others are filled in first.

    A value that is None and follows from a format becomes what follows. A format other than the default one decides
    about the switch of its class of traffic.
    """
    store: Callable[..., None] = options.__init__
    fields = dataclasses.fields(options)  # type: ignore[arg-type]
    defaults = {field.name: field.default for field in fields}

    @functools.wraps(store)
    def init(self: T, **given: Any) -> None:
        values = defaults | given
        for field in fields:
            follows, format = field.metadata["follows"], field.metadata["switched_by"]
            if follows is not None and values[field.name] is None:
                values[field.name] = follows.low_rank if values[follows.format] == "low-rank" else follows.others
            if format and values[format] != defaults[format]:
                values[field.name] = values[format] != "dense"
        store(self, **values)

    options.__init__ = init  # type: ignore[method-assign, assignment]
    return options
