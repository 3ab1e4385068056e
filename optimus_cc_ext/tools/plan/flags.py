"""A job, read from a Megatron command line.

Flags that concern neither the size of the model nor its layout do not change a plan.
"""

import argparse
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from optimus_cc_ext.config.forecast import exact_forecast
from optimus_cc_ext.tools.plan import PlanError
from optimus_cc_ext.tools.plan.left_out import hybrid_bytes
from optimus_cc_ext.tools.plan.model import Job
from optimus_cc_ext.tools.plan.shapes import MODELS, Latent, Mixture, Model

_MODEL = {
    "num-layers": "layers", "hidden-size": "hidden", "num-attention-heads": "heads", "ffn-hidden-size": "ffn",
    "kv-channels": "head_size", "seq-length": "sequence", "padded-vocab-size": "vocabulary",
    "mtp-num-layers": "predictors",
}  # fmt: skip
_MIXTURE = {
    "num-experts": "experts", "moe-router-topk": "top_k", "moe-ffn-hidden-size": "ffn",
    "moe-shared-expert-intermediate-size": "shared",
}  # fmt: skip
_LATENT = {
    "q-lora-rank": "query_rank", "kv-lora-rank": "key_value_rank", "qk-head-dim": "head",
    "qk-pos-emb-head-dim": "positions", "v-head-dim": "value",
}  # fmt: skip
_LAYOUT = {
    "tensor-model-parallel-size": "tp", "pipeline-model-parallel-size": "pp",
    "num-virtual-stages-per-pipeline-rank": "vpp", "context-parallel-size": "cp",
    "expert-model-parallel-size": "ep", "expert-tensor-parallel-size": "etp",
    "micro-batch-size": "micro_batch", "global-batch-size": "batch",
    "num-distributed-optimizer-instances": "instances",
}  # fmt: skip
_HOW = {
    "sequence-parallel": "sequence_parallel", "use-distributed-optimizer": "distributed_optimizer",
    "overlap-grad-reduce": "overlap_grad_reduce", "overlap-param-gather": "overlap_param_gather",
    "fp8-param-gather": "fp8_gather", "tp-comm-overlap": "tp_overlap",
    "overlap-moe-expert-parallel-comm": "expert_overlap",
    "moe-shared-expert-overlap": "shared_expert_overlap",
    "ddp-reduce-scatter-with-fp32-accumulation": "sums_in_fp32",
    "account-for-embedding-in-pipeline-split": "embedding_slot", "account-for-loss-in-pipeline-split": "loss_slot",
}  # fmt: skip
"""Flags, each with the field of `Model`, `Mixture`, `Latent` or `Job` that it sets."""

NOT_MODELLED = (
    "hybrid-layer-pattern", "hybrid-override-pattern", "heterogeneous-layers-config-path", "use-megatron-fsdp",
    "use-torch-fsdp2", "optimizer-cpu-offload",
)  # fmt: skip
"""Flags that change shapes or traffic in a way that no plan contains, and by an unknown number of seconds."""

_SIZES = (
    "vocab-size", "make-vocab-size-divisible-by", "num-layers-per-virtual-pipeline-stage", "num-query-groups",
    "max-position-embeddings", "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers",
)  # fmt: skip
_SWITCHES = (
    "swiglu", "untie-embeddings-and-output-weights", "recompute-activations", "bf16", "fp16", "grad-reduce-in-bf16",
    "accumulate-allreduce-grads-in-fp32", "no-gradient-accumulation-fusion", "use-tp-pp-dp-mapping",
    "group-query-attention", "multi-latent-attention", "disable-bias-linear", "add-qkv-bias", "qk-layernorm",
)  # fmt: skip


class Parser(argparse.ArgumentParser):
    """Parser that refuses a flag in the planner's way, without a page about all other flags."""

    def error(self, message: str) -> NoReturn:
        raise PlanError(message)


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


def _parser() -> Parser:
    parser = Parser(allow_abbrev=False, add_help=False)
    for flag, field in (_MODEL | _LAYOUT | {name: None for name in _SIZES}).items():
        parser.add_argument(f"--{flag}", type=_whole, dest=field)
    for prefix, table in (("mixture", _MIXTURE), ("latent", _LATENT)):
        for flag, field in table.items():
            parser.add_argument(f"--{flag}", type=_whole, dest=f"{prefix}_{field}")
    parser.add_argument("--moe-layer-freq", default="1")
    parser.add_argument("--moe-token-dispatcher-type", choices=("allgather", "alltoall", "flex"), default="allgather")
    parser.add_argument("--moe-flex-dispatcher-backend", choices=("deepep", "hybridep", "ncclep"), default="deepep")
    parser.add_argument("--pipeline-model-parallel-layout")
    parser.add_argument("--cp-comm-type", nargs="+", choices=("p2p", "a2a", "allgather", "a2a+p2p"), default=["p2p"])
    parser.add_argument("--normalization", choices=("LayerNorm", "RMSNorm"), default="LayerNorm")
    parser.add_argument("--position-embedding-type", default="learned_absolute")
    for flag, field in (_HOW | {name: None for name in _SWITCHES}).items():
        parser.add_argument(f"--{flag}", action="store_true", dest=field)
    parser.add_argument("--recompute-granularity", choices=("full", "selective"))
    parser.add_argument("--recompute-method", choices=("uniform", "block"))
    parser.add_argument("--recompute-num-layers", type=_whole)
    parser.add_argument("--recompute-modules", nargs="*", default=[])
    parser.add_argument("--attention-backend", choices=("flash", "fused", "unfused", "local", "auto"), default="auto")
    parser.add_argument("--lr-decay-style")
    for flag in ("--lr", "--min-lr", "--init-method-std"):
        parser.add_argument(flag, type=float)
    parser.add_argument("--fp8-format", "--fp8", choices=("e4m3", "hybrid"))
    return parser


def parsed_flags() -> list[tuple[str, bool, bool]]:
    """Return the flags of Megatron that a plan reads, each with True if it is a switch without a value, and with True
    if its value is a whole number.
    """
    actions = _parser()._actions
    return [(each.option_strings[0].removeprefix("--"), each.nargs == 0, each.type is _whole) for each in actions]


def job_of(flags: Sequence[str], gpus: int, name: str | None = None) -> tuple[Job, list[str]]:
    """Return the job that `flags`, on the model `name`, describe on `gpus` GPUs, and the flags that were not read.

    Raises:
        PlanError: a size is missing or unknown, or no plan can be made of it.
    """
    for place, word in enumerate(flags):
        if word.startswith("--") and word[2:].partition("=")[0] in NOT_MODELLED:
            if word.startswith("--hybrid-"):
                raise PlanError(_hybrid(flags, place, gpus, name))
            raise PlanError(
                f"{word.partition('=')[0]}: not modelled by the planner, and nothing bounds what it changes. Plan "
                "without it"
            )
    args, others = _parser().parse_known_args(list(flags))
    given = {field: value for field, value in vars(args).items() if value}
    layout = {field: given.get(field, 1) for field in _LAYOUT.values()}
    tp, stages, micro_batch = layout["tp"], layout["pp"], layout["micro_batch"]
    layout["etp"] = given.get("etp", tp)
    model = _model(args, given, tp, name)
    if per_chunk := args.num_layers_per_virtual_pipeline_stage:
        if model.layers % (stages * per_chunk):
            raise PlanError(f"{model.layers} layers do not divide among {stages} stages in chunks of {per_chunk}")
        layout["vpp"] = model.layers // (stages * per_chunk)
    layout |= _uneven(args, stages, layout["vpp"], model.layers)
    if "batch" not in given:
        layout["batch"] = 8 * max(1, gpus // (tp * stages * layout["cp"])) * micro_batch * stages
    # For bf16 Megatron lets --grad-reduce-in-bf16 win over the other flag, which it does not read for fp16.
    fp32 = args.accumulate_allreduce_grads_in_fp32 if args.fp16 else not args.grad_reduce_in_bf16
    selective = args.recompute_activations or args.recompute_granularity == "selective"
    args.sequence_parallel &= tp > 1
    if len(set(args.cp_comm_type)) > 1:
        raise PlanError(f"--cp-comm-type {' '.join(args.cp_comm_type)}: one way for all layers is modelled, no mix")
    job = Job(
        model=model,
        gpus=gpus,
        **layout,
        **{field: getattr(args, field) for field in _HOW.values()},
        recompute="full" if args.recompute_granularity == "full" else "sel" if selective else "none",
        recompute_layers=args.recompute_num_layers or 0 if args.recompute_method == "block" else 0,
        recomputed=tuple(args.recompute_modules) if selective else (),
        precision="fp8" if args.fp8_format else "fp16" if args.fp16 else "bf16",
        flash=args.attention_backend not in ("unfused", "local"),
        gradient_bytes=4 if fp32 else 2,
        exact_bits=exact_forecast(args)[0],
        pipeline_before_data=args.use_tp_pp_dp_mapping,
        accumulation="added" if args.no_gradient_accumulation_fusion else "fused",
        cp_exchange=args.cp_comm_type[0],
        dispatcher=args.moe_flex_dispatcher_backend.replace("hybridep", "flex")
        if args.moe_token_dispatcher_type == "flex"
        else args.moe_token_dispatcher_type,
    )
    return job, others


def _hybrid(flags: Sequence[str], place: int, gpus: int, name: str | None) -> str:
    """Return what can be said of a hybrid with Mamba layers: the bytes of its traffic."""
    flag, _, pattern = flags[place].partition("=")
    end = place + 1 if pattern else place + 2
    pattern = pattern or " ".join(flags[place + 1 : end])
    layers = ["--num-layers", str(sum(pattern.count(kind) for kind in "M*-E"))]
    job, others = job_of([*flags[:place], *flags[end:], *layers], gpus, name)
    sent = (f"{each} {nbytes / 1e9:.3g} GB" for each, nbytes in hybrid_bytes(pattern, job, others).items())
    return (
        f"{flag}: the seconds of Mamba layers are not modelled. In an iteration a rank sends {', '.join(sent)}; int8 "
        "sends about a quarter of fp32's bytes and half of bf16's. Whether it pays is what a short run of both tells"
    )


def _uneven(args: argparse.Namespace, stages: int, chunks: int, layers: int) -> dict[str, Any]:
    """Return the fields of `Job` for layers that are dealt out unevenly; no fields if they are not."""
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    if text := args.pipeline_model_parallel_layout:
        return _laid_out(text, stages)
    if not (first or last):
        return {}
    between, rest = stages - bool(first) - bool(last), layers - (first or 0) - (last or 0)
    if rest < 0 or between < bool(rest) or (between and rest % (between * chunks)):
        raise PlanError(f"{rest} layers do not divide among the other {between} stages x {chunks} chunks")
    ends = [(each,) if each else () for each in (first, last)]
    middle = (rest // between,) * between if between else ()
    return {"stage_layers": (*ends[0], *middle, *ends[1])}


def _laid_out(text: str, stages: int) -> dict[str, Any]:
    """Return the fields of `Job` for a layout such as `Et*3|(tt|)*29,m|L`: E is the embedding, t a layer, m a layer of
    MTP and L the loss; a bar ends a chunk of a stage.
    """
    flat = re.sub(r"[, ]", "", text)
    while found := re.search(r"\(([^()]*)\)(?:\*(\d+))?|([^()*])\*(\d+)", flat):
        repeated = (found[1] if found[3] is None else found[3]) * int(found[2] or found[4] or 1)
        flat = flat[: found.start()] + repeated + flat[found.end() :]
    chunks = flat.split("|")
    if set(flat) - set("EtmL|") or len(chunks) % stages:
        raise PlanError(
            f"--pipeline-model-parallel-layout {text}: {len(chunks)} parts of E, t, m and L do not divide among "
            f"{stages} stages"
        )
    layers = tuple(sum(chunk.count("t") for chunk in chunks[stage::stages]) for stage in range(stages))
    return {"vpp": len(chunks) // stages, "stage_layers": layers}


def _model(args: argparse.Namespace, given: dict[str, Any], tp: int, name: str | None) -> Model:
    """Return the model `name`, if any, with the sizes that the flags give instead."""
    if name is not None and name.lower() not in MODELS:
        raise PlanError(f"unknown model {name!r}: there are {', '.join(MODELS)}, or give Megatron's flags")
    sizes = {field: given[field] for field in _MODEL.values() if field in given}
    if words := given.get("vocab_size"):
        multiple = given.get("make_vocab_size_divisible_by", 128) * tp
        sizes.setdefault("vocabulary", -(-words // multiple) * multiple)
    if args.group_query_attention:
        sizes["groups"] = args.num_query_groups or 1
    if name is None and args.position_embedding_type == "learned_absolute":
        sizes["positions"] = args.max_position_embeddings or 0
    sizes |= {
        field: value
        for switch, field, value in (
            (args.untie_embeddings_and_output_weights, "tied", False), (args.disable_bias_linear, "biases", False),
            (args.add_qkv_bias, "qkv_bias", True), (args.normalization == "RMSNorm", "rms_norm", True),
            (args.qk_layernorm, "head_norms", True), (args.swiglu, "gated", True),
            (args.multi_latent_attention, "latent", Latent(**_prefixed(given, "latent"))),
        )
        if switch
    }  # fmt: skip
    if name is None and (missing := [field for field in ("layers", "hidden", "heads") if field not in sizes]):
        raise PlanError(f"no {', '.join(missing)}: give --model, or --num-layers, --hidden-size, --num-attention-heads")
    model = replace(MODELS[name.lower()], **sizes) if name else Model(**sizes)
    if "mixture_experts" not in given:
        return model
    mixture = {"ffn": model.inner, **_prefixed(given, "mixture")}
    return replace(model, mixture=Mixture(**mixture, layers=_mixture_layers(args.moe_layer_freq, model.layers)))


def _prefixed(given: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(f"{prefix}_"): value for name, value in given.items() if name.startswith(f"{prefix}_")}


def _mixture_layers(pattern: str, layers: int) -> int:
    """Return the number of layers with a mixture, by Megatron's `--moe-layer-freq`: N for one of N layers, or a list of
    0 and 1 such as ([0]*3+[1]*58).
    """
    if pattern.isdecimal() and int(pattern):
        return len(range(0, layers, int(pattern)))
    parts = re.findall(r"\[([01, ]+)\](?:\*(\d+))?", pattern)
    rest = re.sub(r"\[[01, ]+\](\*\d+)?|[()+ ]", "", pattern)
    found = [each for part, times in parts for each in re.findall(r"[01]", part) * int(times or 1)]
    if rest or len(found) != layers:
        raise PlanError(
            f"--moe-layer-freq {pattern}: give a number, or a list of 0 and 1 for {layers} layers, such as "
            f"[0]*1+[1]*{layers - 1}"
        )
    return found.count("1")


def taken(words: Sequence[str], left: Sequence[str]) -> list[str]:
    """Return the words that a parser took: all but the words `left`, which keep the order of the command line."""
    kept, rest = [], deque(left)
    for word in words:
        if rest and word == rest[0]:
            rest.popleft()
        else:
            kept.append(word)
    return kept


def read_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line that a plan reads."""
    _, others = _parser().parse_known_args(list(words))
    return taken(words, others)


def used_words(words: Sequence[str], job: Job) -> list[str]:
    """Return the flags with which Megatron trains a planned job.

    Args:
        words: the flags from which the job was planned. Where Megatron's default differs from what the plan assumes, a
            flag is added.
    """
    names = {word.partition("=")[0] for word in words}
    assumed = [
        (("--micro-batch-size",), f"--micro-batch-size {job.micro_batch}"),
        (("--global-batch-size",), f"--global-batch-size {job.batch}"),
        (("--bf16", "--fp16"), "--bf16" if job.precision != "fp32" else ""),
        (("--recompute-method",), "--recompute-method uniform --recompute-num-layers 1" * (job.recompute == "full")),
    ]
    return [*words, *(word for flags, text in assumed if names.isdisjoint(flags) for word in text.split())]
