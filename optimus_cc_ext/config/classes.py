"""What can be switched on: one frozen dataclass per class of traffic, and `OptimusConfig`, which is all of them.

A field is all there is to know of the command-line flag of its name: type, default, help and range;
`optimus_cc_ext.config.flags` makes the parser from it. Each dataclass validates itself, without knowing the cluster;
`optimus_cc_ext.config.presets` holds the rules that need to know it.
"""

import dataclasses
import types
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


def option[T](
    default: T,
    help: str | None,
    values: _Values | None = None,
    shown_default: str = "",
    follows: Callable[[Any], Any] | None = None,
) -> T:
    """A field; `help` documents it and its flag (None: one that is not shown), `values` None: all of its type.

    `follows` makes the value from the configuration where it is None.
    """
    metadata = {"help": help, "values": values, "shown_default": shown_default, "follows": follows}
    return dataclasses.field(default=default, metadata=metadata)


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def default_of(field: "dataclasses.Field[Any]") -> str:
    """A flag's default, as `--help` and the documents say it."""
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    return field.metadata["shown_default"] or str(field.default)


def type_of(field: "dataclasses.Field[Any]") -> Any:
    """A field's type; None is left out, which only stands for a default that follows from other fields."""
    parts = [part for part in typing.get_args(field.type) if part is not types.NoneType]
    return (
        parts[0] if typing.get_origin(field.type) in (types.UnionType, typing.Union) and len(parts) == 1 else field.type
    )


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
            if value is None and (follows := field.metadata["follows"]) is not None:
                object.__setattr__(self, field.name, follows(self))
            elif not values.allows(value):
                raise FlagError(flag_of(field.name), values.reason.format(value), values.cure)

    def _on_by_format(self, technique: str) -> None:
        """A format other than the default one decides whether its class is compressed."""
        given = getattr(self, f"{technique}_format")
        default = {field.name: field.default for field in dataclasses.fields(self)}[f"{technique}_format"]  # type: ignore[arg-type]
        if given != default:
            object.__setattr__(self, technique, given != "dense")


@dataclass(frozen=True, kw_only=True)
class PipelineForwardConfig(_Options):
    """Beyond the paper: activations between pipeline stages in 8 bits."""

    pipeline_forward_format: Literal["dense", "int8", "fp8"] = option(
        "dense", "What the activations that a pipeline stage sends on travel as; not in evaluation."
    )


@dataclass(frozen=True, kw_only=True)
class CompressedBackpropConfig(_Options):
    """Technique 1, paper sections 5.1 and 5.2: activation gradients between pipeline stages."""

    compressed_backprop: bool = option(False, "Compress the activation gradients that a pipeline stage sends back.")
    compressed_backprop_format: Literal["low-rank", "int8", "int4", "fp8", "dense"] = option(
        "low-rank", "What they travel as; one that is given switches --compressed-backprop on, dense switches it off."
    )
    compressed_backprop_rank: int = option(16, "Rank of their factorisation.", _RANK)
    compressed_backprop_messages: Literal["epilogue", "all"] | None = option(
        None, "Which of them; epilogue: those of the receiver's cooldown, which no computation hides.",
        shown_default="epilogue for low-rank, else all",
        follows=lambda config: "epilogue" if config.compressed_backprop_format == "low-rank" else "all",
    )  # fmt: skip
    compressed_backprop_warmup: float = option(0.0, "Fraction of the iterations that send them dense first.", _FRACTION)
    lazy_error_propagation: bool | None = option(
        None, "Add what was left out to the link's next compressed message.", shown_default="on for low-rank, else off",
        follows=lambda config: config.compressed_backprop_format == "low-rank",
    )  # fmt: skip
    residual_across_iterations: Literal["carry", "drop"] = option(
        "drop", "What becomes of an iteration's last residual. Carried, it meets other weights and other text."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._on_by_format("compressed_backprop")

    @property
    def backprop_remembers(self) -> bool:
        """Whether something outlives an iteration: block formats leave nothing behind."""
        return self.compressed_backprop and self.compressed_backprop_format == "low-rank"


@dataclass(frozen=True, kw_only=True)
class FusedEmbeddingSyncConfig(_Options):
    """Technique 2, paper section 6: one all-reduce for the tied embedding instead of two."""

    fused_embedding_sync: bool = option(False, "Reduce the tied embedding once, over all replicas of its two stages.")
    fused_embedding_sync_format: Literal["dense", "int8", "int4"] = option(
        "dense", "What its gradient travels as; one other than dense switches --fused-embedding-sync on."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._on_by_format("fused_embedding_sync")


@dataclass(frozen=True, kw_only=True)
class DataParallelCompressionConfig(_Options):
    """Technique 3, paper section 7: data-parallel gradients, on the first stages or on all."""

    dp_compression: bool = option(False, "Compress data-parallel gradients.")
    dp_compression_format: Literal["low-rank", "int8", "int4", "dense"] = option(
        "low-rank", "What they travel as; one that is given switches --dp-compression on, dense switches it off."
    )
    dp_compression_rank: int = option(128, "Rank of their factorisation.", _RANK)
    dp_compression_warmup: float = option(0.0, "Fraction of the iterations that reduce them dense first.", _FRACTION)
    dp_error_feedback: bool | None = option(
        None, "Add what compression left out to the next iteration's gradient.",
        shown_default="on for low-rank, else off", follows=lambda config: config.dp_compression_format == "low-rank",
    )  # fmt: skip
    dp_compression_stages: int | Literal["all", "auto"] = option(
        "all",
        "The first N pipeline stages compress; auto: those whose dense reduction holds up the iteration, by what the "
        "first iterations measure.",
        _STAGES,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._on_by_format("dp_compression")
        if self.dp_error_feedback and self.dp_compression_format not in ("dense", "low-rank"):
            raise FlagError(
                "--dp-error-feedback",
                f"{self.dp_compression_format} leaves noise out, which averages out by itself: fed back, int4 cost "
                "0.09 % more loss (docs/study.md), and the memory of the gradients",
                "Leave it out, or use --dp-compression-format low-rank",
            )

    @property
    def gradients_remember(self) -> bool:
        """Whether something outlives an iteration: low rank's states, or which stages were chosen."""
        kept = self.dp_compression_format == "low-rank" or self.dp_compression_stages == "auto"
        return self.dp_compression and kept


@dataclass(frozen=True, kw_only=True)
class ParamGatherConfig(_Options):
    """Beyond the paper: what the distributed optimizer's replicas tell each other after its step."""

    param_gather_format: Literal["dense", "int8", "int4"] = option(
        "dense",
        "What the distributed optimizer gathers parameters as; in int8 and int4 what changed since the last gather.",
    )


@dataclass(frozen=True, kw_only=True)
class OptimusConfig(
    ParamGatherConfig, DataParallelCompressionConfig, FusedEmbeddingSyncConfig, CompressedBackpropConfig,
    PipelineForwardConfig,
):  # fmt: skip
    """Everything that `optimus_cc_ext.install` needs to know.

    Raises:
        FlagError: a field is out of range; the message names the command-line flag of that field.
    """

    compression_seed: int = option(1234, "Seed of the private generators.", _Values("S"), "Megatron's --seed")
    compression_state_dtype: Literal["fp32", "bf16"] = option(
        "fp32", "What residuals and factors are kept in between messages and steps; bf16 halves their memory."
    )
    low_rank_wire: Literal["dense", "int8"] = option(
        "dense", "What low-rank factors travel as: in the gradients' dtype, or in blocks of int8."
    )
    block_rotation: bool = option(
        True, "Rotate the blocks of int8 and int4 (random signs, Hadamard), so that an outlier spoils its block less."
    )
    compression_metrics: bool = option(True, "Log traffic by class, compression errors, residuals and times.")
    compression_forecast: bool = option(True, "Measure links and times first; say what each technique will gain.")
    compression_error_statistics: bool = option(False, "Log errors against activation differences (figure 11).")
    # Tests': low-rank for what is not worth it as well; blocks that leave nothing out.
    force_compression: bool = option(False, None)
    exact_blocks: bool = option(False, None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compression_error_statistics and not (self.backprop_remembers and self.compression_metrics):
            raise FlagError(
                "--compression-error-statistics",
                "they are logged with --compression-metrics, and are about low-rank errors of --compressed-backprop",
                "Switch both on, or leave it out",
            )

    @property
    def any_technique(self) -> bool:
        """Whether anything is sent in another form than Megatron's own."""
        return (
            self.compressed_backprop
            or self.fused_embedding_sync
            or self.dp_compression
            or self.pipeline_forward_format != "dense"
            or self.param_gather_format != "dense"
        )

    def replace(self, **changes: object) -> "OptimusConfig":
        """A copy with some fields changed, validated again; what follows from a format that is changed follows anew."""
        for name, following in _FOLLOWING.items():
            if name in changes:
                changes = dict.fromkeys(following) | changes
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


_FOLLOWING = {
    "compressed_backprop_format": ("compressed_backprop_messages", "lazy_error_propagation"),
    "dp_compression_format": ("dp_error_feedback",),
}
