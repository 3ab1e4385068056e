"""The attributes of Megatron's objects that the hooks read, by the module or class that has them.

A seam is a function that we wrap; an attribute is what a wrap reads. Attributes that the hooks read by `getattr` with a
default are missing here, because a Megatron may lack them.
"""

import argparse
import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

__all__ = ["ATTRIBUTES", "PARSER", "lacking"]

PARSER = "megatron.training.arguments:add_megatron_arguments"
"""The function that adds Megatron's flags; its attributes are those of the arguments, after validation."""

_DDP = "megatron.core.distributed"
_BUFFERS = f"{_DDP}.param_and_grad_buffer"

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    f"{_DDP}.distributed_data_parallel:DistributedDataParallel": (
        "bucket_groups", "config", "ddp_config", "expert_parallel_bucket_groups", "force_all_reduce", "module",
        "param_to_bucket_group", "zero_grad_buffer",
    ),
    f"{_DDP}.distributed_data_parallel_config:DistributedDataParallelConfig": (
        "average_in_collective", "num_distributed_optimizer_instances", "overlap_grad_reduce", "overlap_param_gather",
        "reduce_scatter_with_fp32_accumulation", "use_distributed_optimizer",
    ),
    f"{_BUFFERS}:_ParamAndGradBucketGroup": (
        "buckets", "cached_grad_buffer_shard_list", "cached_param_buffer_shard_list", "data_parallel_group",
        "ddp_config", "finish_grad_sync", "grad_reduce_handle", "inter_distributed_optimizer_instance_group",
        "intra_distributed_optimizer_instance_group", "intra_distributed_optimizer_instance_rank",
        "intra_distributed_optimizer_instance_size", "is_first_batch", "param_gather_handle", "param_to_bucket",
        "params", "start_grad_sync", "start_param_sync",
    ),
    f"{_BUFFERS}:_ParamAndGradBucket": (
        "grad_data", "gradient_scaling_factor", "param_data", "param_to_index", "params", "params_list",
    ),
    f"{_BUFFERS}:_ParamAndGradBuffer": ("buckets",),
    _BUFFERS: ("main_grad",),
    "megatron.core.models.common.language_module.language_module": ("shared_embedding",),
    "megatron.core.transformer.transformer_config:TransformerConfig": (
        "batch_p2p_comm", "batch_p2p_sync", "context_parallel_size", "fp16", "grad_scale_func", "hidden_size",
        "microbatch_group_size_per_vp_stage", "mtp_num_layers", "num_moe_experts", "params_dtype", "pipeline_dtype",
        "pipeline_model_parallel_layout", "sequence_parallel", "tensor_model_parallel_size", "variable_seq_lengths",
        "virtual_pipeline_model_parallel_size",
    ),
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer": ("buffers", "config"),
    "megatron.core.optimizer.optimizer_config:OptimizerConfig": ("clip_grad", "use_precision_aware_optimizer"),
    "megatron.core.optimizer": ("optimizer",),
    "megatron.core.parallel_state": (
        "get_data_parallel_group", "get_embedding_group", "get_expert_model_parallel_group",
        "get_pipeline_model_parallel_group", "get_tensor_model_parallel_group",
        "get_virtual_pipeline_model_parallel_world_size", "model_parallel_is_initialized",
    ),
    "megatron.core.pipeline_parallel.schedules": ("get_pp_rank_microbatches", "get_schedule_table"),
    "megatron.core.transformer.enums:LayerType": ("mtp",),
    "megatron.core.transformer.moe.moe_layer:BaseMoELayer": ("experts",),
    "megatron.core.transformer.moe.router": ("Router",),
    "megatron.core.transformer.pipeline_parallel_layer_layout:PipelineParallelLayerLayout": ("layout",),
    "megatron.core.utils": ("get_model_config",),
    "megatron.training": ("checkpointing", "get_args", "get_tensorboard_writer", "get_wandb_writer"),
    "megatron.training.checkpointing": ("_NON_PERSISTENT_CKPT_SUBDIR", "get_checkpoint_name"),
    "megatron.training.global_vars": ("get_args",),
    PARSER: (
        "async_save", "bf16", "clip_grad", "context_parallel_size", "curr_iteration", "data_parallel_size",
        "distributed_timeout_minutes", "expert_model_parallel_size", "finetune", "fp16", "global_batch_size",
        "log_interval", "moe_token_dispatcher_type", "mtp_num_layers", "no_load_optim", "non_persistent_ckpt_type",
        "non_persistent_global_ckpt_dir", "num_experts", "optimizer", "pipeline_model_parallel_layout",
        "pipeline_model_parallel_size", "save", "seed", "train_iters", "train_samples",
        "untie_embeddings_and_output_weights", "use_distributed_optimizer", "use_precision_aware_optimizer",
    ),
}  # fmt: skip


def lacking(owner: str, names: tuple[str, ...]) -> list[str]:
    """Return the names that a module, the objects of a class, or Megatron's arguments do not have.

    What an object has is read from its class and from the assignments in the source, because there is no object yet.

    Raises:
        ImportError: there is no such module.
        AttributeError: the module has no such class.
    """
    module_name, _, path = owner.partition(":")
    module = importlib.import_module(module_name)
    holder = getattr(module, path) if path else module
    missing = set(names) - _declared(owner, holder)
    for source in _sources(owner, module, holder) if missing else ():
        missing -= {node.attr for node in ast.walk(source) if isinstance(node, ast.Attribute)
                    and isinstance(node.ctx, ast.Store)}  # fmt: skip
    return [name for name in names if name in missing]


def _declared(owner: str, holder: Any) -> set[str]:
    """Return the names that a module or a class has without its source, or that a parser adds."""
    if owner == PARSER:
        parser = argparse.ArgumentParser(allow_abbrev=False)
        holder(parser)
        return {action.dest for action in parser._actions}
    annotated = (vars(base).get("__annotations__", {}) for base in getattr(holder, "__mro__", ()))
    return {*dir(holder), *(name for names in annotated for name in names)}


def _sources(owner: str, module: Any, holder: Any) -> Iterator[ast.Module]:
    """Yield the parsed sources in which the attributes of a holder are assigned."""
    package = module.__name__.partition(".")[0]
    if owner == PARSER:  # validation and the training loop add to the arguments
        parts = [module, importlib.import_module("megatron.training.training")]
    else:
        parts = [base for base in getattr(holder, "__mro__", (holder,)) if _package(base) == package]
    for part in parts:
        yield ast.parse(textwrap.dedent(inspect.getsource(part)))


def _package(holder: Any) -> str:
    return str(getattr(holder, "__module__", holder.__name__)).partition(".")[0]
