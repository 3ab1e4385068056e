"""States that an earlier commit saved beside a checkpoint, kept in this repository, are restored to the bit.

`save_beside` of commit 8b301ab wrote the files after three passes of `train`: PP 2, DP 2, low rank on both
classes that carry state, or a state that all ranks share.
"""

import contextlib
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import optimus_cc_ext
from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.announce import on_standard_output
from optimus_cc_ext.config.classes import DP_GRADIENTS
from optimus_cc_ext.techniques import bucket_plan
from tests.forked_ranks import run_ranks
from tests.megatron import own_loops

HERE = Path(__file__).parent
LOW_RANK = OptimusConfig(
    compressed_backprop_format="low-rank", compressed_backprop_rank=2, compressed_backprop_messages="all",
    residual_across_iterations="carry", dp_compression_format="low-rank", dp_compression_rank=2,
    _force_compression=True,
    compression_state_dtype="bf16",
)  # fmt: skip
SHARED = OptimusConfig(dp_compression_format="int4", dp_compression_stages="auto", _force_compression=True)
PASSES = 3
ARGUMENTS = SimpleNamespace(
    world_size=4, tensor_model_parallel_size=1, pipeline_model_parallel_size=2, data_parallel_size=2,
    context_parallel_size=1, expert_model_parallel_size=1, micro_batch_size=2, seq_length=32, sequence_parallel=False,
    params_dtype=torch.float32, finetune=False, no_save_optim=False, no_load_optim=False,
)  # fmt: skip


def train(passes: int, config: OptimusConfig = LOW_RANK) -> Any:
    """Run `passes` training passes on this rank, and return the session that compressed them."""
    own_loops.start(2)
    model = own_loops.build(2, hidden=16)
    handle = optimus_cc_ext.compress(model, None, config)
    for _ in range(passes):
        with handle.step() as step:
            own_loops.pass_of(model)
            step.done(grad_norm=1.0, clip_grad=1.0)
    return handle._session


def restored(folder: Path, config: OptimusConfig) -> tuple[str, list[str]]:
    """Return the lines of restoring, and the parts of the saved state that differ from the session's."""
    from optimus_cc_ext.checkpoint.beside import resume_beside

    session, said = train(1, config), io.StringIO()
    on_standard_output()
    with contextlib.redirect_stdout(said):
        resume_beside(session, folder, PASSES, ARGUMENTS)
    if session.trial is not None:
        return said.getvalue(), [str(session.trial.compressed)]
    file = folder / "optimus_cc" / f"rank_{torch.distributed.get_rank():05d}.pt"
    saved = torch.load(file, weights_only=True)["state"]
    return said.getvalue(), differences(saved, session.state_dict())


def differences(saved: Any, now: Any, name: str = "") -> list[str]:
    if isinstance(saved, dict):
        missing = [f"{name}/{key}" for key in saved.keys() ^ now.keys()]
        return missing + [
            line for key in saved.keys() & now.keys() for line in differences(saved[key], now[key], f"{name}/{key}")
        ]
    if isinstance(saved, torch.Tensor):
        return [] if saved.dtype == now.dtype and torch.equal(saved, now) else [name]
    return [] if saved == now else [name]


def test_a_checkpoint_of_an_earlier_commit_is_restored_to_the_bit() -> None:
    names = "pipeline backward and DP gradients"
    line = f"optimus-cc: the state of {names} is restored from iteration 3\n"
    found = run_ranks(4, restored, HERE / "checkpoints_of_8b301ab/low_rank/iter_0000003", LOW_RANK, timeout=120)
    assert found == [(line, []), *[("", [])] * 3]


def test_the_stages_that_an_earlier_commit_had_chosen_are_the_choice_of_its_trial(tmp_path: Path) -> None:
    """It had left all stages dense, after a measurement of the links."""
    folder = HERE / "checkpoints_of_8b301ab/common/iter_0000003"
    found = run_ranks(4, restored, folder, SHARED, timeout=120)
    assert [choice for _, choice in found] == [["False"]] * 4
    assert "the trial of the checkpoint's run counts here, too: dense" in found[0][0]


def resumed_from_a_compressed_bucket(folder: Path) -> tuple[str, tuple[int, int], bool]:
    """Save the state of a bucket that an older rule compressed; return the lines of resuming from it, the (raw, sent)
    bytes of a step, and whether the state has gone.
    """
    from optimus_cc_ext.checkpoint.beside import resume_beside, save_beside

    own_loops.start(1)
    config = OptimusConfig(dp_compression_format="low-rank", dp_compression_rank=2, dp_compression_stages="all")
    arguments, said = SimpleNamespace(**vars(ARGUMENTS) | {"world_size": 2}), io.StringIO()
    with pytest.MonkeyPatch.context() as before:
        before.setattr(bucket_plan, "_pays", lambda *_: True)
        handle = trained(config)
        assert handle._session.gradients.states.nbytes > 0
        save_beside(handle._session, folder / "iter_0000001", 1, arguments)
    handle = trained(config)
    on_standard_output()
    with contextlib.redirect_stdout(said):
        resume_beside(handle._session, folder / "iter_0000001", 1, arguments)
    return said.getvalue(), handle._session.traffic.total()[DP_GRADIENTS], handle._session.gradients.states.nbytes == 0


def trained(config: OptimusConfig) -> Any:
    """Train a model whose local experts are more than its other matrices for a step; return its handle."""
    model = own_loops.build(1, experts=4, use_distributed_optimizer=True)
    optimizer = own_loops.optimizer_of(model)
    handle = optimus_cc_ext.compress(model, optimizer, config, train_iters=10)
    own_loops.pass_of(model)
    optimizer.step()
    return handle


def test_state_of_a_bucket_that_is_left_to_megatron_by_now_is_dropped_with_a_line(tmp_path: Path) -> None:
    (tmp_path / "iter_0000001").mkdir()
    first, second = run_ranks(2, resumed_from_a_compressed_bucket, tmp_path, timeout=120)
    said, (raw, sent), gone = first
    assert raw == sent > 0 and gone and not second[0]
    (line,) = said.splitlines()
    assert "bucket 0: " in line and "either here or in the checkpoint" in line


def test_the_comparison_sees_a_bit_and_a_missing_part() -> None:
    one = {"a": torch.tensor([1.0, 2.0]), "b": {"c": 3}}
    assert set(differences(one, {"a": torch.tensor([1.0, 2.0000002]), "b": {}})) == {"/a", "/b/c"}
    assert differences(one, one) == []
