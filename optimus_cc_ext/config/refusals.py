"""Megatron's options that classes of traffic do not support.

A conflict belongs to the classes that it names: a preset leaves these dense and compresses the others; a class that a
flag of its own switches on is refused before training starts. Only an option with which every class would be wrong ends
the whole run.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from optimus_cc_ext.compressors.formats import EXACT, block_format
from optimus_cc_ext.config.classes import (
    CLASSES,
    DP_GRADIENTS,
    EMBEDDING,
    PARAM_GATHER,
    PIPELINE_BACKWARD,
    TrafficClass,
    classes_among,
)
from optimus_cc_ext.config.optimus_config import OptimusConfig
from optimus_cc_ext.errors import FlagError

_GRADIENTS = classes_among("ends", "replicas")
_BUFFERS = classes_among("ends", "replicas", "owners")
_MESSAGES, _EXPERTS = classes_among("pipeline"), classes_among("experts")

_FOLDERS = ("save", "load", "pretrained_checkpoint", "non_persistent_global_ckpt_dir")


@dataclass(frozen=True)
class Refusal:
    """An option of Megatron, the classes of traffic that do not support it, and the reason and cure of the refusal."""

    flag: str
    classes: tuple[TrafficClass, ...]
    """The classes of traffic that the option affects."""

    reason: str
    cure: str = "Leave out one of the two"
    given: Callable[[argparse.Namespace], Any] | None = None
    """A test for the option in Megatron's arguments; None: the argument of the flag's own name is true."""

    where: Callable[[OptimusConfig, TrafficClass], bool] = OptimusConfig.is_on
    """A test for whether the option affects a class of traffic in a configuration."""

    unless_asked: Callable[[OptimusConfig], bool] = lambda config: False
    """A test for a configuration in which a class may be compressed all the same, if a flag of its own asks for it."""

    whole_run: bool = False
    """True if the run is refused even under a preset, because it would be wrong with the classes dense, too."""

    def affected(self, args: argparse.Namespace, config: OptimusConfig) -> tuple[TrafficClass, ...]:
        """Return the classes of traffic that these arguments make unsupported."""
        name = self.flag.removeprefix("--").replace("-", "_")
        if not (getattr(args, name, None) if self.given is None else self.given(args)):
            return ()
        return tuple(traffic for traffic in self.classes if self.where(config, traffic))


def _above_one(name: str) -> Callable[[argparse.Namespace], Any]:
    return lambda args: (getattr(args, name, None) or 1) > 1


_instances = _above_one("num_distributed_optimizer_instances")


def _graph_of_everything(args: argparse.Namespace) -> bool:
    # Megatron 0.17 has full_iteration as a scope (a member of an enumeration) of the implementation "local"; later
    # versions have made it an implementation of its own.
    scopes = getattr(args, "cuda_graph_scope", None) or ()
    return getattr(args, "cuda_graph_impl", "none") == "full_iteration" or any(
        getattr(scope, "name", scope) == "full_iteration" for scope in scopes
    )


def _added_up_in_the_buckets_dtype(config: OptimusConfig, traffic: TrafficClass) -> bool:
    chosen = config.format_of(traffic)
    if block_format(config.format_of(DP_GRADIENTS)) is not None:
        return False
    return chosen == "low-rank" or block_format(chosen) is not None


def _graph_of_experts(args: argparse.Namespace) -> bool:
    # The flag names the modules of a layer that CUDA graphs capture ("scopes" in Megatron 0.17 and 0.18). Without a
    # name, whole layers are captured.
    given = getattr(args, "cuda_graph_modules", None) or getattr(args, "cuda_graph_scope", None) or ("moe",)
    on = getattr(args, "cuda_graph_impl", None) not in (None, "none")
    return on and any(getattr(module, "name", module) == "moe" for module in given)


def _other_dispatcher(args: argparse.Namespace) -> bool:
    return getattr(args, "moe_token_dispatcher_type", "alltoall") != "alltoall"


_FSDP = "FSDP keeps gradients and parameters outside of Megatron DDP's buffers"
_QUANTISED = "Megatron gathers quantised parameters, whose changes nothing keeps in fp32"
_SHARDED = "it shards weights and their gradients over further ranks"

REFUSALS = (
    # An option that replaces a class's collective comes before one that only changes it: the first refusal is named.
    Refusal("--use-megatron-fsdp", _BUFFERS, _FSDP),
    Refusal(
        "--use-torch-fsdp2", (DP_GRADIENTS,), "FSDP2 reduces the gradients of each micro-batch by themselves",
        "Give --dp-compression-format int8 or int4, which it takes, or leave out one of the two",
        unless_asked=lambda config: block_format(config.format_of(DP_GRADIENTS)) is not None,
    ),
    Refusal("--use-torch-fsdp2", (EMBEDDING, PARAM_GATHER), _FSDP),
    Refusal(
        "--save-wgrads-interval", _GRADIENTS,
        "with several distributed-optimizer instances Megatron sums whole gradients over the replicas of one instance "
        "only",
        given=lambda args: _instances(args) and getattr(args, "save_wgrads_interval", None) is not None,
    ),
    Refusal(
        "--ddp-reduce-scatter-with-fp32-accumulation", _GRADIENTS,
        "factors of low rank are added up in the bucket's data type, and so is a bucket of which only the embedding is "
        "encoded",
        "Leave it out, or give --dp-compression-format int8",
        where=_added_up_in_the_buckets_dtype,
    ),
    Refusal(
        "--ddp-param-name-patterns-for-fp32-local-accumulation", _GRADIENTS,
        "gradients that are accumulated outside of the gradient buffer are not supported by Optimus-CC",
    ),
    Refusal("--fp8-param-gather", (PARAM_GATHER,), _QUANTISED),
    Refusal("--fp4-param-gather", (PARAM_GATHER,), _QUANTISED),
    Refusal(
        "--tensor-parallel-num-weight-shards", _BUFFERS, _SHARDED, given=_above_one("gtp_weight_remat_size"),
    ),
    Refusal(
        "--expert-tensor-parallel-num-weight-shards", _BUFFERS, _SHARDED,
        given=_above_one("expert_gtp_weight_remat_size"),
    ),
    Refusal(
        "--overlap-moe-expert-parallel-comm", _MESSAGES,
        "it changes the 1F1B schedule, by which both ends decide which messages are compressed",
    ),
    Refusal(
        "--optimizer", (PARAM_GATHER,), "the distributed optimizers of Muon and others copy shards in another way",
        "Use --optimizer adam or sgd", lambda args: getattr(args, "optimizer", "adam") not in ("adam", "sgd"),
    ),
    Refusal(
        "--qk-clip", (PARAM_GATHER,), "it writes parameters between the step and the gather of the step's changes",
        "Give --param-gather-format dense", where=lambda config, _: config.param_gather_format == EXACT,
    ),
    Refusal(
        "--overlap-param-gather-with-optimizer-step", (PARAM_GATHER,),
        "it gathers between the steps of two optimizers, where the lengths of exact messages are not known yet",
        where=lambda config, _: config.param_gather_format == EXACT,
    ),
    Refusal(
        "--cuda-graph-impl", CLASSES,
        "a graph of the whole iteration would repeat one iteration's choice of compressed messages for ever",
        given=_graph_of_everything,
    ),
    Refusal(
        "--moe-token-dispatcher-type", _EXPERTS, "only the tokens of the dispatcher alltoall can be compressed",
        "Use --moe-token-dispatcher-type alltoall", _other_dispatcher,
    ),
    Refusal(
        "--cuda-graph-impl", _EXPERTS,
        "a graph of the MoE layer would compress tokens in evaluation, too, if it compresses them in training",
        "Leave it out, or give --cuda-graph-modules without moe", _graph_of_experts,
    ),
    Refusal("--use-ring-exchange-p2p", _MESSAGES, "ring exchange bypasses the point-to-point calls of compression"),
    Refusal(
        "--compression-error-statistics", (PIPELINE_BACKWARD,),
        "with the interleaved schedule, consecutive messages belong to different layers",
        "Leave it out, or use the non-interleaved schedule", _above_one("virtual_pipeline_model_parallel_size"),
        lambda config, _: config.compression_error_statistics, whole_run=True,
    ),
    # Megatron destroys every process group before it calls `pretrain` again in the same process
    # (training/inprocess_restart.py, destroy_state), while a session keeps the groups of its first place.
    Refusal(
        "--inprocess-restart", CLASSES,
        "an in-process restart would keep the process groups and the compression state of the previous run",
        "Leave it out, or leave out Optimus-CC", whole_run=True,
    ),
    Refusal(
        "--ckpt-convert-format", CLASSES,
        "Megatron converts and ends before the compression state is loaded, so the copy would be without it",
        "Convert without Optimus-CC; a run that goes on from the copy says that its residuals are empty",
        where=OptimusConfig.remembers, whole_run=True,
    ),
    Refusal(
        "--non-persistent-ckpt-type", CLASSES,
        "local checkpoints have no folder for the compression state",
        "Use --non-persistent-ckpt-type global, or leave it out",
        lambda args: getattr(args, "non_persistent_ckpt_type", None) == "local", OptimusConfig.remembers,
    ),
    Refusal(
        "--enable-msc", CLASSES, "the compression state cannot be saved to a remote store",
        "Give --save and --load paths of a file system",
        lambda args: any(str(getattr(args, name, "")).startswith("msc://") for name in _FOLDERS),
        OptimusConfig.remembers,
    ),
    Refusal("--perform-rl-step", CLASSES, "steps of reinforcement learning were not tried with compression"),
)  # fmt: skip


_REMARKS = {
    "nccl_ub": "--use-nccl-ub: the buffers of compression are not registered with NCCL, Megatron's own buffers are",
    "use_sharp": "--use-sharp: the network does not sum gradients in 8 or 4 bits, which are sent by all-to-all",
}


def remarks(args: argparse.Namespace, config: OptimusConfig) -> list[str]:
    """Return the lines about options that work beside compression, and do less there than the user may expect."""
    if not config.any_technique:
        return []
    found = [line for name, line in _REMARKS.items() if getattr(args, name, False)]
    if getattr(args, "num_experts", None) and args.expert_model_parallel_size > 1 and _other_dispatcher(args):
        found.append(
            f"--moe-token-dispatcher-type {args.moe_token_dispatcher_type}: tokens are exchanged as in vanilla "
            "Megatron; only those of alltoall can be compressed"
        )
    return found


def conflicts(args: argparse.Namespace, config: OptimusConfig) -> dict[TrafficClass, Refusal]:
    """Return the first refusal of each class of traffic that is on in `config` and that these arguments do not allow.

    Raises:
        FlagError: an option with which every class of traffic would be wrong; names Megatron's flag, reason and cure.
    """
    found: dict[TrafficClass, Refusal] = {}
    for refusal in REFUSALS:
        affected = refusal.affected(args, config)
        if affected and refusal.whole_run:
            raise FlagError(refusal.flag, refusal.reason, refusal.cure)
        for traffic in affected:
            found.setdefault(traffic, refusal)
    return found


def refusal_of(flag: str, refusal: Refusal, config: OptimusConfig, found: Mapping[TrafficClass, Refusal]) -> FlagError:
    """Return the refusal of a class that `flag` switches on, with the flags that keep the other classes.

    Args:
        flag: the flag as the user wrote it.
        refusal: the conflict of the class.
        config: the configuration that was asked for.
        found: all conflicts of this configuration.
    """
    kept = [traffic.tag for traffic in CLASSES if config.is_on(traffic) and traffic not in found]
    cure = refusal.cure
    if kept:
        ways = ["--expert-exchange direct"] if any(map(config.goes_once, found)) else []
        off = " ".join([*ways, *(traffic.off for traffic in CLASSES if traffic in found)])
        cure = f"{cure}, or give {off}, which keeps {_listed(kept)}"
    return FlagError(flag, f"{refusal.reason} ({refusal.flag})", cure)


def _listed(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def refuse_unsupported(args: argparse.Namespace, config: OptimusConfig) -> None:
    """Refuse the first class of traffic in `config` that does not support an option in `args`.

    Raises:
        FlagError: naming the class's flag, the reason, Megatron's flag and the cure.
    """
    if found := conflicts(args, config):
        traffic, refusal = next(iter(found.items()))
        raise refusal_of(config.flag_of(traffic), refusal, config, found)
