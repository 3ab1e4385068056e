"""The table of the classes of traffic: the options of each class, and the facts that the package needs about it.

A class of traffic is one kind of message or collective that can be compressed. Its dataclass of options has a field for
each flag; its row in `CLASSES` has the names, needs and settings by which the package refuses, reports and resumes it.
All code that loops over classes loops over this table.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Literal

from optimus_cc_ext.compressors.formats import BLOCK, block_format
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


@dataclass(frozen=True)
class Need:
    """A fact about the layout without which a class of traffic cannot be compressed."""

    fact: str
    """The name of the field of `Layout`."""

    reason: str
    """The reason in the refusal if the need is not met."""

    cure: str
    at_least: int = True
    """The smallest value of the field that meets the need."""

    left_out: str = ""
    """The reason that a preset gives for leaving the class out; empty: no line, because the layout has no such traffic.
    """


@dataclass(frozen=True, eq=False, kw_only=True)
class TrafficClass:
    """A class of traffic. Rows compare by identity, so that they are cheap dictionary keys."""

    name: str
    """The name in checkpoints; the names of the class's fields begin with it. If it is the name of a field itself, that
    switches the class on beside its format: dense is then a technique, too.
    """

    options: type[Options]
    """The dataclass of the class's options, one field for each flag."""

    tag: str
    """The name in the log, in messages and in the tags of event files."""

    collective: str
    """The collective that vanilla Megatron uses for this traffic."""

    group: str
    """Words for the ranks of the collective, with a preposition, such as "over the replicas"."""

    among: str
    """The ranks of one collective or message: the stages of a `pipeline`, `replicas`, the `owners` of shards, the
    `ends` of a pipeline with their replicas, or the ranks of `experts`.
    """

    needs: tuple[Need, ...]
    """The needs of the class, in the order in which a refusal checks them."""

    settings: tuple[str, ...] = ()
    """The fields that the checkpointed state depends on, besides the format; empty for a class without state."""

    switch: str = ""
    """The help of the flag of the class's own name, which alone stands for the format low-rank; empty: there is none.
    """

    presets: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    """The fields that each preset sets, by the preset's name. A fraction means that share of the pipeline stages,
    rounded up.
    """

    @property
    def format_field(self) -> str:
        """The name of the field that holds the wire format."""
        return f"{self.name}_format"

    @property
    def format_flag(self) -> str:
        """The flag of the wire format."""
        return flag_of(self.format_field)

    @property
    def flag(self) -> str:
        """The flag that switches the class on: its own name's, or that of the format."""
        return flag_of(self.name) if self.switch or self.name in self.fields else self.format_flag

    @property
    def off(self) -> str:
        """The words of a command line that leave the class as vanilla Megatron sends it, beside a preset, too."""
        return flag_of(f"no_{self.name}") if self.name in self.fields else f"{self.format_flag} dense"

    @property
    def fields(self) -> dict[str, "dataclasses.Field[Any]"]:
        """The option fields of the class, by name."""
        return {field.name: field for field in dataclasses.fields(self.options)}  # type: ignore[arg-type]

    @property
    def formats(self) -> tuple[str, ...]:
        """The wire formats that the class supports, dense included."""
        return literals_of(self.fields[self.format_field].type)

    @property
    def block_formats(self) -> tuple[str, ...]:
        """The block formats among the class's wire formats."""
        return tuple(name for name in self.formats if block_format(name) is not None)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the row by its name, so that unpickling gives the same object in every process."""
        return class_named, (self.name,)

    def check_format(self, settings: Mapping[str, Any]) -> None:
        """Raise UnknownName, with the known formats, if `settings` (by flag) has a format that this class does not
        support.
        """
        if (named := settings.get(self.format_flag, "dense")) not in self.formats:
            raise UnknownName(f"format for {self.tag}", named, self.formats)


def _two_stages(reason: str) -> Need:
    cure = "Leave it out, or use --pipeline-model-parallel-size 2 or more"
    return Need("stages", reason, cure, at_least=2, left_out="one pipeline stage")


def _two_replicas(transfer: str, left_out: str = "") -> Need:
    reason = f"there is nothing to compress: with one data-parallel replica no {transfer}"
    return Need("data_parallel", reason, "Leave it out, or run more replicas", at_least=2, left_out=left_out)


@completed
@dataclass(frozen=True, kw_only=True)
class PipelineForwardConfig(Options):
    """Options of activations between pipeline stages; 8-bit formats, not in the paper."""

    pipeline_forward_format: Literal["dense", "int8"] = option(
        "dense", "Wire format of the activations sent to the next pipeline stage, in training only."
    )


PIPELINE_FORWARD = TrafficClass(
    name="pipeline_forward", options=PipelineForwardConfig,
    tag="pipeline forward", collective="point-to-point", group="between neighbouring stages", among="pipeline",
    needs=(_two_stages("there is nothing to compress: with one pipeline stage no activation is sent"),),
    presets={"balanced": {"pipeline_forward_format": "int8"}},
)  # fmt: skip


@completed
@dataclass(frozen=True, kw_only=True)
class CompressedBackpropConfig(Options):
    """Options of activation gradients between pipeline stages: technique 1, paper sections 5.1 and 5.2."""

    compressed_backprop_format: Literal["low-rank", "int8", "int4", "dense"] = option(
        "dense", "Wire format of activation gradients between pipeline stages; each but dense compresses them."
    )
    compressed_backprop_rank: int = option(
        16, "Rank of the low-rank approximation of activation gradients.", RANK, low_rank_only=True
    )
    compressed_backprop_messages: Literal["epilogue", "all"] | None = option(
        None,
        "Activation gradients to compress: all, or only those that arrive in the receiver's 1F1B cooldown (epilogue), "
        "where no computation hides them.",
        follows=Follows("compressed_backprop_format", low_rank="epilogue", others="all"), said={None: "{} messages"},
    )  # fmt: skip
    compressed_backprop_warmup: float = option(
        0.0, "Fraction of the training iterations, at the start, that send activation gradients dense.", FRACTION
    )
    lazy_error_propagation: bool | None = option(
        None, "Add the compression error of an activation gradient to the next compressed message of the same link.",
        follows=Follows("compressed_backprop_format", low_rank=True, others=False),
        said={True: "with lazy error propagation", False: "without lazy error propagation"},
    )  # fmt: skip
    residual_across_iterations: Literal["carry", "drop"] = option(
        "drop",
        "Treatment of an iteration's last residual: drop it, or carry it into the next iteration, where weights and "
        "training data are different.",
        low_rank_only=True,
    )  # fmt: skip


PIPELINE_BACKWARD = TrafficClass(
    name="compressed_backprop", options=CompressedBackpropConfig,
    tag="pipeline backward", collective="point-to-point", group="between neighbouring stages", among="pipeline",
    needs=(_two_stages("there is nothing to compress: with one pipeline stage no activation gradient is sent"),),
    settings=("compressed_backprop_rank", "compressed_backprop_messages", "lazy_error_propagation"),
    switch="Compress the activation gradients sent to the previous pipeline stage, low-rank unless "
    "--compressed-backprop-format or a preset names another format.",
    presets={
        "paper": {"compressed_backprop_format": "low-rank"}, "balanced": {"compressed_backprop_format": "int8"}
    },
)  # fmt: skip


@completed
@dataclass(frozen=True, kw_only=True)
class DataParallelCompressionConfig(Options):
    """Options of data-parallel gradients, on the first stages or on all: technique 3, paper section 7."""

    dp_compression_format: Literal["low-rank", "int8", "int4", "dense"] = option(
        "dense", "Wire format of data-parallel gradients; each but dense compresses them."
    )
    dp_compression_rank: int = option(
        128, "Rank of the low-rank approximation of data-parallel gradients.", RANK, low_rank_only=True
    )
    dp_compression_warmup: float = option(
        0.0, "Fraction of the training iterations, at the start, that reduce gradients dense.", FRACTION
    )
    dp_error_feedback: bool | None = option(
        None, "Add the compression error of a data-parallel gradient to the next iteration's gradient.",
        follows=Follows("dp_compression_format", low_rank=True, others=False),
    )  # fmt: skip
    dp_compression_stages: int | Literal["all", "auto"] = option(
        "all",
        "Pipeline stages that compress data-parallel gradients: all, the first N, or auto, which is all stages if the "
        "trial of the first iterations (--compression-trial) says that they save time.",
        STAGES,
        said={
            "all": "all stages",
            "auto": "all stages, on trial",
            1: "the first stage",
            None: "the first {} stages",
        },
    )
    dp_compression_levels: Literal["auto", "one", "two"] = option(
        "auto",
        "Levels in which replicas add up their gradients in formats of 8 or 4 bits. two adds up inside a node without "
        "compression, and sends only the sum of a node to other nodes, compressed. one compresses what every replica "
        "sends to every other. auto is two where each node holds equally many replicas, at least two, else one.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dp_compression_stages == "auto" and self.dp_compression_format == "low-rank":
            reason = "a trial has dense iterations, over which low rank would not carry its residuals"
            raise FlagError("--dp-compression-stages", reason, "Give all or N; `optimus-cc plan` says which")
        if self.dp_error_feedback and self.dp_compression_format not in ("dense", "low-rank"):
            raise FlagError(
                "--dp-error-feedback",
                f"the rounding errors of {self.dp_compression_format} average out without feedback; feeding them back "
                "cost 0.09 % more loss with int4 (docs/lab/study-prototypes.md), and as much memory as the gradients",
                "Leave it out, or use --dp-compression-format low-rank",
            )


DP_GRADIENTS = TrafficClass(
    name="dp_compression", options=DataParallelCompressionConfig,
    tag="DP gradients", collective="all-reduce or reduce-scatter", group="among replicas", among="replicas",
    needs=(_two_replicas("gradient is reduced", left_out="one data-parallel replica"),),
    settings=("dp_compression_rank", "dp_compression_stages", "dp_error_feedback"),
    switch="Compress the gradients that data-parallel replicas reduce, low-rank unless --dp-compression-format or a "
    "preset names another format.",
    presets={
        # The paper compresses data-parallel gradients on the first 75 % of the stages (section 9.1).
        "paper": {"dp_compression_format": "low-rank", "dp_compression_stages": Fraction(3, 4)},
        "balanced": {"dp_compression_format": "int8"},
    },
)  # fmt: skip


@completed
@dataclass(frozen=True, kw_only=True)
class FusedEmbeddingSyncConfig(Options):
    """Options of the tied embedding's gradient, reduced once instead of twice: technique 2, paper section 6."""

    fused_embedding_sync: bool = option(
        False, "Reduce the tied embedding's gradient in one all-reduce over all replicas of the first and last stage.",
        said={None: "in one reduction"},
    )  # fmt: skip
    fused_embedding_sync_format: Literal["dense", "int8", "int4"] = option(
        "dense",
        "Wire format of the tied embedding's gradient. A format other than dense also switches --fused-embedding-sync "
        "on.",
    )


_THIRD_COPY = "multi-token prediction on a stage of its own keeps a third copy of the embedding"
EMBEDDING = TrafficClass(
    name="fused_embedding_sync", options=FusedEmbeddingSyncConfig,
    tag="embedding",
    collective="two all-reduces", group="among replicas, then between the first and the last stage", among="ends",
    needs=(
        _two_stages("there is nothing to fuse: with one pipeline stage there is one copy of the embedding"),
        Need(
            "tied_embeddings", "the embeddings are not tied, so the first and the last stage share no weight",
            "Leave it out, or leave out --untie-embeddings-and-output-weights", left_out="the embeddings are not tied",
        ),
        Need(
            "one_pair", f"{_THIRD_COPY}, and fused embedding sync knows two",
            "Leave it out, or leave the MTP layers on the last stage",
            left_out=f"{_THIRD_COPY} (--pipeline-model-parallel-layout)",
        ),
    ),
    presets={
        "paper": {"fused_embedding_sync": True},
        "balanced": {"fused_embedding_sync": True, "fused_embedding_sync_format": "int8"},
        "exact": {"fused_embedding_sync": True},
    },
)  # fmt: skip


@completed
@dataclass(frozen=True, kw_only=True)
class ParamGatherConfig(Options):
    """Options of the all-gather of parameters after the distributed optimizer's step; not in the paper."""

    param_gather_format: Literal["dense", "exact", "int8", "int4"] = option(
        "dense",
        "Wire format of the parameters that the distributed optimizer gathers. int8 and int4 send the change of each "
        "parameter since the last gather; exact sends it to the bit, in 2 to 4 bits a value.",
    )


PARAM_GATHER = TrafficClass(
    name="param_gather", options=ParamGatherConfig,
    tag="parameter gather", collective="all-gather", group="among replicas", among="owners",
    needs=(
        _two_replicas("parameter is gathered"),
        Need(
            "distributed_optimizer", "there is nothing to compress: only the distributed optimizer gathers parameters",
            "Leave it out, or add --use-distributed-optimizer",
        ),
        Need(
            "master_copies",
            "without an fp32 copy of the parameters their change is unknown, and Megatron keeps none here",
            "Leave it out, or use --bf16 or --fp16, without --use-precision-aware-optimizer",
            left_out="no fp32 copies of parameters",
        ),
    ),
    presets={name: {"param_gather_format": "exact"} for name in ("balanced", "exact")},
)  # fmt: skip


@completed
@dataclass(frozen=True, kw_only=True)
class ExpertDispatchConfig(Options):
    """Options of the tokens that experts' ranks exchange in the forward pass; not in the paper."""

    expert_dispatch_format: Literal["dense", "int8", "int4"] = option(
        "dense", "Wire format of tokens on their way to other ranks' experts and back, in training only."
    )


@completed
@dataclass(frozen=True, kw_only=True)
class ExpertGradientConfig(Options):
    """Options of the tokens' gradients that experts' ranks exchange in the backward pass; not in the paper."""

    expert_gradient_format: Literal["dense", "int8", "int4"] = option(
        "dense", "Wire format of the gradients of tokens on their way to other ranks' experts and back."
    )


_EXCHANGED = (
    Need(
        "expert_parallel", "there is nothing to compress: without experts on several ranks no token is sent",
        "Leave it out, or give --num-experts and --expert-model-parallel-size 2 or more", at_least=2,
    ),
    Need(
        "row_width",
        f"a token's values (--moe-latent-size, or else --hidden-size) do not divide into blocks of {BLOCK}",
        f"Leave it out, or use a multiple of {BLOCK}",
        left_out=f"a token's values do not divide into blocks of {BLOCK}",
    ),
)  # fmt: skip

EXPERT_DISPATCH = TrafficClass(
    name="expert_dispatch", options=ExpertDispatchConfig,
    tag="expert dispatch", collective="all-to-all", group="among expert-parallel ranks", among="experts",
    needs=_EXCHANGED,
)  # fmt: skip

EXPERT_GRADIENT = TrafficClass(
    name="expert_gradient", options=ExpertGradientConfig,
    tag="expert gradient", collective="all-to-all", group="among expert-parallel ranks", among="experts",
    needs=_EXCHANGED,
    presets={"balanced": {"expert_gradient_format": "int8"}},
)  # fmt: skip


CLASSES = (
    PIPELINE_FORWARD, PIPELINE_BACKWARD, EMBEDDING, DP_GRADIENTS, PARAM_GATHER, EXPERT_DISPATCH, EXPERT_GRADIENT
)  # fmt: skip
"""All classes of traffic, in the one order of flags, log and documents."""


def classes_among(*kinds: str) -> tuple[TrafficClass, ...]:
    """Return the classes of traffic among these kinds of ranks (`TrafficClass.among`)."""
    return tuple(traffic for traffic in CLASSES if traffic.among in kinds)


@dataclass(frozen=True, kw_only=True)
class ClassOptions(
    ExpertGradientConfig, ExpertDispatchConfig, ParamGatherConfig, DataParallelCompressionConfig,
    FusedEmbeddingSyncConfig, CompressedBackpropConfig, PipelineForwardConfig,
):  # fmt: skip
    """The options of all classes of traffic, whose flags come in the reverse order of these bases."""


def class_named(name: str) -> TrafficClass:
    """Return the class of traffic of this name.

    Raises:
        UnknownName: there is none; the message lists the known names.
    """
    found = {traffic.name: traffic for traffic in CLASSES}
    if name not in found:
        raise UnknownName("class of traffic", name, found)
    return found[name]
