"""Megatron's options that our techniques do not work with yet: each refused by name, before anything starts."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from optimus_cc_ext.config.classes import OptimusConfig
from optimus_cc_ext.errors import FlagError

__all__ = ["REFUSALS", "Refusal", "refuse_unsupported"]


def _any(config: OptimusConfig) -> bool:
    return config.any_technique


def _messages(config: OptimusConfig) -> bool:
    return config.compressed_backprop or config.pipeline_forward_format != "dense"


def _embedding(config: OptimusConfig) -> bool:
    return config.fused_embedding_sync


def _gradients(config: OptimusConfig) -> bool:
    return config.fused_embedding_sync or config.dp_compression


def _buffers(config: OptimusConfig) -> bool:
    return _gradients(config) or config.param_gather_format != "dense"


def _remembers(config: OptimusConfig) -> bool:
    return config.backprop_remembers or config.gradients_remember


_FOLDERS = ("save", "load", "pretrained_checkpoint", "non_persistent_global_ckpt_dir")


@dataclass(frozen=True)
class Refusal:
    """One option of Megatron, the techniques that do not work with it, and what to say."""

    flag: str
    given: Callable[[argparse.Namespace], Any]
    affects: Callable[[OptimusConfig], bool]
    reason: str
    cure: str = "Leave it out, or leave out the technique"


def _set(name: str) -> Callable[[argparse.Namespace], Any]:
    return lambda args: getattr(args, name, None)


def _above_one(name: str) -> Callable[[argparse.Namespace], Any]:
    return lambda args: (getattr(args, name, None) or 1) > 1


def _graph_of_everything(args: argparse.Namespace) -> bool:
    # Megatron 0.17 has it as a scope of "local", a member of an enumeration; later ones have turned it into their own.
    scopes = getattr(args, "cuda_graph_scope", None) or ()
    return getattr(args, "cuda_graph_impl", "none") == "full_iteration" or any(
        getattr(scope, "name", scope) == "full_iteration" for scope in scopes
    )


_QUANTISED = (
    "quantised parameter buffers are not supported with --fused-embedding-sync, --dp-compression and "
    "--param-gather-format"
)
_SHARDED = (
    "it shards weights and their gradients over ranks that --fused-embedding-sync, --dp-compression and "
    "--param-gather-format do not know"
)

REFUSALS = (
    # Before the distributed optimizer, which Megatron switches on with it.
    Refusal(
        "--use-megatron-fsdp", _set("use_megatron_fsdp"), _any, "FSDP keeps its gradients elsewhere",
    ),
    Refusal("--use-torch-fsdp2", _set("use_torch_fsdp2"), _any, "FSDP keeps its gradients elsewhere"),
    Refusal(
        "--context-parallel-size", _above_one("context_parallel_size"), _any,
        "context parallelism is not supported by Optimus-CC",
    ),
    Refusal(
        "--num-distributed-optimizer-instances", _above_one("num_distributed_optimizer_instances"), _any,
        "several distributed-optimizer instances are not supported",
    ),
    Refusal(
        "--ddp-reduce-scatter-with-fp32-accumulation", _set("ddp_reduce_scatter_with_fp32_accumulation"), _gradients,
        "it replaces the collective that --fused-embedding-sync and --dp-compression replace",
    ),
    Refusal(
        "--ddp-param-name-patterns-for-fp32-local-accumulation",
        _set("ddp_param_name_patterns_for_fp32_local_accumulation"), _gradients,
        "gradients that are accumulated outside of the gradient buffer are not supported by Optimus-CC",
    ),
    Refusal("--fp8-param-gather", _set("fp8_param_gather"), _buffers, _QUANTISED),
    Refusal("--fp4-param-gather", _set("fp4_param_gather"), _buffers, _QUANTISED),
    Refusal(
        "--tensor-parallel-num-weight-shards", _above_one("gtp_weight_remat_size"), _buffers,
        _SHARDED,
    ),
    Refusal(
        "--expert-tensor-parallel-num-weight-shards", _above_one("expert_gtp_weight_remat_size"), _buffers,
        _SHARDED,
    ),
    Refusal(
        "--overlap-moe-expert-parallel-comm", _set("overlap_moe_expert_parallel_comm"), _any,
        "it runs another schedule than the 1F1B that decides which messages are compressed",
    ),
    Refusal(
        "--mtp-num-layers", _set("mtp_num_layers"), _embedding,
        "multi-token prediction keeps more than two copies of the embedding",
    ),
    Refusal(
        "--optimizer", lambda args: getattr(args, "optimizer", "adam") not in ("adam", "sgd"), _buffers,
        "layer-wise optimizers (Muon and others) lay their buffers out differently", "Use --optimizer adam or sgd",
    ),
    Refusal(
        "--cuda-graph-impl", _graph_of_everything, _any,
        "a graph of the whole iteration would replay one iteration's decisions for ever",
    ),
    Refusal(
        "--use-ring-exchange-p2p", _set("use_ring_exchange_p2p"), _messages,
        "ring exchange does not pass through the calls that compression wraps",
    ),
    Refusal(
        "--compression-error-statistics", _above_one("virtual_pipeline_model_parallel_size"),
        lambda config: config.compression_error_statistics,
        "with interleaving, consecutive messages belong to different layers",
        "Leave it out, or leave out the interleaving",
    ),
    Refusal(
        "--inprocess-restart", _set("inprocess_restart"), _any,
        "a restart inside the process would keep the state of the run before",
    ),
    Refusal(
        "--non-persistent-ckpt-type", lambda args: getattr(args, "non_persistent_ckpt_type", None) == "local", _any,
        "local checkpoints have no folder in which the compressors' state could lie beside them",
        "Use --non-persistent-ckpt-type global, or leave it out",
    ),
    Refusal(
        "--enable-msc", lambda args: any(str(getattr(args, name, "")).startswith("msc://") for name in _FOLDERS),
        _remembers, "the state of compression cannot be saved to a remote store", "Save to a file system",
    ),
    Refusal(
        "--perform-rl-step", _set("perform_rl_step"), _any, "reinforcement learning steps are not supported",
    ),
)  # fmt: skip


def refuse_unsupported(args: argparse.Namespace, config: OptimusConfig) -> None:
    """Refuse the first option in `args` that a technique in `config` does not work with.

    Raises:
        FlagError: naming Megatron's flag, the reason and the cure.
    """
    for refusal in REFUSALS:
        if refusal.affects(config) and refusal.given(args):
            raise FlagError(refusal.flag, refusal.reason, refusal.cure)
