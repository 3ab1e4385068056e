"""What a training loop of one's own calls: install, begin and end of a step, metrics, state.

    config = preset("paper", stages=4, data_parallel=2)
    install(config, train_iters=1000)          # before the model is built
    for iteration in range(1000):
        begin_step(measured=iteration % 10 == 0)
        ...                                    # megatron-core's forward_backward_func, optimizer.step()
        end_step(applied=updated, grad_norm=grad_norm, clip_grad=1.0)

A whole loop: docs/custom-loops.md.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from optimus_cc_ext.config import OptimusConfig, flag_of
from optimus_cc_ext.config.flags import PRESETS, Request
from optimus_cc_ext.config.presets import Layout, resolve
from optimus_cc_ext.errors import FlagError, OptimusError, require_torch

if TYPE_CHECKING:
    from optimus_cc_ext.hooks import Installation
    from optimus_cc_ext.techniques.session import Session

__all__ = [
    "begin_step",
    "collect_metrics",
    "current_session",
    "end_step",
    "install",
    "load_state_dict",
    "preset",
    "state_dict",
    "uninstall",
]

_installation: "Installation | None" = None
_asked_for: tuple[OptimusConfig | None, int | None] = (None, None)


def install(config: OptimusConfig | None = None, *, train_iters: int | None = None) -> None:
    """Make Megatron compress its communication, in this process. Once more with the same settings changes nothing.

    To be called before the model is built, and before Megatron parses its command line if `config` is None.

    Args:
        config: what to do, for a training loop of one's own; None: flags on Megatron's command line say it.
        train_iters: iterations of the whole run, which warm-ups are a fraction of.

    Raises:
        TypeError: `config` is something else than an OptimusConfig.
        OptimusError: installed already, with other settings; or torch is too old.
        UnsupportedMegatron: Megatron is missing, of an untested version, or a seam has moved.
    """
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
        return
    require_torch()
    from optimus_cc_ext.hooks import Installation

    installation = Installation()
    installation.start(config, train_iters)
    _installation, _asked_for = installation, (config, train_iters)


def uninstall() -> None:
    """Take every wrap off Megatron again. Does nothing where none is on."""
    global _installation
    if _installation is not None:
        _installation.remove()
        _installation = None


def preset(
    name: str,
    *,
    stages: int,
    data_parallel: int,
    tied_embeddings: bool = True,
    distributed_optimizer: bool = False,
    **changes: object,
) -> OptimusConfig:
    """A preset by its name, as far as the layout allows it: what `--optimus-cc NAME` stands for.

    Args:
        name: "paper" or "balanced".
        stages: pipeline stages P.
        data_parallel: replicas D.
        tied_embeddings: whether the first stage's word embedding is the last stage's output weight as well.
        distributed_optimizer: whether it is Megatron's, for parameters in bf16 or fp16.
        changes: fields of OptimusConfig that win over the preset.

    Raises:
        FlagError: there is no such preset, or a change cannot work on this layout.
    """
    if name not in PRESETS:
        raise FlagError("preset", f"{name!r} is none", f"Give {' or '.join(PRESETS)}")
    layout = Layout(
        stages=stages, data_parallel=data_parallel, tied_embeddings=tied_embeddings, train_iters=1,
        distributed_optimizer=distributed_optimizer, master_copies=distributed_optimizer,
    )  # fmt: skip
    return resolve(Request(changes, {field: flag_of(field) for field in changes}, preset=name), layout).config


def begin_step(iteration: int | None = None, *, measured: bool = False) -> None:
    """A training step begins. All forward-backward passes until `end_step` are it; a second one repeats the first.

    A step that was begun before and never ended was abandoned: it leaves no trace.

    Args:
        iteration: completed ones; None: they are counted here.
        measured: whether `collect_metrics` will be asked for errors, residuals and times of this step.
    """
    _session().begin_step(iteration, measured=measured)


def end_step(*, applied: bool = True, grad_norm: float | None = None, clip_grad: float = 0.0) -> None:
    """The training step ended.

    Args:
        applied: whether the optimizer's update counted; False: it was skipped, and leaves no trace.
        grad_norm: the norm of all gradients, before clipping; what an outlier leaves behind is shrunk as it was.
        clip_grad: the norm that gradients were clipped to; 0: they were not.
    """
    from optimus_cc_ext.techniques.clipping import MAIN_NORM_GROUP, clip_coefficient

    _session().end_step(applied=applied, clip={MAIN_NORM_GROUP: clip_coefficient(clip_grad, grad_norm)})


def collect_metrics() -> dict[str, float]:
    """What Megatron's log would get: traffic per step since the last call, and errors if the last step was measured.

    Collective over all ranks of the model, with the same result on each: call it on all or on none. Bytes are of all
    these ranks together; names begin with "optimus-cc/".

    Raises:
        OptimusError: no forward-backward pass has run yet.
    """
    from optimus_cc_ext.hooks.training import training_device

    session = _session()
    if session.grid is None:
        raise OptimusError("there is nothing to report before the first training step")
    return session.report(training_device()).scalars()


def state_dict() -> dict[str, Any]:
    """All that this rank needs to go on from here: residuals, factors, counters. Save it beside the model's.

    Tensors are not copies. Within a step it is the state before the step.
    """
    return _session().state_dict()


def load_state_dict(state: Mapping[str, Any]) -> None:
    """Go on from what `state_dict` returned on this rank.

    Raises:
        ValueError: it does not fit what is switched on here; then nothing is changed.
    """
    _session().load_state_dict(state)


def current_session() -> "Session | None":
    """The state of the installation in this process, once its configuration is known."""
    return _installation.session if _installation is not None else None


def _session() -> "Session":
    session = current_session()
    if session is None:
        raise OptimusError("Optimus-CC is not installed: call optimus_cc_ext.install(OptimusConfig(...)) first")
    return session
