"""Decides how a model is compressed, and attaches a handle to it: on all ranks of the model, or on none."""

import argparse
import functools
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.announce import say
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.flags import PRESETS, Request
from optimus_cc_ext.config.presets import Layout, amplified, check_layout, resolve
from optimus_cc_ext.config.refusals import refuse_unsupported
from optimus_cc_ext.errors import FlagError, OptimusError, is_first_rank
from optimus_cc_ext.hooks.distributed_data_parallel import check_groups, grid_of
from optimus_cc_ext.hooks.facts import is_tied, layout_from, options_of
from optimus_cc_ext.hooks.handle import Handle, Off, close_unless_used, shared_sessions, shared_wraps
from optimus_cc_ext.hooks.parts import check_megatron
from optimus_cc_ext.hooks.sessions import Sessions, bucket_groups_of, layers_of
from optimus_cc_ext.hooks.steps import check_optimizer, follow
from optimus_cc_ext.techniques.grid import Grid
from optimus_cc_ext.techniques.groups import close_abandoned
from optimus_cc_ext.techniques.session import Session

__all__ = ["compress"]


def compress(
    models: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: Any,
    config: OptimusConfig | str | None,
    *,
    train_iters: int | None,
    measure_every: int,
) -> Handle:
    """Attach compression to `models`, and return its handle; `optimus_cc_ext.compress` has the arguments."""
    chunks = [models] if isinstance(models, torch.nn.Module) else list(models)
    if config is None or (isinstance(config, OptimusConfig) and not config.any_technique):
        return Off()
    if not isinstance(config, OptimusConfig | str):
        raise TypeError(f"config: a preset's name or an OptimusConfig is needed, not a {type(config).__name__}")
    _check_once()
    wrapped = [_wrapped(chunk) for chunk in chunks]
    try:
        return _attach(wrapped, optimizer, config, train_iters, measure_every)
    finally:
        close_unless_used()  # removes the session if nothing was attached


@functools.cache
def _check_once() -> None:
    """Check Megatron before it is wrapped, and say so if its version was not tested."""
    seams = [seam for seam, _ in shared_wraps(Sessions())]
    line = check_megatron(seams, "megatron.core")
    if line is not None and is_first_rank():
        say(f"optimus-cc: {line}")


def _attach(
    models: Sequence[torch.nn.Module],
    optimizer: Any,
    config: OptimusConfig | str,
    train_iters: int | None,
    measure_every: int,
) -> Handle:
    grid, refused = grid_of(models[0]), None
    grid.meet()
    tied = any(grid.gather(any(map(is_tied, models))))
    try:
        chosen, layout = _settled(models, grid, optimizer, config, train_iters, tied)
    except OptimusError as error:
        refused = error.naming_fields() if isinstance(error, FlagError) else error
    for rank, reason in grid.reasons(None if refused is None else str(refused)):
        raise refused or OptimusError(f"rank {rank}: {reason}")
    close_abandoned(shared_sessions().abandoned(), grid)
    if not chosen.any_technique:
        return Off()
    handle = Handle(Session(chosen, layout))
    try:
        for model in models:
            handle._attach(model)
        follow(handle._session, models, optimizer, measure_every, handle._patches)
    except BaseException:
        handle._detach()
        raise
    return handle


def _settled(
    models: Sequence[torch.nn.Module],
    grid: Grid,
    optimizer: Any,
    config: OptimusConfig | str,
    train_iters: int | None,
    tied: bool,
) -> tuple[OptimusConfig, Layout]:
    """Return the configuration for a model, and the facts that decided on it.

    Raises:
        OptimusError: the model cannot be compressed in this way.
    """
    check_optimizer(optimizer)
    options = [options_of(model, grid, optimizer, train_iters, tied=tied) for model in models]
    layout = layout_from(options[0])
    if isinstance(config, str):
        config = _preset(config, layout, options[0])
    elif grid.is_first:
        for note in amplified(config, layout):
            say(f"optimus-cc: {note}")
    if shared_sessions().of(models):
        raise OptimusError("models: compressed by another handle already. Remove that handle first")
    groups = chain.from_iterable(map(bucket_groups_of, models))
    if any(bucket.grad_data is None for group in groups for bucket in group.buckets):
        reason = "messages are planned from their lengths and dtypes"
        raise OptimusError(f"models: the gradients of a bucket are freed. Allocate them before compress(): {reason}")
    check_groups(config, grid)
    check_layout(config, layout)
    for each in options:
        refuse_unsupported(each, config)
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


def _preset(name: str, layout: Layout, options: argparse.Namespace) -> OptimusConfig:
    if name not in PRESETS:
        raise FlagError("config", f"{name!r} is not the name of a preset", f"Give {' or '.join(PRESETS)}")
    resolution = resolve(Request({}, {}, preset=name), layout, options)
    for note in resolution.notes if dist.get_rank() == 0 else ():
        say(f"optimus-cc: {note}")
    return resolution.config
