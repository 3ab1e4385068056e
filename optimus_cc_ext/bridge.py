"""Callback for Megatron-Bridge: passing it to Bridge's `pretrain()` switches compression on.

    from optimus_cc_ext.bridge import Compression

    pretrain(config, forward_step, callbacks=[Compression(config, "paper")])

Bridge has its own training loop, log and checkpoints around megatron-core. The callback attaches the handle of
`optimus_cc_ext.compress` to Bridge's model; metrics and state come through Bridge's callbacks
(megatron/bridge/training/callbacks.py).
"""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from optimus_cc_ext.announce import say
from optimus_cc_ext.api import Preset, compress
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.errors import FlagError

__all__ = ["Compression"]

_UNSUPPORTED = (
    ("ddp.use_megatron_fsdp", lambda c: getattr(c.ddp, "use_megatron_fsdp", False)),
    ("dist.use_torch_fsdp2", lambda c: getattr(c.dist, "use_torch_fsdp2", False)),
    ("dist.use_decentralized_pg", lambda c: getattr(c.dist, "use_decentralized_pg", False)),
    ("dist.use_megatron_fsdp", lambda c: getattr(c.dist, "use_megatron_fsdp", False)),
    ("checkpoint.non_persistent_save_interval", lambda c: getattr(c.checkpoint, "non_persistent_save_interval", None)),
    ("checkpoint.async_save", lambda c: getattr(c.checkpoint, "async_save", False)),
)
"""Settings of a ConfigContainer that do not work with compression, or with the compression state in checkpoints."""


class Compression:
    """Callback that compresses a run of Megatron-Bridge. Make it before calling `pretrain`.

    Args:
        config: Bridge's ConfigContainer.
        compression: name of a preset, or an OptimusConfig.
        changes: fields of OptimusConfig that override the preset.

    Raises:
        FlagError: a setting of Bridge and a setting of Optimus-CC do not work together.
    """

    def __init__(self, config: Any, compression: Preset | OptimusConfig = "paper", **changes: Any) -> None:
        for name, given in _UNSUPPORTED:
            if given(config):
                raise FlagError(name, "not supported with Optimus-CC on Megatron-Bridge", "Leave it out")
        self._compression, self._changes = compression, changes

    def on_train_start(self, context: Any) -> None:
        """Attach compression to Bridge's model, check that the compression state can be saved, and load the state that
        lies beside the checkpoint which Bridge has loaded.

        Raises:
            FlagError: the model cannot be compressed in this way.
            UnsupportedMegatron: a part of this megatron-core does not hold.
        """
        from optimus_cc_ext.checkpoint.beside import resume_beside
        from optimus_cc_ext.checkpoint.saving import rehearse

        config, step = context.state.cfg, context.state.train_state.step
        self._handle = compress(
            context.model, context.optimizer, self._compression, train_iters=config.train.train_iters,
            measure_every=config.logger.log_interval, **self._changes,
        )  # fmt: skip
        self._session = self._handle._session
        if self._session is None:  # the model has nothing to compress
            return
        self._session.step.iteration = step
        if config.checkpoint.save and config.checkpoint.save_optim:
            rehearse(self._session, [Path(config.checkpoint.save)])
        if config.checkpoint.load and step:
            resume_beside(self._session, _iteration_folder(config.checkpoint.load, step), step, _arguments(config))

    def on_train_step_end(self, context: Any) -> None:
        """At Bridge's logging interval, print and log our metrics beside Bridge's own."""
        # Bridge increments its step counter after this callback.
        step = context.state.train_state.step + 1
        if step % context.state.cfg.logger.log_interval:
            return
        metrics = self._handle.metrics()
        state = context.state
        if state.tensorboard_logger is not None:
            for name, value in metrics.items():
                state.tensorboard_logger.add_scalar(name, value, step)
        if state.wandb_logger is not None:
            state.wandb_logger.log(metrics, step)
        if os.environ.get("RANK", "0") == "0":
            text = " | ".join(f"{name.removeprefix('optimus-cc/')}: {value:.4g}" for name, value in metrics.items())
            say(f"  optimus-cc step {step} | {text}")

    def on_train_end(self, context: Any) -> None:
        """Remove the compression; a checkpoint that Bridge writes later still gets the state."""
        self._handle.remove()

    def on_checkpoint_save(self, context: Any) -> None:
        """Save the compression state beside the checkpoint that Bridge has just completed."""
        from optimus_cc_ext.checkpoint.beside import save_beside

        config, step = context.state.cfg, context.state.train_state.step
        if self._session is not None:
            save_beside(self._session, _iteration_folder(config.checkpoint.save, step), step, _arguments(config))


def _iteration_folder(checkpoints: str, step: int) -> Path:
    folder = Path(checkpoints)
    # Bridge accepts a folder of checkpoints, or the folder of one checkpoint.
    return folder if folder.name.startswith("iter_") else folder / f"iter_{step:07d}"


def _arguments(config: Any) -> SimpleNamespace:
    """Translate Bridge's configuration to Megatron's argument names, as far as the state files record them."""
    model, sizes = config.model, ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    return SimpleNamespace(
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        virtual_pipeline_model_parallel_size=model.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=getattr(model, "expert_model_parallel_size", 1),
        data_parallel_size=getattr(config, "data_parallel_size", None),
        micro_batch_size=config.train.micro_batch_size,
        seq_length=model.seq_length,
        sequence_parallel=model.sequence_parallel,
        params_dtype=model.params_dtype,
        finetune=config.checkpoint.finetune,
        no_save_optim=not config.checkpoint.save_optim,
        no_load_optim=not config.checkpoint.load_optim,
        **{name: getattr(model, name) for name in sizes},
    )
