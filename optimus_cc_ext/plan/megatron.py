"""A job from Megatron's command line: the flags that say how large and how laid out; others change no plan of ours."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from optimus_cc_ext.plan import PlanError
from optimus_cc_ext.plan.model import MODELS, Job, Model

__all__ = ["job_of", "layout_flags"]

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
"""Flags to the fields of `Model` and `Job` that they are."""

_NOT_MODELLED = ("context-parallel-size", "expert-model-parallel-size", "num-experts")
_SIZES = ("vocab-size", "make-vocab-size-divisible-by", "num-layers-per-virtual-pipeline-stage", *_NOT_MODELLED)
_SWITCHES = (
    "swiglu", "untie-embeddings-and-output-weights", "recompute-activations", "bf16", "fp16", "grad-reduce-in-bf16",
    "accumulate-allreduce-grads-in-fp32", "no-gradient-accumulation-fusion",
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
    """The job that `flags` and the model of this name describe on so many GPUs, and the flags that were not read.

    Raises:
        PlanError: a size is missing, unknown, or nothing that a plan can be made of.
    """
    args, others = _parser().parse_known_args(list(flags))
    given = {field: value for field, value in vars(args).items() if value}
    for flag in _NOT_MODELLED:
        if given.get(flag.replace("-", "_"), 1) > 1:
            raise PlanError(f"--{flag}: not modelled. Plan without it")
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
        accumulation="added" if args.no_gradient_accumulation_fusion else "fused",
    )
    return job, others


def _model(given: dict[str, Any], tp: int, name: str | None) -> Model:
    """The named one, if any, with what the flags say instead."""
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
    """Megatron's flags for the layout of `job`, without the model's sizes."""
    words = [f"--{flag} {getattr(job, field)}" for flag, field in _LAYOUT.items() if field != "vpp" or job.vpp > 1]
    if job.recompute != "none":
        words.append(f"--recompute-granularity {'full' if job.recompute == 'full' else 'selective'}")
    return " ".join([*words, *(f"--{flag}" for flag, field in _HOW.items() if getattr(job, field))])
