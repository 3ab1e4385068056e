"""Handle of one model's compression: attached to the model's buckets, its optimizer and its passes, and to nothing
else.

Megatron's functions belong to the process. They are wrapped while there is a session (`shared_sessions`), and the wraps
look the session up by the model; a model without a session stays vanilla.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from optimus_cc_ext.checkpoint.resuming import settings_of
from optimus_cc_ext.errors import OptimusError, UnfitState
from optimus_cc_ext.hooks import distrib_optimizer, finalize_model_grads, p2p_communication, schedules
from optimus_cc_ext.hooks.distributed_data_parallel import join
from optimus_cc_ext.hooks.finalize_model_grads import tied_embedding
from optimus_cc_ext.hooks.param_and_grad_buffer import finish
from optimus_cc_ext.hooks.registry import AppliedWraps, Seam, check_version
from optimus_cc_ext.hooks.sessions import Sessions
from optimus_cc_ext.hooks.training import training_device
from optimus_cc_ext.patching import Patches
from optimus_cc_ext.techniques.clipping import MAIN_NORM_GROUP, clip_coefficient
from optimus_cc_ext.techniques.collective import all_reduce_sum
from optimus_cc_ext.techniques.grid import Grid
from optimus_cc_ext.techniques.session import Session

__all__ = ["Handle", "Off", "Step", "close_unless_used", "reasons", "shared_sessions", "shared_wraps"]

_CHECKED_STEPS = 3
"""Steps at whose end the ranks exchange if a class saw no message: what is wired wrong is so from the beginning."""

_MADE_BY = "made_by"
"""Key of a state dict for the rank and the settings of the run that saved it."""

_shared: tuple[Sessions, AppliedWraps] | None = None
"""Sessions of this process and the wraps that look them up; shared, because Megatron's functions belong to the
process.
"""


def shared_sessions() -> Sessions:
    """Return the sessions of this process; wrap Megatron if there were none.

    Raises:
        UnsupportedMegatron: the version is not supported, or a seam does not hold.
    """
    global _shared
    if _shared is None:
        check_version()
        sessions, applied = Sessions(), AppliedWraps()
        applied.apply(shared_wraps(sessions))
        _shared = sessions, applied
    return _shared[0]


def close_unless_used() -> None:
    """Remove the wraps from Megatron if no session is left.

    A wrap that other code has wrapped in the meantime stays, and finds no session.
    """
    global _shared
    if _shared is not None and not _shared[0].in_use:
        _shared[1].close()
        _shared = None


def shared_wraps(sessions: Sessions) -> list[tuple[Seam, Callable[[Any], Any]]]:
    """Return the seams that models of all kinds share, with their wraps."""
    return [
        *p2p_communication.wraps(sessions),
        *schedules.wraps(sessions),
        *finalize_model_grads.wraps(sessions),
        *distrib_optimizer.wraps(sessions),
    ]


class Handle:
    """Compression of one model on this rank, made by `optimus_cc_ext.compress`. As a context manager it calls `remove`.

    Args:
        session: the compression state.
    """

    def __init__(self, session: Session) -> None:
        self._sessions, self._session, self._patches = shared_sessions(), session, Patches()
        self._models: list[Any] = []
        self._removed = False

    def _attach(self, model: Any) -> None:
        """Compress a model chunk of this rank, which DistributedDataParallel has wrapped.

        Collective over all ranks of the model if it is the first one.
        """
        join(self._sessions, self._compressing, model, self._patches)
        self._models.append(model)

    def _follow_steps(self, optimizer: Any, measure_every: int) -> None:
        """Begin a step when the gradients are zeroed, and end it after the optimizer's step; None: `step` announces
        steps.

        Args:
            measure_every: errors and times are measured in steps whose number is a multiple of this; 0: in no step.
        """
        session = self._compressing
        session.follows_zeroing = True
        for model in self._models:
            self._patches.wrap(model, "zero_grad_buffer", partial(_zero, session, measure_every, optimizer is None))
        if isinstance(optimizer, torch.optim.Optimizer):
            for hook in (
                optimizer.register_step_pre_hook(lambda *_: _check_messages(session)),
                optimizer.register_step_post_hook(lambda *_: _end_step(session)),
            ):
                self._patches.callback(hook.remove)
        elif optimizer is not None:
            self._patches.wrap(optimizer, "step", partial(_step, session, optimizer))

    def metrics(self) -> dict[str, float]:
        """Return the bytes per step since the last call, and errors and times if the last step was measured.

        Collective over all ranks of the model, with the same result on each. Bytes are summed over these ranks; the
        names begin with "optimus-cc/".
        """
        if self._compressing.grid is None:
            raise OptimusError("metrics: no model has been built yet. Call it after the first training step")
        return self._compressing.report(training_device()).scalars()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that this rank needs to resume: residuals, factors, counters. Tensors are not copies.

        In a step that has not ended, the result is the state before the step.
        """
        return self._compressing.state_dict() | {_MADE_BY: self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the state that `state_dict` returned on this rank. Collective over all ranks of the model.

        A technique that is missing in the state keeps its present state.

        Raises:
            UnfitState: on all ranks, and nothing is changed: on one of them the state is another rank's, or does not
                fit the techniques that are switched on here.
        """
        session, reason = self._compressing, None
        if session.grid is None:  # under `install`, before the first model: this rank cannot ask the others
            session.load_state_dict(state)
            return
        try:
            reason = self._misfit(session, state)
        except (AttributeError, KeyError, TypeError) as error:
            reason = f"it is not what a handle's state_dict() returned ({type(error).__name__}: {error})"
        if found := next(reasons(session.grid, reason), None):
            raise UnfitState("load_state_dict: nothing is changed: rank {}: {}".format(*found))
        session.load_state_dict(state)

    def _misfit(self, session: Session, state: Mapping[str, Any]) -> str | None:
        """Return why this rank cannot resume from `state`; None if it can."""
        if session.active or session.step.open:
            return "a step is open. Load between two steps"
        if "iteration" not in state:
            return "it has no `iteration`: give what a handle's state_dict() returned on this rank"
        here = self._identity
        # States of earlier versions do not name the rank and settings that made them.
        for part, saved in state.get(_MADE_BY, {}).items():
            for name, value in here.get(part, {}).items():
                if saved.get(name) != value:
                    return f"{name} is {value} here and {saved.get(name)} in the state"
        return "; ".join(f"{name}: {why}" for name, why in session.mismatches(state).items()) or None

    @property
    def _identity(self) -> dict[str, dict[str, Any]]:
        """Settings on which a state depends: this rank's place in the layout, and the settings of each technique."""
        config, grid = self._compressing.config, self._compressing.grid
        if grid is None:
            return {}
        replicas, tensor = grid.replica_group, grid.tensor_group
        place = {
            "the number of pipeline stages": grid.stages,
            "the number of model chunks per stage": grid.chunks,
            "the data-parallel size": grid.data_parallel,
            "the tensor-parallel size": 1 if tensor is None else tensor.size(),
            "the pipeline stage of the rank": grid.place.stage,
            "the replica of the rank": 0 if replicas is None else replicas.rank(),
            "the tensor-parallel rank": grid.place.tensor_rank,
            "the hidden size": getattr(self._models[0].config, "hidden_size", None),
        }
        settings = {
            technique: {flag.removeprefix("--").replace("-", "_"): value for flag, value in flags.items()}
            for technique, flags in settings_of(config, {}).items()
        }
        return {"place": place} | settings

    @contextmanager
    def step(self, iteration: int | None = None, *, measured: bool = False) -> Iterator["Step"]:
        """Announce a training step, which the training loop ends by `Step.done` instead of the optimizer.

        After an exception inside, or without a call of `done`, the step's changes of the state are discarded.

        Args:
            iteration: the number of completed steps; None: count them here.
            measured: True if `metrics` will be asked for errors and times of this step.
        """
        session = self._compressing
        session.begin_step(iteration, measured=measured)
        try:
            yield Step(session)
        finally:
            if session.step.open:
                session.end_step(applied=False)

    def remove(self) -> None:
        """End compression: the model trains on as vanilla. Collective over all ranks of the model.

        Gathers and reductions that are under way are finished first.

        Raises:
            OptimusError: a forward-backward pass of the model is open.
        """
        if self._removed:
            return
        if self._session.active:
            raise OptimusError("remove: a forward-backward pass of this model is open. Call it between two passes")
        for model in self._models:
            for bucket_group in (*model.bucket_groups, *model.expert_parallel_bucket_groups):
                finish(self._session, bucket_group)
            embedding = tied_embedding(model)
            if self._session.embedding.left_out and embedding is not None:
                # Its bucket left it out. Megatron, which sums it over the stages, expects the sum over the replicas.
                all_reduce_sum(embedding.main_grad, bucket_group.data_parallel_group, "the end of compression")
                self._session.embedding.left_out = False
        self._detach()

    def _detach(self) -> None:
        """End compression without the other ranks: transfers that are under way are left to themselves."""
        self._session.end_step(applied=False)
        self._session.follows_zeroing = False  # if other code has wrapped our wraps, they stay, and do nothing
        self._removed = True
        self._patches.close()
        if self._session.new_groups is not None:
            self._session.new_groups.close()
        self._sessions.remove(self._session)
        close_unless_used()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.remove()
        else:
            self._detach()  # does not wait: other ranks may not have failed, and would not answer

    @property
    def _compressing(self) -> Session:
        if self._removed:
            raise OptimusError("this handle was removed: its model is vanilla. Call optimus_cc_ext.compress() anew")
        return self._session


class Off(Handle):
    """The handle of a model that is not compressed: its methods do nothing, and the model stays vanilla."""

    def __init__(self) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        """Return nothing."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Leave `state` alone."""

    @contextmanager
    def step(self, iteration: int | None = None, *, measured: bool = False) -> Iterator["Step"]:
        """Do nothing."""
        yield Step(None)

    def remove(self) -> None:
        """Do nothing."""

    def _detach(self) -> None:
        """Do nothing."""


class Step:
    """Training step that the training loop has announced."""

    def __init__(self, session: Session | None) -> None:
        self._session = session

    def done(self, *, applied: bool = True, grad_norm: float | None = None, clip_grad: float = 0.0) -> None:
        """End the step. Collective over all ranks of the model.

        Args:
            applied: False if the optimizer skipped its update; the step's changes of the state are then discarded.
            grad_norm: global gradient norm before clipping.
            clip_grad: the norm to which the gradients were clipped; 0: they were not clipped.

        Raises:
            OptimusError: no forward-backward pass has run in this step.
        """
        if self._session is None:
            return
        if not self._session.in_step:
            raise OptimusError("done: no forward-backward pass of this model has run in the step. Call it after one")
        _check_messages(self._session)
        _agree_and_end(self._session, applied, {MAIN_NORM_GROUP: grad_norm}, clip_grad)


def reasons(grid: Grid | None, mine: str | None) -> Iterator[tuple[int, str]]:
    """Yield the ranks that have a reason to refuse, with the reason. Collective over all ranks of the model."""
    assert grid is not None, "the session has no place in the grid yet"
    everyone = grid.gather((grid.place.rank, mine))
    return ((rank, reason) for rank, reason in everyone if reason is not None)


def _zero(
    session: Session, measure_every: int, announced: bool, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Zero the gradients in `DistributedDataParallel.zero_grad_buffer`: a step begins, or is repeated.

    Raises:
        OptimusError: steps have to be announced, and this one was not.
    """
    if announced and session.in_step and not session.step.open:
        raise OptimusError(
            "optimizer: compress() was given None, so nothing ends the step that this pass began. Give the optimizer, "
            "or train inside of `with handle.step() as step: ...; step.done(...)`"
        )
    if session.follows_zeroing:
        session.restart_step(measured=bool(measure_every) and (session.completed_steps + 1) % measure_every == 0)
    return original(*args, **kwargs)


def _step(session: Session, optimizer: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Take the step of Megatron's optimizer, which ends the step of the session."""
    _check_messages(session)
    result = original(*args, **kwargs)
    applied, norm = result[:2] if isinstance(result, tuple) else (True, None)
    norms = {MAIN_NORM_GROUP: norm, **getattr(optimizer, "grad_norms_by_group", {})}
    clip_grad = getattr(getattr(optimizer, "config", None), "clip_grad", 0.0)
    _end_step(session, bool(applied), norms, clip_grad)
    return result


def _check_messages(session: Session) -> None:
    """Refuse a step in which a class saw none of the messages that it expects, on all ranks of the model.

    Collective over these ranks in the first steps, and before the optimizer's own collectives.

    Raises:
        OptimusError: names the rank and its reason.
    """
    if not session.step.zeroed or session.checks_of_messages == _CHECKED_STEPS:
        return
    session.checks_of_messages += 1
    for rank, reason in reasons(session.grid, _without_messages(session)):
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
    return None


def _end_step(
    session: Session, applied: bool = True, norms: Mapping[str, float | None] | None = None, clip_grad: float = 0.0
) -> None:
    """End a step that a pass has begun, unless the training loop announced the step and ends it by itself."""
    if session.in_step and not session.step.open:
        _agree_and_end(session, applied, norms or {}, clip_grad)


def _agree_and_end(session: Session, applied: bool, norms: Mapping[str, float | None], clip_grad: float) -> None:
    """End a step once all ranks of the model agree on it. Collective over these ranks.

    The step counts as applied if the update was made on all ranks, and the norm is the largest of all, because ranks
    without trainable parameters know neither, as in Megatron's `train_step`.
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
