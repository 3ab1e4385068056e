"""What is trained: models whose traffic has a large model's proportions, layouts, and the variants to compare."""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from optimus_cc_ext.config import OptimusConfig, presets
from optimus_cc_ext.data import PreparedData

VANILLA = "vanilla"
BOUND = "bound of "
"""A variant, in the name of vanilla's run on links that are faster by as much as the variant's bytes are fewer."""

_LAYOUT = re.compile(r"(?:tp(?P<tp>[1-9]\d*))?pp(?P<pp>[1-9]\d*)dp(?P<dp>[1-9]\d*)(?P<zero>z1)?")
_PAPERS_SHARE_OF_STAGES = 0.75
_SCHEDULE_ITERATIONS = 200
"""Of the learning rate: runs differ in length, and their losses should not by that."""


@dataclass(frozen=True, order=True)
class Layout:
    """How the ranks are arranged. The tensor-parallel ranks of one stage and replica share a host and its loopback."""

    tensor: int
    stages: int
    replicas: int
    sharded: bool = False
    """Whether Megatron's distributed optimizer shards the gradients, and parameters are in bf16, as it is used."""

    @property
    def hosts(self) -> int:
        """One for each stage of each replica."""
        return self.stages * self.replicas

    def __str__(self) -> str:
        tensor = f"tp{self.tensor}" if self.tensor > 1 else ""
        return f"{tensor}pp{self.stages}dp{self.replicas}{'z1' if self.sharded else ''}"


def parse_layout(text: str) -> Layout:
    """Read a layout such as pp2dp2, tp2pp4dp2, or pp2dp2z1 with the distributed optimizer and bf16.

    Raises:
        ValueError: not a layout, or one whose single host has nobody to talk to.
    """
    match = _LAYOUT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a layout. Give [tpT]ppPdpD[z1], such as pp4dp2 or tp2pp2dp2")
    layout = Layout(int(match["tp"] or 1), int(match["pp"]), int(match["dp"]), bool(match["zero"]))
    if layout.hosts < 2:
        raise ValueError(f"{text!r}: a single host has no links. Give at least two stages or two replicas")
    return layout


@dataclass(frozen=True)
class Model:
    """A GPT with tied embeddings, and its batch. Layers are given per stage, so that depth follows the layout."""

    layers_per_stage: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    """Tokens of the tokenizer; Megatron pads to a multiple of 128 for each tensor-parallel rank."""

    micro_batch: int
    """Sequences in a micro-batch."""

    micro_batches: int
    """Micro-batches of each replica in an iteration."""


# The micro-batches are chosen so that DP gradients are 8 times the forward activations: see `proportions`.
MODELS: Mapping[str, Model] = {
    "tiny": Model(1, hidden=64, heads=2, sequence=64, vocabulary=512, micro_batch=2, micro_batches=4),
    "small": Model(4, hidden=256, heads=4, sequence=128, vocabulary=1024, micro_batch=1, micro_batches=12),
    "deep": Model(8, hidden=256, heads=4, sequence=128, vocabulary=1024, micro_batch=4, micro_batches=6),
    "wide": Model(4, hidden=384, heads=6, sequence=128, vocabulary=1536, micro_batch=3, micro_batches=6),
}


@dataclass(frozen=True)
class Proportions:
    """Values that one rank has to send in an iteration, by what they are, without compression."""

    dp: float
    """Gradients of a stage's layers, ring all-reduce over the replicas."""

    forward: float
    """Activations to the next stage; their gradients to the stage before are as many."""

    embedding: float
    """One copy of the tied embedding, this rank's part."""

    embedding_share: float
    """The same over what a stage's layers hold."""

    @property
    def dp_to_forward(self) -> float:
        """How many times the pipeline's forward traffic the gradients are; NaN without a pipeline."""
        return self.dp / self.forward if self.forward else math.nan

    def __str__(self) -> str:
        return (
            f"{self.dp / 1e6:.3g} M values of gradients, {self.forward / 1e6:.3g} M forward and as many backward,"
            f" DP {self.dp_to_forward:.1f} times forward, embedding {self.embedding_share:.1%} of a stage's layers"
        )


PAPER = Proportions(dp=390e6, forward=50e6, embedding=20e6, embedding_share=20 / 255)
"""The 8.3B model at TP8 PP4 DP4 (arXiv 2301.09830), where the tensor-parallel ranks share the work of sending an
activation. 18 layers of a stage are 255 M values a rank, and a ring over 4 replicas sends 1.5 times that."""


def proportions(model: Model, layout: Layout) -> Proportions:
    """What a rank of a middle stage sends for 12 hidden^2 values in each layer, and its activations, which every
    tensor-parallel rank sends whole without sequence parallelism."""
    layers = 12 * model.hidden**2 * model.layers_per_stage / layout.tensor
    tokens = model.sequence * model.micro_batch * model.micro_batches
    embedding = model.vocabulary * model.hidden / layout.tensor
    forward = float(tokens * model.hidden) if layout.stages > 1 else 0.0
    return Proportions(layers * 2 * (layout.replicas - 1) / layout.replicas, forward, embedding, embedding / layers)


def compression_ranks(model: Model) -> tuple[int, int]:
    """(CB's, SC's) in the paper's ratios to the hidden size: 16 and 128 of 3072, rounded up."""
    return math.ceil(model.hidden / 192), math.ceil(model.hidden / 24)


VARIANTS: Mapping[str, str] = {
    VANILLA: "",
    "cb": "--compressed-backprop",
    "fe": "--fused-embedding-sync",
    "sc": "--dp-compression --dp-compression-stages {papers_stages}",
    "paper": "--optimus-cc",
    "all": "--optimus-cc --dp-compression-stages all",
    "auto": "--optimus-cc --dp-compression-stages auto",
    "cb-all": "--optimus-cc --compressed-backprop-messages all --dp-compression-stages auto",
    "everything": "--optimus-cc --compressed-backprop-messages all --dp-compression-stages all",
    "blocks": "--pipeline-forward-format fp8 --compressed-backprop-format int8 --dp-compression-format int4 "
    "--fused-embedding-sync-format int8 --param-gather-format int4",
    "dense-gather": "--pipeline-forward-format fp8 --compressed-backprop-format int8 --dp-compression-format int4 "
    "--fused-embedding-sync-format int8",
    "fewest": "--pipeline-forward-format fp8 --compressed-backprop --compressed-backprop-messages all "
    "--dp-compression --fused-embedding-sync-format int4",
    "dp-int4": "--dp-compression-format int4 --fused-embedding-sync",
    "dp-low-rank": "--dp-compression --fused-embedding-sync",
}
"""Name to flags; ranks are added. Those of a class that the layout does not have are left out."""


def variant_flags(variant: str, layout: Layout, ranks: tuple[int, int], further: Sequence[str] = ()) -> list[str]:
    """Our flags of one variant: none for vanilla, whose traffic is still counted; `further` come last and win."""
    if variant == VANILLA:
        return []
    techniques = VARIANTS[variant].format(papers_stages=math.ceil(_PAPERS_SHARE_OF_STAGES * layout.stages))
    known = {
        "--compressed-backprop": (layout.stages > 1, ranks[0]),
        "--dp-compression": (layout.replicas > 1, ranks[1]),
    }
    for flag, (exists, rank) in known.items():
        # A rank means nothing to another format.
        techniques += f" {flag}-rank {rank}" if f"{flag}-format" not in techniques else ""
        if not exists:
            techniques = re.sub(rf"{flag}(-format \w+)?(?= |$)", "", techniques)
    if not layout.sharded:
        techniques = re.sub(r" --param-gather-format \w+", "", techniques)
    if layout.stages == 1:
        techniques = re.sub(r"--(pipeline-forward|fused-embedding-sync)(-format \w+)?(?= |$)", "", techniques)
    return [*techniques.split(), *further]


def config_of(flags: Sequence[str], layout: Layout) -> OptimusConfig:
    """What the package makes of a variant's flags on this layout."""
    place = presets.Layout(
        stages=layout.stages, data_parallel=layout.replicas, tied_embeddings=True, train_iters=1,
        distributed_optimizer=layout.sharded, master_copies=layout.sharded,
    )  # fmt: skip
    return presets.config_of(flags, place, ignore_others=True)


def chooses_by_the_links(flags: Sequence[str], layout: Layout) -> bool:
    """Whether a variant measures at its start which stages it compresses."""
    config = config_of(flags, layout)
    return config.dp_compression and config.dp_compression_stages == "auto"


def megatron_flags(model: Model, layout: Layout, data: PreparedData, *, iterations: int, seed: int) -> list[str]:
    """The flags that all variants share. No dropout: what differs between the losses is the compression.

    Weights begin with a deviation of hidden^-1/2, which is Megatron's 0.02 at a hidden size of 2500: at 0.02 a model as
    narrow as these has residual streams that pass by zero early on, where a layer norm's gradient has no bound, and
    single iterations with fifty times the gradient hide what compression does.
    """
    flags = f"""
        --tensor-model-parallel-size {layout.tensor} --pipeline-model-parallel-size {layout.stages}
        --num-layers {model.layers_per_stage * layout.stages}
        --hidden-size {model.hidden} --num-attention-heads {model.heads}
        --seq-length {model.sequence} --max-position-embeddings {model.sequence}
        --hidden-dropout 0 --attention-dropout 0
        --micro-batch-size {model.micro_batch}
        --global-batch-size {model.micro_batch * model.micro_batches * layout.replicas}
        --train-iters {iterations} --seed {seed} --lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine
        --lr-decay-iters {_SCHEDULE_ITERATIONS} --lr-warmup-fraction 0.1
        --init-method-std {model.hidden**-0.5:.4f} --adam-beta2 0.95 --weight-decay 0.01 --clip-grad 1.0
        --eval-interval {iterations} --eval-iters 0 --split 90,10,0 --num-workers 0
        --tokenizer-type HuggingFaceTokenizer --log-interval 1 --timing-log-level 0
        {"--use-distributed-optimizer --bf16" if layout.sharded else ""}
    """
    paths = {
        "--data-path": data.data_prefix,
        "--tokenizer-model": data.tokenizer_dir,
        # Which sequence comes when: part of the prepared data, and replaced with it.
        "--data-cache-path": data.data_prefix.parent / "cache",
    }
    return shlex.split(flags) + [word for flag, path in paths.items() for word in (flag, str(path))]
