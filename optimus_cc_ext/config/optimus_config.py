"""`OptimusConfig`: the options of all classes of traffic, and those that concern every class."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from optimus_cc_ext.config.classes import (
    CLASSES,
    CompressedBackpropConfig,
    DataParallelCompressionConfig,
    FusedEmbeddingSyncConfig,
    ParamGatherConfig,
    PipelineForwardConfig,
    TrafficClass,
)
from optimus_cc_ext.config.options import Values, completed, option
from optimus_cc_ext.errors import FlagError

__all__ = ["CLASSES_BY_FLAG", "OptimusConfig"]


@completed
@dataclass(frozen=True, kw_only=True)
class OptimusConfig(
    ParamGatherConfig, DataParallelCompressionConfig, FusedEmbeddingSyncConfig, CompressedBackpropConfig,
    PipelineForwardConfig,
):  # fmt: skip
    """Everything that `optimus_cc_ext.install` needs to know.

    Raises:
        FlagError: a field is out of range; the message names the command-line flag of that field.
    """

    compression_seed: int = option(
        1234, "Seed of the private generators.", Values("S"), shown_default="Megatron's --seed"
    )
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

    def is_on(self, traffic: TrafficClass) -> bool:
        """Return whether a class of traffic is sent in another form than Megatron's own."""
        return getattr(self, traffic.switch) not in (False, "dense")

    def format_of(self, traffic: TrafficClass) -> str:
        """Return the format that a class of traffic travels as; dense where it is off."""
        chosen: str = getattr(self, traffic.format_field)
        return chosen if self.is_on(traffic) else "dense"

    def remembers(self, traffic: TrafficClass) -> bool:
        """Return whether a class of traffic keeps state in checkpoints."""
        return bool(traffic.remembers and getattr(self, traffic.remembers))

    @property
    def any_technique(self) -> bool:
        """Whether anything is sent in another form than Megatron's own."""
        return any(map(self.is_on, CLASSES))

    def replace(self, **changes: object) -> "OptimusConfig":
        """A copy with some fields changed, validated again; what follows from a format that is changed follows anew."""
        follow = {field.name: field.metadata["follows"] for field in dataclasses.fields(self)}
        anew = {name: None for name, follows in follow.items() if follows is not None and follows.format in changes}
        return dataclasses.replace(self, **anew | changes)  # type: ignore[arg-type]


_FIELDS = [field.name for field in dataclasses.fields(OptimusConfig)]
CLASSES_BY_FLAG = tuple(sorted(CLASSES, key=lambda traffic: _FIELDS.index(traffic.format_field)))
"""The classes of traffic in the order of their flags, which is that of the paper's techniques."""
