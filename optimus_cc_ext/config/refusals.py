"""Megatron's options that classes of traffic do not support yet. Each is refused by name, before training starts."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from optimus_cc_ext.config.classes import (
    CLASSES,
    DP_GRADIENTS,
    EMBEDDING,
    PARAM_GATHER,
    PIPELINE_BACKWARD,
    PIPELINE_FORWARD,
    TrafficClass,
)
from optimus_cc_ext.config.optimus_config import OptimusConfig
from optimus_cc_ext.errors import FlagError

__all__ = ["REFUSALS", "Refusal", "refuse_unsupported"]


_GRADIENTS = (EMBEDDING, DP_GRADIENTS)
_BUFFERS = (*_GRADIENTS, PARAM_GATHER)

_FOLDERS = ("save", "load", "pretrained_checkpoint", "non_persistent_global_ckpt_dir")


@dataclass(frozen=True)
class Refusal:
    """An option of Megatron, the classes of traffic that do not support it, and the reason and cure of the refusal."""

    flag: str
    classes: tuple[TrafficClass, ...]
    """The classes of traffic that the option affects."""

    reason: str
    cure: str = "Leave it out, or leave out the technique"
    given: Callable[[argparse.Namespace], Any] | None = None
    """A test for the option in Megatron's arguments; None: the argument of the flag's own name is true."""

    where: Callable[[OptimusConfig, TrafficClass], bool] = OptimusConfig.is_on
    """A test for whether the option affects a class of traffic in a configuration."""

    def affected(self, args: argparse.Namespace, config: OptimusConfig) -> tuple[TrafficClass, ...]:
        """Return the classes of traffic that these arguments make unsupported."""
        name = self.flag.removeprefix("--").replace("-", "_")
        if not (getattr(args, name, None) if self.given is None else self.given(args)):
            return ()
        return tuple(traffic for traffic in self.classes if self.where(config, traffic))


def _above_one(name: str) -> Callable[[argparse.Namespace], Any]:
    return lambda args: (getattr(args, name, None) or 1) > 1


def _graph_of_everything(args: argparse.Namespace) -> bool:
    # Megatron 0.17 has full_iteration as a scope (a member of an enumeration) of the implementation "local"; later
    # versions have made it an implementation of its own.
    scopes = getattr(args, "cuda_graph_scope", None) or ()
    return getattr(args, "cuda_graph_impl", "none") == "full_iteration" or any(
        getattr(scope, "name", scope) == "full_iteration" for scope in scopes
    )


_FLAGS = "{}, {} and {}".format(*(traffic.flag for traffic in _BUFFERS))
_QUANTISED = f"quantised parameter buffers are not supported with {_FLAGS}"
_SHARDED = f"it shards weights and their gradients over ranks that {_FLAGS} do not take into account"

REFUSALS = (
    # These come before the distributed optimizer, which Megatron switches on together with FSDP.
    Refusal("--use-megatron-fsdp", CLASSES, "FSDP keeps gradients outside of Megatron DDP's buffers"),
    Refusal("--use-torch-fsdp2", CLASSES, "FSDP keeps gradients outside of Megatron DDP's buffers"),
    Refusal(
        "--context-parallel-size", CLASSES, "context parallelism is not supported by Optimus-CC",
        given=_above_one("context_parallel_size"),
    ),
    Refusal(
        "--num-distributed-optimizer-instances", CLASSES, "several distributed-optimizer instances are not supported",
        given=_above_one("num_distributed_optimizer_instances"),
    ),
    Refusal(
        "--ddp-reduce-scatter-with-fp32-accumulation", _GRADIENTS,
        "it replaces the collective that --fused-embedding-sync and --dp-compression replace",
    ),
    Refusal(
        "--ddp-param-name-patterns-for-fp32-local-accumulation", _GRADIENTS,
        "gradients that are accumulated outside of the gradient buffer are not supported by Optimus-CC",
    ),
    Refusal("--fp8-param-gather", _BUFFERS, _QUANTISED),
    Refusal("--fp4-param-gather", _BUFFERS, _QUANTISED),
    Refusal(
        "--tensor-parallel-num-weight-shards", _BUFFERS, _SHARDED, given=_above_one("gtp_weight_remat_size"),
    ),
    Refusal(
        "--expert-tensor-parallel-num-weight-shards", _BUFFERS, _SHARDED,
        given=_above_one("expert_gtp_weight_remat_size"),
    ),
    Refusal(
        "--overlap-moe-expert-parallel-comm", CLASSES,
        "it replaces the 1F1B schedule, by which both ends decide which messages are compressed",
    ),
    Refusal(
        "--mtp-num-layers", (EMBEDDING,),
        "multi-token prediction keeps more than two copies of the embedding",
    ),
    Refusal(
        "--optimizer", _BUFFERS, "layer-wise optimizers (Muon and others) use another layout of the gradient buffers",
        "Use --optimizer adam or sgd", lambda args: getattr(args, "optimizer", "adam") not in ("adam", "sgd"),
    ),
    Refusal(
        "--cuda-graph-impl", CLASSES,
        "a graph of the whole iteration would repeat one iteration's choice of compressed messages for ever",
        given=_graph_of_everything,
    ),
    Refusal(
        "--use-ring-exchange-p2p", (PIPELINE_FORWARD, PIPELINE_BACKWARD),
        "ring exchange bypasses the point-to-point calls that compression wraps",
    ),
    Refusal(
        "--compression-error-statistics", (PIPELINE_BACKWARD,),
        "with the interleaved schedule, consecutive messages belong to different layers",
        "Leave it out, or use the non-interleaved schedule", _above_one("virtual_pipeline_model_parallel_size"),
        lambda config, _: config.compression_error_statistics,
    ),
    Refusal(
        "--inprocess-restart", CLASSES, "an in-process restart would keep the compression state of the previous run",
    ),
    Refusal(
        "--non-persistent-ckpt-type", CLASSES,
        "local checkpoints have no folder for the state of compression",
        "Use --non-persistent-ckpt-type global, or leave it out",
        lambda args: getattr(args, "non_persistent_ckpt_type", None) == "local",
    ),
    Refusal(
        "--enable-msc", CLASSES, "the state of compression cannot be saved to a remote store",
        "Give --save and --load paths of a file system",
        lambda args: any(str(getattr(args, name, "")).startswith("msc://") for name in _FOLDERS),
        OptimusConfig.remembers,
    ),
    Refusal("--perform-rl-step", CLASSES, "reinforcement learning steps are not supported"),
)  # fmt: skip


def refuse_unsupported(args: argparse.Namespace, config: OptimusConfig) -> None:
    """Refuse the first option in `args` that a class of traffic in `config` does not support.

    Raises:
        FlagError: naming Megatron's flag, the reason and the cure.
    """
    for refusal in REFUSALS:
        if refusal.affected(args, config):
            raise FlagError(refusal.flag, refusal.reason, refusal.cure)
