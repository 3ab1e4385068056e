"""State of low-rank compression between messages and steps, for links and buckets alike: residuals and warm starts.

State follows the step: what a step writes is pending, and kept only if the optimizer applies the step.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from optimus_cc_ext.compressors.low_rank import LowRank, effective_rank, initial_q, next_warm_start, next_warm_starts
from optimus_cc_ext.compressors.scratch import Scratch
from optimus_cc_ext.techniques.clipping import MAIN_NORM_GROUP

__all__ = ["FactorState", "FactorStates", "SteppedTensor", "state_bytes", "state_dtype"]

_Saved = dict[str, torch.Tensor]


def state_dtype(name: str) -> torch.dtype:
    """Return the dtype that `--compression-state-dtype` calls `name`."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[name]


def state_bytes(n: int, m: int, compression_rank: int, dtype: torch.dtype) -> int:
    """Return the bytes of a `FactorState` of these arguments for one matrix; known before there is one."""
    r = effective_rank(n, m, compression_rank)
    return 2 * (n * m + m * r) * dtype.itemsize + m * r * torch.float32.itemsize


class SteppedTensor:
    """A tensor whose writes reach later steps only when the step that made them is committed.

    Residuals and warm starts are fed during forward and backward, before it is known whether the optimizer's step
    is applied: a step can be repeated (Megatron's rerun state machine) or skipped. So what a step writes is pending,
    and `commit` or `rollback` decides afterwards. Rolling back is free. Committing is free on a CPU: two buffers change
    places. On a GPU it is one kernel that reads both and writes one, because whether the step was finite is known
    there only, and asking would stall the host; and a CUDA graph needs its tensors where they were.

    Args:
        initial: fp32, or bf16 to keep it in half the memory.
    """

    def __init__(self, initial: torch.Tensor) -> None:
        self.committed = initial
        """The value that applied steps left; not a copy."""

        self._pending = torch.empty_like(initial)
        self._written = False

    @property
    def value(self) -> torch.Tensor:
        """The value that the step sees: its own last write, or what earlier steps left."""
        return self._pending if self._written else self.committed

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.committed.nbytes + self._pending.nbytes

    @property
    def is_wide(self) -> bool:
        """Whether it is kept in fp32, so that `workspace` lasts until `write`."""
        return self._pending.dtype == torch.float32

    def workspace(self, scratch: Scratch) -> torch.Tensor:
        """Return an fp32 tensor to compute this step's value in: where it will be kept, or else memory of `scratch`.

        It may be the tensor that `value` returns.
        """
        if self.is_wide:
            return self._pending
        return scratch.take("stepped", self._pending.shape, torch.float32, self._pending.device)

    def write(self, value: torch.Tensor) -> None:
        """Take `value`, which may be the `workspace`, as this step's."""
        if value is not self._pending:
            self._pending.copy_(value)
        self._written = True

    def commit(self, finite: torch.Tensor, factor: float = 1.0) -> None:
        """Keep this step's value, unless the 0-dim bool tensor `finite` is false; then multiply it by `factor`.

        The choice is made on the device, without a host synchronisation.
        """
        if not self._written:
            return
        self._written = False
        if finite.device.type != "cpu":
            torch.where(finite, self._pending, self.committed, out=self.committed)
        elif finite.numpy():  # in the host's own memory: nothing to wait for
            self.committed, self._pending = self._pending, self.committed
        if factor != 1.0:
            self.committed.mul_(factor)

    def rollback(self) -> None:
        """Forget this step's value."""
        self._written = False

    def rescale(self, factor: torch.Tensor) -> None:
        """Multiply what earlier steps left by a 0-dim tensor on this device. Not within a step."""
        self.committed.mul_(factor)

    def restore(self, value: torch.Tensor) -> None:
        """Replace what applied steps left by `value`, of any device and dtype.

        Raises:
            ValueError: it has another shape.
        """
        if value.shape != self.committed.shape:
            raise ValueError(f"a tensor of {tuple(value.shape)} where {tuple(self.committed.shape)} is remembered")
        self.committed.copy_(value)
        self._written = False

    def zero_(self) -> None:
        """Forget everything."""
        self.committed.zero_()
        self._written = False


class FactorState:
    """Residual, warm start and fallback directions of a batch of B matrices of n x m; what a step adds is pending.

    Args:
        shape: (B, n, m).
        compression_rank: r is `effective_rank(n, m, compression_rank)`.
        generator: draws the first Q, on its own device.
        dtype: the dtype of residual (B, n, m) and warm start (B, m, r), fp32 or bf16.
        norm_group: the gradient-norm group whose clipping shrinks the residual.
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
        """Q' of the current step, not yet orthogonalised: the next warm start if the optimizer applies the step."""

        self._finite = torch.ones((), dtype=torch.bool, device=device)
        self._norm_group = norm_group

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.residual.nbytes + self.warm_start.nbytes + self.fallback.nbytes

    def note_finite(self, factor: torch.Tensor, scratch: Scratch) -> None:
        """Keep nothing of this step if `factor`, of any shape, has a NaN or Inf. Decided on the device."""
        largest = scratch.take("largest", (), torch.promote_types(factor.dtype, torch.float32), factor.device)
        torch.linalg.vector_norm(factor, ord=torch.inf, out=largest, dtype=largest.dtype)
        # NaN is not below infinity, either.
        below = torch.lt(largest, torch.inf, out=scratch.take("finite", (), torch.bool, factor.device))
        self._finite.logical_and_(below)

    def write_warm_start(self, q: torch.Tensor, compressor: LowRank, scratch: Scratch) -> None:
        """Start the next step from Q' (B, m, r), fp32, which is overwritten."""
        self.warm_start.write(next_warm_start(q, self.fallback, compressor, out=q, scratch=scratch))

    def commit(self, shrinkage: Mapping[str, float]) -> None:
        """Keep what the applied step wrote, if it is finite; the residual shrunk as its norm group was."""
        assert self.next_q is None, "its warm start is not made yet"
        self.residual.commit(self._finite, shrinkage.get(self._norm_group, 1.0))
        self.warm_start.commit(self._finite)
        self._finite.fill_(True)

    def rollback(self) -> None:
        """Forget what a step that is skipped or repeated wrote."""
        self.next_q = None
        self.residual.rollback()
        self.warm_start.rollback()
        self._finite.fill_(True)

    def saved(self) -> _Saved:
        """Return what applied steps left, not copies."""
        return {"residual": self.residual.committed, "warm_start": self.warm_start.committed}

    def restore(self, saved: _Saved) -> None:
        """Go on from what `saved` returned."""
        self.next_q = None
        self.residual.restore(saved["residual"])
        self.warm_start.restore(saved["warm_start"])


class FactorStates:
    """All states of one technique on this rank, by names that mean the same in the run that goes on from a checkpoint.

    Args:
        compression_rank: of all of them.
        made_on_demand: whether a state is made when its first message comes. What is loaded waits for that; otherwise
            what is loaded has to be just what is there.
    """

    def __init__(self, compression_rank: int, *, made_on_demand: bool = False) -> None:
        self._compression_rank = compression_rank
        self._made_on_demand = made_on_demand
        self._states: dict[str, FactorState] = {}
        self._warm_starts: tuple[LowRank, Scratch] | None = None
        self._waiting: dict[str, _Saved] = {}

    def get(self, name: str, make: Callable[[], FactorState]) -> FactorState:
        """Return the state of this name; made, and restored from what was loaded, where there is none yet."""
        if name not in self._states:
            self._states[name] = make()
            if name in self._waiting:
                self._states[name].restore(self._waiting.pop(name))
        return self._states[name]

    def __iter__(self) -> Iterator[FactorState]:
        return iter(self._states.values())

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(state.nbytes for state in self)

    @property
    def device(self) -> torch.device | None:
        """The device of the states; None: there are none."""
        return next((state.residual.committed.device for state in self), None)

    def residuals(self) -> list[torch.Tensor]:
        """Return each state's residual (B, n, m), as the step that goes on sees it."""
        return [state.residual.value for state in self]

    def zero_residuals(self) -> None:
        """Forget all residuals."""
        for state in self:
            state.residual.zero_()
        for saved in self._waiting.values():
            saved["residual"].zero_()

    def rescale_residuals(self, factor: torch.Tensor) -> None:
        """Multiply all residuals by `factor`, 0-dim on the device, as the loss scale was since the last pass."""
        for state in self:
            state.residual.rescale(factor)
        for saved in self._waiting.values():
            saved["residual"] = saved["residual"].to(factor.device) * factor

    def make_warm_starts(self, compressor: LowRank, scratch: Scratch) -> None:
        """Set what makes the warm starts from each `next_q`: all at once, when a step is applied and nobody waits."""
        self._warm_starts = compressor, scratch

    def commit(self, shrinkage: Mapping[str, float]) -> None:
        """See `FactorState.commit`."""
        # On the current stream: every reduction has been waited for, and with it the memory that it shares.
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
        """See `FactorState.rollback`."""
        for state in self:
            state.rollback()

    def state_dict(self) -> dict[str, Any]:
        """Return what applied steps left, as tensors (not copies)."""
        return self._waiting | {name: state.saved() for name, state in self._states.items()}

    def mismatch(
        self, state_dict: Mapping[str, Any], *, expected: Mapping[str, tuple[int, int, int]] | None = None
    ) -> str | None:
        """Say why `load_state_dict` would refuse, or None; nothing is changed.

        Args:
            expected: shapes (B, n, m) of the states that will be there when the state is loaded, by name; None: those
                that are there.
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
                return f"{name}: residual and warm start of {found} where {fitting} are remembered"
        return None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; what is remembered is replaced.

        Raises:
            ValueError: it does not fit; then nothing is changed.
        """
        if reason := self.mismatch(state_dict):
            raise ValueError(reason)
        if not self._made_on_demand:
            for name, state in self._states.items():
                state.restore(state_dict[name])
            return
        self._states.clear()
        # Copies: what was passed in may be the live state of another run.
        self._waiting = {name: {key: t.clone() for key, t in saved.items()} for name, saved in state_dict.items()}
