"""`OptimusConfig`: the options of all classes of traffic, and the options that concern every class."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from optimus_cc_ext.compressors.formats import block_format
from optimus_cc_ext.config import classes
from optimus_cc_ext.config.classes import ClassOptions, TrafficClass
from optimus_cc_ext.config.options import Values, completed, flag_of, option
from optimus_cc_ext.errors import FlagError

MOST_COPIES = 0.85
"""The largest share of a plain all-to-all's copies at which tokens go once a node by themselves."""


@completed
@dataclass(frozen=True, kw_only=True)
class OptimusConfig(ClassOptions):
    """The configuration that `optimus_cc_ext.compress` takes.

    Raises:
        FlagError: a field is out of range; the message names the command-line flag of that field.
    """

    compression_seed: int = option(
        1234, "Seed of compression's own random generators.", Values("S"), shown_default="Megatron's --seed"
    )
    expert_exchange: Literal["auto", "direct", "once-a-node"] = option(
        "auto",
        "Way of experts' tokens: direct sends a copy for each expert, as Megatron does; once-a-node sends a token once "
        "to each node, and adds a node's results up there, in any format, dense too. auto does so where tokens "
        "are compressed, an expert group has as many ranks on each of its nodes, two or more, and at most "
        f"{MOST_COPIES} of the copies are then sent.",
    )
    compression_state_dtype: Literal["fp32", "bf16"] = option(
        "fp32", "Data type of the compression state, residuals and low-rank factors; bf16 halves its memory."
    )
    block_rotation: bool = option(
        True,
        "Rotate blocks by a random-sign Hadamard transform before rounding to int8 or int4, so that one outlier costs "
        "the other values of its block less precision.",
    )
    message_memory: int = option(
        256,
        "MB of messages of gradients and parameters that a rank has under way at once; larger buckets are sent in "
        "slices.",
        Values("MB", lambda size: size >= 1, "messages in {} MB are none", "Give a whole number of at least 1"),
    )
    compression_metrics: bool = option(
        True, "Log the bytes of each class of traffic, and the errors, residual norms and times of compression."
    )
    compression_forecast: bool = option(
        True, "No effect: --compression-trial measures compression in the run, and `optimus-cc plan` forecasts it."
    )
    compression_trial: bool = option(
        True,
        "Try a preset of block formats in the run: the first iterations go dense and compressed by turns, and the "
        "faster way stays. Formats that were asked for one by one stay in any case.",
    )
    compression_error_statistics: bool = option(
        False, "Log how compression errors relate to activation differences (the paper's figure 11)."
    )
    require_triton: bool = option(
        False,
        "End the run where Triton's kernels are not available, instead of compressing with torch, which is slower.",
    )
    # A preset lists here, separated by commas, the classes that it compresses only if their traffic leaves a node.
    only_between_nodes: str = option("", None)
    # The preset that lists them.
    chosen_preset: str = option("", None)
    # For tests: compress low-rank even where it saves no bytes; block formats without rounding error.
    _force_compression: bool = option(False, None)
    _exact_blocks: bool = option(False, None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compression_error_statistics and not (
            self.remembers(classes.PIPELINE_BACKWARD) and self.compression_metrics
        ):
            raise FlagError(
                "--compression-error-statistics",
                "it describes low-rank errors of --compressed-backprop, and --compression-metrics logs them",
                "Switch on --compressed-backprop and --compression-metrics, or leave it out",
            )

    def is_on(self, traffic: TrafficClass) -> bool:
        """Return True if a class of traffic is sent in another form than vanilla Megatron's."""
        return self.format_of(traffic) != "dense" or getattr(self, traffic.name, False) or self.goes_once(traffic)

    def goes_once(self, traffic: TrafficClass) -> bool:
        """Return True if a flag of its own sends the class once a node, in any format."""
        return traffic.among == "experts" and self.expert_exchange == "once-a-node"

    def flag_of(self, traffic: TrafficClass) -> str:
        """Return the flag that switches a class of traffic on in this configuration."""
        dense = self.format_of(traffic) == "dense"
        return flag_of("expert_exchange") if dense and self.goes_once(traffic) else traffic.flag

    def format_of(self, traffic: TrafficClass) -> str:
        """Return the wire format of a class of traffic."""
        return getattr(self, traffic.format_field)  # type: ignore[no-any-return]

    @property
    def sums_in_blocks(self) -> bool:
        """True if gradients of replicas, or of the tied embedding, are sent in blocks of few bits."""
        return any(map(block_format, (self.format_of(classes.DP_GRADIENTS), self.format_of(classes.EMBEDDING))))

    def is_dense_inside(self, traffic: TrafficClass) -> bool:
        """Return True if a class of traffic is compressed only where it leaves a node."""
        return self.only_by_preset(traffic) and not self._force_compression

    def only_by_preset(self, traffic: TrafficClass) -> bool:
        """Return True if a preset alone asks for a class of traffic, which is then also on trial."""
        return traffic.name in self.only_between_nodes.split(",") and self.is_on(traffic)

    def remembers(self, traffic: TrafficClass) -> bool:
        """Return True if a class of traffic keeps state in checkpoints; formats other than low-rank keep none."""
        return self.format_of(traffic) == "low-rank"

    @cached_property
    def any_technique(self) -> bool:
        """True if any class of traffic is sent in another form than vanilla Megatron's."""
        return any(map(self.is_on, classes.CLASSES))

    def replace(self, **changes: Any) -> "OptimusConfig":
        """Return a validated copy with some fields changed. A changed format also resets the fields that follow from
        it.
        """
        follow = {field.name: field.metadata["follows"] for field in dataclasses.fields(self)}
        anew = {name: None for name, follows in follow.items() if follows is not None and follows.format in changes}
        return dataclasses.replace(self, **anew | changes)
