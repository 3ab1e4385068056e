"""The parts of Megatron that the extension needs: the seams that it wraps, and the attributes that it reads; and the
check that they are as expected in the Megatron of this process.
"""

import argparse
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from optimus_cc_ext.errors import UnsupportedMegatron
from optimus_cc_ext.hooks.registry import TESTED, UNSUPPORTED_MEGATRON_VARIABLE, Seam, cure, megatron_version

PARSER = "megatron.training.arguments:add_megatron_arguments"
"""The function that adds Megatron's flags; its attributes are those of the arguments, after validation."""

_DDP = "megatron.core.distributed"
_BUFFERS = f"{_DDP}.param_and_grad_buffer"

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    f"{_DDP}.distributed_data_parallel:DistributedDataParallel": (
        "bucket_groups", "config", "ddp_config", "expert_parallel_bucket_groups", "module", "param_to_bucket_group",
        "zero_grad_buffer",
    ),
    f"{_DDP}.distributed_data_parallel_config:DistributedDataParallelConfig": (
        "average_in_collective", "num_distributed_optimizer_instances", "overlap_grad_reduce", "overlap_param_gather",
        "use_distributed_optimizer",
    ),
    f"{_BUFFERS}:_ParamAndGradBucketGroup": (
        "buckets", "cached_grad_buffer_shard_list", "cached_param_buffer_shard_list", "data_parallel_group",
        "ddp_config", "finish_grad_sync", "grad_reduce_handle", "inter_distributed_optimizer_instance_group",
        "intra_distributed_optimizer_instance_group", "intra_distributed_optimizer_instance_rank",
        "intra_distributed_optimizer_instance_size", "param_gather_handle", "param_to_bucket", "params",
        "start_grad_sync", "start_param_sync",
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
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer": (
        "_get_model_param_range_map", "buffers", "config", "model_float16_groups", "model_fp32_groups",
        "model_param_gbuf_map", "shard_fp32_from_float16_groups", "shard_fp32_groups",
    ),
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
    "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher": (
        "cuda_dtoh_point", "cuda_dtoh_stream", "drop_and_pad", "ep_group", "ep_size", "input_splits", "output_splits",
        "routing_map",
    ),
    "megatron.core.transformer.pipeline_parallel_layer_layout:PipelineParallelLayerLayout": ("layout",),
    "megatron.core.utils": ("get_model_config",),
    "megatron.training": ("checkpointing", "get_args", "get_tensorboard_writer", "get_wandb_writer"),
    "megatron.training.arguments": ("validate_args",),
    "megatron.training.checkpointing": ("_NON_PERSISTENT_CKPT_SUBDIR", "get_checkpoint_name"),
    "megatron.training.global_vars": ("get_args",),
    PARSER: (
        "async_save", "bf16", "clip_grad", "context_parallel_size", "data_parallel_size",
        "distributed_timeout_minutes", "expert_model_parallel_size", "finetune", "fp16", "global_batch_size",
        "log_interval", "moe_token_dispatcher_type", "mtp_num_layers", "no_load_optim", "no_save_optim",
        "non_persistent_ckpt_type", "non_persistent_global_ckpt_dir", "num_experts", "optimizer",
        "pipeline_model_parallel_layout",
        "pipeline_model_parallel_size", "save", "seed", "train_iters", "train_samples",
        "untie_embeddings_and_output_weights", "use_distributed_optimizer", "use_precision_aware_optimizer",
    ),
}  # fmt: skip
"""The attributes that the hooks read of Megatron's objects, by the module or class that has them. Those that they read
by `getattr` with a default are missing here, because a Megatron may lack them.
"""


def parts_of(seams: Iterable[Seam], package: str = "megatron") -> dict[str, str | None]:
    """Return these seams and every attribute that is read, with the reason why it does not hold; None: it does.

    Args:
        package: only attributes of modules inside this package.
    """
    found = {f"seam {seam.target}": _reason(seam) for seam in seams}
    for owner, names in ATTRIBUTES.items():
        if owner.startswith(package) and importable(owner):
            try:
                missing = dict.fromkeys(lacking(owner, names), "")
            except (ImportError, AttributeError) as error:
                missing = dict.fromkeys(names, f" ({error})")
            for name in names:
                said = f"megatron-core {megatron_version()}: {owner} has no {name}{missing.get(name)}. {cure()}"
                found[f"attribute {owner}.{name}"] = said if name in missing else None
    return found


def check_megatron(seams: Iterable[Seam], package: str = "megatron") -> str | None:
    """Check the version of Megatron, and every part that we need, before the first of them is wrapped.

    Args:
        seams: the seams that may be wrapped.
        package: only attributes of modules inside this package.

    Returns:
        the line to log about a version that was not tested; None: it was.

    Raises:
        UnsupportedMegatron: a part does not hold, or the version lies outside of those that were tested and
            OPTIMUS_CC_UNSUPPORTED_MEGATRON does not allow it.
    """
    from packaging.version import Version

    version, tested = megatron_version(), f"tested: {', '.join(TESTED)}"
    parts = parts_of(seams, package)
    reasons = [reason for reason in parts.values() if reason is not None]
    holds = f"{len(parts) - len(reasons)} of the {len(parts)} functions and attributes that Optimus-CC needs hold there"
    outside = not Version(TESTED[0]) <= Version(version) <= Version(TESTED[-1])
    if outside and os.environ.get(UNSUPPORTED_MEGATRON_VARIABLE) != "1":
        raise UnsupportedMegatron(
            f"megatron-core {version} is not supported ({tested}); {holds}. {cure()}, or set "
            f"{UNSUPPORTED_MEGATRON_VARIABLE}=1 to try it untested"
        )
    if reasons:
        raise UnsupportedMegatron(f"{reasons[0]}; {holds}" if len(reasons) > 1 else reasons[0])
    return None if version in TESTED else f"megatron-core {version} was not tested ({tested}), but {holds}"


def _reason(seam: Seam) -> str | None:
    try:
        seam.resolve()
    except UnsupportedMegatron as error:
        return str(error)
    return None


def importable(target: str) -> bool:
    """Return whether the package of a target is installed: custom training loops work without megatron.training."""
    package = ".".join(target.split(":")[0].split(".")[:2])
    return importlib.util.find_spec(package) is not None


def lacking(owner: str, names: Iterable[str]) -> list[str]:
    """Return those of the given names that a module, a class or Megatron's arguments lack.

    What an object has is read from its class, and from the assignments in the source, because there is no object yet.

    Raises:
        ImportError: there is no such module.
        AttributeError: the module has no such class.
    """
    module_name, _, path = owner.partition(":")
    module = importlib.import_module(module_name)
    holder = getattr(module, path) if path else module
    declared = _declared(owner, holder)
    missing = [name for name in names if name not in declared]
    return [name for name in missing if not any(_assigns(text, name) for text in _sources(owner, module, holder))]


def _declared(owner: str, holder: Any) -> set[str]:
    """Return the names that a module or a class has without its source, or that a parser adds."""
    if owner == PARSER:
        parser = argparse.ArgumentParser(allow_abbrev=False)
        holder(parser)
        return {action.dest for action in parser._actions}
    annotated = (vars(base).get("__annotations__", {}) for base in getattr(holder, "__mro__", ()))
    return {*dir(holder), *(name for names in annotated for name in names)}


def _sources(owner: str, module: Any, holder: Any) -> Iterator[str | None]:
    """Yield the source of a module, or of a class and of its bases in the same package; None if there is no source."""
    package = module.__name__.partition(".")[0]
    # Megatron's validation, which is in the parser's module, adds to the arguments.
    classes = [] if owner == PARSER else getattr(holder, "__mro__", ())
    for name, kind in [(each.__module__, each) for each in classes] or [(module.__name__, None)]:
        if name.partition(".")[0] == package:
            try:
                source = inspect.getsource(sys.modules[name])
            except OSError:
                source = None
            if kind is not None and source is not None:
                found = re.search(rf"^class {kind.__name__}\b.*?(?=^(?:class|def|@)|\Z)", source, re.M | re.S)
                source = None if found is None else found[0]
            yield source


def _assigns(source: str | None, name: str) -> bool:
    """Return whether a source assigns an attribute of this name; True if there is no source to look at."""
    pattern = rf"^\s*\(?[\w.\[\], ]*\.{name}\b(?:\s*[,:][^=\n]*)?\s*\)?\s*=(?!=)"
    in_lines = rf"^\s*\(\s*(?:self\.\w+,\s*)*self\.{name}\b,?\s*(?:self\.\w+,?\s*)*\)\s*=(?!=)"
    return source is None or re.search(f"{pattern}|{in_lines}", source, re.M) is not None
