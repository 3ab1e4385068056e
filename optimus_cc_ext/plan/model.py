"""A model and its layout, read from a Megatron command line; contains sizes only, nothing measured.

Flags that concern neither the size of the model nor its layout do not change a plan.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

from optimus_cc_ext.plan import PlanError

__all__ = ["MODELS", "Job", "Model", "job_of", "layout_flags"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of a GPT, in numbers of values."""

    layers: int
    hidden: int
    heads: int
    sequence: int = 2048
    vocabulary: int = 51200
    """Size of the padded vocabulary, as Megatron pads it."""

    ffn: int = 0
    """Hidden size of the MLP; 0: four times `hidden`."""

    groups: int = 0
    """Number of key and value heads; 0: as many as `heads`."""

    gated: bool = False
    """True for SwiGLU, whose MLP has three matrices."""

    tied: bool = True

    @property
    def layer_matrices(self) -> tuple[tuple[int, int], ...]:
        """The (inputs, outputs) of QKV, projection and the two MLP matrices, before tensor parallelism."""
        hidden, inner = self.hidden, self.ffn or 4 * self.hidden
        qkv = hidden + 2 * hidden * (self.groups or self.heads) // self.heads
        return (hidden, qkv), (hidden, hidden), (hidden, inner * (2 if self.gated else 1)), (inner, hidden)

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of one layer, biases and norms included."""
        return 4 * self.hidden + sum((inputs + 1) * outputs for inputs, outputs in self.layer_matrices)

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters of the token embedding."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model, without position embeddings."""
        return self.layers * self.layer_parameters + self.embedding_parameters * (1 if self.tied else 2)


MODELS = {
    "2.5b": Model(layers=52, hidden=1920, heads=20, sequence=1024, vocabulary=51200),
    "8.3b": Model(layers=72, hidden=3072, heads=24, sequence=1024, vocabulary=51200),
    "18b": Model(layers=40, hidden=6144, heads=48),
    "39b": Model(layers=48, hidden=8192, heads=64),
    "76b": Model(layers=60, hidden=10240, heads=80),
    "175b": Model(layers=96, hidden=12288, heads=96),
    "530b": Model(layers=105, hidden=20480, heads=128),
    "1t": Model(layers=128, hidden=25600, heads=160),
}
"""The paper's two models (section 9) and those of Narayanan et al. 2021 (table 1)."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model on `gpus` GPUs. Ranks are numbered in Megatron's order: tensor, then data, then pipeline parallelism."""

    model: Model
    gpus: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    """Number of model chunks per stage."""

    micro_batch: int = 1
    batch: int
    recompute: Literal["none", "sel", "full"] = "none"
    sequence_parallel: bool = False
    precision: Literal["fp32", "fp16", "bf16", "fp8"] = "bf16"
    flash: bool = True
    """True for fused attention, which keeps no matrix of scores in memory and skips the causal half."""

    tp_overlap: bool = False
    """True if tensor-parallel transfers overlap with the GEMMs next to them (`--tp-comm-overlap`)."""

    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    distributed_optimizer: bool = False
    gradient_bytes: int = 4
    """Bytes of one value in the gradient buffer; Megatron uses fp32 by default."""

    accumulation: Literal["fused", "added", "cast"] = "fused"
    """The way in which a micro-batch's gradient gets into the buffer: `fused`, added by the GEMM itself; `added`, by a
    kernel of its own (`--no-gradient-accumulation-fusion`); `cast`, by a kernel that casts and another that adds.
    """

    pipeline_before_data: bool = False
    """True if ranks are numbered tensor, pipeline, data (`--use-tp-pp-dp-mapping`), so that a node holds whole
    pipelines.
    """

    scatter_gather: bool = False
    """True if each tensor-parallel rank sends only its share of a message between stages. Older Megatrons do so
    (Narayanan et al. 2021, section 4.1); newer ones only with sequence parallelism.
    """

    @property
    def replica_stride(self) -> int:
        """The distance between the ranks of two neighbouring replicas of a stage."""
        return self.tp * (self.pp if self.pipeline_before_data else 1)

    def hop_crosses(self, stage: int, ranks_per_node: int) -> bool:
        """Return True if a stage's message to the next stage leaves a node; the last stage sends to the first one."""
        after = (stage + 1) % self.pp
        if self.gpus <= ranks_per_node:
            return False
        if not self.pipeline_before_data:
            ranks = self.gpus // self.pp
            return (stage * ranks) // ranks_per_node != (after * ranks) // ranks_per_node or ranks >= ranks_per_node
        # Pipelines begin at multiples of their length. After as many pipelines as a node has ranks, their positions on
        # nodes repeat.
        length = self.tp * self.pp
        firsts = range(0, min(self.gpus, length * ranks_per_node), length)
        places = ((first + stage * self.tp, first + after * self.tp) for first in firsts)
        return any(a // ranks_per_node != b // ranks_per_node for a, b in places)

    def senders(self, ranks_per_node: int) -> int:
        """Return the number of ranks of a node that send to the next stage over the network at the same time."""
        return min(self.tp if self.pipeline_before_data else self.gpus // self.pp, ranks_per_node)

    def __post_init__(self) -> None:
        for name in ("gpus", "tp", "pp", "vpp", "micro_batch", "batch"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}: {getattr(self, name)} is not a positive number")
        model = self.model
        if min(model.layers, model.hidden, model.heads, model.sequence, model.vocabulary) < 1:
            raise PlanError("a model has a positive number of layers, hidden, heads, sequence and vocabulary")
        checks = (
            (self.gpus, self.tp * self.pp, "GPUs", "tensor x pipeline ranks"),
            (model.hidden, model.heads, "hidden", "heads"),
            (model.heads, self.tp, "heads", "tensor ranks"),
            (model.layers, self.pp * self.vpp, "layers", "stages x chunks"),
        )
        for whole, part, name, parts in checks:
            if whole % part:
                raise PlanError(f"{whole} {name} do not divide among {part} {parts}")
        if self.batch % (self.micro_batch * self.dp):
            raise PlanError(
                f"a batch of {self.batch} does not divide among {self.dp} replicas x micro-batches of "
                f"{self.micro_batch}: give a multiple of {self.dp * self.micro_batch}"
            )
        if self.vpp > 1 and (self.pp == 1 or self.micro_batches % self.pp):
            raise PlanError(
                f"the interleaved schedule needs more than one stage ({self.pp}) and a number of micro-batches "
                f"({self.micro_batches}) that is a multiple of the stages"
            )

    @property
    def dp(self) -> int:
        """Number of data-parallel replicas."""
        return self.gpus // (self.tp * self.pp)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per replica and iteration."""
        return self.batch // (self.micro_batch * self.dp)

    @property
    def value_bytes(self) -> int:
        """Bytes of a parameter, and of a value sent between stages or tensor-parallel ranks."""
        return 4 if self.precision == "fp32" else 2

    @property
    def rows(self) -> int:
        """Number of tokens in a micro-batch."""
        return self.micro_batch * self.model.sequence

    @property
    def layers_per_stage(self) -> int:
        """Number of layers of a stage, over all its chunks."""
        return self.model.layers // self.pp

    @property
    def message_rows(self) -> int:
        """Number of rows of hidden values that one rank sends to the next stage."""
        return self.rows // (self.tp if self.scatter_gather or self.sequence_parallel else 1)

    @property
    def stage_parameters(self) -> int:
        """Number of parameters on one rank of any stage without the embeddings, with biases and norms counted as if
        they were split.
        """
        return self.layers_per_stage * self.model.layer_parameters // self.tp

    @property
    def buckets(self) -> int:
        """Number of buckets of a stage's gradients. Megatron's buckets hold max(40 million, 1 million x replicas)
        parameters.
        """
        return self.vpp * max(1, round(self.stage_parameters / self.vpp / max(40e6, 1e6 * self.dp)))

    @property
    def embedding_share(self) -> int:
        """Number of values of the token embedding on one rank of the first or the last stage."""
        return self.model.embedding_parameters // self.tp

    def replace(self, **changes: object) -> "Job":
        """Return a validated copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


_MODEL = {
    "num-layers": "layers", "hidden-size": "hidden", "num-attention-heads": "heads", "ffn-hidden-size": "ffn",
    "num-query-groups": "groups", "seq-length": "sequence", "padded-vocab-size": "vocabulary",
}  # fmt: skip
_LAYOUT = {
    "tensor-model-parallel-size": "tp", "pipeline-model-parallel-size": "pp",
    "num-virtual-stages-per-pipeline-rank": "vpp", "micro-batch-size": "micro_batch", "global-batch-size": "batch",
}  # fmt: skip
_HOW = {
    "sequence-parallel": "sequence_parallel", "use-distributed-optimizer": "distributed_optimizer",
    "overlap-grad-reduce": "overlap_grad_reduce", "overlap-param-gather": "overlap_param_gather",
    "tp-comm-overlap": "tp_overlap",
}  # fmt: skip
"""Flags, each with the field of `Model` or `Job` that it sets."""

_NOT_MODELLED = ("context-parallel-size", "expert-model-parallel-size", "num-experts")
_SIZES = ("vocab-size", "make-vocab-size-divisible-by", "num-layers-per-virtual-pipeline-stage", *_NOT_MODELLED)
_SWITCHES = (
    "swiglu", "untie-embeddings-and-output-weights", "recompute-activations", "bf16", "fp16", "grad-reduce-in-bf16",
    "accumulate-allreduce-grads-in-fp32", "no-gradient-accumulation-fusion", "use-tp-pp-dp-mapping",
)  # fmt: skip


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise PlanError(message)


def _whole(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def _parser() -> _Parser:
    parser = _Parser(allow_abbrev=False, add_help=False)
    for flag, field in (_MODEL | _LAYOUT | {name: None for name in _SIZES}).items():
        parser.add_argument(f"--{flag}", type=_whole, dest=field)
    for flag, field in (_HOW | {name: None for name in _SWITCHES}).items():
        parser.add_argument(f"--{flag}", action="store_true", dest=field)
    parser.add_argument("--recompute-granularity", choices=("full", "selective"))
    parser.add_argument("--attention-backend", choices=("flash", "fused", "unfused", "local", "auto"), default="auto")
    parser.add_argument("--fp8-format", "--fp8", choices=("e4m3", "hybrid"))
    return parser


def job_of(flags: Sequence[str], gpus: int, name: str | None = None) -> tuple[Job, list[str]]:
    """Return the job that `flags`, on the model `name`, describe on `gpus` GPUs, and the flags that were not read.

    Raises:
        PlanError: a size is missing or unknown, or no plan can be made of it.
    """
    args, others = _parser().parse_known_args(list(flags))
    given = {field: value for field, value in vars(args).items() if value}
    for flag in _NOT_MODELLED:
        if given.get(flag.replace("-", "_"), 1) > 1:
            raise PlanError(f"--{flag}: not modelled by the planner. Plan without it")
    layout = {field: given.get(field, 1) for field in _LAYOUT.values()}
    tp, stages, micro_batch = layout["tp"], layout["pp"], layout["micro_batch"]
    model = _model(given, tp, name)
    if per_chunk := args.num_layers_per_virtual_pipeline_stage:
        if model.layers % (stages * per_chunk):
            raise PlanError(f"{model.layers} layers do not divide among {stages} stages in chunks of {per_chunk}")
        layout["vpp"] = model.layers // (stages * per_chunk)
    if "batch" not in given:
        layout["batch"] = 8 * max(1, gpus // (tp * stages)) * micro_batch * stages
    fp32 = args.accumulate_allreduce_grads_in_fp32 or not (args.grad_reduce_in_bf16 or args.fp16)
    selective = args.recompute_activations or args.recompute_granularity == "selective"
    args.sequence_parallel &= tp > 1
    job = Job(
        model=model,
        gpus=gpus,
        **layout,
        **{field: getattr(args, field) for field in _HOW.values()},
        recompute="full" if args.recompute_granularity == "full" else "sel" if selective else "none",
        precision="fp8" if args.fp8_format else "fp16" if args.fp16 else "bf16",
        flash=args.attention_backend not in ("unfused", "local"),
        gradient_bytes=4 if fp32 else 2,
        pipeline_before_data=args.use_tp_pp_dp_mapping,
        accumulation="added" if args.no_gradient_accumulation_fusion else "fused",
    )
    return job, others


def _model(given: dict[str, Any], tp: int, name: str | None) -> Model:
    """Return the model `name`, if any, with the sizes that the flags give instead."""
    if name is not None and name.lower() not in MODELS:
        raise PlanError(f"unknown model {name!r}: there are {', '.join(MODELS)}, or give Megatron's flags")
    values: dict[str, Any] = vars(MODELS[name.lower()]).copy() if name else {}
    if words := given.get("vocab_size"):
        multiple = given.get("make_vocab_size_divisible_by", 128) * tp
        values["vocabulary"] = -(-words // multiple) * multiple
    values |= {field: given[field] for field in _MODEL.values() if field in given}
    if missing := [field for field in ("layers", "hidden", "heads") if field not in values]:
        raise PlanError(f"no {', '.join(missing)}: give --model, or --num-layers, --hidden-size, --num-attention-heads")
    tied = "untie_embeddings_and_output_weights" not in given
    return Model(**values | {"gated": "swiglu" in given or values.get("gated", False), "tied": tied})


def layout_flags(job: Job) -> str:
    """Return Megatron's flags for the layout of `job`, without the model's sizes."""
    words = [f"--{flag} {getattr(job, field)}" for flag, field in _LAYOUT.items() if field != "vpp" or job.vpp > 1]
    if job.recompute != "none":
        words.append(f"--recompute-granularity {'full' if job.recompute == 'full' else 'selective'}")
    words += ["--use-tp-pp-dp-mapping"] if job.pipeline_before_data else []
    return " ".join([*words, *(f"--{flag}" for flag, field in _HOW.items() if getattr(job, field))])
