"""The planner against published throughput of today's models on H100s, each without rows of its own model."""

from statistics import median

import pytest

from optimus_cc_ext.tools.plan.hardware import GPUS
from optimus_cc_ext.tools.plan.memory import memory
from optimus_cc_ext.tools.plan.published import BAND, MIXTURE_BAND
from optimus_cc_ext.tools.plan.shapes import MODELS
from scripts.planned import validate
from scripts.planned.recipes import Judged, configurations, fitted_efficiency, judged

ROWS, LEFT_OUT = configurations()
MIXTURES = [row for row in ROWS if row.job.model.mixture and row.modelled]


@pytest.fixture(scope="module")
def found() -> list[Judged]:
    return judged(ROWS)


def test_the_hybrid_model_is_named_and_every_other_row_is_planned() -> None:
    assert LEFT_OUT == ["nemotron-3-nano: a hybrid of attention and Mamba layers is not modelled"]
    assert sum(len(row.seconds) for row in ROWS) == 20 and (len(ROWS), len(MIXTURES)) == (6, 3)


def test_models_have_the_parameters_that_their_names_and_cards_say() -> None:
    # Billions, from the model cards.
    cards = {
        "llama3-70b": 70.6, "llama3.1-405b": 405.9, "qwen3-30b": 30.5, "qwen3-235b": 235.1, "gpt-oss-120b": 116.8
    }  # fmt: skip
    assert {name: round(MODELS[name].parameters / 1e9, 1) for name in cards} == cards


def test_dense_models_on_whose_rows_nothing_was_fitted_are_within_the_band(found: list[Judged]) -> None:
    assert max(abs(each.error) for each in found if not each.configuration.job.model.mixture) <= BAND["H100"]


def test_mixtures_have_half_the_error_of_one_rate_even_if_it_is_of_mixtures_only(found: list[Judged]) -> None:
    mixtures = [each for each in found if each.configuration in MIXTURES]
    errors = [abs(each.error) for each in mixtures]
    assert max(errors) <= MIXTURE_BAND / 3
    for rival in ("by_rate", "by_rate_of_kind"):
        assert median(errors) <= 0.5 * median(abs(getattr(each, rival)) for each in mixtures)


def test_the_one_fitted_constant_is_what_the_mixtures_give() -> None:
    assert GPUS["H100"].mixture_efficiency == pytest.approx(fitted_efficiency(MIXTURES), rel=0.02)


def test_releases_of_a_configuration_differ_by_less_than_a_tenth() -> None:
    assert max(row.spread for row in ROWS) < 0.1


@pytest.mark.full
def test_the_row_with_deepep_is_shown_with_its_error_and_fitted_on_by_nothing(found: list[Judged]) -> None:
    (row,) = (each for each in found if not each.configuration.modelled)
    assert sorted(row.configuration.seconds) == ["26.02"] and row.error == pytest.approx(-0.48, abs=0.01)
    assert fitted_efficiency([*MIXTURES, row.configuration]) != pytest.approx(fitted_efficiency(MIXTURES), rel=0.02)
    assert {each.error for each in judged([*MIXTURES, row.configuration])} == {
        each.error for each in found if each.configuration.job.model.mixture
    }


def test_published_runs_fit_into_memory() -> None:
    assert [row.name for row in ROWS if sum(memory(row.job).values()) > GPUS["H100"].memory] == []


@pytest.mark.full
def test_validation_shows_todays_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert validate.main([]) == 0
    said = capsys.readouterr()
    assert "qwen3-235b, tensor 2 x pipeline 8" in said.out and "Median error of the mixtures" in said.out
    assert "not judged: nemotron-3-nano" in said.err
