"""Functions for custom training loops: one compression per model, or one for all models of the process.

    compression = compress(model, optimizer, "balanced", train_iters=1000)   # after DistributedDataParallel
    for iteration in range(1000):
        model.zero_grad_buffer()
        ...                                    # megatron-core's forward_backward_func
        optimizer.step()                       # ends the step

docs/python.md shows a complete loop.
"""

import argparse
import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack

from optimus_cc_ext.announce import say
from optimus_cc_ext.config import OptimusConfig, OptimusFields, flag_of
from optimus_cc_ext.config.flags import PRESETS, Request
from optimus_cc_ext.config.presets import Layout, resolve
from optimus_cc_ext.errors import FlagError, OptimusError, require_torch

if TYPE_CHECKING:
    import torch

    from optimus_cc_ext.hooks import Handle, Installation
    from optimus_cc_ext.techniques.session import Session

__all__ = [
    "begin_step",
    "collect_metrics",
    "compress",
    "current_session",
    "end_step",
    "install",
    "load_state_dict",
    "pad_buckets",
    "preset",
    "state_dict",
    "uninstall",
]

Preset = Literal["paper", "balanced"]
"""The names of presets."""

_installation: "Installation | None" = None
_asked_for: tuple[OptimusConfig | None, int | None] = (None, None)

_DEPRECATED = "optimus_cc_ext.{}() is kept for one release. Call optimus_cc_ext.compress(model, optimizer, ...) instead"


def compress(
    models: "torch.nn.Module | Sequence[torch.nn.Module]",
    optimizer: Any,
    config: "OptimusConfig | Preset | None" = "balanced",
    *,
    train_iters: int | None = None,
    measure_every: int = 10,
) -> "Handle":
    """Compress the communication of one model; all other models of this process stay vanilla.

    Process groups, layout and tied embedding are those of the model. Collective over all ranks of the model, after
    `DistributedDataParallel`. A step begins with `zero_grad_buffer()`, and ends when the optimizer, or one inside it,
    updates the parameters by `step()` or `step_with_ready_grads()`.

    Args:
        models: a model in megatron-core's DistributedDataParallel, or the list of its chunks on this rank.
        optimizer: Megatron's (the outermost one), or torch's, whose clipping is not known; None: `Handle.step`
            announces the steps.
        config: "paper", "balanced", or an OptimusConfig; None: the model stays vanilla, and the handle does nothing.
        train_iters: iterations of the whole run, which warm-ups are a fraction of.
        measure_every: errors and times are measured in each step whose number this divides; 0: in none.

    Raises:
        OptimusError: a model is not wrapped in DistributedDataParallel, or has a handle already.
        FlagError: a setting cannot work on this model.
        UnsupportedMegatron: Megatron is missing, of an untested version, or a seam has moved.
    """
    require_torch()
    from optimus_cc_ext.hooks import compress

    return compress(models, optimizer, config, train_iters=train_iters, measure_every=measure_every)


def pad_buckets[T](ddp_config: T) -> T:
    """Return a copy of `ddp_config` with which DistributedDataParallel pads its buckets, so that kernels load 16 bytes
    at once.

    Wrap the model with the copy if the log says that shards begin at multiples of less than 8 values. Padding adds up
    to 65,535 values to each bucket of the distributed optimizer; Megatron's checkpoints do not contain the padding.

    Args:
        ddp_config: megatron-core's DistributedDataParallelConfig.
    """
    return dataclasses.replace(ddp_config, pad_buckets_for_high_nccl_busbw=True)  # type: ignore[type-var]


def install(config: OptimusConfig | None = None, *, train_iters: int | None = None) -> None:
    """Make Megatron compress its communication in this process. A second call with the same settings changes nothing.

    Call it before the model is built, and, if `config` is None, before Megatron parses its command line. A custom
    training loop should call `compress` instead: `install` with a config is deprecated, and kept for one release.

    Args:
        config: the techniques and formats, for a custom training loop; None: read them from flags on Megatron's command
            line.
        train_iters: iterations of the whole run. Warm-ups are given as fractions of this number.

    Raises:
        TypeError: `config` is not an OptimusConfig.
        OptimusError: Optimus-CC is already installed with other settings, or torch is too old.
        UnsupportedMegatron: Megatron is missing, its version was not tested, or one of the wrapped functions has moved.
    """
    if config is not None:
        warnings.warn(_DEPRECATED.format("install"), DeprecationWarning, stacklevel=2)
    install_once(config, train_iters)


def install_once(config: OptimusConfig | None, train_iters: int | None = None) -> "Installation":
    """Make the installation that `install` describes, unless it is made already, and return it."""
    global _installation, _asked_for
    if config is not None and not isinstance(config, OptimusConfig):
        example = "OptimusConfig(compressed_backprop=True) or preset('paper', stages=4, data_parallel=2)"
        raise TypeError(f"install() takes an OptimusConfig, not a {type(config).__name__}: {example}")
    if _installation is not None:
        if _asked_for != (config, train_iters):
            others = _asked_for[0] or "those of the command line"
            raise OptimusError(
                f"Optimus-CC is installed already, with other settings ({others}). "
                "Call optimus_cc_ext.uninstall() first, before the model is built"
            )
        return _installation
    require_torch()
    from optimus_cc_ext.hooks import Installation

    installation = Installation()
    installation.start(config, train_iters)
    _installation, _asked_for = installation, (config, train_iters)
    return installation


def uninstall() -> None:
    """Take every wrap off Megatron again. Does nothing if Optimus-CC is not installed."""
    global _installation
    if _installation is not None:
        _installation.remove()
        _installation = None


def preset(
    name: Preset,
    *,
    stages: int,
    data_parallel: int,
    tied_embeddings: bool = True,
    distributed_optimizer: bool = False,
    **changes: Unpack[OptimusFields],
) -> OptimusConfig:
    """Make the configuration that `--optimus-cc NAME` stands for, as far as the layout allows each of its techniques.

    Args:
        name: "paper" or "balanced".
        stages: number of pipeline stages.
        data_parallel: number of data-parallel replicas.
        tied_embeddings: True if the first stage's word embedding is also the last stage's output weight.
        distributed_optimizer: True if Megatron's distributed optimizer trains parameters in bf16 or fp16.
        changes: fields of OptimusConfig that override the preset.

    Raises:
        FlagError: there is no preset of this name, or one of the changes cannot work on this layout.
    """
    layout = Layout(
        stages=stages, data_parallel=data_parallel, tied_embeddings=tied_embeddings, train_iters=1,
        distributed_optimizer=distributed_optimizer, master_copies=distributed_optimizer,
    )  # fmt: skip
    return preset_on(name, layout, changes)


def preset_on(
    name: str, layout: Layout, changes: Mapping[str, Any], options: argparse.Namespace | None = None
) -> OptimusConfig:
    """Make the configuration of `preset` for a run of which more is known.

    Args:
        options: Megatron's options; None: there are no conflicts with them to look for.
    """
    if name not in PRESETS:
        raise FlagError("preset", f"{name!r} is not the name of a preset", f"Give {' or '.join(PRESETS)}")
    try:
        resolution = resolve(
            Request(changes, {field: flag_of(field) for field in changes}, preset=name), layout, options
        )
    except FlagError as error:
        raise error.naming_fields() from None
    for note in resolution.notes:
        say(f"optimus-cc: {note}")
    return resolution.config


def begin_step(iteration: int | None = None, *, measured: bool = False) -> None:
    """Mark the start of a training step. Further forward-backward passes before `end_step` rerun the first.

    A step that was begun but never ended counts as abandoned: its changes of residuals and factors are discarded. The
    arguments are those of `Handle.step`. Deprecated like `install`.
    """
    warnings.warn(_DEPRECATED.format("begin_step"), DeprecationWarning, stacklevel=2)
    _session().begin_step(iteration, measured=measured)


def end_step(*, applied: bool = True, grad_norm: float | None = None, clip_grad: float = 0.0) -> None:
    """Mark the end of the training step. The arguments are those of `Step.done`. Deprecated like `install`."""
    from optimus_cc_ext.techniques.clipping import MAIN_NORM_GROUP, clip_coefficient

    warnings.warn(_DEPRECATED.format("end_step"), DeprecationWarning, stacklevel=2)
    _session().end_step(applied=applied, clip={MAIN_NORM_GROUP: clip_coefficient(clip_grad, grad_norm)})


def collect_metrics() -> dict[str, float]:
    """Return `Handle.metrics` of the installation. Collective over all ranks of the model.

    Raises:
        OptimusError: no forward-backward pass has run yet.
    """
    return _handle().metrics()


def state_dict() -> dict[str, Any]:
    """Return `Handle.state_dict` of the installation, to be saved beside the model's state."""
    return _handle().state_dict()


def load_state_dict(state: Mapping[str, Any]) -> None:
    """Resume the installation from the state of `state_dict`, as `Handle.load_state_dict` does."""
    _handle().load_state_dict(state)


def is_installed() -> bool:
    """Return whether Optimus-CC is installed in this process, with or without a known configuration."""
    return _installation is not None


def current_session() -> "Session | None":
    """Return the session of the installation in this process; None before its configuration is known."""
    return _installation.session if _installation is not None else None


def _session() -> "Session":
    session = current_session()
    if session is None:
        raise OptimusError("Optimus-CC is not installed: call optimus_cc_ext.install(OptimusConfig(...)) first")
    return session


def _handle() -> "Handle":
    _session()
    assert _installation is not None and _installation.handle is not None, "a session has a handle"
    return _installation.handle
