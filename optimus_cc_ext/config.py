"""What can be switched on: one frozen dataclass per technique, and `OptimusConfig`, which is all of them.

Every command-line flag has a field of the same name. Each dataclass validates itself, without knowing the
cluster; `optimus_cc_ext.resolve` holds the rules that need to know it.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from optimus_cc_ext.errors import FlagError

__all__ = [
    "CompressedBackpropConfig",
    "DataParallelCompressionConfig",
    "FusedEmbeddingSyncConfig",
    "OptimusConfig",
]


def _require_rank(flag: str, compression_rank: int) -> None:
    if compression_rank < 1:
        raise FlagError(
            flag, f"a rank of {compression_rank} leaves nothing to send", "Give a whole number of at least 1"
        )


def _require_choice(flag: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise FlagError(flag, f"{value!r} is not one of {', '.join(choices)}", f"Give one of {', '.join(choices)}")


def _require_fraction(flag: str, fraction: float) -> None:
    if not 0.0 <= fraction <= 1.0:  # NaN is not, either
        raise FlagError(flag, f"{fraction} is not a fraction of the training iterations", "Give a number from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class CompressedBackpropConfig:
    """Technique 1, paper sections 5.1 and 5.2: low-rank activation gradients between pipeline stages."""

    compressed_backprop: bool = False
    """Compress the activation gradients that a pipeline stage sends back to the one before it."""

    compressed_backprop_rank: int = 16
    """Rank of their factorisation."""

    compressed_backprop_messages: Literal["epilogue", "all"] = "epilogue"
    """`epilogue`: only the messages of the receiver's cooldown, which no computation hides."""

    compressed_backprop_warmup: float = 0.0
    """Fraction of the training iterations that come first and whose gradients are sent as they are."""

    lazy_error_propagation: bool = True
    """Add what compression left out to the next compressed message of the same link."""

    residual_across_iterations: Literal["carry", "drop"] = "drop"
    """What becomes of the residual that the last message of an iteration leaves. Carried, it meets other weights and
    other text."""

    def __post_init__(self) -> None:
        _require_rank("--compressed-backprop-rank", self.compressed_backprop_rank)
        _require_choice("--compressed-backprop-messages", self.compressed_backprop_messages, ("epilogue", "all"))
        _require_fraction("--compressed-backprop-warmup", self.compressed_backprop_warmup)
        _require_choice("--residual-across-iterations", self.residual_across_iterations, ("carry", "drop"))


@dataclass(frozen=True, kw_only=True)
class FusedEmbeddingSyncConfig:
    """Technique 2, paper section 6: one all-reduce for the tied embedding instead of two."""

    fused_embedding_sync: bool = False
    """Reduce the tied embedding once over the data-parallel ranks of the first and the last stage."""


@dataclass(frozen=True, kw_only=True)
class DataParallelCompressionConfig:
    """Technique 3, paper section 7: low-rank data-parallel gradients on the first stages."""

    dp_compression: bool = False
    """Compress data-parallel gradients with PowerSGD."""

    dp_compression_rank: int = 128
    """Rank of their factorisation."""

    dp_compression_warmup: float = 0.0
    """Fraction of the training iterations that come first and are reduced uncompressed."""

    dp_error_feedback: bool = True
    """Add what compression left out to the next iteration's gradient."""

    dp_compression_stages: int | Literal["all", "auto"] = "all"
    """Compress on the first N pipeline stages only; `all` compresses on every stage, `auto` on those whose dense
    reduction holds up the iteration, by what the first iterations measure."""

    def __post_init__(self) -> None:
        _require_rank("--dp-compression-rank", self.dp_compression_rank)
        _require_fraction("--dp-compression-warmup", self.dp_compression_warmup)
        stages = self.dp_compression_stages
        if stages not in ("all", "auto") and (not isinstance(stages, int) or stages < 1):
            raise FlagError(
                "--dp-compression-stages",
                f"{stages!r} names no stages",
                "Give 'all', 'auto' or a number of at least 1",
            )


@dataclass(frozen=True, kw_only=True)
class OptimusConfig(CompressedBackpropConfig, FusedEmbeddingSyncConfig, DataParallelCompressionConfig):
    """Everything that `optimus_cc_ext.install` needs to know.

    Raises:
        FlagError: a field is out of range; the message names the command-line flag of that field.
    """

    compression_seed: int = 1234
    """Seed of the compressors' private random generators; the command line takes Megatron's --seed."""

    compression_state_dtype: Literal["fp32", "bf16"] = "fp32"
    """What residuals and factors are kept in between messages and steps; bf16 halves their memory."""

    compression_metrics: bool = True
    """Log bytes by traffic class, raw and sent, compression errors, residuals and times at the logging interval."""

    compression_forecast: bool = True
    """Measure links and times in the first iterations, and say what each technique will gain or lose."""

    compression_error_statistics: bool = False
    """Log how errors of compressed backpropagation relate to activations (paper, figure 11)."""

    force_compression: bool = False
    """For tests: compress tensors on which nothing is saved as well."""

    def __post_init__(self) -> None:
        CompressedBackpropConfig.__post_init__(self)
        DataParallelCompressionConfig.__post_init__(self)
        _require_choice("--compression-state-dtype", self.compression_state_dtype, ("fp32", "bf16"))
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
