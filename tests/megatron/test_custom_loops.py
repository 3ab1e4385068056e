"""Custom training loops: the loop of docs/python.md as the page has it, and variations that users make."""

import math
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import optimus_cc_ext
from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.config.presets import Layout, Resolution
from optimus_cc_ext.errors import FlagError, OptimusError
from optimus_cc_ext.hooks import start
from optimus_cc_ext.hooks.attaching import attach
from tests.forked_ranks import run_ranks
from tests.megatron import own_loops

pytestmark = pytest.mark.ci

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
        assert ("optimus-cc/DP gradients relative error/stage 0" in metrics) == (number >= WARMUP)


@pytest.mark.full
def test_the_documented_loop_runs_as_written_on_a_laptop(tmp_path: Path) -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "loop.py").write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "loop.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "'optimus-cc/DP gradients sent bytes': " in run.stdout


def a_preset_with_changes() -> list[Any]:
    """Return the configuration of a preset with a change on two layouts, and what is said of changes that cannot be."""
    own_loops.start(2)
    handle = compressed(own_loops.build(2), "paper", compressed_backprop_rank=8)
    found: list[Any] = [handle._session.config]
    handle.remove()
    for changes in ({"config": "papr"}, {"expert_dispatch_format": "int8"}, {"compressed_backprop_rank": "8"}):
        with pytest.raises(FlagError) as refused:
            compressed(own_loops.build(2), **{"config": "paper", **changes})
        found.append(str(refused.value))
    return found


def test_a_preset_takes_changes_by_name_and_is_what_the_flag_stands_for() -> None:
    for config, unknown, impossible, mistyped in run_ranks(4, a_preset_with_changes, timeout=90):
        assert config == OptimusConfig(
            compressed_backprop_format="low-rank", compressed_backprop_rank=8, fused_embedding_sync=True,
            dp_compression_format="low-rank",
            dp_compression_stages=2,
        )  # fmt: skip
        assert "'papr' is not the name of a preset. Give paper" in unknown
        assert impossible.startswith("expert_dispatch_format: ") and "--" not in impossible
        assert "'8' is not of type int" in mistyped


def attached(model: Any, config: OptimusConfig) -> Any:
    """Make the handle of a model; with everything off the one that counts bytes, which the launcher makes."""
    return (
        compressed(model, config)
        if config.any_technique
        else attach([model], lambda layout, _: (config, layout), on=False)
    )


def compressed(model: Any, config: Any, optimizer: Any = None, **changes: Any) -> Any:
    return optimus_cc_ext.compress(model, optimizer, config, train_iters=10, **changes)


# -- process groups of one's own, and ranks without a model ----------------------------------------------------------


def one_model_without_parallel_state() -> bool:
    torch.distributed.init_process_group("gloo")
    model = layer(own_loops.groups_of_ones_own(1))
    attached(model, OptimusConfig())
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
    model = own_loops.build(2, groups)
    handle = attached(model, OptimusConfig(**changes))
    with handle.step() as step:
        own_loops.pass_of(model, groups)
        step.done()
    found = own_loops.gradients(model)
    error = max(float((found[name] - of).norm() / of.norm()) for name, of in vanilla.items())
    return handle._session.grid.stages == 2, error, handle.metrics()


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
    setattr(groups, name, {"none": None, "two": [groups.pp, groups.pp]}[value])
    try:
        attached(layer(groups) if name == "pp" else own_loops.build(2, groups, **ddp), OptimusConfig(**changes))
    except FlagError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("name", "value", "changes", "ddp", "said"),
    [
        ("pp", "two", {"compressed_backprop_format": "low-rank"}, {},
        "(compressed_backprop): the model has no pipeline process"),
        ("pp", "two", {}, {}, "no error"),
        (
            "embd", "none", {"fused_embedding_sync": True}, {"use_distributed_optimizer": True},
            "fused_embedding_sync: the model has no embedding process group",
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
        model = own_loops.build(2, groups)
        handle = attached(model, OptimusConfig(**changes))
        for _ in range(3):
            with handle.step() as step:
                own_loops.pass_of(model, groups)
                step.done()
        handle.metrics()
    torch.distributed.barrier()
    return "through"


@pytest.mark.parametrize(
    "changes", [{}, {"compressed_backprop_format": "int8", "fused_embedding_sync": True}], ids=["off", "on"]
)
def test_a_rank_without_a_model_is_not_waited_for(changes: dict[str, Any]) -> None:
    assert run_ranks(3, a_model_on_two_of_three_ranks, changes, timeout=60) == ["through"] * 3


# -- no wrong gradients ----------------------------------------------------------------------------------------------

FE = OptimusConfig(fused_embedding_sync=True)


def a_model_beside_the_command_lines() -> list[str]:
    """Return what is said of training a model of one's own while the model of a compressing command line is awaited,
    and once it is no longer.
    """
    own_loops.start(2)
    said, model = [], own_loops.build(2)
    launch = start()
    launch._resolved(lambda _: Resolution(FE, ()), Layout(stages=2, data_parallel=2, tied_embeddings=True))
    own_loops.pass_of(model, forward_only=True)
    for _ in range(2):
        try:
            own_loops.pass_of(model)
            said.append("trained")
        except OptimusError as error:
            said.append(str(error))
        launch.remove()
    return said


def test_a_model_that_megatron_did_not_set_up_is_refused_with_the_cure_instead_of_training_uncompressed() -> None:
    for refused, then in run_ranks(4, a_model_beside_the_command_lines, timeout=90):
        assert "not made by megatron.training.training.setup_model_and_optimizer" in refused
        assert "call optimus_cc_ext.compress(model, optimizer, ...)" in refused and then == "trained"


def finalised_by_hand(when: str, ddp: dict[str, Any]) -> tuple[float, list[float]]:
    """Return the largest relative error of a gradient, and the bytes of the embedding that vanilla and we send."""
    from megatron.core.distributed import finalize_model_grads

    own_loops.start(2)
    model = own_loops.build(2, **ddp)
    for _ in range(2):  # Megatron overlaps buckets from the second pass on
        own_loops.pass_of(model)
    vanilla = own_loops.gradients(model)
    model = own_loops.build(2, finalize=False, **ddp)
    handle = compressed(model, FE, own_loops.optimizer_of(model) if when == "followed" else None)
    for _ in range(2):
        with handle.step() if when == "announced" else nullcontext() as step:
            own_loops.pass_of(model)
            finalize_model_grads([model])
            if step is not None:
                step.done()
    found = own_loops.gradients(model)
    error = max(float((found[name] - of).norm() / of.norm()) for name, of in vanilla.items())
    metrics = handle.metrics()
    return error, [metrics[f"optimus-cc/embedding {kind} bytes"] for kind in ("raw", "sent")]


@pytest.mark.parametrize("overlapped", [pytest.param(False, marks=pytest.mark.full), True], ids=["", "overlapped"])
@pytest.mark.parametrize("when", ["announced", "followed"])
def test_gradients_that_are_finalised_after_the_pass_are_vanillas(when: str, overlapped: bool) -> None:
    for error, (raw, sent) in run_ranks(4, finalised_by_hand, when, {"overlap_grad_reduce": overlapped}, timeout=90):
        assert error < 1e-5  # the sums are added in another order, in fp32
        assert 0 < sent < raw, "the embedding was reduced in one collective"


def an_abandoned_step(config: OptimusConfig, fails: bool) -> list[bool]:
    own_loops.start(1)
    model = own_loops.build(1)
    handle = compressed(model, config)
    session = handle._session

    def residuals() -> list[torch.Tensor]:
        return [r.clone() for r in session.gradients.states.residuals()]

    with handle.step() as step:
        own_loops.pass_of(model)
        step.done()
    before, steps = residuals(), session.completed_steps
    if fails:  # the pass itself fails after its reduction
        model.config.finalize_model_grads_func, finalize = _finalize_and_fail, model.config.finalize_model_grads_func
        with pytest.raises(MemoryError), handle.step():
            own_loops.pass_of(model)
        model.config.finalize_model_grads_func = finalize
    else:
        with handle.step():
            own_loops.pass_of(model)
    after = residuals()
    return [all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), session.completed_steps == steps,
            any(bool(r.any()) for r in before)]  # fmt: skip


def _finalize_and_fail(*args: Any, **kwargs: Any) -> None:
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(*args, **kwargs)
    raise MemoryError("the optimizer's")


@pytest.mark.parametrize("fails", [False, True], ids=["not ended", "its pass raised"])
def test_a_step_that_was_abandoned_leaves_no_trace(fails: bool) -> None:
    config = OptimusConfig(dp_compression_format="low-rank", dp_compression_rank=2, _force_compression=True)
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
    model = own_loops.build(1, hidden=hidden, use_distributed_optimizer=sharded)
    handle = compressed(model, OptimusConfig(dp_compression_format="int4", _force_compression=True))
    own_loops.pass_of(model)
    assert seen
    return handle._session.grid.align, {_tables(layout, torch.device("cpu")).align for layout in seen}


@pytest.mark.parametrize(
    "hidden, told, sharded",
    [
        (64, 16, True), (36, 4, False),
        *(pytest.param(*row, marks=pytest.mark.full) for row in ((36, 4, True), (34, 2, True))),
    ],
)  # fmt: skip
def test_kernels_are_tried_for_the_alignment_of_every_layout_of_the_run(hidden: int, told: int, sharded: bool) -> None:
    for align, used in run_ranks(4, alignments, hidden, sharded, timeout=100):
        assert math.gcd(16, align) == told and all(each % told == 0 for each in used)
