"""Table of the classes of traffic: every list of classes is derived from it, or compared with it here."""

import copy
import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.compressors.formats import FORMATS
from optimus_cc_ext.config import literals_of
from optimus_cc_ext.config.classes import CLASSES, ClassOptions, TrafficClass, class_named
from optimus_cc_ext.config.flags import PRESETS
from optimus_cc_ext.config.presets import Layout, config_of, describe
from optimus_cc_ext.config.refusals import REFUSALS
from optimus_cc_ext.errors import FlagError, UnknownName
from optimus_cc_ext.techniques import agreement
from optimus_cc_ext.techniques.grid import Grid, RankPlace
from optimus_cc_ext.techniques.session import Session
from optimus_cc_ext.tools.plan.variants import VARIANTS

FLAGS_MD = (Path(__file__).resolve().parents[2] / "docs" / "flags.md").read_text()
SEEN = {
    "pipeline_forward": "pipeline forward",
    "compressed_backprop": "pipeline backward",
    "fused_embedding_sync": "embedding",
    "dp_compression": "DP gradients",
    "param_gather": "parameter gather",
    "expert_dispatch": "expert dispatch",
    "expert_gradient": "expert gradient",
}
"""Names in checkpoints of earlier versions, and in logs, event files and messages, by class."""

every_class = pytest.mark.parametrize("traffic", CLASSES, ids=lambda traffic: traffic.name)


def compressed() -> Iterator[tuple[TrafficClass, str]]:
    """Yield each class of traffic in each format but dense."""
    yield from ((traffic, format) for traffic in CLASSES for format in traffic.formats if format != "dense")


def test_the_configuration_is_imported_without_torch_and_megatron() -> None:
    code = (
        "import sys, pkgutil, importlib, optimus_cc_ext.config as config\n"
        "[importlib.import_module(m.name) for m in pkgutil.iter_modules(config.__path__, 'optimus_cc_ext.config.')]\n"
        "print([m for m in ('torch', 'megatron') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_the_names_that_users_see_stay_as_they_were() -> None:
    assert {each.name: each.tag for each in CLASSES} == SEEN
    for unique in ("name", "tag", "options"):
        assert len({getattr(each, unique) for each in CLASSES}) == len(CLASSES), unique


@every_class
def test_a_row_names_what_there_is(traffic: TrafficClass) -> None:
    assert traffic.options in ClassOptions.__bases__
    assert traffic.format_field in traffic.fields and "dense" in traffic.formats
    assert set(traffic.settings) <= traffic.fields.keys()
    assert bool(traffic.settings) == bool(traffic.switch) == ("low-rank" in traffic.formats)
    assert {need.fact for need in traffic.needs} <= {field.name for field in dataclasses.fields(Layout)}
    assert traffic.presets.keys() <= set(PRESETS)
    for wanted in traffic.presets.values():
        assert wanted.keys() <= traffic.fields.keys()


def test_the_configuration_has_the_options_of_every_class_and_each_belongs_to_one() -> None:
    owned = [name for traffic in CLASSES for name in traffic.fields]
    assert len(owned) == len(set(owned))
    shared = {name for name in vars(OptimusConfig)["__annotations__"]}
    assert {field.name for field in dataclasses.fields(OptimusConfig)} == {*owned, *shared}


@every_class
def test_a_class_is_on_alone_in_each_of_its_formats_and_off_in_dense(traffic: TrafficClass) -> None:
    for format in traffic.formats:
        config = OptimusConfig(**{traffic.format_field: format})
        assert config.format_of(traffic) == format
        assert [each for each in CLASSES if config.is_on(each)] == ([traffic] if format != "dense" else [])
        assert config.any_technique == config.is_on(traffic)
        assert describe(config).startswith(traffic.tag if format != "dense" else "every technique is off")


@given(
    switch=st.sampled_from([None, False, True]),
    given_format=st.sampled_from([None, "low-rank", "int8", "int4", "dense"]),
)  # fmt: skip
def test_a_format_is_the_only_switch(switch: bool | None, given_format: str | None) -> None:
    """A switch stands for low rank, or for dense, and has no effect beside a format; only beside a block format it must
    not be off.
    """
    layout = Layout(stages=4, data_parallel=4, tied_embeddings=True)
    for traffic in CLASSES:
        if not traffic.switch or given_format not in (None, *traffic.formats):
            continue
        line = [] if given_format is None else [traffic.format_flag, given_format]
        line += [] if switch is None else [traffic.flag if switch else f"--no-{traffic.flag[2:]}"]
        if switch is False and given_format in traffic.block_formats:
            with pytest.raises(FlagError, match="it contradicts "):
                config_of(line, layout)
            continue
        config = config_of(line, layout)
        off = switch is False or ((given_format or "dense") == "dense" and not (switch and given_format is None))
        assert config.format_of(traffic) == ("dense" if off else given_format or "low-rank")
        assert config.is_on(traffic) is not off
        assert dataclasses.replace(config) == config == config.replace()


@every_class
def test_a_format_that_is_changed_leaves_its_class_on_unless_it_is_dense_and_what_follows_from_it_follows_anew(
    traffic: TrafficClass,
) -> None:
    before = OptimusConfig(**{traffic.format_field: "int8"})  # type: ignore[arg-type]
    for format in traffic.formats:
        assert before.replace(**{traffic.format_field: format}) == OptimusConfig(**{traffic.format_field: format})


def test_nothing_can_be_written_into_a_configuration() -> None:
    sources = Path(sys.modules[OptimusConfig.__module__].__file__ or "").parent.glob("*.py")
    assert not [path.name for path in sources if "object.__setattr__" in path.read_text()]
    for options in (OptimusConfig, *(traffic.options for traffic in CLASSES)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(options(), dataclasses.fields(options)[0].name, None)  # type: ignore[arg-type]


@every_class
def test_an_unknown_format_is_refused_with_the_known_ones(traffic: TrafficClass) -> None:
    with pytest.raises(FlagError) as refused:
        OptimusConfig(**{traffic.format_field: "int5"})  # type: ignore[arg-type]
    assert refused.value.flag == traffic.format_flag
    assert refused.value.cure == f"Give one of {', '.join(traffic.formats)}"
    with pytest.raises(UnknownName, match=rf"'int5'.* known are {', '.join(traffic.formats)}"):
        traffic.check_format({traffic.format_flag: "int5"})
    traffic.check_format({traffic.format_flag: traffic.formats[0]})
    traffic.check_format({})


@every_class
def test_a_row_is_the_same_row_in_every_process(traffic: TrafficClass) -> None:
    assert pickle.loads(pickle.dumps({traffic: 1})) == {traffic: 1} == copy.deepcopy({traffic: 1})


def test_an_unknown_class_is_refused_with_the_known_ones() -> None:
    assert [class_named(traffic.name) for traffic in CLASSES] == list(CLASSES)
    with pytest.raises(UnknownName, match=r"'gahter'.* known are pipeline_forward, compressed_backprop, "):
        class_named("gahter")


def test_every_refusal_names_the_classes_that_it_affects() -> None:
    for refusal in REFUSALS:
        assert refusal.classes and set(refusal.classes) <= set(CLASSES), refusal.flag


def test_the_session_has_a_technique_and_a_gauge_for_each_class_by_its_name() -> None:
    session = Session(OptimusConfig())
    names = {traffic.name for traffic in CLASSES}
    assert {technique.name for technique in session.techniques} | {"fused_embedding_sync"} == names
    remembering = {traffic.name for traffic in CLASSES if "low-rank" in traffic.formats}
    everything = Session(OptimusConfig(compressed_backprop_format="low-rank", dp_compression_format="low-rank"))
    assert {technique.name for technique in everything.techniques if technique.remembers} == remembering


@every_class
def test_ranks_agree_about_the_kernels_of_every_class(traffic: TrafficClass) -> None:
    grid = Grid(place=RankPlace(rank=0, stage=0, tensor_rank=0), stages=1, data_parallel=1)
    for format in traffic.formats:
        config = OptimusConfig(**{traffic.format_field: format})
        needed = agreement._needed(config, grid)
        assert bool(needed.ranks) == (format == "low-rank")
        assert format in needed.formats or format not in FORMATS


def test_the_planner_tries_every_class_in_every_format_by_the_names_that_it_always_printed() -> None:
    for name in (
        "backward low-rank",
        "backward int8",
        "forward int8",
        "gradients low-rank",
        "gradients int4",
        "embedding in one reduction",
        "embedding int4",
        "gather int8",
    ):
        assert name in VARIANTS
    layout = Layout(
        stages=4, data_parallel=4, tied_embeddings=True, distributed_optimizer=True, master_copies=True,
        expert_parallel=2, row_width=128,
    )  # fmt: skip
    planned = [config_of(flags.split(), layout) for flags in VARIANTS.values()]
    alone = [[(each, c.format_of(each)) for each in CLASSES if c.is_on(each)] for c in planned]
    assert [(traffic.name, format) for traffic, format in compressed() if [(traffic, format)] not in alone] == []


def test_every_format_of_a_class_has_a_record_unless_it_has_no_blocks() -> None:
    known = {"dense", "low-rank", "exact", *FORMATS}
    for field in dataclasses.fields(OptimusConfig):
        if field.name.endswith("_format"):
            assert set(literals_of(field.type)) <= known, field.name
