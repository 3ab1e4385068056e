"""From what was asked for to what is done: the preset, the cluster's layout, and what must be refused.

Pure rules: no Megatron, no process group, so that each can be tested by itself.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from optimus_cc_ext.config.artifact import ARTIFACT_DEFAULTS
from optimus_cc_ext.config.classes import (
    CompressedBackpropConfig,
    DataParallelCompressionConfig,
    FusedEmbeddingSyncConfig,
    OptimusConfig,
    flag_of,
)
from optimus_cc_ext.config.flags import PRESETS, Request
from optimus_cc_ext.errors import FlagError

__all__ = ["Layout", "Resolution", "check_layout", "resolve"]

PRESET_STAGE_SHARE = 0.75
"""The paper compresses data-parallel gradients on the first 75 % of the stages (section 9.1)."""

_LOW_RANK_ONLY = {
    "compressed_backprop": ("compressed_backprop_rank", "residual_across_iterations"),
    "dp_compression": ("dp_compression_rank",),
}

_TECHNIQUES = {
    "compressed_backprop": "compressed backpropagation",
    "fused_embedding_sync": "fused embedding sync",
    "dp_compression": "data-parallel compression",
}
_NAMES = _TECHNIQUES | {
    "pipeline_forward_format": "compressed activations",
    "param_gather_format": "compressed parameter gather",
}


_OPTIONS = {
    "compressed_backprop": CompressedBackpropConfig,
    "fused_embedding_sync": FusedEmbeddingSyncConfig,
    "dp_compression": DataParallelCompressionConfig,
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The facts about a run that decide which techniques can work."""

    stages: int
    """Pipeline stages P."""

    data_parallel: int
    """Data-parallel replicas D."""

    tied_embeddings: bool
    """Whether the first stage's word embedding is the last stage's output weight as well."""

    distributed_optimizer: bool = False
    """Whether each replica's optimizer reads only its shard of the gradients."""

    master_copies: bool = False
    """Whether Megatron keeps parameters in bf16 or fp16, and copies them over from an fp32 copy after each step."""

    train_iters: int | None = None
    seed: int = 1234
    """Megatron's seed."""


@dataclass(frozen=True)
class Resolution:
    """A validated configuration, and the lines that say what was changed or left out on the way."""

    config: OptimusConfig
    notes: tuple[str, ...] = ()


def resolve(request: Request, layout: Layout) -> Resolution:
    """Apply the preset and the defaults, and refuse what cannot work on this layout.

    Raises:
        FlagError: a flag that was given one by one cannot work, or is out of range.
    """
    fields: dict[str, Any] = {"compression_seed": layout.seed}
    notes: list[str] = []
    if request.preset:
        preset, left_out = _preset(request.preset, layout)
        # A technique that is switched off takes the preset's format with it, which would switch it on.
        off = [name for name in _TECHNIQUES if request.explicit.get(name) is False]
        fields |= {field: value for field, value in preset.items() if field.removesuffix("_format") not in off}
        notes += [
            line for name, line in left_out.items() if request.explicit.keys().isdisjoint((name, f"{name}_format"))
        ]
    fields |= request.explicit
    written = request.spelling.get("dp_compression_stages", "")
    stages = fields.get("dp_compression_stages")
    if written.startswith("--selective_grad_comp") and isinstance(stages, int) and stages > layout.stages:
        # The artifact's own 335M scripts ask for 3 compressed stages of 2; there it meant all of them.
        fields["dp_compression_stages"] = layout.stages
        notes.append(f"--selective_grad_comp_way {stages}: clamped to the {layout.stages} stages that there are")
    try:
        config = OptimusConfig(**fields)
        _check_formats(config, request)
        check_layout(config, layout)
    except FlagError as error:
        # Named as the user wrote it; a technique that a format switched on, by that.
        name = error.flag.removeprefix("--").replace("-", "_")
        written = request.spelling.get(name) or request.spelling.get(f"{name}_format", error.flag)
        raise FlagError(written, error.reason, error.cure) from None
    notes += _without_effect(request.spelling, config)
    if request.artifact:
        notes += _inherited(ARTIFACT_DEFAULTS, request.spelling, config)
    carried = request.artifact and "residual_across_iterations" not in request.spelling
    if carried and config.compressed_backprop and config.lazy_error_propagation:
        notes.append(
            "--use_error_feedback: carries the residual across iterations: as the published artifact does. Add "
            "--residual-across-iterations drop, our default: carrying cost 3 % of loss"
        )
    return Resolution(config, tuple(notes))


def _check_formats(config: OptimusConfig, request: Request) -> None:
    """Refuse what was given beside a format that it means nothing to. Dense is a way out: it goes with anything."""
    for technique in _TECHNIQUES:
        chosen, flag = getattr(config, f"{technique}_format"), flag_of(f"{technique}_format")
        if chosen in ("dense", "low-rank"):
            continue
        if request.explicit.get(technique) is False:
            raise FlagError(flag, f"{request.spelling[technique]} says the opposite", "Give one of the two")
        given = [name for name in _LOW_RANK_ONLY.get(technique, ()) if name in request.spelling]
        if given:
            cure = f"Leave it out, or give {flag} low-rank"
            raise FlagError(
                flag_of(given[0]), f"{flag} {chosen} has no rank, and keeps nothing across iterations", cure
            )


def check_layout(config: OptimusConfig, layout: Layout) -> None:
    """Refuse what has nothing to work on.

    Raises:
        FlagError: naming the flag, the reason and the cure.
    """
    for technique, (_, reason, cure) in _obstacles(layout).items():
        if getattr(config, technique) not in (False, "dense"):
            raise FlagError(flag_of(technique), reason, cure)
    stages = config.dp_compression_stages
    if isinstance(stages, int) and stages > layout.stages:
        reason = f"{stages} stages are to be compressed but there are only {layout.stages}"
        raise FlagError("--dp-compression-stages", reason, f"Give 'all' or a number up to {layout.stages}")
    for technique in ("compressed_backprop", "dp_compression"):
        warmup = f"{technique}_warmup"
        if getattr(config, technique) and getattr(config, warmup) and layout.train_iters is None:
            reason = "a fraction of the training iterations means nothing where their number is not known"
            raise FlagError(flag_of(warmup), reason, "Give --train-iters, or a warm-up of 0")


def _obstacles(layout: Layout) -> dict[str, tuple[str, str, str]]:
    """By what cannot work on a layout, as its field: why a preset leaves it out (nothing: nobody would miss it), why in
    a refusal, and the cure."""
    one_stage, more = "one pipeline stage", "Leave it out, or use --pipeline-model-parallel-size 2 or more"
    found = {}
    if layout.stages == 1:
        reason = "there is nothing to compress: with one pipeline stage no activation is sent"
        found["pipeline_forward_format"] = (one_stage, reason, more)
        reason = "there is nothing to compress: with one pipeline stage no activation gradient is sent"
        found["compressed_backprop"] = (one_stage, reason, more)
        reason = "there is nothing to fuse: with one pipeline stage there is one copy of the embedding"
        found["fused_embedding_sync"] = (one_stage, reason, more)
    elif not layout.tied_embeddings:
        reason = "the embeddings are not tied, so the first and the last stage share no weight"
        cure = "Leave it out, or leave out --untie-embeddings-and-output-weights"
        found["fused_embedding_sync"] = ("the embeddings are not tied", reason, cure)
    if layout.data_parallel == 1:
        reason = "there is nothing to compress: with one data-parallel replica no gradient is reduced"
        found["dp_compression"] = ("one data-parallel replica", reason, "Leave it out, or run more replicas")
        reason = "there is nothing to compress: with one data-parallel replica no parameter is gathered"
        found["param_gather_format"] = ("", reason, "Leave it out, or run more replicas")
    elif not layout.distributed_optimizer:
        reason = "there is nothing to compress: only the distributed optimizer gathers parameters"
        cure = "Leave it out, or add --use-distributed-optimizer"
        found["param_gather_format"] = ("", reason, cure)
    elif not layout.master_copies:
        reason = "what a message leaves out has to stay in an fp32 copy that Megatron updates the parameters from"
        cure = "Leave it out, or use --bf16 or --fp16, without --use-precision-aware-optimizer"
        found["param_gather_format"] = ("no fp32 copies of parameters", reason, cure)
    return found


def _preset(name: str, layout: Layout) -> tuple[dict[str, Any], dict[str, str]]:
    """(the preset's fields, the line to say by what the layout left out of it)."""
    presets: dict[str, dict[str, Any]] = {
        "paper": {
            "compressed_backprop": True,
            "fused_embedding_sync": True,
            "dp_compression": True,
            "dp_compression_stages": math.ceil(PRESET_STAGE_SHARE * layout.stages),
        },
        "balanced": {
            "pipeline_forward_format": "fp8",
            "compressed_backprop": True,
            "compressed_backprop_format": "int8",
            "fused_embedding_sync": True,
            "fused_embedding_sync_format": "int8",
            "dp_compression": True,
            "dp_compression_format": "int4",
            "dp_compression_stages": "auto",
            "param_gather_format": "int4",
        },
    }
    wanted = presets[name]
    flag = "--optimus-cc" if name == PRESETS[0] else f"--optimus-cc {name}"
    obstacles = _obstacles(layout)
    notes = {
        field: f"{flag} leaves out {_NAMES[field]}: {why}"
        for field, (why, _, _) in obstacles.items()
        if why and any(mine.startswith(field) for mine in wanted)
    }
    return {field: value for field, value in wanted.items() if not field.startswith(tuple(obstacles))}, notes


def _without_effect(spelling: Mapping[str, str], config: OptimusConfig) -> Iterator[str]:
    """A line for each flag that does nothing.

    Args:
        spelling: by field, the flag that the user gave it by.
        config: what is done.
    """
    idle: dict[str, str] = {}
    working: set[str] = set()
    for technique, options in _OPTIONS.items():
        itself = (technique, f"{technique}_format")
        flags = [spelling[f.name] for f in dataclasses.fields(options) if f.name in spelling and f.name not in itself]
        if getattr(config, technique):
            working.update(flags)
        else:
            idle |= dict.fromkeys(flags, technique)
    # The artifact's --use_error_feedback is an option of two techniques.
    for flag, technique in idle.items():
        if flag not in working:
            yield f"{flag}: no effect: {flag_of(technique)} is off"
    low_rank = config.backprop_remembers or (config.dp_compression and config.dp_compression_format == "low-rank")
    if "low_rank_wire" in spelling and not low_rank:
        yield "--low-rank-wire: no effect: nothing is sent as low-rank"
    lep = config.lazy_error_propagation or not config.compressed_backprop
    if "residual_across_iterations" in spelling and not lep:
        yield "--residual-across-iterations: no effect: --lazy-error-propagation is off"


def _inherited(defaults: Mapping[str, Any], spelling: Mapping[str, str], config: OptimusConfig) -> Iterator[str]:
    """A line that names which of `defaults` are in force although no flag says so, and ours are others."""
    ours = {field.name: field.default for field in dataclasses.fields(OptimusConfig)}
    # What the residual does has a line of its own.
    of_what_is_on = {f.name for name, t in _OPTIONS.items() if getattr(config, name) for f in dataclasses.fields(t)}
    of_what_is_on = of_what_is_on - {"residual_across_iterations"} | {"compression_seed"}
    named = [
        _written(name, value)
        for name, value in defaults.items()
        if name not in spelling and value != ours[name] and name in of_what_is_on
    ]
    if named and config.any_technique:
        yield f"the published artifact's defaults: {', '.join(named)}"


def _written(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return flag_of(name) if value else flag_of("no_" + name)
    return f"{flag_of(name)} {value}"
