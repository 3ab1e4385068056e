"""The callback for Megatron-Bridge, in the order and with the fields of Bridge 0.6.0, around the documented model.

Bridge itself is not installed: its training loop imports packages for GPUs (docs/python.md).
"""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optimus_cc_ext.bridge import Compression
from optimus_cc_ext.errors import FlagError
from tests.forked_ranks import run_ranks

pytestmark = pytest.mark.ci

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"
RANKS = {"compressed_backprop_rank": 4, "dp_compression_rank": 8}


class Writer:
    """Stand-in for TensorBoard's writer, as far as the callback uses it."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[int, str], float] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[step, name] = value


def configuration(save: str | None = None, load: str | None = None, **model: Any) -> SimpleNamespace:
    """Return the fields of Bridge's ConfigContainer that the callback reads."""
    import torch

    sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2, "context_parallel_size": 1}
    return SimpleNamespace(
        model=SimpleNamespace(
            **sizes | {"virtual_pipeline_model_parallel_size": None, "share_embeddings_and_output_weights": True,
                       "seq_length": 64, "sequence_parallel": False, "params_dtype": torch.float32} | model
        ),
        train=SimpleNamespace(train_iters=4, micro_batch_size=2),
        optimizer=SimpleNamespace(clip_grad=1.0),
        logger=SimpleNamespace(log_interval=2),
        checkpoint=SimpleNamespace(
            save=save, load=load, finetune=False, save_optim=True, load_optim=True, async_save=False
        ),
        ddp=SimpleNamespace(use_megatron_fsdp=False),
        dist=SimpleNamespace(use_torch_fsdp2=False, use_decentralized_pg=False),
        data_parallel_size=2,
    )  # fmt: skip


def run_like_bridge(
    save: str, load: str | None, steps: range, skipped: bool = False, save_optim: bool = True
) -> dict[str, Any]:
    """Make the calls of `pretrain(config, forward_step, callbacks=[Compression(...)])`, in its order."""
    import torch
    from megatron.core import parallel_state, tensor_parallel

    torch.distributed.init_process_group("gloo")
    code, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    config = configuration(save, load)
    config.checkpoint.save_optim = save_optim
    callback = Compression(config, "paper", **RANKS)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    model, optimizer = names["build"]()
    if skipped:
        optimizer.step = lambda: (False, None, None)
    writer = Writer()
    state = SimpleNamespace(
        cfg=config, train_state=SimpleNamespace(step=steps.start), tensorboard_logger=writer, wandb_logger=None
    )
    context = SimpleNamespace(state=state, model=[model], optimizer=optimizer)
    callback.on_train_start(context)
    proven = Path(save).exists()
    session = callback._session
    began_with = [residual.double().norm().item() for t in session.techniques for residual in t.states.residuals()]
    for step in steps:
        torch.manual_seed(step)
        names["train_step"](model, optimizer)
        callback.on_train_step_end(context)
        state.train_state.step += 1
    if torch.distributed.get_rank() == 0:
        (Path(save) / f"iter_{steps.stop:07d}").mkdir(parents=True)  # Bridge's own checkpoint
    torch.distributed.barrier()
    callback.on_checkpoint_save(context)
    norms = [residual.double().norm().item() for t in session.techniques for residual in t.states.residuals()]
    return {
        "began with": began_with, "proven": proven, "norms": norms, "scalars": writer.scalars,
        "steps": session.completed_steps,
    }  # fmt: skip


def test_one_callback_compresses_logs_and_keeps_its_state_in_bridges_checkpoints(tmp_path: Path) -> None:
    save = str(tmp_path)
    first = run_ranks(4, run_like_bridge, save, None, range(0, 2))
    assert (tmp_path / "iter_0000002" / "optimus_cc" / "topology.json").is_file()
    for rank in first:
        assert {step for step, _ in rank["scalars"]} == {2}, "at the logging interval"
        raw, sent = (rank["scalars"][2, f"optimus-cc/DP gradients {kind} bytes"] for kind in ("raw", "sent"))
        assert sent < raw
        assert any(rank["norms"])
    second = run_ranks(4, run_like_bridge, save, save, range(2, 3))
    for before, after in zip(first, second, strict=True):
        assert after["steps"] == 3
        # Residuals of CB (activation gradients) are dropped between iterations; the state of SC (data-parallel
        # gradients) exists before the first step.
        assert [norm for norm in before["norms"] if norm in after["began with"]] or not after["began with"]


def test_a_step_that_bridge_skipped_leaves_no_trace(tmp_path: Path) -> None:
    ranks = run_ranks(4, run_like_bridge, str(tmp_path), None, range(0, 1), True)
    for rank in ranks:
        assert rank["steps"] == 0 and not any(rank["norms"])


@pytest.mark.parametrize("save_optim", [True, False])
def test_the_state_is_proven_and_saved_only_with_the_optimizers_state(tmp_path: Path, save_optim: bool) -> None:
    save = tmp_path / "checkpoints"  # the proof makes it
    ranks = run_ranks(4, run_like_bridge, str(save), None, range(0, 1), False, save_optim)
    assert all(rank["proven"] == save_optim for rank in ranks)
    assert [*save.glob("iter_0000001/*")] == [save / "iter_0000001" / "optimus_cc"] * save_optim


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (("checkpoint", "async_save"), "checkpoint.async_save"),
        (("ddp", "use_megatron_fsdp"), "ddp.use_megatron_fsdp"),
        (("checkpoint", "non_persistent_save_interval"), "checkpoint.non_persistent_save_interval"),
        (("dist", "use_torch_fsdp2"), "dist.use_torch_fsdp2"),
        (("dist", "use_megatron_fsdp"), "dist.use_megatron_fsdp"),
        (("dist", "use_decentralized_pg"), "dist.use_decentralized_pg"),
    ],
)
def test_what_does_not_work_with_bridge_is_refused_by_its_name(change: tuple[str, str], name: str) -> None:
    config = configuration()
    setattr(getattr(config, change[0]), change[1], True)
    with pytest.raises(FlagError, match=re.escape(name)):
        Compression(config)
