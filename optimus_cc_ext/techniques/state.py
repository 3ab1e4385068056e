"""State of low-rank compression between messages and steps, for links and buckets alike: residuals and warm starts.

State follows the step: values that a step writes are pending, and kept only if the optimizer applies the step.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from optimus_cc_ext.compressors.fast import copy_unless
from optimus_cc_ext.compressors.low_rank import LowRank, effective_rank, initial_q, next_warm_start, next_warm_starts
from optimus_cc_ext.compressors.scratch import Scratch
from optimus_cc_ext.techniques.clipping import MAIN_NORM_GROUP

_Saved = dict[str, torch.Tensor]


def state_dtype(name: str) -> torch.dtype:
    """Return the dtype that `--compression-state-dtype` calls `name`."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[name]


def state_bytes(n: int, m: int, compression_rank: int, dtype: torch.dtype) -> int:
    """Return the bytes of a `FactorState` with these arguments for one matrix, before it is made."""
    r = effective_rank(n, m, compression_rank)
    return 2 * (n * m + m * r) * dtype.itemsize + m * r * torch.float32.itemsize


class SteppedTensor:
    """Tensor with a pending value that reaches later steps only if the step that wrote it is committed.

    Residuals and warm starts are written during forward and backward, before it is known whether the optimizer's step
    is applied: a step can be repeated (Megatron's rerun state machine) or skipped. So the values of a step are pending,
    and `commit` or `rollback` decides afterwards. Both are free: to commit, two buffers change places. If the step was
    not finite, which only the device knows, it copies the old value back (`copy_unless`).

    Args:
        initial: fp32, or bf16 to keep it in half the memory.
    """

    def __init__(self, initial: torch.Tensor) -> None:
        self.committed = initial
        """Value after the last applied step; not a copy."""

        self._pending = torch.empty_like(initial)
        self._written = False

    @property
    def value(self) -> torch.Tensor:
        """Value that the current step sees: its own last write, or the committed value."""
        return self._pending if self._written else self.committed

    @property
    def nbytes(self) -> int:
        return self.committed.nbytes + self._pending.nbytes

    @property
    def is_wide(self) -> bool:
        """True if the tensor is kept in fp32, so that `workspace` lasts until `write`."""
        return self._pending.dtype == torch.float32

    def workspace(self, scratch: Scratch) -> torch.Tensor:
        """Return an fp32 tensor for computing this step's value: the pending buffer if that is fp32, else memory of
        `scratch`.

        It may be the tensor that `value` returns.
        """
        if self.is_wide:
            return self._pending
        return scratch.take("stepped", self._pending.shape, torch.float32, self._pending.device)

    def write(self, value: torch.Tensor) -> None:
        """Make `value`, which may be the `workspace`, the pending value of this step."""
        if value is not self._pending:
            self._pending.copy_(value)
        self._written = True

    def commit(self, finite: torch.Tensor, factor: float = 1.0) -> None:
        """Keep this step's value, unless the 0-dim bool tensor `finite` is false; then multiply it by `factor`.

        The device makes the choice, without a host synchronisation.
        """
        if not self._written:
            return
        self._written = False
        self.committed, self._pending = self._pending, self.committed
        copy_unless(finite, self._pending, self.committed)
        if factor != 1.0:
            self.committed.mul_(factor)

    def rollback(self) -> None:
        self._written = False

    def rescale(self, factor: torch.Tensor) -> None:
        """Multiply the committed value by a 0-dim tensor on this device. Not within a step."""
        self.committed.mul_(factor)

    def restore(self, value: torch.Tensor) -> None:
        """Replace the committed value by `value`, of any device and dtype.

        Raises:
            ValueError: `value` has another shape.
        """
        if value.shape != self.committed.shape:
            raise ValueError(
                f"a tensor of shape {tuple(value.shape)} does not fit the state's {tuple(self.committed.shape)}"
            )
        self.committed.copy_(value)
        self._written = False

    def zero_(self) -> None:
        """Set the committed value to zero, and discard a pending one."""
        self.committed.zero_()
        self._written = False


class FactorState:
    """Residual, warm start and fallback directions of a batch of B matrices of n x m; changes of a step are pending.

    Args:
        shape: (B, n, m).
        compression_rank: r is `effective_rank(n, m, compression_rank)`.
        generator: draws the first Q, on its own device.
        dtype: the dtype of residual (B, n, m) and warm start (B, m, r), fp32 or bf16.
        norm_group: the gradient-norm group whose clipping scales the residual.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        compression_rank: int,
        *,
        generator: torch.Generator,
        dtype: torch.dtype,
        device: torch.device,
        norm_group: str = MAIN_NORM_GROUP,
    ) -> None:
        batch, n, m = self.shape = shape
        r = effective_rank(n, m, compression_rank)
        self.fallback = initial_q(batch, m, r, generator=generator, device=device)
        self.warm_start = SteppedTensor(self.fallback.to(dtype, copy=True))
        self.residual = SteppedTensor(torch.zeros(shape, dtype=dtype, device=device))
        self.next_q: torch.Tensor | None = None
        """Q' of the current step, not yet orthogonalised. It becomes the next warm start if the optimizer applies the
        step.
        """

        self._finite = torch.ones((), dtype=torch.bool, device=device)
        self._norm_group = norm_group

    @property
    def nbytes(self) -> int:
        return self.residual.nbytes + self.warm_start.nbytes + self.fallback.nbytes

    def note_finite(self, factor: torch.Tensor, scratch: Scratch) -> None:
        """Discard this step's changes if `factor`, of any shape, has a NaN or Inf. The device decides."""
        largest = scratch.take("largest", (), torch.promote_types(factor.dtype, torch.float32), factor.device)
        torch.linalg.vector_norm(factor, ord=torch.inf, out=largest, dtype=largest.dtype)
        # For a NaN the comparison is false as well.
        below = torch.lt(largest, torch.inf, out=scratch.take("finite", (), torch.bool, factor.device))
        self._finite.logical_and_(below)

    def write_warm_start(self, q: torch.Tensor, compressor: LowRank, scratch: Scratch) -> None:
        """Make the next step's warm start from Q' (B, m, r), fp32, which is overwritten."""
        self.warm_start.write(next_warm_start(q, self.fallback, compressor, out=q, scratch=scratch))

    def commit(self, shrinkage: Mapping[str, float]) -> None:
        """Commit an applied step if its values are finite; scale the residual as the norm group was scaled."""
        assert self.next_q is None, "its warm start is not made yet"
        self.residual.commit(self._finite, shrinkage.get(self._norm_group, 1.0))
        self.warm_start.commit(self._finite)
        self._finite.fill_(True)

    def rollback(self) -> None:
        """Discard the values of a step that is skipped or repeated."""
        self.next_q = None
        self.residual.rollback()
        self.warm_start.rollback()
        self._finite.fill_(True)

    def saved(self) -> _Saved:
        """Return the committed values, not copies."""
        return {"residual": self.residual.committed, "warm_start": self.warm_start.committed}

    def restore(self, saved: _Saved) -> None:
        """Restore the values that `saved` returned."""
        self.next_q = None
        self.residual.restore(saved["residual"])
        self.warm_start.restore(saved["warm_start"])


class FactorStates:
    """All states of one technique on this rank, by names that are valid in the run that resumes from a checkpoint, too.

    Args:
        compression_rank: the compression rank of all states.
        made_on_demand: True if a state is made when its first message comes. Loaded values wait for that; otherwise the
            loaded states must be exactly those that exist.
    """

    def __init__(self, compression_rank: int, *, made_on_demand: bool = False) -> None:
        self._compression_rank = compression_rank
        self._made_on_demand = made_on_demand
        self._states: dict[str, FactorState] = {}
        self._used: dict[str, None] = {}
        """Names of states that are limited in number, the one unused longest first."""

        self._warm_starts: tuple[LowRank, Scratch] | None = None
        self._waiting: dict[str, _Saved] = {}

    def get(self, name: str, make: Callable[[], FactorState], *, kin: str = "", most: int | None = None) -> FactorState:
        """Return the state `name`, made and restored from the loaded values if it is not there.

        Args:
            kin: the beginning of the names of states that are limited in number.
            most: largest number of such states; a further one replaces the one unused longest. None: no limit.
        """
        state = self._states.get(name)
        if state is None:
            state = self._states[name] = make()
            if name in self._waiting:
                state.restore(self._waiting.pop(name))
        if most is not None:
            self._used.pop(name, None)
            self._used[name] = None
            alike = [other for other in self._used if other.startswith(kin)]
            if len(alike) > most:
                del self._used[alike[0]], self._states[alike[0]]
        return state

    def __iter__(self) -> Iterator[FactorState]:
        return iter(self._states.values())

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self)

    @property
    def device(self) -> torch.device | None:
        """Device of the states; None if there are none."""
        first = next(iter(self._states.values()), None)
        return None if first is None else first.residual.committed.device

    def residuals(self) -> list[torch.Tensor]:
        """Return each state's residual (B, n, m), with the pending changes of the current step."""
        return [state.residual.value for state in self]

    def zero_residuals(self) -> None:
        for state in self:
            state.residual.zero_()
        for saved in self._waiting.values():
            saved["residual"].zero_()

    def rescale_residuals(self, factor: torch.Tensor) -> None:
        """Multiply all residuals by `factor`, 0-dim on the device: the ratio of this pass's loss scale to the last
        one's.
        """
        for state in self:
            state.residual.rescale(factor)
        for saved in self._waiting.values():
            saved["residual"] = saved["residual"].to(factor.device) * factor

    def make_warm_starts(self, compressor: LowRank, scratch: Scratch) -> None:
        """Set the compressor that makes the warm starts from each `next_q`.

        All are made at once, when a step is applied and no message waits for them.
        """
        self._warm_starts = compressor, scratch

    def commit(self, shrinkage: Mapping[str, float]) -> None:
        """Commit an applied step; make the pending warm starts first."""
        # Warm starts are made on the current stream: every reduction has been waited for, so its memory is free.
        open_ones = [(state, state.next_q) for state in self if state.next_q is not None]
        if open_ones:
            assert self._warm_starts is not None
            qs = [q for _, q in open_ones]
            next_warm_starts(qs, [state.fallback for state, _ in open_ones], *self._warm_starts)
            for state, q in open_ones:
                state.warm_start.write(q)
                state.next_q = None
        for state in self:
            state.commit(shrinkage)

    def rollback(self) -> None:
        """Discard the values of a step that is skipped or repeated."""
        for state in self:
            state.rollback()

    def state_dict(self) -> dict[str, Any]:
        """Return the committed values, as tensors (not copies)."""
        return self._waiting | {name: state.saved() for name, state in self._states.items()}

    def mismatch(
        self, state_dict: Mapping[str, Any], *, expected: Mapping[str, tuple[int, int, int]] | None = None
    ) -> str | None:
        """Return why `load_state_dict` would refuse; None if it would not. Nothing is changed.

        Args:
            expected: shapes (B, n, m), by name, of the states that will exist when the state is loaded; None: the
                present ones.
        """
        if expected is None:
            expected = {name: state.shape for name, state in self._states.items()}
        names = expected.keys() if not self._made_on_demand else state_dict.keys()
        if missing := sorted(names - state_dict.keys()) or sorted(state_dict.keys() - names):
            return f"{', '.join(missing)}: either here or in the checkpoint, not in both"
        for name, saved in state_dict.items():
            found = tuple(saved["residual"].shape), tuple(saved["warm_start"].shape)
            batch, n, m = expected.get(name, found[0])
            fitting = (batch, n, m), (batch, m, effective_rank(n, m, self._compression_rank))
            if found != fitting:
                return f"{name}: residual and warm start have shapes {found}, but {fitting} are needed here"
        return None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace all states by those that `state_dict` returned.

        Raises:
            ValueError: they do not fit; then nothing is changed.
        """
        if reason := self.mismatch(state_dict):
            raise ValueError(reason)
        if not self._made_on_demand:
            for name, state in self._states.items():
                state.restore(state_dict[name])
            return
        self._states.clear()
        self._used.clear()
        # The state is copied, because the argument may be the live state of another run.
        self._waiting = {name: {key: t.clone() for key, t in saved.items()} for name, saved in state_dict.items()}
