"""SteppedTensor against a model of it in plain Python: what is remembered follows the step."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optimus_cc_ext.compressors import Scratch
from optimus_cc_ext.techniques.stepped import SteppedTensor

SCRATCH = Scratch()
FINITE, NOT_FINITE = torch.tensor(True), torch.tensor(False)


def write(state: SteppedTensor, number: float) -> None:
    state.write(state.workspace(SCRATCH).fill_(number))


def test_a_write_is_seen_by_its_own_step_at_once() -> None:
    state = SteppedTensor(torch.zeros(3))
    write(state, 5.0)
    assert state.value.tolist() == [5.0] * 3


def test_a_workspace_is_not_seen_before_it_is_written() -> None:
    state = SteppedTensor(torch.zeros(3))
    state.workspace(SCRATCH).fill_(5.0)
    assert state.value.tolist() == [0.0] * 3


def test_a_committed_write_reaches_the_next_step() -> None:
    state = SteppedTensor(torch.zeros(3))
    write(state, 5.0)
    state.commit(FINITE)
    state.workspace(SCRATCH).fill_(7.0)  # the next step begins to write
    assert state.value.tolist() == [5.0] * 3


def test_a_rolled_back_write_is_forgotten() -> None:
    state = SteppedTensor(torch.ones(3))
    write(state, 5.0)
    write(state, 6.0)
    state.rollback()
    assert state.value.tolist() == [1.0] * 3
    state.commit(FINITE)
    assert state.value.tolist() == [1.0] * 3, "a commit after it has nothing to commit"


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_nothing_non_finite_is_ever_committed(number: float) -> None:
    state = SteppedTensor(torch.ones(3))
    write(state, number)
    state.commit(NOT_FINITE)
    assert state.value.tolist() == [1.0] * 3


def test_forgetting_everything_forgets_writes_as_well() -> None:
    state = SteppedTensor(torch.ones(3))
    write(state, 5.0)
    state.zero_()
    assert state.value.tolist() == [0.0] * 3


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


# What can happen to it, in any order; a number is a write.
events = st.lists(st.integers(1, 9) | st.sampled_from(["commit", "commit non-finite", "rollback", "zero"]))


@given(events)
def test_any_order_of_events_leaves_the_last_committed_value(order: list[int | str]) -> None:
    state = SteppedTensor(torch.zeros(2))
    committed, pending = 0, None
    for event in order:
        match event:
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


def test_what_is_restored_is_what_was_committed_and_no_more() -> None:
    state = SteppedTensor(torch.ones(3))
    write(state, 5.0)
    assert state.committed.tolist() == [1.0] * 3, "a step that is not over does not count"
    other = SteppedTensor(torch.zeros(3, dtype=torch.bfloat16))
    write(other, 7.0)
    other.restore(state.committed)
    assert other.value.tolist() == [1.0] * 3
    with pytest.raises(ValueError, match=r"\(2,\) where \(3,\)"):
        other.restore(torch.zeros(2))
