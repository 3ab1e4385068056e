"""What can be switched on: one frozen dataclass per technique, and `OptimusConfig`, which is all of them.

A field is all there is to know of the command-line flag of its name: type, default, help and range;
`optimus_cc_ext.flags` makes the parser from it. Each dataclass validates itself, without knowing the cluster;
`optimus_cc_ext.resolve` holds the rules that need to know it.
"""

import dataclasses
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from optimus_cc_ext.errors import FlagError

__all__ = ["CompressedBackpropConfig", "DataParallelCompressionConfig", "FusedEmbeddingSyncConfig", "OptimusConfig"]


class _Values(NamedTuple):
    """Which values a field takes, and how others are refused; `{}` is the value."""

    metavar: str | None = None
    allows: Callable[[Any], bool] = lambda value: True
    reason: str = ""
    cure: str = ""


_RANK = _Values("R", lambda rank: rank >= 1, "a rank of {} leaves nothing to send", "Give a whole number of at least 1")
_FRACTION = _Values(
    "F",
    lambda fraction: 0.0 <= fraction <= 1.0,  # NaN is not, either
    "{} is not a fraction of the training iterations",
    "Give a number from 0 to 1",
)
_STAGES = _Values(
    "{all,auto,N}",
    lambda stages: stages in ("all", "auto") or (isinstance(stages, int) and stages >= 1),
    "{!r} names no stages",
    "Give 'all', 'auto' or a number of at least 1",
)


def option[T](default: T, help: str | None, values: _Values | None = None, shown_default: str = "") -> T:
    """A field; `help` documents it and its flag (None: one that is not shown), `values` None: all of its type."""
    metadata = {"help": help, "values": values, "shown_default": shown_default}
    return dataclasses.field(default=default, metadata=metadata)


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def default_of(field: "dataclasses.Field[Any]") -> str:
    """A flag's default, as `--help` and the documents say it."""
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    return field.metadata["shown_default"] or str(field.default)


def literals_of(kind: Any) -> tuple[str, ...]:
    """The words among a field's values."""
    parts = typing.get_args(kind)
    return parts if typing.get_origin(kind) is Literal else tuple(word for part in parts for word in literals_of(part))


def values_of(field: "dataclasses.Field[Any]") -> _Values:
    """A field's values: what it says of them, or else what its type does."""
    words = ", ".join(literals_of(field.type))
    choice = _Values(
        None, literals_of(field.type).__contains__, f"{{!r}} is not one of {words}", f"Give one of {words}"
    )
    return field.metadata["values"] or (choice if words else _Values())


class _Options:
    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, values = getattr(self, field.name), values_of(field)
            if not values.allows(value):
                raise FlagError(flag_of(field.name), values.reason.format(value), values.cure)


@dataclass(frozen=True, kw_only=True)
class CompressedBackpropConfig(_Options):
    """Technique 1, paper sections 5.1 and 5.2: low-rank activation gradients between pipeline stages."""

    compressed_backprop: bool = option(False, "Compress the activation gradients that a pipeline stage sends back.")
    compressed_backprop_rank: int = option(16, "Rank of their factorisation.", _RANK)
    compressed_backprop_messages: Literal["epilogue", "all"] = option(
        "epilogue", "Which of them; epilogue: those of the receiver's cooldown, which no computation hides."
    )
    compressed_backprop_warmup: float = option(0.0, "Fraction of the iterations that send them dense first.", _FRACTION)
    lazy_error_propagation: bool = option(True, "Add what was left out to the link's next compressed message.")
    residual_across_iterations: Literal["carry", "drop"] = option(
        "drop", "What becomes of an iteration's last residual. Carried, it meets other weights and other text."
    )


@dataclass(frozen=True, kw_only=True)
class FusedEmbeddingSyncConfig(_Options):
    """Technique 2, paper section 6: one all-reduce for the tied embedding instead of two."""

    fused_embedding_sync: bool = option(False, "Reduce the tied embedding once, over all replicas of its two stages.")


@dataclass(frozen=True, kw_only=True)
class DataParallelCompressionConfig(_Options):
    """Technique 3, paper section 7: low-rank data-parallel gradients on the first stages."""

    dp_compression: bool = option(False, "Compress data-parallel gradients with PowerSGD.")
    dp_compression_rank: int = option(128, "Rank of their factorisation.", _RANK)
    dp_compression_warmup: float = option(0.0, "Fraction of the iterations that reduce them dense first.", _FRACTION)
    dp_error_feedback: bool = option(True, "Add what compression left out to the next iteration's gradient.")
    dp_compression_stages: int | Literal["all", "auto"] = option(
        "all",
        "The first N pipeline stages compress; auto: those whose dense reduction holds up the iteration, by what the "
        "first iterations measure.",
        _STAGES,
    )


@dataclass(frozen=True, kw_only=True)
class OptimusConfig(DataParallelCompressionConfig, FusedEmbeddingSyncConfig, CompressedBackpropConfig):
    """Everything that `optimus_cc_ext.install` needs to know.

    Raises:
        FlagError: a field is out of range; the message names the command-line flag of that field.
    """

    compression_seed: int = option(1234, "Seed of the private generators.", _Values("S"), "Megatron's --seed")
    compression_state_dtype: Literal["fp32", "bf16"] = option(
        "fp32", "What residuals and factors are kept in between messages and steps; bf16 halves their memory."
    )
    compression_metrics: bool = option(True, "Log traffic by class, compression errors, residuals and times.")
    compression_forecast: bool = option(True, "Measure links and times first; say what each technique will gain.")
    compression_error_statistics: bool = option(False, "Log errors against activation differences (figure 11).")
    force_compression: bool = option(False, None)  # A test's: compress what is not worth it as well.

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compression_error_statistics and not (self.compressed_backprop and self.compression_metrics):
            raise FlagError(
                "--compression-error-statistics",
                "they are logged with --compression-metrics, and are about the errors of --compressed-backprop",
                "Switch both on, or leave it out",
            )

    @property
    def any_technique(self) -> bool:
        """Whether anything is sent in another form than Megatron's own."""
        return self.compressed_backprop or self.fused_embedding_sync or self.dp_compression

    def replace(self, **changes: object) -> "OptimusConfig":
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]
