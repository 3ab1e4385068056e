"""Shapes of a model's parameters by pipeline stage, from Megatron's own model on the meta device.

Nothing is computed and no memory is taken: every tensor is on the meta device, and the process groups are torch's fake
ones. The model is Megatron's with its local implementation, whose parameters have the shapes of Transformer Engine's.
Needs the model builders of megatron-core 0.19; an older Megatron has none, and nothing is estimated from shapes there.
"""

import argparse
import contextlib
import io
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from optimus_cc_ext.errors import OptimusError
from optimus_cc_ext.patching import Patches
from optimus_cc_ext.techniques.bucket_rules import ParameterRecord


class NotBuilt(OptimusError):
    """A model whose shapes are not known here; the message gives the reason."""


def stages_of(args: argparse.Namespace, *, trained_here: bool = False) -> list[list[ParameterRecord]]:
    """Return the parameters of tensor-parallel rank 0 of every stage.

    Args:
        trained_here: True if this machine trains the model as it is, without Transformer Engine's kernels.

    Raises:
        NotBuilt: no builder, or one that the model does not have.
        Exception: whatever Megatron's model code raises if it cannot build the model.
    """
    try:
        from megatron.training.argument_utils import gpt_config_from_args
        from megatron.training.models.gpt import GPTModelBuilder
    except ImportError as error:
        raise NotBuilt("this Megatron has no builder of models") from error
    pattern = ["hybrid_layer_pattern", "hybrid_override_pattern", "spec"]
    pattern += [] if trained_here else ["heterogeneous_layers_config_path"]
    if given := [name for name in pattern if getattr(args, name, None)]:
        raise NotBuilt(f"--{given[0].replace('_', '-')}: only models of equal layers are built")
    local = _without_kernels(args)
    if not trained_here:
        local.layernorm_zero_centered_gamma = False  # a norm that adds 1 to its weight has the same weight
    logging.disable(logging.WARNING)  # Megatron would print its warning that GPTModel is deprecated before the verdict
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return [_stage(local, stage, gpt_config_from_args, GPTModelBuilder) for stage in range(_stages(args))]
    finally:
        logging.disable(logging.NOTSET)


def _stages(args: argparse.Namespace) -> int:
    return int(args.pipeline_model_parallel_size)


def _without_kernels(args: argparse.Namespace) -> argparse.Namespace:
    """Return arguments for the same model without fused kernels, and with its part of the experts on one rank."""
    local = argparse.Namespace(**vars(args))
    switched_off = (
        "gradient_accumulation_fusion", "masked_softmax_fusion", "bias_gelu_fusion", "bias_swiglu_fusion",
        "bias_dropout_fusion", "apply_rope_fusion", "moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion",
        "cross_entropy_loss_fusion", "tp_comm_overlap", "fp8", "fp4", "fp8_param_gather", "fp4_param_gather",
        "use_transformer_engine_op_fuser", "overlap_moe_expert_parallel_comm", "delay_wgrad_compute",
        "fine_grained_activation_offloading", "defer_embedding_wgrad_compute", "use_kitchen", "cpu_offloading",
        "moe_shared_expert_overlap",
    )  # fmt: skip
    vars(local).update({name: False for name in switched_off if hasattr(local, name)})
    local.fp8 = local.fp4 = None
    local.transformer_impl, local.cuda_graph_impl, local.persist_layer_norm = "local", "none", False
    local.recompute_granularity = local.recompute_method = local.recompute_num_layers = None
    local.no_persist_layer_norm, local.context_parallel_size, local.sequence_parallel = True, 1, False
    if local.num_experts:
        local.num_experts //= local.expert_model_parallel_size
    local.routed = local.expert_model_parallel_size
    local.expert_model_parallel_size, local.moe_token_dispatcher_type = 1, "allgather"
    for name in ("moe_router_num_groups", "moe_router_group_topk", "moe_expert_rank_capacity_factor"):
        setattr(local, name, None)
    if local.num_experts:
        local.moe_router_topk = min(local.moe_router_topk, local.num_experts)
        local.moe_router_pre_softmax = True  # Megatron requires the softmax first with one expert
    return local


def _stage(args: argparse.Namespace, stage: int, config_of: Any, builder: Any) -> list[ParameterRecord]:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    with _fake_ranks(args, stage), _OnMeta(), Patches() as patches:
        # The attention core has no parameters, and its constructor rejects the arguments of multi-latent attention.
        patches.replace(DotProductAttention, "__init__", lambda self, *_, **__: torch.nn.Module.__init__(self))
        config = config_of(args)
        config.transformer.perform_initialization = False
        groups = ProcessGroupCollection.use_mpu_process_groups()
        size = args.virtual_pipeline_model_parallel_size
        chunks = [None] if size is None else range(size)
        models = [builder(config).build_model(groups, vp_stage=chunk) for chunk in chunks]
        return [parameter for model in models for parameter in _parameters(model, args.routed)]


def _parameters(model: torch.nn.Module, expert_ranks: int) -> Iterator[ParameterRecord]:
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer

    layers = (layer.experts for layer in model.modules() if isinstance(layer, BaseMoELayer))
    experts = {id(parameter) for layer in layers for parameter in layer.parameters()}
    for name, parameter in model.named_parameters():
        # A router knows the experts of all expert-parallel ranks.
        first, *others = parameter.shape
        router = ".router." in name
        yield ParameterRecord(
            shape=(first * expert_ranks if router else first, *others),
            router=router,
            tied=getattr(parameter, "shared_embedding", False),
            embedding=getattr(parameter, "is_embedding_or_output_parameter", False),
            expert=id(parameter) in experts,
        )


@contextlib.contextmanager
def _fake_ranks(args: argparse.Namespace, stage: int) -> Iterator[None]:
    """Initialise Megatron's process groups of one replica, as rank 0 of `stage`, without any other process."""
    from megatron.core import parallel_state, tensor_parallel

    stages, tensor = args.pipeline_model_parallel_size, args.tensor_model_parallel_size
    with fake_world(stage * tensor, stages * tensor):
        parallel_state.initialize_model_parallel(
            tensor, stages, args.virtual_pipeline_model_parallel_size,
            expert_tensor_parallel_size=min(tensor, args.expert_tensor_parallel_size or tensor),
            create_gloo_process_groups=False,
        )  # fmt: skip
        tensor_parallel.random.initialize_rng_tracker()
        yield


@contextlib.contextmanager
def fake_world(rank: int, ranks: int) -> Iterator[None]:
    """Be one of `ranks` ranks of torch's fake process group, without any other process. Megatron's groups end, too."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


class _OnMeta(TorchFunctionMode):
    """Mode of torch functions that puts every new tensor on the meta device, and moves none from there."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if name in ("cuda", "to", "cpu") and args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            return args[0]
        if "device" in kwargs or name in ("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn"):
            kwargs["device"] = "meta"
            kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)
