"""Handle of one model's compression: attached to the model's buckets, its optimizer and its passes, and to nothing
else.

Megatron's functions belong to the process. They are wrapped while there is a session (`shared_sessions`), and the wraps
look the session up by the model; a model without a session stays vanilla.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from optimus_cc_ext.checkpoint.resuming import settings_of
from optimus_cc_ext.collectives.calls import all_reduce_sum
from optimus_cc_ext.errors import OptimusError, UnfitState
from optimus_cc_ext.hooks import (
    distrib_optimizer,
    finalize_model_grads,
    p2p_communication,
    schedules,
    token_dispatcher,
)
from optimus_cc_ext.hooks.distributed_data_parallel import join
from optimus_cc_ext.hooks.facts import tied_embedding
from optimus_cc_ext.hooks.param_and_grad_buffer import finish
from optimus_cc_ext.hooks.registry import AppliedWraps, Seam
from optimus_cc_ext.hooks.sessions import Sessions, bucket_groups_of
from optimus_cc_ext.hooks.steps import Step
from optimus_cc_ext.hooks.training import training_device
from optimus_cc_ext.patching import Patches
from optimus_cc_ext.techniques.session import Session

_MADE_BY = "made_by"
"""Key of a state dict for the rank and the settings of the run that saved it."""

_shared: tuple[Sessions, AppliedWraps] | None = None
"""Sessions of this process and the wraps that look them up; shared, because Megatron's functions belong to the
process.
"""


def shared_sessions() -> Sessions:
    """Return the sessions of this process; wrap Megatron if there were none.

    Raises:
        UnsupportedMegatron: a seam does not hold.
    """
    global _shared
    if _shared is None:
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
        *token_dispatcher.wraps(sessions),
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
        """Compress a model chunk of this rank, which DistributedDataParallel has wrapped."""
        join(self._sessions, self._compressing, model, self._patches)
        self._models.append(model)

    def metrics(self) -> dict[str, float]:
        """Return the bytes per step since the last call, and errors and times if the last step was measured.

        Collective over all ranks of the model, with the same result on each. Bytes are summed over these ranks, and
        divided by the steps that had a pass, ended or not; the names begin with "optimus-cc/".
        """
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
            UnfitState: on every rank, before anything is changed, if one rank's state belongs to another rank or does
                not fit the techniques that are switched on here.
        """
        session, reason = self._compressing, None
        assert session.grid is not None, "a handle's session has a place"
        try:
            reason = self._misfit(session, state)
        except (AttributeError, KeyError, TypeError) as error:
            reason = f"it is not what a handle's state_dict() returned ({type(error).__name__}: {error})"
        for rank, misfit in session.grid.reasons(reason):
            raise UnfitState(f"load_state_dict: nothing is changed: rank {rank}: {misfit}")
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
        assert grid is not None, "a handle's session has a place"
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
            for bucket_group in bucket_groups_of(model):
                finish(self._session, bucket_group)
            embedding = tied_embedding(model)
            if self._session.embedding.left_out and embedding is not None:
                # The embedding's bucket left it out. Megatron, which sums it over the stages, expects the sum over the
                # replicas: those of this bucket, because experts have replicas of their own.
                left = next(group for group in model.bucket_groups if embedding in group.params)
                all_reduce_sum(embedding.main_grad, left.data_parallel_group, "the end of compression")
                self._session.embedding.left_out = False
        self._detach()

    def _detach(self) -> None:
        """End compression without the other ranks: transfers that are under way are left to themselves."""
        self._session.end_step(applied=False)
        self._session.follows_zeroing = False  # if other code has wrapped our wraps, ours stay and do nothing
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
            self._detach()  # this way of closing does not wait for other ranks, which may not have failed

    @property
    def _compressing(self) -> Session:
        if self._removed:
            raise OptimusError("this handle was removed: its model is vanilla. Call optimus_cc_ext.compress() anew")
        return self._session


class Off(Handle):
    """The handle of a model that is not compressed: its methods do nothing, and the model stays vanilla."""

    def __init__(self) -> None:
        self._session = None  # type: ignore[assignment]

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
