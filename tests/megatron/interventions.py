"""Changes of a rank before Megatron parses its command line: faults, other ways to install.

Each is a function without arguments (or a partial of one), run in every rank of a run.
"""

from __future__ import annotations

import functools
import itertools
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import optimus_cc_ext
from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.hooks import start

INF_AT, NAN_AT = 1, 3
"""Iterations, counted from 0, in which a gradient of the first stage is Inf, and in which the last stage's are NaN."""

BY_CONFIG = OptimusConfig(
    compressed_backprop_format="low-rank",
    compressed_backprop_rank=4,
    residual_across_iterations="carry",
    fused_embedding_sync=True,
    dp_compression_format="low-rank",
    dp_compression_rank=4,
    compression_seed=1234,  # Megatron's default of --seed
)


def small_ring(kilobytes: float, slots: int) -> None:
    """Give messages of gradients and parameters so little memory that the buckets of a tiny model are cut."""
    from optimus_cc_ext.techniques import bucket_rules, fused_embedding_sync, session

    session.Ring = functools.partial(session.Ring, slots)  # type: ignore[misc, assignment]
    for module in (bucket_rules, fused_embedding_sync):
        module.slot_bytes = lambda megabytes, several=0: int(kilobytes * 1000) // slots  # type: ignore[attr-defined]


def compress_by_config() -> None:
    """Compress the model that Megatron sets up as a training loop of one's own does, without our flags."""
    from megatron.training import get_args, training

    set_up = training.setup_model_and_optimizer

    def compressed(*args: Any, **kwargs: Any) -> Any:
        model, optimizer, scheduler = set_up(*args, **kwargs)
        optimus_cc_ext.compress(model, optimizer, BY_CONFIG, train_iters=get_args().train_iters)
        return model, optimizer, scheduler

    training.setup_model_and_optimizer = compressed


def start_and_remove() -> None:
    start().remove()


def without(flag: str, values: int = 1) -> None:
    """Remove a flag that cannot be overridden from the command line, with its values."""
    at = sys.argv.index(flag)
    del sys.argv[at : at + 1 + values]


def last_load_on_rank_1_only() -> None:
    """Let rank 1 take the last of two folders to load from, as a node does that did not mount the shared one."""
    if os.environ["RANK"] != "1":
        at = len(sys.argv) - 1 - sys.argv[::-1].index("--load")
        del sys.argv[at : at + 2]


def impatient() -> None:
    """Shorten the wait for the rank that prints an error, because no launcher ends these ranks meanwhile."""
    from optimus_cc_ext import errors

    errors.time = SimpleNamespace(sleep=lambda seconds: sys.exit(2))  # type: ignore[attr-defined]


def hang_up() -> None:
    """Let a rank that ends with an error close its connections, as the end of a process does: this one stays."""
    from optimus_cc_ext import errors

    exit_with = errors.exit_with

    def exit_and_hang_up(reason: Exception | str) -> None:
        try:
            exit_with(reason)
        finally:
            torch.distributed.destroy_process_group()

    errors.exit_with = exit_and_hang_up  # type: ignore[assignment]


def full_disk_on_rank_1() -> None:
    """Let the first large file that rank 1 writes, its share of the state, meet a full disk."""
    if os.environ["RANK"] == "1":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def disks_of_nodes(ranks: int) -> None:
    """Give each node of `ranks` consecutive ranks its own folders below --save and --load."""
    for at, word in enumerate(sys.argv[:-1]):
        if word in ("--save", "--load"):
            sys.argv[at + 1] += f"/node_{int(os.environ['RANK']) // ranks}"


def clean_up_before_publishing() -> None:
    """Delete the folders that are no checkpoint, as a script from outside, when state files are ready to be moved."""
    from optimus_cc_ext.checkpoint import state_files

    publish = state_files.publish

    def publish_nothing(staging: Path, iteration_folder: Path) -> None:
        shutil.rmtree(staging)
        publish(staging, iteration_folder)

    state_files.publish = publish_nothing


def hold_up_writers() -> None:
    """Hold up writers until training has overwritten the state that they save, two iterations later."""
    from megatron.training import get_args

    from optimus_cc_ext.checkpoint import state_files

    write = state_files.write_rank_file

    def write_later(staging: Path, rank: int, iteration: int, state: Any) -> Any:
        give_up = time.monotonic() + 20
        while iteration and get_args().curr_iteration <= iteration + 1 < get_args().train_iters:
            if time.monotonic() > give_up:
                raise RuntimeError("training waits for this file")
            time.sleep(0.01)
        return write(staging, rank, iteration, state)

    state_files.write_rank_file = write_later


def fail_to_write_the_last_on_rank_1() -> None:
    """Let the last write fail on rank 1, in the thread that writes, as on a full disk."""
    from megatron.training import get_args

    from optimus_cc_ext.checkpoint import state_files

    write = state_files.write_rank_file

    def write_or_fail(staging: Path, rank: int, iteration: int, state: Any) -> Any:
        if rank == 1 and iteration == get_args().train_iters:
            raise OSError("the disk is full")
        return write(staging, rank, iteration, state)

    state_files.write_rank_file = write_or_fail


def kill_in_the_last_save(name: str, *, done: bool) -> None:
    """Send SIGKILL to a rank that calls this function of `state_files` for the last save, and to its child processes.

    It waits until the checkpoint before is complete, because in the background Megatron may still be writing that one.

    done: kill after the call instead of before it.
    """
    from megatron.training import get_args

    from optimus_cc_ext.checkpoint import state_files

    original = getattr(state_files, name)

    def killed(*args: Any) -> Any:
        save, iteration = Path(get_args().save), get_args().train_iters
        last = iteration in args or save / f"iter_{iteration:07d}" in args
        if done or not last:
            result = original(*args)
        if last:
            deadline = time.monotonic() + 60
            while not (save / "latest_checkpointed_iteration.txt").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            os.killpg(0, signal.SIGKILL)
        return result

    setattr(state_files, name, killed)


def poison() -> None:
    """Make one replica's gradients Inf in one iteration and NaN in another, each time as if they had been computed
    so.
    """
    from megatron.core import parallel_state as mpu
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
    from megatron.training import get_args

    from optimus_cc_ext.tools import pretrain_gpt

    start_grad_sync, masked_loss = _ParamAndGradBucketGroup.start_grad_sync, pretrain_gpt.masked_loss

    def ill(iteration: int) -> bool:
        return mpu.get_data_parallel_rank() == 1 and get_args().curr_iteration == iteration

    def start_with_inf(self: Any, *args: Any, **kwargs: Any) -> None:
        if ill(INF_AT) and mpu.is_pipeline_first_stage():
            for matrix in (p.main_grad for p in self.params if p.main_grad.shape == (256, 64)):
                matrix[3, 5] = torch.inf
        start_grad_sync(self, *args, **kwargs)

    def loss_with_nan(mask: torch.Tensor, token_losses: torch.Tensor) -> Any:
        # The NaN passes the link between the stages with the backward pass, in epilogue messages too.
        if ill(NAN_AT) and token_losses.requires_grad:
            token_losses.register_hook(lambda gradient: gradient * torch.nan)
        return masked_loss(mask, token_losses)

    _ParamAndGradBucketGroup.start_grad_sync = start_with_inf
    pretrain_gpt.masked_loss = loss_with_nan


def outlier(iteration: int, factor: float) -> None:
    """Multiply the loss of one iteration by `factor`, so that its gradients are outliers."""
    from megatron.training import get_args

    from optimus_cc_ext.tools import pretrain_gpt

    masked_loss = pretrain_gpt.masked_loss

    def loss(*args: Any) -> Any:
        total, tokens, report = masked_loss(*args)
        return (total * factor if get_args().curr_iteration == iteration else total), tokens, report

    pretrain_gpt.masked_loss = loss


def unbatched() -> None:
    """Make Megatron post point-to-point calls one by one; without interleaving it would batch them."""
    from megatron.core.pipeline_parallel import p2p_communication
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    def batched(**tensors: Any) -> None:
        raise AssertionError("this run was to send every tensor by itself")

    p2p_communication._batched_p2p_ops = functools.wraps(p2p_communication._batched_p2p_ops)(batched)
    original = P2PCommunicator.__init__

    def init(self: Any, pp_group: Any, config: Any) -> None:
        config.batch_p2p_comm = False
        original(self, pp_group, config)

    P2PCommunicator.__init__ = init


def nodes_of(ranks: int) -> None:
    """Let `ranks` consecutive ranks share a node."""
    os.environ["OPTIMUS_CC_NODE"] = f"ranks:{ranks}"


def forced_way(*, dense: bool) -> None:
    """Force all steps of a trial, and its choice, to be dense or compressed."""
    from optimus_cc_ext.techniques import trial

    for name in ("dense", "gathers_dense"):
        setattr(trial.WaysByTurns, name, property(lambda _: dense))
    trial.verdict = lambda *_: (not dense, "forced")


def chosen_way(seconds: Sequence[float]) -> None:
    """Let the steps of a trial have these seconds."""
    from optimus_cc_ext.techniques import trial

    judged = trial.verdict
    trial.verdict = lambda measured, name: judged(seconds[: len(measured)], name)


def start_one_ulp_away() -> None:
    """Move every bf16 weight to its upper or lower neighbour, the same way on all replicas."""
    from megatron.core.distributed import DistributedDataParallel

    wrap, chunks = DistributedDataParallel.__init__, itertools.count()

    # The weights are changed here, before the optimizer is built, which copies them.
    @functools.wraps(wrap)
    def wrap_neighbour(self: Any, *args: Any, **kwargs: Any) -> None:
        wrap(self, *args, **kwargs)
        chunk = next(chunks)
        for number, parameter in enumerate(self.module.parameters()):
            assert parameter.dtype == torch.bfloat16
            tied = getattr(parameter, "shared_embedding", False)
            generator = torch.Generator().manual_seed(0 if tied else 1 + 1000 * chunk + number)
            steps = 2 * torch.randint(2, parameter.shape, generator=generator, dtype=torch.int16) - 1
            # Adding 1 to a weight's bits, or subtracting it, gives the next number away from zero, or towards it; zero
            # stays.
            parameter.data.view(torch.int16).add_(steps * (parameter.data != 0))

    DistributedDataParallel.__init__ = wrap_neighbour


def _after_setup(change: Callable[[list[torch.nn.Module]], None]) -> None:
    """Change the model once Megatron has built it."""
    from megatron.training import training

    setup = training.setup_model_and_optimizer

    def setup_and_change(*args: Any, **kwargs: Any) -> Any:
        model, *rest = setup(*args, **kwargs)
        change(model)
        return model, *rest

    training.setup_model_and_optimizer = setup_and_change


def weights_by_place() -> None:
    """Make the initial weights a function of a parameter's place in the whole model, whatever the layout."""
    _after_setup(_initialize_by_place)


def _initialize_by_place(model: list[torch.nn.Module]) -> None:
    from megatron.core.transformer.transformer_layer import TransformerLayer

    for chunk in model:
        layers = [item for item in chunk.named_modules() if isinstance(item[1], TransformerLayer)]
        numbers = {name: layer.layer_number for name, layer in layers}
        for name, parameter in chunk.named_parameters():
            layer = next((numbers[prefix] for prefix in numbers if name.startswith(f"{prefix}.")), 0)
            generator = torch.Generator().manual_seed(1000 * layer + parameter.numel())
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.02, generator=generator)


def another_dropout() -> None:
    """Draw dropout from another seed, with the same weights and data."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    _after_setup(lambda model: model_parallel_cuda_manual_seed(4321, force_reset_rng=True))


_recomputed: list[int] = []


def count_recomputation() -> None:
    from megatron.core import tensor_parallel

    checkpoint = tensor_parallel.checkpoint

    def counted(*args: Any, **kwargs: Any) -> Any:
        _recomputed.append(1)
        return checkpoint(*args, **kwargs)

    tensor_parallel.checkpoint = counted


def recomputations(model: list[torch.nn.Module], optimizer: Any) -> int:
    """Return how many layers were recomputed (a probe)."""
    return len(_recomputed)


# -- what happens to the folder that a run goes on from, a copy --------------------------------------------------------


def only(iteration: int, folder: Path) -> None:
    """Make this checkpoint the latest, and the only one."""
    for checkpoint in folder.glob("iter_*"):
        if checkpoint.name != f"iter_{iteration:07d}":
            shutil.rmtree(checkpoint)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def go_back_on_both_disks(folder: Path) -> None:
    """Make the first checkpoint the latest; only the first node has a tracker file, and people copy it to the other."""
    for node in (0, 1):
        (folder / f"node_{node}" / "latest_checkpointed_iteration.txt").write_text("4")


def archive_the_last(folder: Path) -> None:
    """Move the last checkpoint to another file system, leave a link, and make the first the latest."""
    archive = Path(tempfile.mkdtemp(dir="/dev/shm")) / "iter_0000008"
    shutil.move(folder / archive.name, archive)
    (folder / archive.name).symlink_to(archive)
    (folder / "latest_checkpointed_iteration.txt").write_text("4")


def damage(folder: Path) -> None:
    file = next(folder.glob("iter_*4/optimus_cc/rank_00002.pt"))
    file.write_bytes(file.read_bytes()[:-1])


def take_the_state_out(folder: Path) -> None:
    for state in folder.glob("iter_*/optimus_cc"):
        shutil.rmtree(state)


_gathered = [0]


def count_gathers() -> None:
    """Count the bytes that this rank sends in Megatron's own all-gathers of parameters.

    A save forces these gathers; here it finds them under way, as --overlap-param-gather-with-optimizer-step leaves
    them.
    """
    from megatron.core.distributed import DistributedDataParallel, param_and_grad_buffer

    start = DistributedDataParallel.start_param_sync

    def start_before_forced(ddp: Any, *unused: Any, force_sync: bool = False, **rest: Any) -> None:
        if force_sync:
            start(ddp, **rest)
        start(ddp, force_sync=force_sync, **rest)

    DistributedDataParallel.start_param_sync = start_before_forced

    gather = param_and_grad_buffer.dist_all_gather_func

    def counting(out: torch.Tensor, shard: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        _gathered[0] += out.nbytes - shard.nbytes
        return gather(out, shard, *args, **kwargs)

    param_and_grad_buffer.dist_all_gather_func = counting


def counted_gathers(model: list[torch.nn.Module], optimizer: Any) -> int:
    return _gathered[0]


def norms_in_fp32() -> None:
    """Keep the layers' norms in fp32 in a bf16 model: parameters that have no master copy beside them."""
    from megatron.core.transformer.module import Float16Module

    original = Float16Module.__init__

    def keeping(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for name, parameter in self.named_parameters():
            if "layernorm" in name:
                parameter.data = parameter.data.float()

    Float16Module.__init__ = keeping
