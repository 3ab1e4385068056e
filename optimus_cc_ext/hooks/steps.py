"""Steps of a handle's model: the calls that begin and end a step, and the check that every class of traffic saw its
messages in it.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

from optimus_cc_ext.announce import say
from optimus_cc_ext.errors import OptimusError
from optimus_cc_ext.hooks.training import training_device
from optimus_cc_ext.patching import Patches
from optimus_cc_ext.techniques.clipping import MAIN_NORM_GROUP, clip_coefficient
from optimus_cc_ext.techniques.session import Session

_DOORS = ("step", "step_with_ready_grads", "prepare_grads")
"""The methods of an optimizer by which a training loop updates parameters, or learns that there will be no update."""

_ANNOUNCED = "`with handle.step() as step: ...; step.done(...)`"

_CHECKED_STEPS = 3
"""Number of applied steps after which ranks no longer check together if a class saw no message: a loop that is wired
wrongly fails in its first steps.
"""

_UNSEEN = (
    "gradients were reduced outside of the forward-backward passes that Optimus-CC sees. Call megatron-core's schedule "
    "after compress(), by get_forward_backward_func(), and not by a name that was imported before"
)

_WITHOUT_END, _WITHOUT_NEXT_END = 5, 15
"""Numbers of consecutive steps without an end at which a warning is logged: before a step has ended for the first time,
and afterwards, when a loop may give up several steps in a row.
"""


def follow(session: Session, models: Iterable[Any], optimizer: Any, measure_every: int, patches: Patches) -> None:
    """Begin a step when the gradients are zeroed, and end it after the optimizer's step. If `optimizer` is None,
    `Handle.step` announces the steps. Collective over all ranks of the model.

    Args:
        measure_every: errors and times are measured in steps whose number is a multiple of this; 0: in no step.
    """
    assert session.grid is not None, "a session that follows steps has a place"
    session.follows_zeroing, session.steps_are_announced = True, optimizer is None
    chained = list(_below(optimizer))
    empty = hasattr(optimizer, "chained_optimizers") and not chained
    without = [rank for rank, _ in session.grid.reasons("its chain is empty" if empty else None)]
    loop = _Loop(session, optimizer, measure_every, without)
    for model in models:
        patches.wrap(model, "zero_grad_buffer", loop.zeroed)
    if isinstance(optimizer, torch.optim.Optimizer):
        for hook in (
            optimizer.register_step_pre_hook(lambda *_: check_messages(session)),
            optimizer.register_step_post_hook(lambda *_: loop.end()),
        ):
            patches.callback(hook.remove)
    elif optimizer is not None:
        for owner, name in product((optimizer, *chained), _DOORS):
            if hasattr(owner, name):
                patches.wrap(owner, name, partial(loop.passed, owner, name))


def check_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer whose steps cannot be seen.

    Raises:
        OptimusError: names the optimizer, the reason and the cure.
    """
    kind = type(optimizer).__name__
    cure = "Give the optimizer inside it, which makes the update"
    if isinstance(optimizer, torch.optim.Optimizer):
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            reason = f"this {kind} is one of torch's by its class, but has not called torch's __init__()"
            raise OptimusError(f"optimizer: {reason}, so nothing tells when it steps. {cure}")
    elif optimizer is not None and not any(hasattr(optimizer, name) for name in _DOORS):
        raise OptimusError(f"optimizer: this {kind} has no step(). {cure}")


def _below(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers that an optimizer of Megatron is made of, at every depth: those of a chain, and those of the
    modules of a multimodal model.
    """
    modules = getattr(optimizer, "module_infos", None) or {}
    inside = (*(getattr(optimizer, "chained_optimizers", None) or ()), *(info.optimizer for info in modules.values()))
    for each in inside:
        if each is not None:
            yield each
            yield from _below(each)


class _Loop:
    """Training loop of one model, seen through the calls that zero gradients and that update parameters.

    The loop may update by any of the methods `_DOORS`. They call one another, and the outermost call ends the step.

    Args:
        session: the session of the model.
        optimizer: the optimizer that `compress` was given.
        measure_every: as in `follow`.
        without: the ranks whose chain of optimizers is empty.
    """

    def __init__(self, session: Session, optimizer: Any, measure_every: int, without: Sequence[int]) -> None:
        self._session, self._given, self._measure_every, self._without = session, optimizer, measure_every, without
        self._inside = False
        self._unended, self._limit = 0, _WITHOUT_END
        """Number of consecutive steps that have begun and not ended, and the number at which a warning is logged."""

    def zeroed(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Zero the gradients in `DistributedDataParallel.zero_grad_buffer`: a step begins, or is repeated.

        Raises:
            OptimusError: steps have to be announced, and this one was not; or the pass before was seen by nobody, and
                the parameters were updated past the optimizer's methods, which would have refused that.
        """
        session, every = self._session, self._measure_every
        step, early = session.step, session.applied_steps < _CHECKED_STEPS
        if early and step.zeroed and step.strayed and not session.in_step and session.grid is not None:
            raise OptimusError(f"rank {session.grid.place.rank}: {_UNSEEN}")
        if session.steps_are_announced and session.in_step and not session.step.open:
            raise OptimusError(
                "optimizer: compress() was given None, so nothing ends the step that this pass began. Give the "
                f"optimizer, or train inside of {_ANNOUNCED}"
            )
        if session.follows_zeroing:
            if session.step.open:
                self._ended()
            elif session.in_step:
                self._unended += 1
                self._warn()
            session.restart_step(measured=bool(every) and (session.completed_steps + 1) % every == 0)
        return original(*args, **kwargs)

    def passed(self, owner: Any, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the method `name` of `owner`, and end the step if the call is an outermost one that decides on it.

        Raises:
            OptimusError: optimizers of a chain are called one by one, and a rank has none, so that it would not take
                part in the end of the step.
        """
        if self._inside:
            return original(*args, **kwargs)
        session = self._session
        if self._without and owner is not self._given and session.in_step and not session.step.open:
            raise OptimusError(
                f"optimizer: the chain of rank {self._without[0]} is empty, so that rank does not learn that a step "
                f"ends if the optimizers of the chain are called one by one. Announce each step by {_ANNOUNCED}"
            )
        check_messages(session)
        self._inside = True
        try:
            result = original(*args, **kwargs)
        finally:
            self._inside = False
        if name == "prepare_grads":
            if result is True:  # a gradient is not finite, and there will be no update
                self.end(applied=False)
            return result
        first, norm = (*result, None, None)[:2] if isinstance(result, tuple) else (result, None)
        norms = (
            {MAIN_NORM_GROUP: norm, **getattr(owner, "grad_norms_by_group", {})} if isinstance(result, tuple) else {}
        )
        # Wrappers return a loss first, which may be None.
        self.end(first is not False, norms, getattr(getattr(owner, "config", None), "clip_grad", 0.0))
        return result

    def end(self, applied: bool = True, norms: Mapping[str, Any] | None = None, clip_grad: float = 0.0) -> None:
        """End a step that a pass has begun, unless the training loop announced the step and ends it by itself."""
        if self._session.in_step and not self._session.step.open:
            self._ended()
            _agree_and_end(self._session, applied, norms or {}, clip_grad)

    def _ended(self) -> None:
        self._unended, self._limit = 0, _WITHOUT_NEXT_END

    def _warn(self) -> None:
        """Log that no step ends: none has so far, or none does any more, for example with a new optimizer."""
        assert self._session.grid is not None
        if self._unended < self._limit:
            return
        if self._session.trial is not None:
            self._session.trial.give_up("no step ends")
        if self._unended == self._limit and self._session.grid.is_first:
            say(
                f"optimus-cc: warning: {self._limit} steps have begun and none has ended, so each counts as repeated: "
                "warm-ups do not end, and low rank loses its error feedback. Give compress() the optimizer whose "
                f"step() or step_with_ready_grads() the training loop calls, or announce each step by {_ANNOUNCED}",
                logging.WARNING,
            )


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
        return _UNSEEN
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
    reasons = (technique.unseen(session.applied_steps) for technique in session.techniques)
    return next(filter(None, reasons), None)


def _agree_and_end(session: Session, applied: bool, norms: Mapping[str, Any], clip_grad: float) -> None:
    """End a step once all ranks of the model agree on it. Collective over these ranks.

    The step counts as applied if all ranks made the update. The norm is the largest of all ranks, as in Megatron's
    `train_step`, because ranks without trainable parameters know neither norm nor update.
    """
    from megatron.core.optimizer import optimizer

    assert session.grid is not None, "a handle's session has a place"
    groups = (MAIN_NORM_GROUP, *getattr(optimizer, "SEPARATE_GRAD_NORM_GROUPS", ()))
    mine = [float(not applied or session.step.failed), float(session.is_unusual)]
    mine += [_number(norms.get(group)) for group in groups]
    agreed = torch.tensor(mine, dtype=torch.float64).to(training_device())
    session.grid.largest(agreed)
    skipped, unusual, *largest = agreed.tolist()
    clip = {group: clip_coefficient(clip_grad, norm) for group, norm in zip(groups, largest, strict=True) if norm >= 0}
    session.end_step(applied=not skipped, clip=clip, unusual=bool(unusual))


def _number(norm: Any) -> float:
    """Return a norm as a number whose maximum can be taken: an unknown norm is below all others."""
    known = isinstance(norm, int | float) or (isinstance(norm, torch.Tensor) and norm.numel() == 1)
    return float(norm) if known else -1.0
