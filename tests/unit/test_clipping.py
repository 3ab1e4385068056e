"""Residuals of a clipped step are scaled by its clipping: the rule, and its effect on a session's residuals."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_cc_ext.techniques.clipping import UsualClipping, clip_coefficient
from optimus_cc_ext.techniques.schedule import NonInterleaved
from optimus_cc_ext.techniques.session import Session
from tests.unit.test_links import done, gradient, residual_of
from tests.unit.test_session import new_session

OUTLIER, STEPS = 5, 16
COEFFICIENTS = st.floats(1e-6, 1.0)


def test_the_coefficient_is_megatrons():
    assert clip_coefficient(1.0, 4.0) == pytest.approx(0.25)
    assert clip_coefficient(1.0, 0.5) == 1.0, "nothing is clipped"
    assert clip_coefficient(0.0, 4.0) == 1.0, "clipping is off"
    assert clip_coefficient(1.0, None) == 1.0, "nobody knows the norm"


@given(usual=COEFFICIENTS, steps=st.integers(1, 30))
def test_a_step_that_is_clipped_as_usual_or_less_keeps_its_residual(usual, steps):
    clipping = UsualClipping()
    for _ in range(steps):
        assert clipping.shrinkage(usual) == pytest.approx(1.0)
    assert clipping.shrinkage(1.0) == 1.0


@given(usual=st.floats(0.01, 1.0), outlier=st.floats(1e-6, 0.1))
def test_an_outlier_shrinks_by_how_much_more_it_was_clipped_and_hardly_moves_what_is_usual(usual, outlier):
    clipping = UsualClipping()
    for _ in range(20):
        clipping.shrinkage(usual)
    assert clipping.shrinkage(usual * outlier) == pytest.approx(outlier, rel=1e-6)
    # However extreme, a coefficient moves the mean as if it were twice as far from it as usual, a twentieth of the way.
    assert clipping.shrinkage(0.9 * usual) == pytest.approx(0.9 * 2**0.05, rel=1e-6)


@given(before=COEFFICIENTS, after=COEFFICIENTS)
def test_a_lasting_change_becomes_usual(before, after):
    clipping = UsualClipping()
    for coefficient, steps in ((before, 5), (after, 700)):
        for _ in range(steps):
            clipping.shrinkage(coefficient)
    assert math.exp(clipping.state["log"]) == pytest.approx(after, rel=1e-3)


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_shrinks_nothing_and_is_not_usual(norm):
    clipping = UsualClipping()
    clipping.shrinkage(0.5)
    # The residuals of a step whose norm is not finite are discarded.
    assert clipping.shrinkage(clip_coefficient(1.0, norm)) == 1.0
    assert clipping.shrinkage(0.25) == pytest.approx(0.5)


def step(session: Session, number: int, size: float = 1.0, *, applied: bool = True, **clipped: float) -> float:
    """Take one announced step with a gradient of `size` times the usual one; return the norm of the residual after
    it.
    """
    session.begin_step(number)
    with session.iteration(NonInterleaved(2, 1)):
        done(session.backprop.sending.send(size * gradient(number, shape=(8, 2, 16))))
    session.end_step(applied=applied, clip=clipped or None)
    return float(residual_of(session.backprop).norm())


def after_four_steps() -> tuple[Session, float]:
    session = new_session()
    return session, [step(session, number, main=0.5) for number in range(4)][-1]


def residual_norms(outlier: float, clip: bool = True) -> list[float]:
    session, sizes = new_session(), [1.0] * STEPS
    sizes[OUTLIER] = outlier
    return [
        step(session, number, size, **({"main": clip_coefficient(0.25, size)} if clip else {}))
        for number, size in enumerate(sizes)
    ]


def test_ten_steps_after_an_outlier_a_links_residual_is_within_twice_of_what_it_would_be_thanks_to_clipping():
    usual, after = residual_norms(1.0), residual_norms(100.0)
    assert after[:OUTLIER] == usual[:OUTLIER]
    assert after[OUTLIER + 10] < 2 * usual[OUTLIER + 10]
    assert residual_norms(100.0, clip=False)[OUTLIER] > 30 * usual[OUTLIER]


def test_a_skipped_step_changes_neither_the_residual_nor_what_is_usual():
    (session, before), (twin, _) = after_four_steps(), after_four_steps()
    assert step(session, 4, 100.0, applied=False, main=0.005) == before
    assert step(session, 5, main=0.5) == step(twin, 5, main=0.5), "as if the skipped step had not been"


def test_a_resumed_run_knows_what_is_usual():
    (session, _), twin = after_four_steps(), new_session()
    twin.load_state_dict(session.state_dict())
    assert step(twin, 4, 100.0, main=0.005) == step(session, 4, 100.0, main=0.005)
