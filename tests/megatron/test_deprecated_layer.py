"""Law: loops of `install`, `begin_step` and `end_step` run as before for one release, and Python warns of them."""

import warnings
from typing import Any

import pytest
import torch

import optimus_cc_ext
from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.errors import OptimusError, UnfitState
from tests.forked_ranks import run_ranks
from tests.launches import launch
from tests.megatron import own_loops
from tests.megatron.test_beside_others import tap
from tests.megatron.test_bridge import run_like_bridge

STEPS = 4
LOW_RANK = OptimusConfig(
    dp_compression=True, dp_compression_rank=2, _force_compression=True, compression_forecast=False
)  # fmt: skip


def the_loop_of_d851e77() -> dict[str, Any]:
    from tests.megatron import loop_of_d851e77

    torch.distributed.init_process_group("gloo")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log, state = loop_of_d851e77.train(STEPS)
    said = [(str(each.message), each.filename) for each in caught if each.category is DeprecationWarning]
    return {"log": log, "iteration": state["iteration"], "said": [each for each in said if "optimus_cc_ext" in each[0]]}


def test_the_loop_that_d851e77_documented_runs_unchanged_and_python_says_what_replaces_it() -> None:
    for rank in run_ranks(4, the_loop_of_d851e77):
        assert rank["iteration"] == STEPS
        for number, metrics in enumerate(rank["log"]):
            for traffic in ("pipeline backward", "DP gradients"):
                raw, sent = (metrics[f"optimus-cc/{traffic} {kind} bytes"] for kind in ("raw", "sent"))
                assert (sent < raw) == (number >= 1), "after the warm-up"
        assert len(rank["said"]) == 1 + 2 * STEPS
        for said, file in rank["said"]:
            assert "Call optimus_cc_ext.compress(model, optimizer, ...) instead" in said
            assert file.endswith("loop_of_d851e77.py"), "the line of the user's loop"


def warnings_are_errors() -> None:
    warnings.filterwarnings("error", message="optimus_cc_ext")


def bridge_without_warnings(save: str) -> int:
    warnings_are_errors()
    return int(run_like_bridge(save, None, range(0, 1))["steps"])


def test_the_launcher_and_bridge_use_nothing_that_is_deprecated(tmp_path: Any) -> None:
    assert launch(["--optimus-cc", "balanced"], before=warnings_are_errors).accepted
    assert run_ranks(4, bridge_without_warnings, str(tmp_path)) == [1] * 4


def uninstalled_under_a_profiler() -> bool:
    """Return whether a model that is built after `uninstall` is vanilla, though other code wraps our wraps."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.pipeline_parallel import schedules

    own_loops.start(1)
    vanilla = own_loops.build(1)
    own_loops.pass_of(vanilla)
    optimus_cc_ext.install(LOW_RANK)
    for owner, name in ((DistributedDataParallel, "__init__"), (schedules, "forward_backward_no_pipelining")):
        tap(owner, name)
    optimus_cc_ext.uninstall()
    model = own_loops.build(1)
    own_loops.pass_of(model)
    return own_loops.digest(model) == own_loops.digest(vanilla)


def test_a_model_is_vanilla_after_uninstall_though_other_code_wraps_our_wraps() -> None:
    assert run_ranks(2, uninstalled_under_a_profiler, timeout=90) == [True] * 2


def states_of_an_installation() -> tuple[str, bool, str]:
    """Return the refusal of a state that does not fit on rank 1 alone, whether all state stayed, and an early call's
    refusal."""
    own_loops.start(1)
    with warnings.catch_warnings(action="ignore"):
        optimus_cc_ext.install(LOW_RANK)
        with pytest.raises(OptimusError) as early:
            optimus_cc_ext.collect_metrics()
        model = own_loops.build(1)
        for _ in range(2):
            optimus_cc_ext.begin_step()
            own_loops.pass_of(model)
            optimus_cc_ext.end_step()
    session, own = optimus_cc_ext.current_session(), optimus_cc_ext.state_dict()
    assert session is not None
    before = [residual.clone() for residual in session.gradients.states.residuals()]
    given = own if torch.distributed.get_rank() == 0 else {"iteration": 1, "dp_compression": {"states": {}}}
    with pytest.raises(UnfitState) as refused:
        optimus_cc_ext.load_state_dict(given)
    unchanged = all(map(torch.equal, before, session.gradients.states.residuals())) and session.completed_steps == 2
    optimus_cc_ext.load_state_dict(own)
    return str(refused.value), unchanged, str(early.value)


def test_a_state_that_one_rank_cannot_take_is_refused_on_all() -> None:
    for said, unchanged, early in run_ranks(2, states_of_an_installation, timeout=60):
        assert said.startswith("load_state_dict: nothing is changed: rank 1: dp_compression: bucket 0")
        assert unchanged
        assert early.startswith("metrics: no model has been built yet")
