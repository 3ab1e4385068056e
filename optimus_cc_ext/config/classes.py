"""The table of the classes of traffic: what can be chosen for each, and what the package has to know of it.

A class of traffic is one kind of message or collective that can be compressed. Its dataclass of options says what can
be chosen for it; its row in `CLASSES` says what the rest of the package has to know in order to name it, to refuse it,
to report it and to resume it. Whatever loops over classes loops over this table.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Literal

from optimus_cc_ext.compressors.formats import block_format
from optimus_cc_ext.config.options import (
    FRACTION,
    RANK,
    STAGES,
    Follows,
    Options,
    completed,
    flag_of,
    literals_of,
    option,
)
from optimus_cc_ext.errors import FlagError, UnknownName

__all__ = [
    "CLASSES", "DP_GRADIENTS", "EMBEDDING", "PARAM_GATHER", "PIPELINE_BACKWARD", "PIPELINE_FORWARD",
    "CompressedBackpropConfig", "DataParallelCompressionConfig", "FusedEmbeddingSyncConfig", "Need",
    "ParamGatherConfig", "PipelineForwardConfig", "TrafficClass", "class_named",
]  # fmt: skip


@dataclass(frozen=True)
class Need:
    """A fact about the layout without which a class of traffic cannot be compressed."""

    fact: str
    """The field of `Layout`."""

    reason: str
    """The reason that a refusal gives if the fact does not hold."""

    cure: str
    at_least: int = True
    """The smallest value of the field that will do."""

    left_out: str = ""
    """The reason that a preset gives for leaving the class out; empty: no line, since nobody would miss it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TrafficClass:
    """A class of traffic. Rows are compared by identity, so that they are cheap keys."""

    name: str
    """The name in checkpoints, with which the names of the class's fields begin."""

    options: type[Options]
    """The dataclass of the options: a field for each flag of the class."""

    phrase: str
    """The name in sentences."""

    title: str
    """The name in the log's line about errors and times."""

    tag: str
    """The name in the log's line about traffic, and in the tags of event files."""

    collective: str
    """The collective that carries it in vanilla Megatron."""

    group: str
    """The ranks that this collective runs over, with a preposition."""

    needs: tuple[Need, ...]
    """The layouts on which there is something to compress; the first need that does not hold is named."""

    settings: tuple[str, ...] = ()
    """The fields that the state in a checkpoint depends on, beside the format; a class that keeps no state has none."""

    remembers: str = ""
    """The property of the options that says whether the class keeps state in checkpoints."""

    presets: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    """The fields that a preset sets, by the preset's name. A fraction is one of the pipeline's stages, rounded up."""

    @property
    def format_field(self) -> str:
        """The field of the format."""
        return f"{self.name}_format"

    @property
    def format_flag(self) -> str:
        """The flag of the format."""
        return flag_of(self.format_field)

    @property
    def switch(self) -> str:
        """The field that says whether the class is on: a boolean, or else the format itself."""
        return self.name if hasattr(self.options, self.name) else self.format_field

    @property
    def flag(self) -> str:
        """The flag of the switch."""
        return flag_of(self.switch)

    @property
    def fields(self) -> dict[str, "dataclasses.Field[Any]"]:
        """The options by name."""
        return {field.name: field for field in dataclasses.fields(self.options)}  # type: ignore[arg-type]

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats that the class can travel as, dense included."""
        return literals_of(self.fields[self.format_field].type)

    @property
    def block_formats(self) -> tuple[str, ...]:
        """The formats of blocks among them."""
        return tuple(name for name in self.formats if block_format(name) is not None)

    @property
    def default(self) -> str:
        """The format that the switch alone stands for."""
        return str(self.fields[self.format_field].default)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the row by its name, so that it is the same row in every process."""
        return class_named, (self.name,)

    def check_format(self, settings: Mapping[str, Any]) -> None:
        """Raise UnknownName, with the names that are known, if `settings`, by flag, name another format than these."""
        if (named := settings.get(self.format_flag, "dense")) not in self.formats:
            raise UnknownName(f"format for {self.tag}", named, self.formats)


def _two_stages(reason: str) -> Need:
    cure = "Leave it out, or use --pipeline-model-parallel-size 2 or more"
    return Need("stages", reason, cure, at_least=2, left_out="one pipeline stage")


def _two_replicas(what: str, left_out: str = "") -> Need:
    reason = f"there is nothing to compress: with one data-parallel replica no {what}"
    return Need("data_parallel", reason, "Leave it out, or run more replicas", at_least=2, left_out=left_out)


@completed
@dataclass(frozen=True, kw_only=True)
class PipelineForwardConfig(Options):
    """Beyond the paper: activations between pipeline stages in 8 bits."""

    pipeline_forward_format: Literal["dense", "int8", "fp8"] = option(
        "dense", "What the activations that a pipeline stage sends on travel as; not in evaluation."
    )


PIPELINE_FORWARD = TrafficClass(
    name="pipeline_forward", options=PipelineForwardConfig,
    phrase="compressed activations", title="forward", tag="pipeline forward",
    collective="point-to-point", group="between neighbouring stages",
    needs=(_two_stages("there is nothing to compress: with one pipeline stage no activation is sent"),),
    presets={"balanced": {"pipeline_forward_format": "fp8"}},
)  # fmt: skip


@completed
@dataclass(frozen=True, kw_only=True)
class CompressedBackpropConfig(Options):
    """Technique 1, paper sections 5.1 and 5.2: activation gradients between pipeline stages."""

    compressed_backprop: bool = option(
        False, "Compress the activation gradients that a pipeline stage sends back.",
        switched_by="compressed_backprop_format",
    )  # fmt: skip
    compressed_backprop_format: Literal["low-rank", "int8", "int4", "fp8", "dense"] = option(
        "low-rank", "What they travel as; one that is given switches --compressed-backprop on, dense switches it off."
    )
    compressed_backprop_rank: int = option(16, "Rank of their factorisation.", RANK, low_rank_only=True)
    compressed_backprop_messages: Literal["epilogue", "all"] | None = option(
        None, "Which of them; epilogue: those of the receiver's cooldown, which no computation hides.",
        follows=Follows("compressed_backprop_format", low_rank="epilogue", others="all"), said={None: "{} messages"},
    )  # fmt: skip
    compressed_backprop_warmup: float = option(0.0, "Fraction of the iterations that send them dense first.", FRACTION)
    lazy_error_propagation: bool | None = option(
        None, "Add what was left out to the link's next compressed message.",
        follows=Follows("compressed_backprop_format", low_rank=True, others=False),
        said={True: "with lazy error propagation", False: "without lazy error propagation"},
    )  # fmt: skip
    residual_across_iterations: Literal["carry", "drop"] = option(
        "drop", "What becomes of an iteration's last residual. Carried, it meets other weights and other text.",
        low_rank_only=True,
    )  # fmt: skip

    @property
    def backprop_remembers(self) -> bool:
        """Whether something outlives an iteration: block formats leave nothing behind."""
        return self.compressed_backprop and self.compressed_backprop_format == "low-rank"


PIPELINE_BACKWARD = TrafficClass(
    name="compressed_backprop", options=CompressedBackpropConfig,
    phrase="compressed backpropagation", title="CB", tag="pipeline backward",
    collective="point-to-point", group="between neighbouring stages",
    needs=(_two_stages("there is nothing to compress: with one pipeline stage no activation gradient is sent"),),
    settings=("compressed_backprop_rank", "compressed_backprop_messages", "lazy_error_propagation"),
    remembers="backprop_remembers",
    presets={
        "paper": {"compressed_backprop": True},
        "balanced": {"compressed_backprop": True, "compressed_backprop_format": "int8"},
    },
)  # fmt: skip


@completed
@dataclass(frozen=True, kw_only=True)
class DataParallelCompressionConfig(Options):
    """Technique 3, paper section 7: data-parallel gradients, on the first stages or on all."""

    dp_compression: bool = option(False, "Compress data-parallel gradients.", switched_by="dp_compression_format")
    dp_compression_format: Literal["low-rank", "int8", "int4", "dense"] = option(
        "low-rank", "What they travel as; one that is given switches --dp-compression on, dense switches it off."
    )
    dp_compression_rank: int = option(128, "Rank of their factorisation.", RANK, low_rank_only=True)
    dp_compression_warmup: float = option(0.0, "Fraction of the iterations that reduce them dense first.", FRACTION)
    dp_error_feedback: bool | None = option(
        None, "Add what compression left out to the next iteration's gradient.",
        follows=Follows("dp_compression_format", low_rank=True, others=False),
    )  # fmt: skip
    dp_compression_stages: int | Literal["all", "auto"] = option(
        "all",
        "The first N pipeline stages compress; auto: those whose dense reduction holds up the iteration, by what the "
        "first iterations measure.",
        STAGES,
        said={
            "all": "all stages",
            "auto": "the stages where measured times say that it pays",
            1: "the first stage",
            None: "the first {} stages",
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
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


DP_GRADIENTS = TrafficClass(
    name="dp_compression", options=DataParallelCompressionConfig,
    phrase="data-parallel compression", title="SC", tag="DP gradients",
    collective="all-reduce or reduce-scatter", group="among replicas",
    needs=(_two_replicas("gradient is reduced", left_out="one data-parallel replica"),),
    settings=("dp_compression_rank", "dp_compression_stages", "dp_error_feedback"), remembers="gradients_remember",
    presets={
        # The paper compresses data-parallel gradients on the first 75 % of the stages (section 9.1).
        "paper": {"dp_compression": True, "dp_compression_stages": Fraction(3, 4)},
        "balanced": {"dp_compression": True, "dp_compression_format": "int4", "dp_compression_stages": "auto"},
    },
)  # fmt: skip


@completed
@dataclass(frozen=True, kw_only=True)
class FusedEmbeddingSyncConfig(Options):
    """Technique 2, paper section 6: one all-reduce for the tied embedding instead of two."""

    fused_embedding_sync: bool = option(
        False, "Reduce the tied embedding once, over all replicas of its two stages.",
        switched_by="fused_embedding_sync_format",
    )  # fmt: skip
    fused_embedding_sync_format: Literal["dense", "int8", "int4"] = option(
        "dense", "What its gradient travels as; one other than dense switches --fused-embedding-sync on."
    )


EMBEDDING = TrafficClass(
    name="fused_embedding_sync", options=FusedEmbeddingSyncConfig,
    phrase="fused embedding sync", title="FE", tag="embedding",
    collective="two all-reduces", group="among replicas, then between the first and the last stage",
    needs=(
        _two_stages("there is nothing to fuse: with one pipeline stage there is one copy of the embedding"),
        Need(
            "tied_embeddings", "the embeddings are not tied, so the first and the last stage share no weight",
            "Leave it out, or leave out --untie-embeddings-and-output-weights", left_out="the embeddings are not tied",
        ),
    ),
    presets={
        "paper": {"fused_embedding_sync": True},
        "balanced": {"fused_embedding_sync": True, "fused_embedding_sync_format": "int8"},
    },
)  # fmt: skip


@completed
@dataclass(frozen=True, kw_only=True)
class ParamGatherConfig(Options):
    """Beyond the paper: what the distributed optimizer's replicas tell each other after its step."""

    param_gather_format: Literal["dense", "int8", "int4"] = option(
        "dense",
        "What the distributed optimizer gathers parameters as; in int8 and int4 what changed since the last gather.",
    )


PARAM_GATHER = TrafficClass(
    name="param_gather", options=ParamGatherConfig,
    phrase="compressed parameter gather", title="gather", tag="parameter gather",
    collective="all-gather", group="among replicas",
    needs=(
        _two_replicas("parameter is gathered"),
        Need(
            "distributed_optimizer", "there is nothing to compress: only the distributed optimizer gathers parameters",
            "Leave it out, or add --use-distributed-optimizer",
        ),
        Need(
            "master_copies",
            "what a message leaves out has to stay in an fp32 copy that Megatron updates the parameters from",
            "Leave it out, or use --bf16 or --fp16, without --use-precision-aware-optimizer",
            left_out="no fp32 copies of parameters",
        ),
    ),
    presets={"balanced": {"param_gather_format": "int4"}},
)  # fmt: skip


CLASSES = (PIPELINE_FORWARD, PIPELINE_BACKWARD, DP_GRADIENTS, EMBEDDING, PARAM_GATHER)
"""All classes of traffic, in the order in which an iteration sends them, which is that of the log."""


def class_named(name: str) -> TrafficClass:
    """Return the class of traffic of this name.

    Raises:
        UnknownName: there is none; the message lists those that there are.
    """
    found = {traffic.name: traffic for traffic in CLASSES}
    if name not in found:
        raise UnknownName("class of traffic", name, found)
    return found[name]
