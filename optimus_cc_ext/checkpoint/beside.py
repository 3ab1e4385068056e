"""Saving and restoring state beside the checkpoints of a run, whichever program writes the checkpoints.

`args` are Megatron's arguments, or an object with the same attributes.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from optimus_cc_ext.announce import say
from optimus_cc_ext.checkpoint import state_files
from optimus_cc_ext.checkpoint.loading import FoundCheckpoint, Resume
from optimus_cc_ext.checkpoint.resuming import settings_of
from optimus_cc_ext.checkpoint.saving import Remembers, Save, on_all_ranks

_TOPOLOGY = {
    "the number of ranks": "world_size",
    "--tensor-model-parallel-size": "tensor_model_parallel_size",
    "--pipeline-model-parallel-size": "pipeline_model_parallel_size",
    "the number of model chunks per stage": "virtual_pipeline_model_parallel_size",
    "--pipeline-model-parallel-layout": "pipeline_model_parallel_layout",
    "the data-parallel size": "data_parallel_size",
    "--context-parallel-size": "context_parallel_size",
    "--expert-model-parallel-size": "expert_model_parallel_size",
    "--use-tp-pp-dp-mapping": "use_tp_pp_dp_mapping",
}
_MESSAGES = {
    "--micro-batch-size": "micro_batch_size",
    "--seq-length": "seq_length",
    "--sequence-parallel": "sequence_parallel",
    "the parameters' dtype": "params_dtype",
}


def stage(session: Remembers, save_folder: Path, iteration: int, args: Any, *, copied: bool = False) -> Save | None:
    """Stage a save of the state; None if no technique keeps state, or if the optimizer's is not saved. Collective over
    all ranks.

    Raises:
        OptimusError: as `Save.stage` does.
    """
    settings = settings_of(session.config, _words(args, _MESSAGES))
    if not settings or args.no_save_optim:
        return None
    save = Save(save_folder, iteration, settings, _words(args, _TOPOLOGY))
    save.stage(session, copied=copied)
    return save


def save_beside(session: Remembers, iteration_folder: Path, iteration: int, args: Any) -> None:
    """Save the state beside a checkpoint that another program than Megatron's loop has written. Collective over all
    ranks.

    Raises:
        OptimusError: on all ranks, if one of them could not write.
    """
    save = stage(session, iteration_folder.parent, iteration, args)
    if save is not None:
        save.finish_writing()
        save.publish(iteration_folder)


def resume_beside(session: Remembers, iteration_folder: Path, iteration: int, args: Any) -> None:
    """Restore the state that `save_beside` saved, and print the reasons for anything not restored. Collective over all
    ranks.

    Raises:
        OptimusError: on all ranks: a file is missing or damaged, or ranks found different checkpoints.
    """
    (manifest, *_) = on_all_ranks(lambda: state_files.read_manifest(iteration_folder), "")
    mark = None if manifest is None else manifest.checkpoint
    resume(session, FoundCheckpoint(iteration_folder, iteration, mark), args)


def resume(
    session: Remembers,
    found: FoundCheckpoint,
    args: Any,
    *,
    release: bool = False,
    trial: Mapping[str, Any] | None = None,
) -> None:
    """Restore the parts of the state that fit this run, and print why others were not restored.

    Collective over all ranks.

    Args:
        trial: the choice of the saving run's trial (`Trial.state`); None: the checkpoint has none.

    Raises:
        OptimusError: as `Resume.restore` does.
    """
    settings = settings_of(session.config, _words(args, _MESSAGES))
    unwanted = _unwanted(args, release=release)
    lines = Resume(found, settings, _words(args, _TOPOLOGY), unwanted=unwanted).restore(session)
    if session.trial is not None and session.trial.open and unwanted is None:
        (old, *_) = on_all_ranks(lambda: _choice_of_stages(found.iteration_folder), "")
        session.trial.resume(trial, old)
        lines = lines if session.trial.open or settings else []
    for line in lines if dist.get_rank() == 0 else ():
        say(f"optimus-cc: {line}")


def _choice_of_stages(folder: Path) -> Mapping[str, Any]:
    """Return the state of 8b301ab's `auto`, which lies in topology.json; empty if there is none that can be read."""
    manifest = None
    with suppress(state_files.DamagedState):  # a choice is made anew then
        manifest = state_files.read_manifest(folder) if dist.get_rank() == 0 else None
    return (manifest.common if manifest is not None else None) or {}


def _unwanted(args: Any, *, release: bool) -> str | None:
    """Return the reason why no state of the checkpoint is to be restored at all; None: it may be restored."""
    if args.finetune:
        return "--finetune"
    if args.no_load_optim:
        return "--no-load-optim"
    return "a release checkpoint contains no state of a run" if release else None


def _words(args: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of Megatron's arguments `names`, by their description, in the types that JSON gives back."""
    values = {words: getattr(args, name, None) for words, name in names.items()}
    return {words: value if isinstance(value, int | None) else str(value) for words, value in values.items()}
