"""Names of another day: the published artifact's flags, and those of its Megatron (v2.5) that today's has lost.

One table says what each stands for: fields of `OptimusConfig`; Megatron's own of today; or nothing, because what it
chose is the only behaviour left. What is not ours is said to the user, a line for each.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from optimus_cc_ext.config.classes import flag_of
from optimus_cc_ext.errors import FlagError

__all__ = [
    "ARTIFACT_DEFAULTS",
    "OLD_FLAGS",
    "add_artifact_flags",
    "add_gone_flags",
    "given_artifact_flags",
    "take_notes",
]


@dataclass(frozen=True)
class OldFlag:
    """A flag that was, and the fields that its value goes to."""

    spelling: str
    fields: tuple[str, ...] = ()
    parse: Callable[[str], Any] = str
    default: Any = None
    """What the artifact does where the flag is left out (its megatron/arguments.py); None: what we do."""

    const: Any = None
    """A switch: the value that it stands for."""

    needs: str | None = None
    """The switch without which its value means nothing."""

    gone: str = ""
    """Megatron's: what there is today instead. Empty: the artifact's, and `fields` are of `OptimusConfig`."""

    accepts: tuple[str, ...] = ()
    """The only values that can be honoured; empty: any."""

    cure: str = ""
    """It is refused, because `gone`, and this is what to do instead."""

    implies: Mapping[str, Any] = field(default_factory=dict)
    """Megatron's fields that it sets as well, unless the user did."""


OLD_FLAGS = (
    OldFlag("--inter_grad_comp", ("compressed_backprop",), const=True),
    OldFlag("--inter_grad_comp_rank", ("compressed_backprop_rank",), int, 12),
    OldFlag("--inter_grad_comp_epilogue_only", ("compressed_backprop_messages",), default="all", const="epilogue"),
    OldFlag("--use_error_feedback", ("lazy_error_propagation", "dp_error_feedback"), default=False, const=True),
    OldFlag("--emb_comm_opt", ("fused_embedding_sync",), const=True),
    OldFlag("--grad_comp", ("dp_compression",), const=True),
    OldFlag("--grad_comp_rank", ("dp_compression_rank",), int, 4),
    OldFlag("--grad_comp_warm_up", ("dp_compression_warmup",), float, 0.1),
    OldFlag("--inter_grad_comp_warm_up", ("compressed_backprop_warmup",), float),
    OldFlag("--selective_grad_comp", ("dp_compression_stages",), const=2),
    OldFlag("--selective_grad_comp_way", ("dp_compression_stages",), int, needs="--selective_grad_comp"),
    OldFlag("--check_orth_error_acti", ("compression_error_statistics",), const=True),
    OldFlag("--comp_seed", ("compression_seed",), int, 714),
    OldFlag("--data-impl", gone="the memory-mapped dataset is the only one today", accepts=("mmap", "infer")),
    OldFlag("--DDP-impl", gone="Megatron's own DDP is what is used today", accepts=("local",)),
    OldFlag(
        "--activations-checkpoint-method", ("recompute_method",), accepts=("uniform", "block"),
        gone="--recompute-granularity full --recompute-method with the same value",
        implies={"recompute_granularity": "full", "recompute_num_layers": 1},
    ),
    OldFlag(
        "--activations-checkpoint-num-layers", ("recompute_num_layers",), int,
        gone="--recompute-num-layers with the same value",
    ),
    OldFlag(
        "--checkpoint-num-layers", ("recompute_num_layers",), int, gone="--recompute-num-layers with the same value",
    ),
    OldFlag(
        "--distribute-checkpointed-activations", ("distribute_saved_activations",), const=True,
        gone="--distribute-saved-activations",
    ),
    OldFlag("--layernorm-epsilon", ("layernorm_epsilon",), float, gone="--norm-epsilon with the same value"),
    OldFlag(
        "--override-lr-scheduler", ("override_opt_param_scheduler",), const=True,
        gone="--override-opt-param-scheduler",
    ),
    OldFlag(
        "--use-checkpoint-lr-scheduler", ("use_checkpoint_opt_param_scheduler",), const=True,
        gone="--use-checkpoint-opt-param-scheduler",
    ),
    OldFlag("--no-query-key-layer-scaling", const=True, gone="not scaling is today's default"),
    OldFlag("--no-contiguous-buffers-in-local-ddp", const=True, gone="gradients lie in contiguous buffers today"),
    OldFlag("--use-contiguous-buffers-in-ddp", const=True, gone="gradients lie in contiguous buffers today"),
    OldFlag(
        "--no-scatter-gather-tensors-in-pipeline", const=True,
        gone="tensors between stages are sent whole, or with --sequence-parallel as the shards that they are",
    ),
    OldFlag(
        "--no-async-tensor-model-parallel-allreduce", const=True, gone="today's all-reduce is always asynchronous"
    ),
    OldFlag("--mmap-warmup", const=True, gone="datasets are not warmed up today"),
    OldFlag("--log-batch-size-to-tensorboard", const=True, gone="the batch size is always logged today"),
    OldFlag("--no-log-learnig-rate-to-tensorboard", const=True, gone="the learning rate is always logged today"),
    OldFlag("--local_rank", parse=int, gone="the launcher's LOCAL_RANK says it"),
    OldFlag("--retriever-seq-length", parse=int, gone="only retrievers read it, never GPT"),
    OldFlag("--img-dim", parse=int, gone="only vision models read it, never GPT"),
    OldFlag(
        "--pipeline-model-parallel-split-rank", parse=int, gone="models of encoder and decoder are gone from Megatron",
        cure="Leave it out",
    ),
    OldFlag("--experiment_name", gone="a label that nothing reads; name --tensorboard-dir or --save instead"),
    OldFlag("--save_json_log", const=True, gone="losses and traffic go to --tensorboard-dir"),
    OldFlag("--save_json_path", gone="losses and traffic go to --tensorboard-dir"),
    OldFlag("--check_comp_speed", const=True, gone="nothing read it; --compression-metrics logs times"),
    OldFlag("--check_comp_ratio", const=True, gone="nothing read it; --compression-metrics logs traffic"),
    OldFlag("--grad_comp_type", gone="PowerSGD is the compressor", accepts=("PowerSGD",)),
    OldFlag("--inter_grad_comp_type", gone="PowerSGD is the compressor", accepts=("PowerSGD",)),
    OldFlag(
        "--emb_grad_comp", const=True, gone="compressing the embedding's gradient costs more than it saves",
        cure="Give --emb_comm_opt, or --fused-embedding-sync, which halves its traffic without loss",
    ),
    OldFlag(
        "--mp_grad_comp", const=True, gone="tensor-parallel traffic stays within a node and is not compressed",
        cure="Leave it out",
    ),
    OldFlag(
        "--mp_acti_comp", const=True, gone="tensor-parallel traffic stays within a node and is not compressed",
        cure="Leave it out",
    ),
    OldFlag(
        "--inter_acti_comp", const=True, gone="the artifact itself says 'We do not support' it", cure="Leave it out",
    ),
    OldFlag(
        "--get_val_ppls", const=True, gone="checkpoints are evaluated by another program",
        cure="Train without it, then run scripts/eval/perplexity.sh on the checkpoints",
    ),
    *(
        OldFlag(f"--{switch}_{value}", gone=f"it means nothing without --{switch}")
        for switch in ("emb_grad_comp", "mp_grad_comp", "mp_acti_comp", "inter_acti_comp")
        for value in ("type", "rank", "warm_up")
    ),
    OldFlag("--emb_use_error_feedback", const=True, gone="it means nothing without --emb_grad_comp"),
    *(
        OldFlag(spelling, gone="it means nothing without --get_val_ppls")
        for spelling in (
            "--src_ckpt_path", "--val_start_iteration", "--val_target_iteration", "--val_ckpt_interval",
            "--val_ppls_save_path",
        )
    ),
)  # fmt: skip

ARTIFACT_DEFAULTS: Mapping[str, Any] = {
    name: flag.default for flag in OLD_FLAGS for name in flag.fields if flag.default is not None
} | {"residual_across_iterations": "carry"}
"""What a command line in the artifact's names means where it is silent."""

_GIVEN, _NOTES = "optimus_cc_artifact", "optimus_cc_gone_flags"


class _OldFlagAction(argparse.Action):
    """Keeps an artifact's flag for `given_artifact_flags`; does what a gone one stands for, with a line to say."""

    def __init__(self, option_strings: list[str], dest: str, flag: OldFlag, help: str) -> None:
        nargs = None if flag.const is None else 0
        super().__init__(option_strings, dest, nargs, None, argparse.SUPPRESS, flag.parse, help=help, metavar="X")
        self._flag = flag

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        flag, value = self._flag, values if self._flag.const is None else self._flag.const
        if not flag.gone:
            setattr(namespace, _GIVEN, getattr(namespace, _GIVEN, {}) | {flag.spelling: value})
            return
        if flag.cure:
            parser.error(str(FlagError(flag.spelling, flag.gone, flag.cure)))
        if flag.accepts and value not in flag.accepts:
            cure = f"Leave the flag out, or give {' or '.join(flag.accepts)}"
            parser.error(str(FlagError(flag.spelling, f"{value!r} is gone from Megatron ({flag.gone})", cure)))
        unset = {name: implied for name, implied in flag.implies.items() if getattr(namespace, name, None) is None}
        vars(namespace).update(unset, **dict.fromkeys(flag.fields, value))
        shown = f"{value:g}" if isinstance(value, float) else value
        written = flag.spelling if flag.const is not None else f"{flag.spelling} {shown}"
        note = f"{written}: {'translated' if flag.fields else 'dropped'}: {flag.gone}"
        setattr(namespace, _NOTES, [*getattr(namespace, _NOTES, []), note])


def add_artifact_flags(group: argparse._ArgumentGroup) -> None:
    """Let `group`'s parser accept what the published artifact calls our options."""
    for flag in OLD_FLAGS:
        if not flag.gone:
            help = f"The published artifact's name (see {flag_of(flag.fields[0])})."
            group.add_argument(flag.spelling, action=_OldFlagAction, flag=flag, dest=_GIVEN, help=help)


def add_gone_flags(parser: argparse.ArgumentParser) -> None:
    """Let `parser` accept every flag of Megatron v2.5 in the table that it does not know by itself."""
    for flag in OLD_FLAGS:
        if flag.gone and flag.spelling not in parser._option_string_actions:
            parser.add_argument(flag.spelling, action=_OldFlagAction, flag=flag, dest=_NOTES, help=argparse.SUPPRESS)


def given_artifact_flags(args: argparse.Namespace) -> list[tuple[OldFlag, Any]]:
    """The artifact's flags in `args` and their values, in the table's order."""
    values: dict[str, Any] = getattr(args, _GIVEN, {})
    return [(flag, values[flag.spelling]) for flag in OLD_FLAGS if flag.spelling in values]


def take_notes(args: argparse.Namespace) -> list[str]:
    """The lines to say about gone flags in `args`; they are taken off the namespace."""
    notes: list[str] = vars(args).pop(_NOTES, [])
    return notes
