"""Law: a step ends by whichever method a loop updates its parameters; where nothing ends it, a warning says so."""

import contextlib
import logging
from typing import Any

import pytest
import torch

import optimus_cc_ext
from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.errors import OptimusError
from tests.forked_ranks import run_ranks
from tests.megatron import own_loops

LOW_RANK = OptimusConfig(
    dp_compression_format="low-rank", dp_compression_rank=2, dp_compression_warmup=0.3, _force_compression=True,
)  # fmt: skip
STEPS = 3  # the first one is the warm-up


class KeepsMethods:
    """Trainer that keeps the optimizer's bound methods."""

    def __init__(self, optimizer: Any) -> None:
        self.step, self.zero_grad = optimizer.step, optimizer.zero_grad


class ReturnsLoss:
    """Wrapper whose `step` returns (loss, norm, zeros), as that of NeMo does."""

    def __init__(self, optimizer: Any, first: Any = None) -> None:
        self.inner, self.first = optimizer, first

    def step(self) -> Any:
        return self.first, *self.inner.step()[1:]


class WithoutInit(torch.optim.Optimizer):
    """Wrapper that is one of torch's optimizers by its class alone, as NeMo's is."""

    def __init__(self, optimizer: Any) -> None:
        self.inner = optimizer

    def step(self, closure: Any = None) -> Any:
        return self.inner.step()


def of_modules(optimizer: Any) -> Any:
    """Return Megatron's optimizer of a multimodal model, of which this rank has one module."""
    from megatron.core.models.mimo.optimizer import MimoOptimizer, ModuleOptimizerInfo

    absent = ModuleOptimizerInfo(None, None, None, is_active=False)
    return MimoOptimizer(
        {"language": ModuleOptimizerInfo(optimizer, None, None, is_active=True), "images": absent}, optimizer.config
    )


def prepared(optimizer: Any) -> None:
    assert not optimizer.prepare_grads()
    optimizer.get_grad_norm()


def update(way: str, optimizer: Any, wrapper: Any) -> Any:
    """Update the parameters in one of the ways of public training loops."""
    if way == "prepared, then step":  # slime
        prepared(optimizer)
        return optimizer.step()
    if way == "step with ready gradients":
        prepared(optimizer)
        return optimizer.step_with_ready_grads()
    if way == "children":
        return [child.step() for child in optimizer.chained_optimizers]
    if way == "children, ready":
        return [(child.prepare_grads(), child.step_with_ready_grads()) for child in optimizer.chained_optimizers]
    return wrapper.step()


WRAPPERS = {
    "kept": KeepsMethods, "kept, given": KeepsMethods, "a loss first": ReturnsLoss, "a loss first, given": ReturnsLoss,
    "modules, given": of_modules, "inside of modules": of_modules,
}  # fmt: skip
WAYS = (
    "step", "prepared, then step", "step with ready gradients", "children", "children, ready", *WRAPPERS,
)  # fmt: skip


def trained(way: str) -> tuple[int, str, dict[str, float]]:
    """Return the number of steps, the hash of the last gradients, and the metrics of all steps but the first."""
    model = own_loops.build(1, experts=2)  # the experts get an optimizer of their own in Megatron's ChainedOptimizer
    optimizer = own_loops.optimizer_of(model, clip_grad=0.0)
    assert len(optimizer.chained_optimizers) == 2
    wrapper = WRAPPERS.get(way, lambda inner: inner)(optimizer)
    given = wrapper if way.endswith(("given", "of modules")) else optimizer
    handle = optimus_cc_ext.compress(model, given, LOW_RANK, train_iters=STEPS, measure_every=0)
    for batch in range(STEPS):
        own_loops.pass_of(model, batch=batch)
        update("step" if way == "inside of modules" else way, optimizer, optimizer if "inside" in way else wrapper)
        if batch == 0:
            handle.metrics()
    found = handle.state_dict()["iteration"], own_loops.digest(model), handle.metrics()
    handle.remove()
    return found


def every_way() -> dict[str, Any]:
    own_loops.start(1, expert_parallel=2)
    return {way: trained(way) for way in WAYS}


def test_a_step_ends_in_whatever_way_a_loop_updates_its_parameters() -> None:
    for found in run_ranks(2, every_way, timeout=150):
        steps, _, metrics = found["step"]
        raw, sent = (metrics[f"optimus-cc/DP gradients {kind} bytes"] for kind in ("raw", "sent"))
        assert steps == STEPS and sent < raw, "the warm-up has ended"
        for way in WAYS:
            assert found[way] == found["step"], way


# -- what is skipped -------------------------------------------------------------------------------------------------


def skipped(way: str) -> list[Any]:
    """Return the number of steps, and whether a step is open, after a step whose gradients are not finite and after the
    next one.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model = own_loops.build(1, in_bf16=True)
    config = OptimizerConfig(
        optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, loss_scale=1.0, clip_grad=0.0
    )
    optimizer = get_megatron_optimizer(config, [model])
    wrapper = ReturnsLoss(optimizer, first=False if way == "a loss first" else None)
    given = wrapper if way == "a loss first" else optimizer
    handle, found = optimus_cc_ext.compress(model, given, LOW_RANK, train_iters=STEPS), []
    for poisoned in (True, False):
        own_loops.pass_of(model)
        if poisoned:
            next(model.parameters()).main_grad[0] = float("nan")
        if way == "prepared":
            if not optimizer.prepare_grads():
                optimizer.step_with_ready_grads()
        elif way == "children":
            update(way, optimizer, None)
        else:
            wrapper.first = False if poisoned and way == "a loss first" else wrapper.first
            (wrapper if way == "a loss first" else optimizer).step()
            wrapper.first = None
        found += [handle.state_dict()["iteration"], handle._session.in_step]
    handle.remove()
    return found


def every_skip() -> list[list[Any]]:
    own_loops.start(1)
    return [skipped(way) for way in ("step", "prepared", "children", "a loss first")]


def test_a_step_that_megatron_skips_is_over_and_leaves_no_trace() -> None:
    assert run_ranks(2, every_skip, timeout=150) == [[[0, False, 1, False]] * 4] * 2


# -- what nothing ends -----------------------------------------------------------------------------------------------


def warnings_of_ours() -> list[str]:
    """Return a list to which every warning of the extension is added from now on."""
    found: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            found.append(record.getMessage())
        return True

    logging.getLogger("optimus_cc_ext").addFilter(note)
    return found


def never_ended() -> tuple[list[str], list[int], list[dict[str, float]]]:
    """Return the warnings, their number after each step, and the bytes of one step and of seven."""
    own_loops.start(1)
    model = own_loops.build(1)
    optimizer, elsewhere = own_loops.optimizer_of(model), own_loops.optimizer_of(model)
    config = LOW_RANK.replace(dp_compression_warmup=0.0)
    handle, metrics = optimus_cc_ext.compress(model, elsewhere, config, train_iters=STEPS, measure_every=0), []
    said, told = warnings_of_ours(), []
    for batch in range(8):
        model.zero_grad_buffer()  # slime and SkyRL zero twice; pass_of zeroes once more
        own_loops.pass_of(model, batch=batch)
        optimizer.step()
        told.append(len(said))
        if batch in (0, 7):
            metrics.append({name: value for name, value in handle.metrics().items() if name.endswith(" bytes")})
    return said, told, metrics


def test_a_loop_that_ends_no_step_is_told_so_once_and_its_bytes_are_those_of_a_step() -> None:
    (said, told, (one, seven)), (others, *_) = run_ranks(2, never_ended, timeout=150)
    assert not others, "one rank speaks for all"
    [line] = said
    assert told == [0] * 5 + [1] * 3, "zeroing without a pass counts nothing"
    assert line.startswith("optimus-cc: warning: 5 steps have begun and none has ended, so each counts as repeated")
    assert "Give compress() the optimizer whose step()" in line
    assert one == seven and one["optimus-cc/DP gradients sent bytes"] > 0


def repeated_before_the_first_end() -> list[str]:
    own_loops.start(1)
    model = own_loops.build(1)
    optimizer = own_loops.optimizer_of(model)
    optimus_cc_ext.compress(model, optimizer, LOW_RANK, train_iters=STEPS)
    said = warnings_of_ours()
    for batch in range(16):
        own_loops.pass_of(model, batch=batch)
        if batch == 3:
            optimizer.step()
    return said


def test_steps_that_a_loop_gives_up_are_no_fault_where_others_end() -> None:
    assert run_ranks(2, repeated_before_the_first_end, timeout=150) == [[]] * 2


def an_optimizer_made_anew(steps: int) -> list[str]:
    own_loops.start(1)
    model = own_loops.build(1)
    optimizer = own_loops.optimizer_of(model)
    optimus_cc_ext.compress(model, optimizer, LOW_RANK, train_iters=STEPS)
    said = warnings_of_ours()
    for batch in range(steps):
        own_loops.pass_of(model, batch=batch)
        optimizer.step()
        if batch == 0:
            optimizer = own_loops.optimizer_of(model)
    return said


def test_a_loop_that_makes_its_optimizer_anew_after_some_steps_is_told_so_once() -> None:
    said, others = run_ranks(2, an_optimizer_made_anew, 18, timeout=150)
    [line] = said
    assert "15 steps have begun and none has ended" in line and not others


def an_empty_chain_on_the_last_stage(announced: bool) -> Any:
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    own_loops.start(2)
    model = own_loops.build(2, tied=False)
    optimizer = own_loops.optimizer_of(model, clip_grad=0.0)  # Megatron would wait for every rank's part of the norm
    if torch.distributed.get_rank() == 1:
        optimizer = ChainedOptimizer([])
    config = OptimusConfig(compressed_backprop_format="int8")
    handle = optimus_cc_ext.compress(model, optimizer, config)
    for batch in range(2):
        with handle.step() if announced else contextlib.nullcontext() as step:
            own_loops.pass_of(model, batch=batch)
            try:
                update("children", optimizer, None)
            except OptimusError as error:
                return str(error)
            if announced:
                step.done()
        if not announced:
            return None
    return handle.state_dict()["iteration"]


def test_a_rank_whose_chain_is_empty_is_named_instead_of_waited_for() -> None:
    said, nothing = run_ranks(2, an_empty_chain_on_the_last_stage, False, timeout=150)
    assert nothing is None
    assert said.startswith("optimizer: the chain of rank 1 is empty, so that rank does not learn that a step ends")
    assert said.endswith("Announce each step by `with handle.step() as step: ...; step.done(...)`")
    assert run_ranks(2, an_empty_chain_on_the_last_stage, True, timeout=150) == [2, 2]


def unfit_optimizers() -> list[str]:
    own_loops.start(1)
    model, said = own_loops.build(1), []
    for optimizer in (WithoutInit(own_loops.optimizer_of(model)), object()):
        with pytest.raises(OptimusError) as refused:
            optimus_cc_ext.compress(model, optimizer, LOW_RANK, train_iters=STEPS)
        said.append(str(refused.value))
    optimus_cc_ext.compress(model, own_loops.optimizer_of(model), LOW_RANK, train_iters=STEPS)
    return said


def test_an_optimizer_whose_steps_nobody_sees_is_refused_with_the_cure() -> None:
    for unborn, without_step in run_ranks(2, unfit_optimizers, timeout=150):
        assert unborn.startswith("optimizer: this WithoutInit is one of torch's by its class, but has not called torch")
        assert without_step.startswith("optimizer: this object has no step(). Give the optimizer inside it")
