"""The loop of docs/custom-loops.md, as it stands there, on four ranks; and what `install` refuses."""

import re
from pathlib import Path
from typing import Any

import pytest

import optimus_cc_ext
from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.errors import FlagError, OptimusError
from tests.forked_ranks import run_ranks
from tests.launches import call

PAGE = Path(__file__).resolve().parents[2] / "docs" / "custom-loops.md"
STEPS, WARMUP = 4, 1


def the_documented_loop() -> dict[str, Any]:
    import torch

    torch.distributed.init_process_group("gloo")
    torch.manual_seed(torch.distributed.get_rank())
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    log, state = names["train"](STEPS)
    session = optimus_cc_ext.current_session()
    assert session is not None
    optimus_cc_ext.load_state_dict(state)
    return {"log": log, "iteration": state["iteration"], "techniques": sorted(state), "layout": session.layout}


def test_the_documented_loop_warms_up_compresses_and_measures() -> None:
    ranks = run_ranks(4, the_documented_loop)
    assert all(rank["log"] == ranks[0]["log"] for rank in ranks), "the same on every rank"
    assert all(rank["iteration"] == STEPS for rank in ranks)
    assert ranks[0]["layout"].train_iters == STEPS
    for number, metrics in enumerate(ranks[0]["log"]):
        for traffic in ("pipeline backward", "DP gradients"):
            raw, sent = (metrics[f"optimus-cc/{traffic} {kind} bytes"] for kind in ("raw", "sent"))
            assert (sent < raw) == (number >= WARMUP), (number, traffic)
        assert metrics["optimus-cc/embedding sent bytes"] < metrics["optimus-cc/embedding raw bytes"]
        assert ("optimus-cc/SC relative error/stage 0" in metrics) == (number >= WARMUP)


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
    assert optimus_cc_ext.preset("balanced", stages=4, data_parallel=2).dp_compression_format == "int4"
    with pytest.raises(FlagError, match=r"'papr' is none. Give paper"):
        optimus_cc_ext.preset("papr", stages=4, data_parallel=2)
    with pytest.raises(FlagError, match="nothing to compress"):
        optimus_cc_ext.preset("paper", stages=4, data_parallel=1, dp_compression=True)
