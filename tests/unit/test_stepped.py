"""SteppedTensor compared with a model of it in plain Python: its value follows applied steps."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optimus_cc_ext.compressors.scratch import Scratch
from optimus_cc_ext.techniques.state import FactorState, SteppedTensor, state_bytes

SCRATCH = Scratch()
FINITE, NOT_FINITE = torch.tensor(True), torch.tensor(False)


def write(state: SteppedTensor, number: float) -> None:
    state.write(state.workspace(SCRATCH).fill_(number))


def test_committing_reads_finiteness_from_the_tensor_and_not_on_the_host() -> None:
    """On a meta device any read by the host raises."""
    state = SteppedTensor(torch.zeros(3, device="meta"))
    state.write(torch.zeros(3, device="meta"))
    state.commit(torch.ones((), dtype=torch.bool, device="meta"))


def test_on_a_cpu_a_commit_copies_nothing() -> None:
    state = SteppedTensor(torch.zeros(3))
    write(state, 5.0)
    written = state.value.data_ptr()
    state.commit(FINITE)
    assert state.committed.data_ptr() == written


# The state meets these events in any order; a number is a write of this value.
NAMED = ["commit", "commit non-finite", "rollback", "zero", "begin to write", math.nan, math.inf, -math.inf]
events = st.lists(st.integers(1, 9) | st.sampled_from(NAMED))


@given(events)
def test_in_any_order_of_events_a_step_sees_its_own_writes_and_the_next_what_was_finite_and_committed(
    order: list[int | float | str],
) -> None:
    state = SteppedTensor(torch.zeros(2))
    committed, pending = 0, None
    for event in order:
        match event:
            case "begin to write" if pending is None:
                state.workspace(SCRATCH).fill_(-1.0)
            case float(number):
                write(state, number)
                state.commit(NOT_FINITE)
                pending = None
            case "commit":
                state.commit(FINITE)
                committed, pending = committed if pending is None else pending, None
            case "commit non-finite":
                state.commit(NOT_FINITE)
                pending = None
            case "rollback":
                state.rollback()
                pending = None
            case "zero":
                state.zero_()
                committed, pending = 0, None
            case int(number):
                write(state, number)
                pending = number
        assert state.value.tolist() == [committed if pending is None else pending] * 2
        assert state.committed.tolist() == [committed] * 2, "a step that is not over does not count"


def test_what_is_restored_replaces_what_was_written_and_has_its_shape() -> None:
    state = SteppedTensor(torch.zeros(3, dtype=torch.bfloat16))
    write(state, 7.0)
    state.restore(torch.ones(3))
    assert state.value.tolist() == state.committed.tolist() == [1.0] * 3
    with pytest.raises(ValueError, match=r"\(2,\) does not fit the state's \(3,\)"):
        state.restore(torch.zeros(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_state_takes_is_known_before_there_is_one(dtype: torch.dtype) -> None:
    made = FactorState((3, 30, 20), 4, generator=torch.Generator(), dtype=dtype, device=torch.device("cpu"))
    assert made.nbytes == 3 * state_bytes(30, 20, 4, dtype)
