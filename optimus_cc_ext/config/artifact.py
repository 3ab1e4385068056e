"""Names of another day: the published artifact's flags, and those of its Megatron (v2.5) that today's has lost.

Two tables say what each stands for: a flag of the artifact's for fields of `OptimusConfig`; one of Megatron's for its
fields of today, or for nothing, because what it chose is the only behaviour left, which the user is told in a line.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from optimus_cc_ext.config.options import flag_of
from optimus_cc_ext.errors import FlagError

__all__ = [
    "ARTIFACT_DEFAULTS", "ARTIFACT_FLAGS", "REMOVED_FLAGS", "add_artifact_flags", "add_removed_flags",
    "given_artifact_flags", "take_notes",
]  # fmt: skip


@dataclass(frozen=True)
class OldFlag:
    """A flag of another day, and the fields of today that its value goes to."""

    spelling: str
    fields: tuple[str, ...] = ()
    parse: Callable[[str], Any] = str
    _: KW_ONLY
    const: Any = None
    """The value that a switch stands for."""


@dataclass(frozen=True)
class ArtifactFlag(OldFlag):
    """The published artifact's name of fields of `OptimusConfig`."""

    default: Any = None
    """What the artifact does where the flag is left out (its megatron/arguments.py); None: what we do."""

    needs: str | None = None
    """The switch without which its value means nothing."""


@dataclass(frozen=True)
class RemovedFlag(OldFlag):
    """A flag that Megatron has lost: translated into fields of Megatron's, dropped or refused."""

    _: KW_ONLY
    today: str
    """What there is today instead."""

    accepts: tuple[str, ...] = ()
    """The only values that can be honoured; empty: any."""

    cure: str = ""
    """What to do instead of a flag that is refused; empty: it is not refused."""

    implies: Mapping[str, Any] = field(default_factory=dict)
    """Fields of Megatron's that it sets as well, unless the user did."""


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
"""The artifact's flags. Their defaults are those of its megatron/arguments.py."""

REMOVED_FLAGS = (
    RemovedFlag("--data-impl", today="the memory-mapped dataset is the only one today", accepts=("mmap", "infer")),
    RemovedFlag("--DDP-impl", today="Megatron's own DDP is what is used today", accepts=("local",)),
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
    RemovedFlag("--no-query-key-layer-scaling", const=True, today="not scaling is today's default"),
    RemovedFlag("--no-contiguous-buffers-in-local-ddp", const=True, today="gradients lie in contiguous buffers today"),
    RemovedFlag("--use-contiguous-buffers-in-ddp", const=True, today="gradients lie in contiguous buffers today"),
    RemovedFlag(
        "--no-scatter-gather-tensors-in-pipeline", const=True,
        today="tensors between stages are sent whole, or with --sequence-parallel as the shards that they are",
    ),
    RemovedFlag(
        "--no-async-tensor-model-parallel-allreduce", const=True, today="today's all-reduce is always asynchronous"
    ),
    RemovedFlag("--mmap-warmup", const=True, today="datasets are not warmed up today"),
    RemovedFlag("--log-batch-size-to-tensorboard", const=True, today="the batch size is always logged today"),
    RemovedFlag("--no-log-learnig-rate-to-tensorboard", const=True, today="the learning rate is always logged today"),
    RemovedFlag("--local_rank", parse=int, today="the launcher's LOCAL_RANK says it"),
    RemovedFlag("--retriever-seq-length", parse=int, today="only retrievers read it, never GPT"),
    RemovedFlag("--img-dim", parse=int, today="only vision models read it, never GPT"),
    RemovedFlag(
        "--pipeline-model-parallel-split-rank", parse=int, today="models of encoder and decoder are gone from Megatron",
        cure="Leave it out",
    ),
    RemovedFlag("--experiment_name", today="a label that nothing reads; name --tensorboard-dir or --save instead"),
    RemovedFlag("--save_json_log", const=True, today="losses and traffic go to --tensorboard-dir"),
    RemovedFlag("--save_json_path", today="losses and traffic go to --tensorboard-dir"),
    RemovedFlag("--check_comp_speed", const=True, today="nothing read it; --compression-metrics logs times"),
    RemovedFlag("--check_comp_ratio", const=True, today="nothing read it; --compression-metrics logs traffic"),
    RemovedFlag("--grad_comp_type", today="PowerSGD is the compressor", accepts=("PowerSGD",)),
    RemovedFlag("--inter_grad_comp_type", today="PowerSGD is the compressor", accepts=("PowerSGD",)),
    RemovedFlag(
        "--emb_grad_comp", const=True, today="compressing the embedding's gradient costs more than it saves",
        cure="Give --emb_comm_opt, or --fused-embedding-sync, which halves its traffic without loss",
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
    *(
        RemovedFlag(f"--{switch}_{value}", today=f"it means nothing without --{switch}")
        for switch in ("emb_grad_comp", "mp_grad_comp", "mp_acti_comp", "inter_acti_comp")
        for value in ("type", "rank", "warm_up")
    ),
    RemovedFlag("--emb_use_error_feedback", const=True, today="it means nothing without --emb_grad_comp"),
    *(
        RemovedFlag(spelling, today="it means nothing without --get_val_ppls")
        for spelling in (
            "--src_ckpt_path", "--val_start_iteration", "--val_target_iteration", "--val_ckpt_interval",
            "--val_ppls_save_path",
        )
    ),
)  # fmt: skip

ARTIFACT_DEFAULTS: Mapping[str, Any] = {
    name: flag.default for flag in ARTIFACT_FLAGS for name in flag.fields if flag.default is not None
} | {"residual_across_iterations": "carry"}
"""What a command line in the artifact's names means where it is silent."""

_GIVEN, _NOTES = "optimus_cc_artifact", "optimus_cc_gone_flags"


class _Action(argparse.Action):
    """Reads a flag's value, or takes the one that a switch stands for, and does with it what its kind of flag does."""

    def __init__(self, option_strings: list[str], dest: str, flag: Any, take: Callable[..., None], help: str) -> None:
        nargs = None if flag.const is None else 0
        super().__init__(option_strings, dest, nargs, None, argparse.SUPPRESS, flag.parse, help=help, metavar="X")
        self._flag, self._take = flag, take

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        self._take(parser, namespace, self._flag, values if self._flag.const is None else self._flag.const)


def add_artifact_flags(group: argparse._ArgumentGroup) -> None:
    """Let `group`'s parser accept what the published artifact calls our options."""
    for flag in ARTIFACT_FLAGS:
        help = f"The published artifact's name (see {flag_of(flag.fields[0])})."
        group.add_argument(flag.spelling, action=_Action, flag=flag, take=_keep, dest=_GIVEN, help=help)


def _keep(parser: argparse.ArgumentParser, namespace: argparse.Namespace, flag: ArtifactFlag, value: Any) -> None:
    """Keep a flag of the artifact's for `given_artifact_flags`."""
    setattr(namespace, _GIVEN, getattr(namespace, _GIVEN, {}) | {flag.spelling: value})


def add_removed_flags(parser: argparse.ArgumentParser) -> None:
    """Let `parser` accept every flag of Megatron v2.5 in the table that it does not know by itself."""
    for flag in REMOVED_FLAGS:
        if flag.spelling not in parser._option_string_actions:
            parser.add_argument(
                flag.spelling, action=_Action, flag=flag, take=_translate, dest=_NOTES, help=argparse.SUPPRESS
            )


def _translate(parser: argparse.ArgumentParser, namespace: argparse.Namespace, flag: RemovedFlag, value: Any) -> None:
    """Do what a lost flag stands for, with a line to say; or refuse it."""
    if flag.cure:
        parser.error(str(FlagError(flag.spelling, flag.today, flag.cure)))
    if flag.accepts and value not in flag.accepts:
        cure = f"Leave the flag out, or give {' or '.join(flag.accepts)}"
        parser.error(str(FlagError(flag.spelling, f"{value!r} is gone from Megatron ({flag.today})", cure)))
    unset = {name: implied for name, implied in flag.implies.items() if getattr(namespace, name, None) is None}
    vars(namespace).update(unset, **dict.fromkeys(flag.fields, value))
    shown = f"{value:g}" if isinstance(value, float) else value
    written = flag.spelling if flag.const is not None else f"{flag.spelling} {shown}"
    note = f"{written}: {'translated' if flag.fields else 'dropped'}: {flag.today}"
    setattr(namespace, _NOTES, [*getattr(namespace, _NOTES, []), note])


def given_artifact_flags(args: argparse.Namespace) -> list[tuple[ArtifactFlag, Any]]:
    """The artifact's flags in `args` and their values, in the table's order."""
    values: dict[str, Any] = getattr(args, _GIVEN, {})
    return [(flag, values[flag.spelling]) for flag in ARTIFACT_FLAGS if flag.spelling in values]


def take_notes(args: argparse.Namespace) -> list[str]:
    """The lines to say about gone flags in `args`; they are taken off the namespace."""
    notes: list[str] = vars(args).pop(_NOTES, [])
    return notes
