"""The sessions of this process: the wraps on Megatron ask here whose a model, a pass or a message is."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from optimus_cc_ext.techniques.session import Session

__all__ = ["Sessions", "layers_of"]


class Sessions:
    """Sessions, each with the models that it compresses. A model that is in none of them is vanilla Megatron's."""

    def __init__(self) -> None:
        self.of_every_model: Session | None = None
        """The one that `install` made, which all models of the process are meant to join."""

        self._of_model: WeakKeyDictionary[torch.nn.Module, Session] = WeakKeyDictionary()
        self._passes: list[tuple[Session, ...]] = []
        """The sessions of each forward-backward pass that is open, the innermost last; passes may nest."""

    def __iter__(self) -> Iterator[Session]:
        return iter(dict.fromkeys(self._of_model.values()))

    @property
    def in_use(self) -> bool:
        """Whether there is a session, or will be one as soon as a model is built."""
        return self.of_every_model is not None or bool(self._of_model)

    def add(self, model: torch.nn.Module, session: Session) -> None:
        """Note that `session` compresses `model`, which is wrapped in DistributedDataParallel."""
        self._of_model[model] = session

    def remove(self, session: Session) -> None:
        """Forget a session: its models are vanilla Megatron's from now on."""
        for model in [model for model, other in self._of_model.items() if other is session]:
            del self._of_model[model]

    def of(self, chunks: Iterable[torch.nn.Module]) -> tuple[Session, ...]:
        """Return the sessions of the models that these chunks are, wrap, or contain."""
        found: dict[Session, None] = {}
        for chunk in chunks:
            known = [self._of_model[layer] for layer in layers_of(chunk) if layer in self._of_model]
            # A multimodal model is no DDP itself: each of its parts is one.
            found |= dict.fromkeys(
                known or [self._of_model[part] for part in chunk.modules() if part in self._of_model]
            )
        return tuple(found)

    @contextmanager
    def passing(self, sessions: Sequence[Session]) -> Iterator[None]:
        """A forward-backward pass of the models of these sessions; of none: what it sends is not compressed."""
        self._passes.append(tuple(sessions))
        try:
            yield
        finally:
            self._passes.pop()

    @property
    def passing_now(self) -> tuple[Session, ...]:
        """The sessions of the innermost open pass."""
        return self._passes[-1] if self._passes else ()

    def with_pipeline(self, group: dist.ProcessGroup) -> Session | None:
        """Return the session of the innermost open pass whose pipeline has the ranks of `group`."""
        return next((s for s in self.passing_now if s.grid is not None and s.grid.is_pipeline(group)), None)


def layers_of(chunk: torch.nn.Module | None) -> Iterator[torch.nn.Module]:
    """Yield the chunk, and what it wraps: Megatron's wrappers keep that as `module`."""
    while chunk is not None:
        yield chunk
        chunk = getattr(chunk, "module", None)
