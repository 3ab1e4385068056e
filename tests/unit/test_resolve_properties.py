"""Any command line on any layout gives a valid configuration that holds its values, or a refusal by name."""

import argparse
import dataclasses
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.config.artifact import ARTIFACT_DEFAULTS, ARTIFACT_FLAGS
from optimus_cc_ext.config.classes import CLASSES, EMBEDDING
from optimus_cc_ext.config.flags import add_flags, flag_fields, request_from
from optimus_cc_ext.config.presets import Layout, Resolution, check_layout, resolve
from optimus_cc_ext.errors import FlagError

PARSER = add_flags(argparse.ArgumentParser(allow_abbrev=False))
OUR_FLAGS = {spelling for action in PARSER._actions for spelling in action.option_strings}

RANKS, FRACTIONS = st.integers(-2, 64), st.sampled_from([-0.5, 0.0, 0.1, 1.0, 1.5, float("nan")])
STAGES = st.one_of(st.sampled_from(["all", "auto"]), st.integers(-1, 9))
SWITCHES = {traffic.name: traffic for traffic in CLASSES if traffic.switch}
KNOBS = {"_force_compression", "_exact_blocks", "only_between_nodes", "chosen_preset"}
LOW_RANK_ONLY = {
    "compressed_backprop_format": ("compressed_backprop_rank", "residual_across_iterations"),
    "dp_compression_format": ("dp_compression_rank",),
}
VALUES: dict[str, st.SearchStrategy[Any]] = {
    **{traffic.format_field: st.sampled_from(traffic.formats) for traffic in CLASSES},
    "block_rotation": st.booleans(),
    "message_memory": st.integers(-1, 1024),
    "compressed_backprop": st.booleans(),
    "compressed_backprop_rank": RANKS,
    "compressed_backprop_messages": st.sampled_from(["epilogue", "all"]),
    "compressed_backprop_warmup": FRACTIONS,
    "lazy_error_propagation": st.booleans(),
    "residual_across_iterations": st.sampled_from(["carry", "drop"]),
    "fused_embedding_sync": st.booleans(),
    "dp_compression": st.booleans(),
    "dp_compression_rank": RANKS,
    "dp_compression_warmup": FRACTIONS,
    "dp_error_feedback": st.booleans(),
    "dp_compression_stages": STAGES,
    "expert_exchange": st.sampled_from(
        ["auto", "direct"]
    ),  # the third needs experts: tests/unit/test_expert_refusals.py
    "dp_compression_levels": st.sampled_from(["auto", "one", "two"]),
    "compression_seed": st.integers(0, 2**31),
    "compression_state_dtype": st.sampled_from(["fp32", "bf16"]),
    "compression_metrics": st.booleans(),
    "compression_forecast": st.booleans(),
    "compression_trial": st.booleans(),
    "compression_error_statistics": st.booleans(),
    "require_triton": st.booleans(),
}
"""Values in and out of range, for every field that has a flag."""


GIVEN = st.fixed_dictionaries({}, optional=VALUES)
PRESETS = st.sampled_from(["", "--optimus-cc", "--optimus-cc balanced", "--optimus-cc exact"])
LAYOUTS = st.builds(
    Layout,
    stages=st.integers(1, 8),
    data_parallel=st.integers(1, 8),
    tied_embeddings=st.booleans(),
    distributed_optimizer=st.booleans(),
    master_copies=st.booleans(),
    train_iters=st.none() | st.integers(1, 1000),
    seed=st.integers(0, 2**31),
)
ARTIFACT = {
    flag.spelling: st.just(flag.const) if flag.const else {int: RANKS, float: FRACTIONS}[flag.parse]
    for flag in ARTIFACT_FLAGS
    if flag.fields != ("dp_compression_stages",)
}
"""Flags of the artifact without those whose value is clamped where our flag would be refused."""


def written(fields: dict[str, Any]) -> list[str]:
    """Return the command line that sets these fields one by one, in our spelling."""
    line = []
    for name, value in fields.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            line.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            line.append(f"--{flag}={value}")
    return line


def resolved(line: list[str], layout: Layout) -> Resolution | FlagError:
    """Resolve a line; check a refusal, and return the resolution or the refusal."""
    try:
        found = resolve(request_from(PARSER.parse_args(line)), layout)
        # Two spellings differ in which classes a preset leaves dense inside a node, so this field is not compared.
        return Resolution(found.config.replace(only_between_nodes="", chosen_preset=""), found.notes)
    except FlagError as error:
        assert error.flag in OUR_FLAGS and str(error).startswith(f"{error.flag}: ")
        return error


def test_every_field_with_a_flag_has_values_here() -> None:
    assert set(VALUES) == {field.name for field in flag_fields()} - KNOBS


def wanted(before: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration `before` with these fields set, and with the consequences of the formats among them."""
    config = before | {name: value for name, value in fields.items() if name not in SWITCHES}
    for name in SWITCHES:
        chosen = fields.get(f"{name}_format")
        if fields.get(name) is False and chosen in (None, "low-rank"):
            config[f"{name}_format"] = "dense"
        elif fields.get(name) and chosen is None and config[f"{name}_format"] == "dense":
            config[f"{name}_format"] = "low-rank"
    if fields.get("fused_embedding_sync") is False:
        config["fused_embedding_sync_format"] = "dense"
    follows = {
        "compressed_backprop_messages": "epilogue" if config["compressed_backprop_format"] == "low-rank" else "all",
        "lazy_error_propagation": config["compressed_backprop_format"] == "low-rank",
        "dp_error_feedback": config["dp_compression_format"] == "low-rank",
    }
    return config | {name: value for name, value in follows.items() if name not in fields}


@settings(deadline=None)
@given(fields=GIVEN, preset=PRESETS, after=st.booleans(), layout=LAYOUTS)
def test_a_request_becomes_a_valid_configuration_that_holds_it_or_is_refused_by_one_of_its_flags(
    fields: dict[str, Any], preset: str, after: bool, layout: Layout
) -> None:
    line, by_itself = written(fields), preset.split()
    outcome = resolved(line + by_itself if after else by_itself + line, layout)
    if isinstance(outcome, FlagError):
        assert any(outcome.flag == argument.split("=")[0] for argument in line), "the user wrote it"
        return
    config = dataclasses.asdict(outcome.config)
    assert OptimusConfig(**config) == outcome.config
    check_layout(outcome.config, layout)
    unasked = resolved(by_itself, layout)
    assert isinstance(unasked, Resolution)
    papers = (*SWITCHES.values(), EMBEDDING)
    papers = (EMBEDDING,) * layout.distributed_optimizer if "exact" in preset else papers
    left_out = sum(not unasked.config.is_on(traffic) for traffic in papers) if preset else 0
    left_out += "exact" in preset and not layout.distributed_optimizer
    left_out += "balanced" in preset and unasked.config.pipeline_forward_format == "dense"
    gathered = layout.distributed_optimizer and layout.data_parallel > 1
    left_out += preset not in ("", "--optimus-cc") and gathered and unasked.config.param_gather_format == "dense"
    assert len(unasked.notes) == left_out, "the preset is never refused, and says what it left out"
    assert config == wanted(dataclasses.asdict(unasked.config), fields), "what is given one by one wins, and no more"
    if "compression_seed" not in fields:
        assert outcome.config.compression_seed == layout.seed


@settings(deadline=None)
@given(fields=GIVEN, preset=PRESETS, layout=LAYOUTS)
def test_what_a_request_became_asks_for_itself(fields: dict[str, Any], preset: str, layout: Layout) -> None:
    outcome = resolved([*preset.split(), *written(fields)], layout)
    if isinstance(outcome, Resolution):
        config = dataclasses.asdict(outcome.config)
        assert not any(config.pop(knob) for knob in KNOBS), "a test's knobs, not flags with two forms"
        for name, low_rank_only in LOW_RANK_ONLY.items():
            if config[name] not in ("low-rank", "dense"):  # these fields are refused with block formats
                config = {field: value for field, value in config.items() if field not in low_rank_only}
        again = resolved(written(config), layout)
        assert isinstance(again, Resolution) and again.config == outcome.config
        assert all(": no effect: " in note for note in again.notes), "of options of what is off, and nothing else"


@settings(deadline=None)
@given(
    fields=GIVEN, layout=LAYOUTS, more_stages=st.integers(0, 4), more_replicas=st.integers(0, 4), sharded=st.booleans()
)
def test_what_works_on_a_layout_works_on_a_larger_one(
    fields: dict[str, Any], layout: Layout, more_stages: int, more_replicas: int, sharded: bool
) -> None:
    assume(sharded or fields.get("param_gather_format", "dense") == "dense")
    outcome = resolved(written(fields), layout)
    larger = dataclasses.replace(
        layout,
        stages=layout.stages + more_stages,
        data_parallel=layout.data_parallel + more_replicas,
        distributed_optimizer=sharded,
    )
    if isinstance(outcome, Resolution):
        assert resolved(written(fields), larger) == outcome


@settings(deadline=None)
@given(options=st.fixed_dictionaries({}, optional=ARTIFACT), layout=LAYOUTS)
def test_the_artifacts_names_mean_the_same_in_ours(options: dict[str, Any], layout: Layout) -> None:
    line = [flag if isinstance(value, bool | str) else f"{flag}={value}" for flag, value in options.items()]
    ours: dict[str, Any] = dict(ARTIFACT_DEFAULTS) if options else {}
    for flag in ARTIFACT_FLAGS:
        if flag.spelling in options:
            ours |= dict.fromkeys(flag.fields, options[flag.spelling])
    theirs, same = resolved(line, layout), resolved(written(ours), layout)
    if isinstance(theirs, FlagError):
        assert isinstance(same, FlagError), "refused in both"
        assert str(theirs).removeprefix(theirs.flag) == str(same).removeprefix(same.flag)
    else:
        assert theirs.config == same.config
        # Two kinds of notes may differ: on the spelling itself, and on flags that have no effect in one spelling only.
        said = [
            note for note in theirs.notes if not note.startswith(("--use_error_feedback: carries", "the published"))
        ]
        theirs_said, ours_said = ([n for n in notes if ": no effect: " not in n] for notes in (said, same.notes))
        assert theirs_said == ours_said
