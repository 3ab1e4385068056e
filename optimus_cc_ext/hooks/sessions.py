"""The registry of sessions in this process: Megatron's wraps look up the session of a model, a pass or a message."""

import gc
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from optimus_cc_ext.techniques.groups import NewGroups
from optimus_cc_ext.techniques.session import Session


class _Passes(threading.local):
    """Open passes of a thread: while a model trains, another thread may generate with a model of its own."""

    def __init__(self) -> None:
        self.open: list[tuple[Session, ...]] = [()]
        """Stack of the open forward-backward passes: an entry holds the sessions of one pass. Passes may nest, and the
        innermost one is last. The first entry is empty, for code outside of all passes.
        """


class Sessions:
    """Sessions, each with the models that the session compresses. A model without a session stays vanilla."""

    def __init__(self) -> None:
        self.awaits_model = False
        """True from the validation of a command line that compresses until the model that Megatron sets up has a
        session.
        """

        self._of_model: WeakKeyDictionary[torch.nn.Module, Session] = WeakKeyDictionary()
        self._groups: dict[NewGroups, ReferenceType[Session]] = {}
        """The process groups of each session, which outlive a model that is dropped with its handle."""

        self._passes = _Passes()
        self._open: list[tuple[Session, ...]] = []
        """The open passes of all threads."""

    def __iter__(self) -> Iterator[Session]:
        return iter(dict.fromkeys(self._of_model.values()))

    @property
    def in_use(self) -> bool:
        """True if a session exists, or is awaited, or groups of one that was dropped are left."""
        return self.awaits_model or bool(self._of_model) or any(groups.made for groups in self._groups)

    def add(self, model: torch.nn.Module, session: Session) -> None:
        """Register `session` as the session that compresses `model`, a DistributedDataParallel."""
        self._of_model[model] = session

    def note(self, groups: NewGroups, session: Session) -> None:
        """Note the process groups of a session, so that they do not outlive it."""
        self._groups[groups] = ref(session)

    def remove(self, session: Session) -> None:
        """Remove a session from the registry; the session's models are vanilla from now on."""
        for model in [model for model, other in self._of_model.items() if other is session]:
            del self._of_model[model]
        self._groups = {groups: owner for groups, owner in self._groups.items() if owner() is not session}

    def abandoned(self) -> list[NewGroups]:
        """Return the process groups of models that were dropped with their handles, in the order of their making."""
        if self._groups:
            gc.collect()  # a dropped model, with its session, consists of reference cycles
        self._groups = {groups: session for groups, session in self._groups.items() if groups.made}
        return [groups for groups, session in self._groups.items() if session() is None]

    def of(self, chunks: Iterable[torch.nn.Module]) -> tuple[Session, ...]:
        """Return the sessions of all registered models among these chunks, inside their wrappers or their parts."""
        found: dict[Session, None] = {}
        for chunk in chunks:
            known = [self._of_model[layer] for layer in layers_of(chunk) if layer in self._of_model]
            # A multimodal model is not wrapped in DDP as a whole: each of its parts is.
            found |= dict.fromkeys(
                known or [self._of_model[part] for part in chunk.modules() if part in self._of_model]
            )
        return tuple(found)

    @contextmanager
    def passing(self, sessions: Sequence[Session]) -> Iterator[None]:
        """Mark a forward-backward pass of the models of `sessions` as open; with no sessions messages stay dense."""
        entry = tuple(sessions)
        self._passes.open.append(entry)
        self._open.append(entry)
        try:
            yield
        finally:
            self._passes.open.pop()
            # Threads end their passes in any order, and `remove` would take an equal entry of another thread as well.
            del self._open[next(i for i, other in enumerate(self._open) if other is entry)]

    def with_pipeline(self, group: dist.ProcessGroup) -> Session | None:
        """Return the session of the innermost open pass whose pipeline has the ranks of `group`."""
        for session in self._passes.open[-1]:
            if session.grid is not None and session.grid.is_pipeline(group):
                return session
        return None

    def with_experts_on(self, group: dist.ProcessGroup) -> Session | None:
        """Return the session of the innermost open pass whose experts are dealt out over the ranks of `group`.

        On a GPU, autograd recomputes layers in a thread of its own, which belongs to the pass of another thread.
        """
        candidates: Iterable[Session] = self._passes.open[-1]
        if len(self._passes.open) == 1 and _in_backward():
            candidates = (session for entry in reversed(self._open) for session in entry)
        for session in candidates:
            if session.grid is not None and session.grid.has_experts_on(group):
                return session
        return None


def _in_backward() -> bool:
    """Return True if autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def bucket_groups_of(model: Any) -> tuple[Any, ...]:
    """Return the bucket groups of a model in DistributedDataParallel, those of its experts last."""
    return (*getattr(model, "bucket_groups", ()), *getattr(model, "expert_parallel_bucket_groups", ()))


def layers_of(chunk: torch.nn.Module | None) -> Iterator[torch.nn.Module]:
    """Yield the chunk and every module inside its wrappers: Megatron's wrappers keep the wrapped one as `module`."""
    while chunk is not None:
        yield chunk
        chunk = getattr(chunk, "module", None)
