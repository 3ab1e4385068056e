"""Steps of a handle's model: the calls that begin and end a step, and the check that every class of traffic saw its
messages in it.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from optimus_cc_ext.errors import OptimusError
from optimus_cc_ext.hooks.training import training_device
from optimus_cc_ext.patching import Patches
from optimus_cc_ext.techniques.clipping import MAIN_NORM_GROUP, clip_coefficient
from optimus_cc_ext.techniques.session import Session

__all__ = ["Step", "check_messages", "follow"]

_CHECKED_STEPS = 3
"""Number of applied steps after which ranks no longer check together if a class saw no message: a loop that is wired
wrongly fails in its first steps.
"""


def follow(session: Session, models: Iterable[Any], optimizer: Any, measure_every: int, patches: Patches) -> None:
    """Begin a step when the gradients are zeroed, and end it after the optimizer's step. If `optimizer` is None,
    `Handle.step` announces the steps.

    Args:
        measure_every: errors and times are measured in steps whose number is a multiple of this; 0: in no step.
    """
    session.follows_zeroing, session.steps_are_announced = True, optimizer is None
    for model in models:
        patches.wrap(model, "zero_grad_buffer", partial(_zero, session, measure_every))
    if isinstance(optimizer, torch.optim.Optimizer):
        for hook in (
            optimizer.register_step_pre_hook(lambda *_: check_messages(session)),
            optimizer.register_step_post_hook(lambda *_: _end_step(session)),
        ):
            patches.callback(hook.remove)
    elif optimizer is not None:
        patches.wrap(optimizer, "step", partial(_step, session, optimizer))


class Step:
    """Training step that the training loop has announced."""

    def __init__(self, session: Session | None) -> None:
        self._session = session

    def done(self, *, applied: bool = True, grad_norm: float | None = None, clip_grad: float = 0.0) -> None:
        """End the step. Collective over all ranks of the model.

        Args:
            applied: False if the optimizer skipped its update; the step's changes of the state are then discarded.
            grad_norm: global gradient norm before clipping, by which residuals of unusually strongly clipped steps are
                scaled.
            clip_grad: the norm to which the gradients were clipped; 0: they were not clipped.

        Raises:
            OptimusError: no forward-backward pass has run in this step.
        """
        if self._session is None:
            return
        if not self._session.in_step:
            raise OptimusError("done: no forward-backward pass of this model has run in the step. Call it after a pass")
        check_messages(self._session)
        _agree_and_end(self._session, applied, {MAIN_NORM_GROUP: grad_norm}, clip_grad)


def _zero(session: Session, measure_every: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Zero the gradients in `DistributedDataParallel.zero_grad_buffer`: a step begins, or is repeated.

    Raises:
        OptimusError: steps have to be announced, and this one was not.
    """
    if session.steps_are_announced and session.in_step and not session.step.open:
        raise OptimusError(
            "optimizer: compress() was given None, so nothing ends the step that this pass began. Give the optimizer, "
            "or train inside of `with handle.step() as step: ...; step.done(...)`"
        )
    if session.follows_zeroing:
        session.restart_step(measured=bool(measure_every) and (session.completed_steps + 1) % measure_every == 0)
    return original(*args, **kwargs)


def _step(session: Session, optimizer: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Take the step of Megatron's optimizer, which ends the step of the session."""
    check_messages(session)
    result = original(*args, **kwargs)
    applied, norm = result[:2] if isinstance(result, tuple) else (True, None)
    norms = {MAIN_NORM_GROUP: norm, **getattr(optimizer, "grad_norms_by_group", {})}
    clip_grad = getattr(getattr(optimizer, "config", None), "clip_grad", 0.0)
    _end_step(session, bool(applied), norms, clip_grad)
    return result


def check_messages(session: Session) -> None:
    """Refuse a step in which a class saw none of the messages that it expects, on all ranks of the model.

    Collective over these ranks in the first steps, and before the optimizer's own collectives.

    Raises:
        OptimusError: names the rank and its reason.
    """
    if not session.step.zeroed or session.applied_steps >= _CHECKED_STEPS:
        return
    assert session.grid is not None, "a session that follows steps has a place"
    for rank, reason in session.grid.reasons(_without_messages(session)):
        raise OptimusError(f"rank {rank}: {reason}")


def _without_messages(session: Session) -> str | None:
    """Return why a class has seen none of the messages that it expects on this rank in this step; None: each has."""
    step, embedding = session.step, session.embedding
    step.zeroed = False
    if step.strayed and not session.in_step:
        return (
            "gradients were reduced outside of the forward-backward passes that Optimus-CC sees. Call megatron-core's "
            "schedule after compress(), by get_forward_backward_func(), and not by a name that was imported before"
        )
    if not session.in_step:
        return None
    if not step.reduced and (session.gradients.expects_reductions or embedding.group is not None):
        return (
            "no gradient bucket was reduced, or the model has none. Call finalize_model_grads() between the "
            "forward-backward pass and the optimizer's step"
        )
    if embedding.left_out:
        return (
            "the tied embedding was not summed over its stages. Call finalize_model_grads(), not finish_grad_sync() "
            "alone"
        )
    staged = session.grid is not None and session.grid.stages > 1
    if staged and session.forward.messages is not None and not session.forward.seen:
        return (
            "no activation passed between stages by megatron-core's point-to-point calls, which "
            "pipeline_forward_format compresses. Leave it out with another communicator"
        )
    if session.config.sends_rows and session.expects_rows and not session.dispatch.seen:
        return (
            "no token was exchanged among experts in the forward-backward passes that Optimus-CC sees, and the "
            "experts' formats compress tokens. Call megatron-core's schedule, or leave the formats out"
        )
    if session.applied_steps and session.parameters.buckets and not session.parameters.seen:
        return (
            "no parameters were gathered after a step of Megatron's distributed optimizer, which param_gather_format "
            "compresses. Leave it out with another optimizer"
        )
    return None


def _end_step(
    session: Session, applied: bool = True, norms: Mapping[str, float | None] | None = None, clip_grad: float = 0.0
) -> None:
    """End a step that a pass has begun, unless the training loop announced the step and ends it by itself."""
    if session.in_step and not session.step.open:
        _agree_and_end(session, applied, norms or {}, clip_grad)


def _agree_and_end(session: Session, applied: bool, norms: Mapping[str, float | None], clip_grad: float) -> None:
    """End a step once all ranks of the model agree on it. Collective over these ranks.

    The step counts as applied if all ranks made the update. The norm is the largest of all ranks, as in Megatron's
    `train_step`, because ranks without trainable parameters know neither norm nor update.
    """
    from megatron.core.optimizer import optimizer

    assert session.grid is not None, "a handle's session has a place"
    groups = (MAIN_NORM_GROUP, *getattr(optimizer, "SEPARATE_GRAD_NORM_GROUPS", ()))
    mine = [float(not applied or session.step.failed), *(_number(norms.get(group)) for group in groups)]
    agreed = torch.tensor(mine, dtype=torch.float64).to(training_device())
    session.grid.largest(agreed)
    skipped, *largest = agreed.tolist()
    clip = {group: clip_coefficient(clip_grad, norm) for group, norm in zip(groups, largest, strict=True) if norm >= 0}
    session.end_step(applied=not skipped, clip=clip)


def _number(norm: float | None) -> float:
    """Return a norm as a number whose maximum can be taken: an unknown norm is below all others."""
    return -1.0 if norm is None else float(norm)
