"""Custom training loops: the loop of docs/python.md as the page has it, and variations that users make."""

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import optimus_cc_ext
from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.errors import FlagError, OptimusError
from tests.forked_ranks import run_ranks
from tests.launches import call
from tests.megatron import own_loops

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"
STEPS, WARMUP = 4, 1


def the_documented_loop() -> dict[str, Any]:
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(torch.distributed.get_rank())
    code, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    log, state = names["train"](STEPS)
    return {"log": log, "iteration": state["iteration"]}


def test_the_documented_loop_warms_up_compresses_and_measures() -> None:
    ranks = run_ranks(4, the_documented_loop)
    assert all(rank["log"] == ranks[0]["log"] for rank in ranks), "the same on every rank"
    assert all(rank["iteration"] == STEPS for rank in ranks)
    for number, metrics in enumerate(ranks[0]["log"]):
        for traffic in ("pipeline backward", "DP gradients"):
            raw, sent = (metrics[f"optimus-cc/{traffic} {kind} bytes"] for kind in ("raw", "sent"))
            assert (sent < raw) == (number >= WARMUP), (number, traffic)
        assert metrics["optimus-cc/embedding sent bytes"] < metrics["optimus-cc/embedding raw bytes"]
        assert ("optimus-cc/SC relative error/stage 0" in metrics) == (number >= WARMUP)


@pytest.mark.full
def test_the_documented_loop_runs_as_written_on_a_laptop(tmp_path: Path) -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "loop.py").write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "loop.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "'optimus-cc/DP gradients sent bytes': " in run.stdout


def install_twice() -> tuple[str, bool]:
    config = OptimusConfig(compressed_backprop=True)
    optimus_cc_ext.install(config, train_iters=10)
    optimus_cc_ext.install(config, train_iters=10)
    first = optimus_cc_ext.current_session()
    with pytest.raises(OptimusError) as refused:
        optimus_cc_ext.install(config.replace(compressed_backprop_rank=8), train_iters=10)
    optimus_cc_ext.uninstall()
    optimus_cc_ext.install(config.replace(compressed_backprop_rank=8))
    return str(refused.value), optimus_cc_ext.current_session() is not first


def test_a_second_install_with_other_settings_is_an_error() -> None:
    [(said, anew)] = run_ranks(1, install_twice)
    assert "installed already, with other settings" in said and "uninstall() first" in said
    assert anew


def test_install_says_what_it_wants() -> None:
    with pytest.raises(TypeError, match=r"takes an OptimusConfig, not a dict: .*preset"):
        optimus_cc_ext.install({"compressed_backprop": True})  # type: ignore[arg-type]
    for name in ("begin_step", "end_step", "state_dict", "collect_metrics"):
        found = call(getattr(optimus_cc_ext, name))
        assert "OptimusError: Optimus-CC is not installed: call optimus_cc_ext.install" in found.output


def test_a_preset_by_name_is_what_the_flag_stands_for() -> None:
    config = optimus_cc_ext.preset("paper", stages=4, data_parallel=2, compressed_backprop_rank=8)
    assert config == OptimusConfig(
        compressed_backprop=True, compressed_backprop_rank=8, fused_embedding_sync=True, dp_compression=True,
        dp_compression_stages=3,
    )  # fmt: skip
    assert not optimus_cc_ext.preset("paper", stages=1, data_parallel=2).compressed_backprop
    assert optimus_cc_ext.preset("balanced", stages=4, data_parallel=2).dp_compression_format == "int8"
    with pytest.raises(FlagError, match=r"'papr' is not the name of a preset. Give paper"):
        optimus_cc_ext.preset("papr", stages=4, data_parallel=2)
    with pytest.raises(FlagError, match="nothing to compress"):
        optimus_cc_ext.preset("paper", stages=4, data_parallel=1, dp_compression=True)


# -- process groups of one's own, and ranks without a model ----------------------------------------------------------


def one_model_without_parallel_state() -> bool:
    torch.distributed.init_process_group("gloo")
    optimus_cc_ext.install(OptimusConfig())
    model = layer(own_loops.groups_of_ones_own(1))
    model(torch.ones(1, 4)).sum().backward()
    model.finish_grad_sync()
    return bool(model.module.weight.main_grad.eq(1).all())


def layer(groups: Any = None) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(num_layers=1, num_attention_heads=1)
    module = torch.nn.Linear(4, 4)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), module, pg_collection=groups)


def test_off_asks_nothing_of_parallel_state() -> None:
    assert run_ranks(1, one_model_without_parallel_state, timeout=60) == [True]


def a_pipeline_of_ones_own(changes: dict[str, Any]) -> tuple[bool, float, dict[str, float]]:
    """Train on a pipeline of two stages and one replica while Megatron's own groups have one stage and two replicas."""
    own_loops.start(1)
    groups = own_loops.groups_of_ones_own(2)
    model = own_loops.build(2, groups)
    own_loops.pass_of(model, groups)
    vanilla = own_loops.gradients(model)
    optimus_cc_ext.install(OptimusConfig(compression_forecast=False, **changes))
    model = own_loops.build(2, groups)
    optimus_cc_ext.begin_step()
    own_loops.pass_of(model, groups)
    optimus_cc_ext.end_step()
    found = own_loops.gradients(model)
    error = max(float((found[name] - of).norm() / of.norm()) for name, of in vanilla.items())
    session = optimus_cc_ext.current_session()
    assert session is not None and session.grid is not None
    return session.grid.stages == 2, error, optimus_cc_ext.collect_metrics()


@pytest.mark.parametrize(
    ("changes", "most", "fewer"),
    [({}, 0.0, False), ({"compressed_backprop_format": "int8", "fused_embedding_sync": True}, 0.05, True)],
    ids=["off", "int8"],
)
def test_a_pipeline_of_ones_own_groups_trains_and_its_messages_are_counted(
    changes: dict[str, Any], most: float, fewer: bool
) -> None:
    for of_model, error, metrics in run_ranks(2, a_pipeline_of_ones_own, changes, timeout=90):
        assert of_model, "the layout is the model's"
        # Switched off, gradients are equal to the bit; otherwise they differ at least by the rounding to eight bits,
        # 1/254 of a block's largest value.
        assert error <= most
        raw, sent = (metrics[f"optimus-cc/pipeline backward {kind} bytes"] for kind in ("raw", "sent"))
        assert raw > 0 and (sent < raw) == fewer


def groups_that_lack(name: str, value: str, changes: dict[str, Any], ddp: dict[str, Any]) -> str:
    own_loops.start(1)
    groups = own_loops.groups_of_ones_own(2)
    optimus_cc_ext.install(OptimusConfig(**changes))
    setattr(groups, name, {"none": None, "two": [groups.pp, groups.pp]}[value])
    try:
        if name == "pp":
            layer(groups)
        else:
            own_loops.build(2, groups, **ddp)
    except FlagError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("name", "value", "changes", "ddp", "said"),
    [
        ("pp", "two", {"compressed_backprop": True}, {}, "(compressed_backprop): the model has no pipeline process"),
        ("pp", "two", {}, {}, "no error"),
        (
            "embd", "none", {"fused_embedding_sync": True}, {"use_distributed_optimizer": True},
            "--fused-embedding-sync: the model has no embedding process group",
        ),
    ],
)  # fmt: skip
def test_a_process_group_that_a_technique_needs_and_the_model_lacks_is_named(
    name: str, value: str, changes: dict[str, Any], ddp: dict[str, Any], said: str
) -> None:
    for found in run_ranks(2, groups_that_lack, name, value, changes, ddp, timeout=60):
        assert said in found
        assert said == "no error" or f"`{name}`" in found


def a_model_on_two_of_three_ranks(changes: dict[str, Any]) -> str:
    """Train on ranks 0 and 1, a pipeline; rank 2 builds no model, and waits for the others only at the end."""
    own_loops.start(1)
    groups = own_loops.groups_of_ones_own(2)
    if torch.distributed.get_rank() < 2:
        optimus_cc_ext.install(OptimusConfig(**changes))
        model = own_loops.build(2, groups)
        for _ in range(3):  # the forecast measures before the third pass
            optimus_cc_ext.begin_step()
            own_loops.pass_of(model, groups)
            optimus_cc_ext.end_step()
        optimus_cc_ext.collect_metrics()
    torch.distributed.barrier()
    return "through"


@pytest.mark.parametrize(
    "changes", [{}, {"compressed_backprop_format": "int8", "fused_embedding_sync": True}], ids=["off", "on"]
)
def test_a_rank_without_a_model_is_not_waited_for(changes: dict[str, Any]) -> None:
    assert run_ranks(3, a_model_on_two_of_three_ranks, changes, timeout=60) == ["through"] * 3


# -- no wrong gradients ----------------------------------------------------------------------------------------------

FE = OptimusConfig(fused_embedding_sync=True, compression_forecast=False)


def models_of_other_installations(config: OptimusConfig) -> list[str]:
    """Return the errors of training a model built before `install`, and one built under an earlier installation."""
    own_loops.start(2)
    said, stranger = [], own_loops.build(2)
    for _ in range(2):
        optimus_cc_ext.install(config)
        try:
            own_loops.pass_of(stranger)
            said.append("trained")
        except OptimusError as error:
            said.append(str(error))
        stranger = own_loops.build(2)
        own_loops.pass_of(stranger)
        optimus_cc_ext.uninstall()
    own_loops.pass_of(stranger)
    return said


def test_a_model_of_another_installation_is_refused_with_the_cure_where_a_technique_is_on() -> None:
    for said in run_ranks(4, models_of_other_installations, FE, timeout=90):
        assert len(said) == 2
        for line in said:
            assert "before optimus_cc_ext.install(), or under an earlier installation" in line
            assert "Build the model after install()" in line
    assert run_ranks(4, models_of_other_installations, OptimusConfig(), timeout=90) == [["trained"] * 2] * 4


def finalised_by_hand(when: str, ddp: dict[str, Any]) -> tuple[float, list[float]]:
    """Return the largest relative error of a gradient, and the bytes of the embedding that vanilla and we send."""
    from megatron.core.distributed import finalize_model_grads

    own_loops.start(2)
    model = own_loops.build(2, **ddp)
    for _ in range(2):  # Megatron overlaps buckets from the second pass on
        own_loops.pass_of(model)
    vanilla = own_loops.gradients(model)
    optimus_cc_ext.install(FE)
    model = own_loops.build(2, finalize=False, **ddp)
    for _ in range(2):
        if when != "without steps":
            optimus_cc_ext.begin_step()
        own_loops.pass_of(model)
        if when == "after the step":
            optimus_cc_ext.end_step()
        finalize_model_grads([model])
        if when == "in the step":
            optimus_cc_ext.end_step()
    found = own_loops.gradients(model)
    error = max(float((found[name] - of).norm() / of.norm()) for name, of in vanilla.items())
    metrics = optimus_cc_ext.collect_metrics()
    return error, [metrics[f"optimus-cc/embedding {kind} bytes"] for kind in ("raw", "sent")]


@pytest.mark.parametrize("overlapped", [False, True], ids=["", "overlapped"])
@pytest.mark.parametrize("when", ["in the step", "after the step", "without steps"])
def test_gradients_that_are_finalised_after_the_pass_are_vanillas(when: str, overlapped: bool) -> None:
    for error, (raw, sent) in run_ranks(4, finalised_by_hand, when, {"overlap_grad_reduce": overlapped}, timeout=90):
        assert error < 1e-5  # the sums are added in another order, in fp32
        if overlapped or when != "after the step":
            assert 0 < sent < raw, "the embedding was reduced in one collective"


def an_abandoned_step(config: OptimusConfig, fails: bool) -> list[bool]:
    own_loops.start(1)
    optimus_cc_ext.install(config)
    model = own_loops.build(1)
    session = optimus_cc_ext.current_session()
    assert session is not None

    def residuals() -> list[torch.Tensor]:
        return [r.clone() for r in session.gradients.states.residuals()]

    def step() -> None:
        optimus_cc_ext.begin_step()
        own_loops.pass_of(model)
        optimus_cc_ext.end_step()

    step()
    before, steps = residuals(), session.completed_steps
    if fails:  # the pass itself fails after its reduction: this loop does not announce steps
        model.config.finalize_model_grads_func, finalize = _finalize_and_fail, model.config.finalize_model_grads_func
        with pytest.raises(MemoryError):
            own_loops.pass_of(model)
        model.config.finalize_model_grads_func = finalize
    else:
        optimus_cc_ext.begin_step()
        own_loops.pass_of(model)
    optimus_cc_ext.begin_step()
    after = residuals()
    optimus_cc_ext.end_step()
    return [all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), session.completed_steps == steps,
            any(bool(r.any()) for r in before)]  # fmt: skip


def _finalize_and_fail(*args: Any, **kwargs: Any) -> None:
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(*args, **kwargs)
    raise MemoryError("the optimizer's")


@pytest.mark.parametrize("fails", [False, True], ids=["not ended", "its pass raised"])
def test_a_step_that_was_abandoned_leaves_no_trace(fails: bool) -> None:
    config = OptimusConfig(dp_compression=True, dp_compression_rank=2, _force_compression=True)
    for unchanged, uncounted, remembered in run_ranks(2, an_abandoned_step, config, fails, timeout=60):
        assert remembered and unchanged and uncounted


def alignments(hidden: int, sharded: bool) -> tuple[int, set[int]]:
    """Return the alignment that the trial of the kernels gets, and the alignments of the layouts of a pass."""
    from optimus_cc_ext.compressors.blocks import BlockLayout, Codec
    from optimus_cc_ext.compressors.triton.blocks import _tables

    own_loops.start(stages=1)
    seen: list[BlockLayout] = []
    for name in ("encode", "decode", "decode_add"):
        original = getattr(Codec, name)

        def noted(codec: Codec, *args: Any, original: Any = original, **kwargs: Any) -> None:
            seen.extend(each for each in args if isinstance(each, BlockLayout))
            original(codec, *args, **kwargs)

        setattr(Codec, name, noted)
    optimus_cc_ext.install(OptimusConfig(dp_compression_format="int4", _force_compression=True), train_iters=2)
    own_loops.pass_of(own_loops.build(1, hidden=hidden, use_distributed_optimizer=sharded))
    session = optimus_cc_ext.current_session()
    assert session is not None and session.grid is not None and seen
    return session.grid.align, {_tables(layout, torch.device("cpu")).align for layout in seen}


@pytest.mark.parametrize("hidden, told, sharded", [(64, 16, True), (36, 4, True), (36, 4, False), (34, 2, True)])
def test_kernels_are_tried_for_the_alignment_of_every_layout_of_the_run(hidden: int, told: int, sharded: bool) -> None:
    for align, used in run_ranks(4, alignments, hidden, sharded, timeout=100):
        assert math.gcd(16, align) == told and all(each % told == 0 for each in used)
