"""Megatron-Bridge: one callback of its `pretrain()` is all there is to switch on.

    from optimus_cc_ext.bridge import Compression

    pretrain(config, forward_step, callbacks=[Compression(config, "paper")])

Bridge has a training loop, a log and checkpoints of its own around megatron-core. Messages and gradients pass through
what is wrapped there; steps, metrics and state come through its callbacks (megatron/bridge/training/callbacks.py).
"""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from optimus_cc_ext.api import begin_step, collect_metrics, current_session, end_step, install, preset
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.errors import FlagError

__all__ = ["Compression"]

_UNSUPPORTED = (
    ("model.context_parallel_size above 1", lambda c: c.model.context_parallel_size > 1),
    ("ddp.use_megatron_fsdp", lambda c: getattr(c.ddp, "use_megatron_fsdp", False)),
    ("dist.use_torch_fsdp2", lambda c: getattr(c.dist, "use_torch_fsdp2", False)),
    ("dist.use_decentralized_pg", lambda c: getattr(c.dist, "use_decentralized_pg", False)),
    ("dist.use_megatron_fsdp", lambda c: getattr(c.dist, "use_megatron_fsdp", False)),
    ("checkpoint.non_persistent_save_interval", lambda c: getattr(c.checkpoint, "non_persistent_save_interval", None)),
    ("checkpoint.async_save", lambda c: getattr(c.checkpoint, "async_save", False)),
)
"""Settings of a ConfigContainer that do not work with compression, or with its state in checkpoints."""


class Compression:
    """A callback that compresses a run of Megatron-Bridge's; made before `pretrain`, because models are built there.

    Args:
        config: Bridge's ConfigContainer.
        compression: a preset's name, or an OptimusConfig.
        changes: fields of OptimusConfig that win over the preset.

    Raises:
        FlagError: a setting of either side does not work with the other.
        UnsupportedMegatron: this megatron-core was not tested.
    """

    def __init__(self, config: Any, compression: str | OptimusConfig = "paper", **changes: object) -> None:
        for name, given in _UNSUPPORTED:
            if given(config):
                raise FlagError(name, "not supported with Optimus-CC on Megatron-Bridge", "Leave it out")
        model = config.model
        parallel = model.tensor_model_parallel_size * model.pipeline_model_parallel_size
        if isinstance(compression, str):
            compression = preset(
                compression,
                stages=model.pipeline_model_parallel_size,
                data_parallel=int(os.environ.get("WORLD_SIZE", "1")) // parallel,
                tied_embeddings=getattr(model, "share_embeddings_and_output_weights", True),
                distributed_optimizer=_gathers(config),
                **changes,  # type: ignore[arg-type]
            )
        install(compression, train_iters=config.train.train_iters)

    def on_train_start(self, context: Any) -> None:
        """The model and a checkpoint are loaded: take the compressors' state beside it."""
        from optimus_cc_ext.checkpoint.beside import resume_beside

        config, step = context.state.cfg, context.state.train_state.step
        session = current_session()
        if config.checkpoint.load and step and session is not None:
            resume_beside(session, _iteration_folder(config.checkpoint.load, step), step, _arguments(config))

    def on_train_step_start(self, context: Any) -> None:
        """See `api.begin_step`."""
        step = context.state.train_state.step
        begin_step(step, measured=_due(context, step + 1))

    def on_train_step_end(self, context: Any) -> None:
        """See `api.end_step`; at Bridge's logging interval, our lines and scalars go where its own go."""
        clip_grad = context.state.cfg.optimizer.clip_grad
        end_step(applied=not context.skipped_iter, grad_norm=context.grad_norm, clip_grad=clip_grad)
        # Bridge counts the step after this callback.
        step = context.state.train_state.step + 1
        if not _due(context, step):
            return
        metrics = collect_metrics()
        state = context.state
        if state.tensorboard_logger is not None:
            for name, value in metrics.items():
                state.tensorboard_logger.add_scalar(name, value, step)
        if state.wandb_logger is not None:
            state.wandb_logger.log(metrics, step)
        if os.environ.get("RANK", "0") == "0":
            said = " | ".join(f"{name.removeprefix('optimus-cc/')}: {value:.4g}" for name, value in metrics.items())
            print(f"  optimus-cc step {step} | {said}", flush=True)

    def on_checkpoint_save(self, context: Any) -> None:
        """A checkpoint is complete: put the compressors' state beside it."""
        from optimus_cc_ext.checkpoint.beside import save_beside

        config, step = context.state.cfg, context.state.train_state.step
        session = current_session()
        if session is not None:
            save_beside(session, _iteration_folder(config.checkpoint.save, step), step, _arguments(config))


def _gathers(config: Any) -> bool:
    """Whether the distributed optimizer gathers 16-bit parameters that it copies over from fp32 ones."""
    sharded = getattr(config.ddp, "use_distributed_optimizer", False)
    in_16_bits = getattr(config.model, "bf16", False) or getattr(config.model, "fp16", False)
    return sharded and in_16_bits and not getattr(config.optimizer, "use_precision_aware_optimizer", False)


def _iteration_folder(checkpoints: str, step: int) -> Path:
    folder = Path(checkpoints)
    # Bridge loads a folder of checkpoints, or one of them.
    return folder if folder.name.startswith("iter_") else folder / f"iter_{step:07d}"


def _due(context: Any, step: int) -> bool:
    return bool(step % context.state.cfg.logger.log_interval == 0)


def _arguments(config: Any) -> SimpleNamespace:
    """Bridge's configuration, by the names that Megatron's arguments have for it."""
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
        no_load_optim=not config.checkpoint.load_optim,
        **{name: getattr(model, name) for name in sizes},
    )
