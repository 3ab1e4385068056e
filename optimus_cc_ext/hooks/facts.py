"""The facts about a run, gathered in one place: Megatron's options by the names of its flags, whether they come from
its command line or from the configurations of a model, and the layout that follows from them.
"""

import argparse
from dataclasses import replace
from typing import Any

import torch

from optimus_cc_ext.config.forecast import exact_forecast
from optimus_cc_ext.config.presets import Layout, direct_of, row_width_of
from optimus_cc_ext.errors import OptimusError
from optimus_cc_ext.techniques.grid import Grid

_OTHER_NAMES = {
    "num_moe_experts": "num_experts",
    "reduce_scatter_with_fp32_accumulation": "ddp_reduce_scatter_with_fp32_accumulation",
    "param_name_patterns_for_fp32_local_accumulation": "ddp_param_name_patterns_for_fp32_local_accumulation",
}
"""The flags' names of fields that have another name in a configuration."""

_DEFAULTS = {
    "num_experts": None, "expert_model_parallel_size": 1, "mtp_num_layers": None,
    "pipeline_model_parallel_layout": None, "use_distributed_optimizer": False, "optimizer": "adam",
    "use_precision_aware_optimizer": False, "overlap_param_gather_with_optimizer_step": False, "bf16": False,
    "fp16": False, "lr": 0.0, "min_lr": 0.0,
}  # fmt: skip


def options_from(model: Any, ddp: Any, optimizer: Any, **known: Any) -> argparse.Namespace:
    """Return Megatron's options, by the names of its flags, as the configurations of a run hold them.

    Args:
        model: the configuration of the model.
        ddp: the configuration of its DistributedDataParallel.
        optimizer: the configuration of the optimizer; None: it is not known.
        known: options that replace those of the configurations.
    """
    found = _DEFAULTS | {_OTHER_NAMES.get(name, name): value for name, value in (vars(ddp) | vars(model)).items()}
    of_optimizer = ("optimizer", "use_precision_aware_optimizer", "overlap_param_gather_with_optimizer_step")
    for name in (*of_optimizer, "lr", "min_lr"):
        value = getattr(optimizer, name, None)
        found[name] = value if isinstance(value, type(_DEFAULTS[name])) else _DEFAULTS[name]
    return argparse.Namespace(**found | known)


def options_of(model: Any, grid: Grid, optimizer: Any, train_iters: int | None, *, tied: bool) -> argparse.Namespace:
    """Return Megatron's options as a training loop has built a model with them.

    Args:
        model: the model, in DistributedDataParallel.
        grid: this rank's place in the model's process groups.
        optimizer: the optimizer of the model; None: it is not known.
        train_iters: iterations of the run.
        tied: True if the word embedding is the output weight, too.
    """
    experts = grid.expert_group
    return options_from(
        model.config, model.ddp_config, getattr(optimizer, "config", None),
        pipeline_model_parallel_size=grid.stages,
        # The replicas of a grid include those of context parallelism.
        data_parallel_size=grid.data_parallel, context_parallel_size=1,
        expert_model_parallel_size=1 if experts is None else experts.size(),
        untie_embeddings_and_output_weights=not tied,
        bf16=grid.dtype == torch.bfloat16, fp16=grid.dtype == torch.float16,
        train_iters=train_iters, seed=Layout.seed,
    )  # fmt: skip


def layout_from(options: argparse.Namespace) -> Layout:
    """Return the facts about the run in Megatron's validated arguments, or in the options of a model."""
    return Layout(
        stages=options.pipeline_model_parallel_size,
        data_parallel=options.data_parallel_size * options.context_parallel_size,
        # With multi-token prediction the last stage has a copy of the word embedding although it is not tied.
        tied_embeddings=not options.untie_embeddings_and_output_weights or bool(options.mtp_num_layers),
        one_pair=not _mtp_apart(options),
        distributed_optimizer=options.use_distributed_optimizer or _layer_wise(options),
        instances=getattr(options, "num_distributed_optimizer_instances", None) or 1,
        sums_in_fp32=bool(getattr(options, "ddp_reduce_scatter_with_fp32_accumulation", False)),
        optimizer=options.optimizer,
        exact_bits=exact_forecast(options),
        expert_parallel=options.expert_model_parallel_size if options.num_experts else 0,
        row_width=row_width_of(options),
        routing=_routing(options),
        direct=direct_of(options),
        master_copies=(options.bf16 or options.fp16) and not options.use_precision_aware_optimizer,
        train_iters=_train_iters(options),
        seed=options.seed,
    )


def tied_embedding(module: torch.nn.Module, *, trained: bool = True) -> Any:
    """Return the word embedding parameter that this stage shares with another stage; None if it holds none.

    Megatron marks it in `LanguageModule.setup_embeddings_and_output_layer`
    (megatron/core/models/common/language_module/language_module.py).

    Args:
        trained: True for an embedding that is trained, False for a frozen one.
    """
    for parameter in module.parameters():
        if getattr(parameter, "shared_embedding", False) and parameter.requires_grad is trained:
            return parameter
    return None


def is_tied(model: torch.nn.Module) -> bool:
    """Return whether this rank's part of a model says that the word embedding is the output weight, too.

    Models that are no GPT decide by themselves: Megatron's vision-language script leaves the command line's
    `--untie-embeddings-and-output-weights` unread.
    """
    tied = (getattr(module, "share_embeddings_and_output_weights", False) for module in model.modules())
    return any(tied) or tied_embedding(model) is not None


def as_built(of_flags: Layout, of_model: Layout) -> Layout:
    """Return the facts of a run: from the built model where it has them, else from the command line.

    The model knows nothing of its optimizer. Which buffers a sharded Muon gets depends on the entry that builds the
    model: `training.get_model` shards them, the configuration container does not (training/training.py and
    training/models/dist_utils.py).

    Raises:
        OptimusError: the buffers differ from the command line's with another optimizer.
    """
    sharded = of_model.distributed_optimizer
    if sharded != of_flags.distributed_optimizer and not of_flags.scales_errors:
        raise OptimusError(
            f"the command line says use_distributed_optimizer={of_flags.distributed_optimizer}, and this model's "
            f"DistributedDataParallel has {sharded}. Build the model with the flags of the command line"
        )
    kept = ("optimizer", "exact_bits", "master_copies", "train_iters", "seed")
    return replace(of_model, **{name: getattr(of_flags, name) for name in kept})


def _routing(options: argparse.Namespace) -> tuple[int, int, int]:
    """Return `Layout.routing`: with group-limited routing a token picks some groups, and its experts from these.

    All groups are no limit: models without one are launched with one group, of which a token picks one.
    """
    experts, top = options.num_experts or 0, getattr(options, "moe_router_topk", None) or 0
    groups, picks = (getattr(options, f"moe_router_{name}", None) for name in ("num_groups", "group_topk"))
    return (groups, picks, top) if groups and picks and picks < groups else (experts, top, top)


def _layer_wise(options: argparse.Namespace) -> bool:
    """Return True if Megatron shards the buffers for Muon, although it unsets `use_distributed_optimizer`."""
    on = getattr(options, "use_layer_wise_distributed_optimizer", False)
    return bool(on and getattr(options, "use_layer_wise_param_layout", True))


def _mtp_apart(options: argparse.Namespace) -> bool:
    """Return True if the layout of the pipeline puts multi-token prediction on another stage than the last one."""
    if not options.mtp_num_layers or not options.pipeline_model_parallel_layout:
        return False
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    given = options.pipeline_model_parallel_layout
    stages = options.pipeline_model_parallel_size
    layout = given if hasattr(given, "layout") else PipelineParallelLayerLayout(given, stages)
    return any(LayerType.mtp in chunk for stage in layout.layout[:-1] for chunk in stage)


def _train_iters(options: argparse.Namespace) -> int | None:
    """Return the iterations of the run, as Megatron's `update_train_iters` will count them; None if the batch size
    grows.
    """
    grows = getattr(options, "step_batch_size_schedule", None) or getattr(options, "rampup_batch_size", None)
    if options.train_iters or not getattr(options, "train_samples", None) or grows:
        return options.train_iters  # type: ignore[no-any-return]
    return options.train_samples // options.global_batch_size  # type: ignore[no-any-return]
