"""Attaches a model of megatron/core/distributed/distributed_data_parallel.py to its session: its gradient buckets.

The process groups of the first model give the session its place. They are the groups that DDP holds, whether made by
Megatron's `parallel_state` or by the user, who passes a `ProcessGroupCollection`.
"""

import importlib.util
import math
from collections.abc import Callable
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.announce import say
from optimus_cc_ext.collectives.nodes import ranks_per_node
from optimus_cc_ext.config.classes import CLASSES, EMBEDDING
from optimus_cc_ext.config.optimus_config import OptimusConfig
from optimus_cc_ext.config.presets import Layout, cost_of_shards
from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.hooks.facts import tied_embedding
from optimus_cc_ext.hooks.param_and_grad_buffer import attach
from optimus_cc_ext.hooks.sessions import Sessions, bucket_groups_of
from optimus_cc_ext.patching import Patches
from optimus_cc_ext.techniques.grid import Grid, RankPlace
from optimus_cc_ext.techniques.session import Session


def join(sessions: Sessions, session: Session, model: Any, patches: Patches) -> None:
    """Let a model in DistributedDataParallel join a session: attach its gradient buckets.

    Args:
        patches: holds the replaced attributes of the model.
    """
    experts, routers = _expert_parameters(model.module), _router_parameters(model.module)
    for rows in session.rows:
        rows.expected |= bool(experts)
    for bucket_groups, replicas in (
        (model.bucket_groups, "dp_cp_group"), (model.expert_parallel_bucket_groups, "expt_dp_group")
    ):  # fmt: skip
        for bucket_group in bucket_groups:
            attach(session, bucket_group, patches, experts, routers, replicas=getattr(model, replicas, None))
    sessions.add(model, session)
    if session.new_groups is not None:
        sessions.note(session.new_groups, session)


def take_place(session: Session, grid: Grid, layout: Layout, model: Any) -> None:
    """Give the session its place in the process groups of `model`, and log what follows from it.

    Collective over all ranks of the model if a technique is on.
    """
    lines = session.place(grid, layout)
    if session.new_groups is not None:
        nodes = [place.node for place in session.new_groups.places]
        lines += filter(None, [grid.placement(ranks_per_node(nodes))])
        if session.config.is_on(EMBEDDING) and any(place.frozen_embedding for place in session.new_groups.places):
            lines.append(f"leaves out {EMBEDDING.tag}: the tied embedding is frozen, so nothing of it is summed")
    padded = getattr(getattr(model, "ddp_config", None), "pad_buckets_for_high_nccl_busbw", False)
    if layout.distributed_optimizer and not padded:
        lines += filter(None, [cost_of_shards(session.config, grid.data_parallel)])
    for line in lines if grid.is_first else ():
        say(f"optimus-cc: {line}")


def grid_of(model: Any) -> Grid:
    """Return this rank's place in the process groups of `model`. A group is None if the model has several of its
    kind.
    """
    from megatron.core import parallel_state

    config = model.config
    tensor, pipeline, replicas = (
        _only(group)
        for group in (
            _group(model, "tp_group", parallel_state.get_tensor_model_parallel_group),
            _group(model, "pp_group", parallel_state.get_pipeline_model_parallel_group),
            _group(model, "dp_cp_group", lambda: parallel_state.get_data_parallel_group(with_context_parallel=True)),
        )
    )
    rank = dist.get_rank()
    embedding = _group(model, "embd_group", lambda: parallel_state.get_embedding_group(check_initialized=False))
    if embedding is not None and rank not in dist.get_process_group_ranks(embedding):
        embedding = None
    return Grid(
        place=RankPlace(
            rank=rank,
            stage=pipeline.rank() if pipeline is not None else 0,
            tensor_rank=tensor.rank() if tensor is not None else 0,
            frozen_embedding=tied_embedding(model, trained=False) is not None,
        ),
        stages=pipeline.size() if pipeline is not None else 1,
        chunks=config.virtual_pipeline_model_parallel_size
        or parallel_state.get_virtual_pipeline_model_parallel_world_size()
        or 1,
        data_parallel=replicas.size() if replicas is not None else 1,
        context_parallel=config.context_parallel_size,
        pipeline_group=pipeline,
        tensor_group=tensor,
        replica_group=replicas,
        expert_group=_group(model, "ep_group", parallel_state.get_expert_model_parallel_group),
        embedding_group=embedding,
        batched_messages=config.batch_p2p_comm,
        dtype=config.params_dtype,
        align=_alignment(model),
        timeout=_timeout(),
    )


def check_groups(config: OptimusConfig, grid: Grid) -> None:
    """Refuse a model that lacks a process group which a technique needs.

    Raises:
        FlagError: names the group.
    """
    if not config.any_technique:
        return
    for group, name, attribute in (
        (grid.tensor_group, "tensor-parallel", "tp"),
        (grid.pipeline_group, "pipeline", "pp"),
        (grid.replica_group, "data-parallel", "dp_cp"),
    ):
        if group is None:
            on = [each.name for each in CLASSES if config.is_on(each)]
            raise _missing(f"--optimus-cc ({', '.join(on)})", name, attribute)
    if config.is_on(EMBEDDING) and grid.embedding_group is not None and grid.embedding_group.size() > 2:
        raise FlagError("--fused-embedding-sync", "more than two stages hold a copy of the embedding", "Leave it out")
    # Megatron sums no tied embedding without this group, and the stages between have none.
    if config.is_on(EMBEDDING) and grid.place.stage in (0, grid.stages - 1) and grid.embedding_group is None:
        raise _missing("--fused-embedding-sync", "embedding", "embd")


def _alignment(model: Any) -> int:
    """Return a number that divides starts and lengths of parameters and shards in buckets, and of messages."""
    numbers = [getattr(model.config, "hidden_size", 1)]
    for group in bucket_groups_of(model):
        shards = group.intra_distributed_optimizer_instance_size if group.ddp_config.use_distributed_optimizer else 1
        for bucket in group.buckets:
            if bucket.grad_data is None:
                continue  # `compress` refuses the model
            ranges = (bucket.param_to_index[parameter][:2] for parameter in bucket.params_list)
            numbers += [bucket.grad_data.numel() // shards, *chain.from_iterable(ranges)]
    return math.gcd(*numbers)


def _group(model: Any, attribute: str, default: Callable[[], Any]) -> Any:
    """Return the process group that the model, or a module inside it, holds by this name; else Megatron's own, or
    None.
    """
    from megatron.core import parallel_state

    # DDP's own groups come first; the language model inside it holds the embedding group.
    for layer in model.modules():
        if hasattr(layer, attribute):
            return getattr(layer, attribute)
    return default() if parallel_state.model_parallel_is_initialized() else None


def _only(group: Any) -> dist.ProcessGroup | None:
    """Return a pipeline group, which Megatron gives by itself or in a list; None if the list has several."""
    if isinstance(group, list):
        return group[0] if len(group) == 1 else None
    return group  # type: ignore[no-any-return]


def _missing(flag: str, name: str, attribute: str) -> FlagError:
    reason = f"the model has no {name} process group of its own"
    return FlagError(flag, reason, f"Give its ProcessGroupCollection one process group as `{attribute}`")


def _timeout() -> timedelta | None:
    """Return Megatron's own limit on every wait; None if there are no Megatron arguments."""
    if importlib.util.find_spec("megatron.training") is None:
        return None
    from megatron.training.global_vars import get_args

    try:
        return timedelta(minutes=get_args().distributed_timeout_minutes)
    except AssertionError:
        return None


def _expert_parameters(module: torch.nn.Module) -> frozenset[torch.nn.Parameter]:
    """Return the weights of a mixture's routed experts: low rank leaves them dense, whatever the expert parallelism.

    An expert's gradient comes from the few tokens that were routed to it, on some replicas from none, so the
    compression error of one step is unrelated to the gradient of a later one. Megatron marks a parameter that not every
    replica holds (`allreduce` is False), and gives it a bucket and a group of ranks of its own. Without expert
    parallelism it marks no parameter, and experts lie among the others: they are the `experts` of Megatron's
    `MoELayer`, by whatever name the model holds the layer. Shared experts and routers see every token.
    """
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer

    marked = (parameter for parameter in module.parameters() if not getattr(parameter, "allreduce", True))
    layers = (layer.experts for layer in module.modules() if isinstance(layer, BaseMoELayer))
    return frozenset(
        (*marked, *(parameter for experts in layers if experts is not None for parameter in experts.parameters()))
    )


def _router_parameters(module: torch.nn.Module) -> frozenset[torch.nn.Parameter]:
    """Return the weights of a mixture's routers: a few KB, in which an error of int4 sends tokens to other experts."""
    from megatron.core.transformer.moe.router import Router

    routers = (layer for layer in module.modules() if isinstance(layer, Router))
    return frozenset(parameter for router in routers for parameter in router.parameters())
