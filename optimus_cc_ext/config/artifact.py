"""Flags of the published artifact, and flags of its Megatron (v2.5) that today's Megatron no longer has.

One table maps each flag of the artifact to fields of `OptimusConfig`. The other maps each removed flag of Megatron to
today's fields of Megatron, or to nothing where the behaviour that it selected is the only one left; the user gets one
line about each.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from optimus_cc_ext.config.options import flag_of
from optimus_cc_ext.errors import FlagError


@dataclass(frozen=True)
class OldFlag:
    """An old flag, and the fields of today that receive its value."""

    spelling: str
    fields: tuple[str, ...] = ()
    parse: Callable[[str], Any] = str
    _: KW_ONLY
    const: Any = None
    """The value that the flag stands for if it is a switch."""


@dataclass(frozen=True)
class ArtifactFlag(OldFlag):
    """The published artifact's name for fields of `OptimusConfig`."""

    default: Any = None
    """The artifact's default for this flag (its megatron/arguments.py); None: our default applies."""

    needs: str | None = None
    """Name of the switch that has to be on for this flag to have an effect."""


@dataclass(frozen=True)
class RemovedFlag(OldFlag):
    """A flag that Megatron no longer has: it is translated into fields of today's Megatron, dropped, or refused."""

    _: KW_ONLY
    today: str
    """The part of the message that says what replaces the flag today."""

    accepts: tuple[str, ...] = ()
    """The values that the flag accepts; empty: every value."""

    cure: str = ""
    """The cure that the flag's refusal names; empty: the flag is not refused."""

    implies: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of Megatron that the flag sets unless the user has set them."""


ARTIFACT_FLAGS = (
    ArtifactFlag("--inter_grad_comp", ("compressed_backprop",), const=True),
    ArtifactFlag("--inter_grad_comp_rank", ("compressed_backprop_rank",), int, 12),
    ArtifactFlag("--inter_grad_comp_epilogue_only", ("compressed_backprop_messages",), default="all", const="epilogue"),
    ArtifactFlag("--use_error_feedback", ("lazy_error_propagation", "dp_error_feedback"), default=False, const=True),
    ArtifactFlag("--emb_comm_opt", ("fused_embedding_sync",), const=True),
    ArtifactFlag("--grad_comp", ("dp_compression",), const=True),
    ArtifactFlag("--grad_comp_rank", ("dp_compression_rank",), int, 4),
    ArtifactFlag("--grad_comp_warm_up", ("dp_compression_warmup",), float, 0.1),
    ArtifactFlag("--inter_grad_comp_warm_up", ("compressed_backprop_warmup",), float),
    ArtifactFlag("--selective_grad_comp", ("dp_compression_stages",), const=2),
    ArtifactFlag("--selective_grad_comp_way", ("dp_compression_stages",), int, needs="--selective_grad_comp"),
    ArtifactFlag("--check_orth_error_acti", ("compression_error_statistics",), const=True),
    ArtifactFlag("--comp_seed", ("compression_seed",), int, 714),
)
"""The artifact's flags, with the defaults of the artifact's megatron/arguments.py."""

REMOVED_FLAGS = (
    RemovedFlag("--data-impl", today="the memory-mapped dataset is the only one today", accepts=("mmap", "infer")),
    RemovedFlag("--DDP-impl", today="Megatron uses its own DDP today", accepts=("local",)),
    RemovedFlag(
        "--activations-checkpoint-method", ("recompute_method",), accepts=("uniform", "block"),
        today="--recompute-granularity full --recompute-method with the same value",
        implies={"recompute_granularity": "full", "recompute_num_layers": 1},
    ),
    RemovedFlag(
        "--activations-checkpoint-num-layers", ("recompute_num_layers",), int,
        today="--recompute-num-layers with the same value",
    ),
    RemovedFlag(
        "--checkpoint-num-layers", ("recompute_num_layers",), int, today="--recompute-num-layers with the same value",
    ),
    RemovedFlag(
        "--distribute-checkpointed-activations", ("distribute_saved_activations",), const=True,
        today="--distribute-saved-activations",
    ),
    RemovedFlag("--layernorm-epsilon", ("layernorm_epsilon",), float, today="--norm-epsilon with the same value"),
    RemovedFlag(
        "--override-lr-scheduler", ("override_opt_param_scheduler",), const=True,
        today="--override-opt-param-scheduler",
    ),
    RemovedFlag(
        "--use-checkpoint-lr-scheduler", ("use_checkpoint_opt_param_scheduler",), const=True,
        today="--use-checkpoint-opt-param-scheduler",
    ),
    RemovedFlag("--no-query-key-layer-scaling", const=True, today="query-key layer scaling is off by default today"),
    RemovedFlag("--no-contiguous-buffers-in-local-ddp", const=True, today="gradients lie in contiguous buffers today"),
    RemovedFlag("--use-contiguous-buffers-in-ddp", const=True, today="gradients lie in contiguous buffers today"),
    RemovedFlag(
        "--no-scatter-gather-tensors-in-pipeline", const=True,
        today="stages exchange full tensors today, or with --sequence-parallel each rank's shard",
    ),
    RemovedFlag(
        "--no-async-tensor-model-parallel-allreduce", const=True, today="today's all-reduce is always asynchronous"
    ),
    RemovedFlag("--mmap-warmup", const=True, today="datasets are not warmed up today"),
    RemovedFlag("--log-batch-size-to-tensorboard", const=True, today="the batch size is always logged today"),
    RemovedFlag("--no-log-learnig-rate-to-tensorboard", const=True, today="the learning rate is always logged today"),
    RemovedFlag("--local_rank", parse=int, today="the launcher sets LOCAL_RANK in the environment"),
    RemovedFlag("--retriever-seq-length", parse=int, today="only retrievers read it, never GPT"),
    RemovedFlag("--img-dim", parse=int, today="only vision models read it, never GPT"),
    RemovedFlag(
        "--pipeline-model-parallel-split-rank", parse=int, today="Megatron no longer trains encoder-decoder models",
        cure="Leave it out",
    ),
    RemovedFlag("--experiment_name", today="nothing reads this label; give --tensorboard-dir or --save"),
    RemovedFlag("--save_json_log", const=True, today="losses and traffic go to --tensorboard-dir"),
    RemovedFlag("--save_json_path", today="losses and traffic go to --tensorboard-dir"),
    RemovedFlag("--check_comp_speed", const=True, today="the artifact never read it; --compression-metrics logs times"),
    RemovedFlag(
        "--check_comp_ratio", const=True, today="the artifact never read it; --compression-metrics logs traffic",
    ),
    RemovedFlag("--grad_comp_type", today="PowerSGD is the only low-rank compressor", accepts=("PowerSGD",)),
    RemovedFlag("--inter_grad_comp_type", today="PowerSGD is the only low-rank compressor", accepts=("PowerSGD",)),
    RemovedFlag(
        "--emb_grad_comp", const=True, today="compressing the embedding's gradient costs more than it saves",
        cure="Give --emb_comm_opt, or --fused-embedding-sync, which halves the embedding's traffic without loss",
    ),
    RemovedFlag(
        "--mp_grad_comp", const=True, today="tensor-parallel traffic stays within a node and is not compressed",
        cure="Leave it out",
    ),
    RemovedFlag(
        "--mp_acti_comp", const=True, today="tensor-parallel traffic stays within a node and is not compressed",
        cure="Leave it out",
    ),
    RemovedFlag(
        "--inter_acti_comp", const=True, today="the artifact itself says 'We do not support' it", cure="Leave it out",
    ),
    RemovedFlag(
        "--get_val_ppls", const=True, today="checkpoints are evaluated by another program",
        cure="Train without it, then run scripts/eval/perplexity.sh on the checkpoints",
    ),
    RemovedFlag(
        "--compression-debug", const=True, today="settings of ranks are compared when training begins",
        cure="Leave it out",
    ),
    RemovedFlag(
        "--low-rank-wire", today="low-rank factors are sent in the gradients' data type",
        cure="Leave it out, or give the class a format of int4, which sends fewer bytes for less loss",
    ),
    *(
        RemovedFlag(f"--{switch}_{value}", today=f"it has no effect without --{switch}")
        for switch in ("emb_grad_comp", "mp_grad_comp", "mp_acti_comp", "inter_acti_comp")
        for value in ("type", "rank", "warm_up")
    ),
    RemovedFlag("--emb_use_error_feedback", const=True, today="it has no effect without --emb_grad_comp"),
    *(
        RemovedFlag(spelling, today="it has no effect without --get_val_ppls")
        for spelling in (
            "--src_ckpt_path", "--val_start_iteration", "--val_target_iteration", "--val_ckpt_interval",
            "--val_ppls_save_path",
        )
    ),
)  # fmt: skip

ARTIFACT_DEFAULTS: Mapping[str, Any] = {
    name: flag.default for flag in ARTIFACT_FLAGS for name in flag.fields if flag.default is not None
} | {"residual_across_iterations": "carry"}
"""The fields that a command line in the artifact's names leaves at the artifact's defaults."""

_GIVEN, _NOTES = "optimus_cc_artifact", "optimus_cc_gone_flags"


class _Action(argparse.Action):
    """argparse action of an old flag: parses the value, or uses the constant of a switch, and calls `take` with it."""

    def __init__(self, option_strings: list[str], dest: str, flag: Any, take: Callable[..., None], help: str) -> None:
        nargs = None if flag.const is None else 0
        super().__init__(option_strings, dest, nargs, None, argparse.SUPPRESS, flag.parse, help=help, metavar="X")
        self._flag, self._take = flag, take

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        self._take(parser, namespace, self._flag, values if self._flag.const is None else self._flag.const)


def add_artifact_flags(group: argparse._ArgumentGroup) -> None:
    """Let `group`'s parser accept the published artifact's names for our options."""
    for flag in ARTIFACT_FLAGS:
        help = f"The published artifact's name (see {flag_of(flag.fields[0])})."
        group.add_argument(flag.spelling, action=_Action, flag=flag, take=_keep, dest=_GIVEN, help=help)


def _keep(parser: argparse.ArgumentParser, namespace: argparse.Namespace, flag: ArtifactFlag, value: Any) -> None:
    """Keep the value of an artifact flag for `given_artifact_flags`."""
    setattr(namespace, _GIVEN, getattr(namespace, _GIVEN, {}) | {flag.spelling: value})


def add_removed_flags(parser: argparse.ArgumentParser) -> None:
    """Let `parser` accept every removed flag of Megatron v2.5 that it does not define itself."""
    for flag in REMOVED_FLAGS:
        if flag.spelling not in parser._option_string_actions:
            parser.add_argument(
                flag.spelling, action=_Action, flag=flag, take=_translate, dest=_NOTES, help=argparse.SUPPRESS
            )


def _translate(parser: argparse.ArgumentParser, namespace: argparse.Namespace, flag: RemovedFlag, value: Any) -> None:
    """Set the fields that a removed flag stands for and note a line about it, or refuse the flag."""
    if flag.cure:
        parser.error(str(FlagError(flag.spelling, flag.today, flag.cure)))
    if flag.accepts and value not in flag.accepts:
        cure = f"Leave the flag out, or give {' or '.join(flag.accepts)}"
        parser.error(str(FlagError(flag.spelling, f"Megatron no longer has {value!r} ({flag.today})", cure)))
    unset = {name: implied for name, implied in flag.implies.items() if getattr(namespace, name, None) is None}
    vars(namespace).update(unset, **dict.fromkeys(flag.fields, value))
    shown = f"{value:g}" if isinstance(value, float) else value
    written = flag.spelling if flag.const is not None else f"{flag.spelling} {shown}"
    note = f"{written}: {'translated' if flag.fields else 'dropped'}: {flag.today}"
    setattr(namespace, _NOTES, [*getattr(namespace, _NOTES, []), note])


def given_artifact_flags(args: argparse.Namespace) -> list[tuple[ArtifactFlag, Any]]:
    """Return the artifact's flags in `args` with their values, in the order of the table."""
    values: dict[str, Any] = getattr(args, _GIVEN, {})
    return [(flag, values[flag.spelling]) for flag in ARTIFACT_FLAGS if flag.spelling in values]


def take_notes(args: argparse.Namespace) -> list[str]:
    """Remove the lines about removed flags from `args`, and return them."""
    notes: list[str] = vars(args).pop(_NOTES, [])
    return notes
