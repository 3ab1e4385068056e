"""OptimusConfig by itself: a value out of range is refused by the name of its flag, with reason and cure."""

import dataclasses
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.config import CompressedBackpropConfig, DataParallelCompressionConfig, flag_of, literals_of
from optimus_cc_ext.errors import FlagError, OptimusError

RANKS = ("compressed_backprop_rank", "dp_compression_rank")
WARMUPS = ("compressed_backprop_warmup", "dp_compression_warmup")
FIELDS = {field.name: field for field in dataclasses.fields(OptimusConfig)}
CHOICES = {
    name: ", ".join(literals_of(field.type))
    for name, field in FIELDS.items()
    if literals_of(field.type) and name != "dp_compression_stages"
}


def refused(**fields: object) -> FlagError:
    with pytest.raises(FlagError) as caught:
        OptimusConfig(**fields)  # type: ignore[arg-type]
    return caught.value


def test_nothing_is_on_by_default_and_each_technique_alone_counts_as_one() -> None:
    assert not OptimusConfig().any_technique
    for one in (
        {"compressed_backprop_format": "low-rank"},
        {"fused_embedding_sync": True},
        {"dp_compression_format": "int8"},
    ):
        assert OptimusConfig(**one).any_technique  # type: ignore[arg-type]


def test_defaults_are_the_papers_but_for_the_residual_across_iterations() -> None:
    config = OptimusConfig(compressed_backprop_format="low-rank", dp_compression_format="low-rank")
    assert (config.compressed_backprop_rank, config.dp_compression_rank) == (16, 128)
    assert config.compressed_backprop_messages == "epilogue"
    assert config.lazy_error_propagation and config.dp_error_feedback
    assert config.residual_across_iterations == "drop", "carrying it cost 3 % of loss"
    assert (config.dp_compression_warmup, config.dp_compression_stages) == (0.0, "all")


@pytest.mark.parametrize("field", RANKS)
@given(rank=st.integers())
@example(rank=0)
@example(rank=1)
def test_a_rank_is_accepted_from_one_on(field: str, rank: int) -> None:
    if rank >= 1:
        assert getattr(OptimusConfig(**{field: rank}), field) == rank
        return
    error = refused(**{field: rank})
    assert error.flag == flag_of(field)
    assert field in str(error) and str(rank) in str(error)
    assert "sends nothing" in str(error) and "at least 1" in str(error)


@pytest.mark.parametrize("field", WARMUPS)
@given(fraction=st.floats() | st.floats(min_value=0.0, max_value=1.0))
@example(fraction=math.nan)
def test_a_warmup_is_accepted_where_it_is_a_fraction(field: str, fraction: float) -> None:
    if 0 <= fraction <= 1:
        assert getattr(OptimusConfig(**{field: fraction}), field) == fraction
        return
    error = refused(**{field: fraction})
    assert error.flag == flag_of(field)
    assert "not a fraction" in str(error) and "from 0 to 1" in str(error)


@pytest.mark.parametrize("stages", [0, -1, "some", None, 1.5])
def test_stages_that_name_none_are_refused(stages: object) -> None:
    error = refused(dp_compression_stages=stages)
    assert error.flag == "--dp-compression-stages"
    assert "does not name pipeline stages" in str(error) and "'all', 'auto' or a number of at least 1" in str(error)


@pytest.mark.parametrize("stages", ["all", "auto", 1, 64])
def test_stages_that_name_some_are_accepted(stages: object) -> None:
    assert OptimusConfig(dp_compression_stages=stages).dp_compression_stages == stages  # type: ignore[arg-type]


@pytest.mark.parametrize("field", CHOICES)
def test_a_value_that_is_no_choice_is_refused(field: str) -> None:
    error = refused(**{field: "most"})
    assert error.flag == flag_of(field)
    assert "'most'" in str(error) and f"Give one of {CHOICES[field]}" in str(error)


def test_each_dataclass_validates_itself_and_a_copy_with_changes_again() -> None:
    with pytest.raises(FlagError, match=r"^compressed_backprop_rank"):
        CompressedBackpropConfig(compressed_backprop_rank=0)
    with pytest.raises(FlagError, match=r"^dp_compression_rank"):
        DataParallelCompressionConfig(dp_compression_rank=0)
    config = OptimusConfig(dp_compression_format="low-rank")
    assert config.replace(dp_compression_rank=7) == OptimusConfig(
        dp_compression_format="low-rank", dp_compression_rank=7
    )
    with pytest.raises(FlagError, match=r"^dp_compression_rank"):
        config.replace(dp_compression_rank=0)


def test_a_configuration_cannot_be_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        OptimusConfig().dp_compression_format = "int8"  # type: ignore[misc]


def test_every_public_field_but_the_presets_own_is_documented_and_the_tests_fields_are_not_public() -> None:
    hidden = {name for name, field in FIELDS.items() if field.metadata["help"] is None}
    assert hidden == {"_force_compression", "_exact_blocks", "only_between_nodes", "chosen_preset"}
    for name in FIELDS.keys() - hidden:
        assert FIELDS[name].metadata["help"].endswith(".")
    assert not any(name in repr(OptimusConfig()) for name in hidden)


def test_messages_and_feedback_follow_from_the_format_unless_they_are_given() -> None:
    low_rank, int8 = (OptimusConfig(compressed_backprop_format=form) for form in ("low-rank", "int8"))
    assert (low_rank.compressed_backprop_messages, low_rank.lazy_error_propagation) == ("epilogue", True)
    assert (int8.compressed_backprop_messages, int8.lazy_error_propagation) == ("all", False)
    assert low_rank.replace(compressed_backprop_format="int8") == int8
    kept = OptimusConfig(compressed_backprop_format="int4", compressed_backprop_messages="epilogue")
    assert kept.compressed_backprop_messages == "epilogue"
    assert not OptimusConfig(dp_compression_format="int4").dp_error_feedback


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"dp_compression_format": "int4", "dp_error_feedback": True}, "--dp-error-feedback"),
        (
            {"compressed_backprop_format": "int8", "compression_error_statistics": True},
            "--compression-error-statistics",
        ),
    ],
)
def test_what_only_low_rank_remembers_is_refused_with_other_formats(given: dict[str, object], flag: str) -> None:
    assert refused(**given).flag == flag


def test_a_flag_error_says_flag_reason_and_cure_and_is_a_value_error() -> None:
    error = FlagError("--a-flag", "it cannot", "Do that")
    assert str(error) == "--a-flag: it cannot. Do that."
    assert isinstance(error, ValueError) and isinstance(error, OptimusError)
