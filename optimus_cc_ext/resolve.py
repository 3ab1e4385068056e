"""From what was asked for to what is done: the preset, the cluster's layout, and what must be refused.

Pure rules: no Megatron, no process group, so that each can be tested by itself.
"""

import math
from dataclasses import dataclass
from typing import Any

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.flags import ARTIFACT_DEFAULT, ARTIFACT_STAGES_FLAG, Request

__all__ = ["Layout", "Resolution", "check_layout", "resolve"]

PRESET_STAGE_SHARE = 0.75
"""The paper compresses data-parallel gradients on the first 75 % of the stages (section 9.1)."""


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
        preset, left_out = _preset(layout)
        fields |= preset
        notes += [line for name, line in left_out.items() if name not in request.explicit]
    fields |= request.explicit
    if request.spelling.get("dp_compression_stages") == ARTIFACT_STAGES_FLAG:
        fields, clamped = _clamp_stages(fields, layout)
        notes += clamped
    try:
        config = OptimusConfig(**fields)
        check_layout(config, layout)
    except FlagError as error:
        raise _in_the_users_spelling(error, request) from None
    carried = request.spelling.get("residual_across_iterations") == ARTIFACT_DEFAULT
    if carried and config.compressed_backprop and config.lazy_error_propagation:
        notes.append(
            "--use_error_feedback: carries the residual across iterations, as the published artifact does. Add "
            "--residual-across-iterations drop, our default: carrying cost 3 % of loss"
        )
    return Resolution(config, tuple(notes))


def check_layout(config: OptimusConfig, layout: Layout) -> None:
    """Refuse techniques that have nothing to work on.

    Raises:
        FlagError: naming the flag, the reason and the cure.
    """
    if config.compressed_backprop and layout.stages == 1:
        raise FlagError(
            "--compressed-backprop",
            "there is nothing to compress: with one pipeline stage no activation gradient is sent",
            "Leave it out, or use --pipeline-model-parallel-size 2 or more",
        )
    if config.fused_embedding_sync and layout.stages == 1:
        raise FlagError(
            "--fused-embedding-sync",
            "there is nothing to fuse: with one pipeline stage there is one copy of the embedding",
            "Leave it out, or use --pipeline-model-parallel-size 2 or more",
        )
    if config.fused_embedding_sync and not layout.tied_embeddings:
        raise FlagError(
            "--fused-embedding-sync",
            "the embeddings are not tied, so the first and the last stage share no weight",
            "Leave it out, or leave out --untie-embeddings-and-output-weights",
        )
    if config.dp_compression and layout.data_parallel == 1:
        raise FlagError(
            "--dp-compression",
            "there is nothing to compress: with one data-parallel replica no gradient is reduced",
            "Leave it out, or run more replicas",
        )
    stages = config.dp_compression_stages
    if isinstance(stages, int) and stages > layout.stages:
        raise FlagError(
            "--dp-compression-stages",
            f"{stages} stages are to be compressed but there are only {layout.stages}",
            f"Give 'all' or a number up to {layout.stages}",
        )
    warmups = {
        "--compressed-backprop-warmup": config.compressed_backprop and config.compressed_backprop_warmup,
        "--dp-compression-warmup": config.dp_compression and config.dp_compression_warmup,
    }
    for flag, fraction in warmups.items():
        if fraction and layout.train_iters is None:
            raise FlagError(
                flag,
                "a fraction of the training iterations means nothing where their number is not known",
                "Give --train-iters, or a warm-up of 0",
            )


def _preset(layout: Layout) -> tuple[dict[str, Any], dict[str, str]]:
    """(fields switched on, the line to say by field that the layout left out)."""
    fields: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    if layout.stages > 1:
        fields["compressed_backprop"] = True
    else:
        left_out["compressed_backprop"] = "--optimus-cc leaves out compressed backpropagation: one pipeline stage"
    if layout.stages > 1 and layout.tied_embeddings:
        fields["fused_embedding_sync"] = True
    else:
        reason = "one pipeline stage" if layout.stages == 1 else "the embeddings are not tied"
        left_out["fused_embedding_sync"] = f"--optimus-cc leaves out fused embedding sync: {reason}"
    if layout.data_parallel > 1:
        fields["dp_compression"] = True
        fields["dp_compression_stages"] = math.ceil(PRESET_STAGE_SHARE * layout.stages)
    else:
        left_out["dp_compression"] = "--optimus-cc leaves out data-parallel compression: one data-parallel replica"
    return fields, left_out


def _clamp_stages(fields: dict[str, Any], layout: Layout) -> tuple[dict[str, Any], list[str]]:
    """The artifact's own 335M scripts ask for 3 compressed stages of 2; there it meant all of them."""
    stages = fields.get("dp_compression_stages")
    if not isinstance(stages, int) or stages <= layout.stages:
        return fields, []
    note = f"{ARTIFACT_STAGES_FLAG} {stages}: clamped to the {layout.stages} stages that there are"
    return fields | {"dp_compression_stages": layout.stages}, [note]


def _in_the_users_spelling(error: FlagError, request: Request) -> FlagError:
    """The same refusal, naming the flag that the user wrote."""
    field = error.flag.removeprefix("--").replace("-", "_")
    written = request.spelling.get(field, error.flag)
    if not written.startswith("--") or written == error.flag:
        return error
    renamed = FlagError(written, "", "")
    renamed.args = (str(error).replace(error.flag, written, 1),)
    return renamed
