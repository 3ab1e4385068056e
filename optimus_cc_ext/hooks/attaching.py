"""Decides how a model is compressed, and attaches a handle to it: on all ranks of the model, or on none."""

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.announce import say
from optimus_cc_ext.config import OptimusConfig, flag_of
from optimus_cc_ext.config.flags import PRESETS, Request
from optimus_cc_ext.config.presets import Layout, amplified, check_layout, resolve
from optimus_cc_ext.config.refusals import refuse_unsupported
from optimus_cc_ext.config.trials import on_trial
from optimus_cc_ext.errors import FlagError, OptimusError, is_first_rank
from optimus_cc_ext.hooks.distributed_data_parallel import check_groups, grid_of, take_place
from optimus_cc_ext.hooks.facts import is_tied, layout_from, options_of
from optimus_cc_ext.hooks.handle import Handle, Off, close_unless_used, shared_sessions, shared_wraps
from optimus_cc_ext.hooks.parts import check_megatron
from optimus_cc_ext.hooks.sessions import Sessions, bucket_groups_of, layers_of
from optimus_cc_ext.hooks.steps import check_optimizer, follow
from optimus_cc_ext.hooks.training import training_device
from optimus_cc_ext.techniques.grid import Grid
from optimus_cc_ext.techniques.groups import close_abandoned
from optimus_cc_ext.techniques.session import Session
from optimus_cc_ext.techniques.trial import Trial, WaysByTurns

Choice = Callable[[Layout, argparse.Namespace], tuple[OptimusConfig, Layout]]
"""Chooses the configuration of a model by its layout and Megatron's options, and says by which layout it chose."""


def compress(
    models: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: Any,
    config: OptimusConfig | str | None,
    *,
    train_iters: int | None,
    measure_every: int,
    changes: Mapping[str, Any],
) -> Handle:
    """Attach compression to `models`, and return its handle; `optimus_cc_ext.compress` has the arguments."""
    chunks = [models] if isinstance(models, torch.nn.Module) else list(models)
    if isinstance(config, OptimusConfig):
        config = config.replace(**changes)
    if config is None or (isinstance(config, OptimusConfig) and not config.any_technique):
        return Off()
    if not isinstance(config, OptimusConfig | str):
        raise TypeError(f"config: a preset's name or an OptimusConfig is needed, not a {type(config).__name__}")
    _check_once()
    check_optimizer(optimizer)
    wrapped = [_wrapped(chunk) for chunk in chunks]
    try:
        handle = attach(wrapped, partial(_chosen, config, changes), optimizer, train_iters, in_code=True)
        if not handle._session.config.any_technique:  # a preset of which this model leaves nothing
            handle.remove()
            return Off()
        try:
            follow(handle._session, wrapped, optimizer, measure_every, handle._patches)
        except BaseException:
            handle._detach()
            raise
        return handle
    finally:
        close_unless_used()  # removes the session if nothing was attached


@functools.cache
def _check_once() -> None:
    """Check Megatron before it is wrapped, and say so if its version was not tested."""
    seams = [seam for seam, _ in shared_wraps(Sessions())]
    line = check_megatron(seams, "megatron.core")
    if line is not None and is_first_rank():
        say(f"optimus-cc: {line}")


def attach(
    models: Sequence[torch.nn.Module],
    choose: Choice,
    optimizer: Any = None,
    train_iters: int | None = None,
    *,
    on: bool = True,
    in_code: bool = False,
) -> Handle:
    """Choose the configuration of a model and attach a handle to it. If one rank refuses, no rank attaches.

    Collective over all ranks of the model if a technique is on.

    Args:
        models: the chunks of the model on this rank, in DistributedDataParallel.
        choose: chooses the configuration.
        optimizer: the optimizer of the model; None: it is not known.
        train_iters: iterations of the whole run; None: it is not known.
        on: False if `choose` switches no technique on, so that no rank waits for another.
        in_code: True if errors name fields of OptimusConfig, not flags.

    Raises:
        OptimusError: the model cannot be compressed in this way, on this rank or on another.
    """
    grid, refused, tied = grid_of(models[0]), None, any(map(is_tied, models))
    if on:
        grid.meet()
        tied = any(grid.gather(tied))
    try:
        config, layout = _settled(models, grid, choose, optimizer, train_iters, tied)
    except OptimusError as error:
        refused = error.naming_fields() if in_code and isinstance(error, FlagError) else error
    reason = None if refused is None else str(refused)
    for rank, why in grid.reasons(reason) if on else ():
        raise refused or OptimusError(f"rank {rank}: {why}")
    if refused is not None:
        raise refused
    if on:
        close_abandoned(shared_sessions().abandoned(), grid)
    handle = Handle(Session(config))
    try:
        take_place(handle._session, grid, layout, models[0])
        for model in models:
            handle._attach(model)
        handle._session.trial = _trial(handle._session, models[0])
    except BaseException:
        handle._detach()
        raise
    return handle


def _trial(session: Session, model: Any) -> Trial | None:
    """Return the trial of what a preset alone asks for; None: nothing of it leaves a node, or flags leave it out."""
    classes, groups = on_trial(session.config, session.left_dense), session.new_groups
    if session.grid is None or groups is None or not classes:
        return None
    config, nodes = model.config, {place.node.name for place in groups.places}
    # CUDA graphs are captured in some of a run's first steps.
    graphs = getattr(config, "cuda_graph_impl", "none") != "none"
    untimed = max(2, getattr(config, "cuda_graph_warmup_steps", 0) + 1 if graphs else 0)
    return Trial(
        classes=classes, techniques=session.techniques, grid=session.grid, device=training_device(),
        place=(len(nodes), len(groups.places)), name=session.config.chosen_preset,
        counters=lambda: session.traffic.bytes, memory=lambda: session.memory_bytes,
        ways=WaysByTurns(untimed, ahead=bool(model.ddp_config.overlap_param_gather)),
    )  # fmt: skip


def _settled(
    models: Sequence[torch.nn.Module],
    grid: Grid,
    choose: Choice,
    optimizer: Any,
    train_iters: int | None,
    tied: bool,
) -> tuple[OptimusConfig, Layout]:
    """Return the configuration for a model, and the facts that decided on it.

    Raises:
        OptimusError: the model cannot be compressed in this way.
    """
    options = [options_of(model, grid, optimizer, train_iters, tied=tied) for model in models]
    config, layout = choose(layout_from(options[0]), options[0])
    if shared_sessions().of(models):
        raise OptimusError("models: compressed by another handle already. Remove that handle first")
    groups = chain.from_iterable(map(bucket_groups_of, models))
    if config.any_technique and any(bucket.grad_data is None for group in groups for bucket in group.buckets):
        reason = "messages are planned from their lengths and dtypes"
        raise OptimusError(f"models: the gradients of a bucket are freed. Allocate them before compress(): {reason}")
    check_groups(config, grid)
    check_layout(config, layout)
    for each in options:
        refuse_unsupported(each, config)
    return config, layout


def _chosen(
    config: OptimusConfig | str, changes: Mapping[str, Any], layout: Layout, options: argparse.Namespace
) -> tuple[OptimusConfig, Layout]:
    """Return a preset with changes as far as the layout allows it, or the given configuration."""
    if isinstance(config, OptimusConfig):
        notes = tuple(amplified(config, layout))
    elif config in PRESETS:
        request = Request(changes, {field: flag_of(field) for field in changes}, preset=config)
        resolution = resolve(request, layout, options)
        config, notes = resolution.config, resolution.notes
    else:
        raise FlagError("config", f"{config!r} is not the name of a preset", f"Give {' or '.join(PRESETS)}")
    for note in notes if dist.get_rank() == 0 else ():
        say(f"optimus-cc: {note}")
    return config, layout


def _wrapped(chunk: torch.nn.Module) -> torch.nn.Module:
    """Return the DistributedDataParallel that `chunk` is, or wraps."""
    found = next((layer for layer in layers_of(chunk) if hasattr(layer, "bucket_groups")), None)
    if found is None:
        raise OptimusError(
            f"models: this {type(chunk).__name__} is not wrapped in megatron-core's DistributedDataParallel, whose "
            "gradient buckets are compressed. Wrap it first, or leave it out: a model without a handle stays vanilla"
        )
    return found
