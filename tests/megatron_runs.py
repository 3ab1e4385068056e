"""Tiny GPT trained by Megatron's own pretrain() in forked ranks, with a record of all values that tests ask for, to the
bit.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import pickle
import random
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy
import torch

from tests.forked_ranks import run_ranks
from tests.megatron import identity, recording
from tests.megatron.recording import Messages, Ours, hash_of

__all__ = [
    "TINY_GPT", "MegatronRun", "Step", "last_stage_losses", "megatron_run", "relative_gap", "run_megatron",
]  # fmt: skip

TINY_GPT = shlex.split("""
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --mock-data --tokenizer-type NullTokenizer --vocab-size 500 --num-workers 0
    --micro-batch-size 2 --global-batch-size 16 --train-iters 4 --lr 1e-3
    --eval-iters 0 --eval-interval 1000 --log-interval 1
    --transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-persist-layer-norm --no-bias-gelu-fusion --no-bias-dropout-fusion
""")
"""Flags of every run: 4 layers, hidden 64, 4 iterations of 16 sequences. Later flags override earlier ones: append your
own.
"""

SKIPPED, GRAD_NORM = 1, 5
"""Indices of `skipped_iter` and of the gradients' norm in the tuple that `train_step` returns."""


@dataclass(frozen=True, slots=True)
class Step:
    """Record of one training step."""

    skipped: bool
    loss_scale: float
    """Loss scale of the step."""
    weights: str
    """sha256 of all weights."""
    memory: list[str]
    """sha256 of each tensor of the compression state, with residuals in units of unscaled gradients."""
    memory_norms: list[float]


@dataclass(slots=True)
class MegatronRun:
    """Record of one rank's training run."""

    stage: int = 0
    tensor_rank: int = 0
    data_rank: int = 0
    ended: int | str | None = None
    """Exit status, or our error, with which the run ended early; None if it reached its end."""
    losses: list[float | None] = field(default_factory=list)
    """Averaged fp32 training loss of each iteration, exactly; None except on the last stage."""
    evaluation_losses: list[float | None] = field(default_factory=list)
    """Averaged fp32 validation loss of each evaluation, exactly; None except on the last stage."""
    grad_norms: list[float | None] = field(default_factory=list)
    """Norm of the gradients before clipping, by iteration."""
    random_states: list[str] = field(default_factory=list)
    """sha256 of the states of torch's, Megatron's, numpy's and Python's generators after each iteration."""
    steps: list[Step] = field(default_factory=list)
    passes: int = 0
    """Number of forward-backward passes of all steps together."""
    weights: dict[str, str] = field(default_factory=dict)
    """sha256 of each parameter's bytes at the end, by "<model chunk>.<parameter's name>"; `gradients` has the same of
    gradients.
    """
    gradients: dict[str, str] = field(default_factory=dict)
    gradient_bytes: dict[str, int] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    """Copies of the tied embedding among `weights`."""
    split_over_tensor_ranks: dict[str, bool] = field(default_factory=dict)
    buckets: int = 0
    expert_buckets: int = 0
    printed: list[str] = field(default_factory=list)
    """Lines that this rank wrote to stdout and stderr."""
    saves: list[dict[str, Any]] = field(default_factory=list)
    """Files present each time that Megatron reached its tracker file, gave a save to the background or finished it."""
    wire: dict[str, str] = field(default_factory=dict)
    """Hash of all that this rank sent, by function of torch.distributed; in sessions with --record only."""
    calls: dict[str, int] = field(default_factory=dict)
    """Numbers of the package's functions and torch's operators that the third iteration called; with --record only."""
    messages: dict[str, Messages] = field(default_factory=dict)
    """Messages by end of a link, "sent" or "received"."""
    asked: dict[str, list[str]] = field(default_factory=dict)
    """Requests of each watched method to torch after the first iteration: new memory and values on the host."""
    ours: Ours | None = None
    probed: Any = None
    """Return value of the test's probe."""

    @property
    def said(self) -> list[str]:
        """Lines that Optimus-CC printed, without the prefix "optimus-cc: "."""
        return [line.removeprefix("optimus-cc: ") for line in self.printed if line.startswith("optimus-cc: ")]


def run_megatron(
    world_size: int,
    argv: Sequence[str] = (),
    *,
    before: Callable[[], Any] | None = None,
    probe: Callable[[list[torch.nn.Module], Any], Any] | None = None,
    entry: Callable[[], Any] | None = None,
    watched: bool = False,
    timeout: float = 180.0,
) -> list[MegatronRun]:
    """Run :func:`megatron_run` on ``world_size`` forked ranks; return the records in rank order."""
    return run_ranks(world_size, megatron_run, list(argv), before, probe, entry, watched, timeout=timeout)


def megatron_run(
    argv: Sequence[str],
    before: Callable[[], Any] | None = None,
    probe: Callable[[list[torch.nn.Module], Any], Any] | None = None,
    entry: Callable[[], Any] | None = None,
    watched: bool = False,
) -> MegatronRun:
    """Train the tiny GPT with the flags ``argv`` in this rank; once per process, because Megatron's state is global.

    ``before()`` runs before Megatron parses its flags (to install hooks); ``probe(model_chunks, optimizer)`` runs at
    the end, and its result must be picklable; ``entry`` replaces the `main` of tools/pretrain_gpt.py; ``watched``
    notes the hot path's requests to torch, which takes time.
    """
    from optimus_cc_ext.errors import OptimusError

    run = MegatronRun(printed=(tee := _Tee(sys.stdout)).lines)
    sys.stdout = sys.stderr = tee  # type: ignore[assignment]
    run.asked = recording.hot_path() if watched else {}
    run.messages = recording.observe_links()
    if identity.switched_on():
        run.wire = identity.hash_messages()
    _record_saves(run)
    built = _record_training(run)
    over_nccl = shlex.split("--distributed-backend nccl") if os.environ["OPTIMUS_CC_DEVICE"] != "cpu" else []
    sys.argv = ["pretrain_gpt.py", *TINY_GPT, *over_nccl, *argv]
    if {"--save", "torch_dist"} <= {*argv}:
        _fork_the_writers_queue()
    if before is not None:
        before()
    if entry is None:
        # imported here, because an older Megatron lacks modules that this entry needs, and runs another entry
        from optimus_cc_ext.tools import pretrain_gpt

        entry = pretrain_gpt.main
    try:
        entry()
    except SystemExit as ended:
        run.ended = ended.code or None  # an exit status of 0 means that --exit-interval ended the run
    except OptimusError as error:
        run.ended = str(error)
    if built and torch.distributed.is_initialized():  # a rank that has left the others has no place any more
        model, optimizer, _ = built
        _record_end(run, model)
        run.probed = None if probe is None else probe(model, optimizer)
    return run


def _fork_the_writers_queue() -> None:
    """Fork the server of the writer's queue; started afresh, as by Megatron, it would import Megatron at the first
    save.
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue

    get_write_results_queue(mp_mode="fork")


class _Tee:
    """Stream that notes whole lines and passes them on to another stream."""

    def __init__(self, stream: TextIO) -> None:
        self.lines: list[str] = []
        self._stream, self._rest = stream, ""

    def write(self, text: str) -> int:
        *whole, self._rest = (self._rest + text).split("\n")
        self.lines += whole
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _record_training(run: MegatronRun) -> list[Any]:
    """Record every step and evaluation; the returned list will hold model, optimizer and scheduler."""
    from megatron.training import training

    built: list[Any] = []
    train, evaluate, setup = training.train, training.evaluate, training.setup_model_and_optimizer
    get_schedule = training.get_forward_backward_func

    @functools.wraps(train)
    def recording_train(*args: Any, **kwargs: Any) -> Any:
        # Our hook wraps train_step once the flags are known; the record is taken around the hook.
        training.train_step = _recording_step(run, training.train_step, built)
        result = train(*args, **kwargs)
        # Megatron's last save, which comes next, may change the gradients.
        trained = (item for item in named_parameters(built[0]) if hasattr(item[1], "main_grad"))  # FSDP2 has none
        run.gradients = {name: hash_of(p.main_grad) for name, p in trained}
        return result

    @functools.wraps(evaluate)
    def recording_evaluate(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        run.evaluation_losses.append(_loss(result[0]))
        return result

    @functools.wraps(setup)
    def recording_setup(*args: Any, **kwargs: Any) -> Any:
        built[:] = setup(*args, **kwargs)
        return tuple(built)

    @functools.wraps(get_schedule)
    def counting_schedule(*args: Any, **kwargs: Any) -> Any:
        forward_backward = get_schedule(*args, **kwargs)

        @functools.wraps(forward_backward)
        def counted(**arguments: Any) -> Any:
            run.passes += not arguments.get("forward_only")
            return forward_backward(**arguments)

        return counted

    training.train, training.evaluate, training.setup_model_and_optimizer = (
        recording_train, recording_evaluate, recording_setup,
    )  # fmt: skip
    training.get_forward_backward_func = counting_schedule
    return built


def _recording_step(run: MegatronRun, original: Any, built: list[Any]) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        model, *_ = built
        scale = float(signature.bind(*args, **kwargs).arguments["optimizer"].get_loss_scale())
        counted = identity.switched_on() and len(run.steps) == 2
        with identity.counting_calls(run.calls) if counted else contextlib.nullcontext():
            result = original(*args, **kwargs)
        run.losses.append(_loss(result[0]))
        run.grad_norms.append(None if result[GRAD_NORM] is None else float(result[GRAD_NORM]))
        run.random_states.append(_random_state())
        session = recording.current()
        memory = [] if session is None else list(recording.memory(session, scale))
        weights = hashlib.sha256("".join(hash_of(p) for chunk in model for p in chunk.parameters()).encode())
        run.steps.append(
            Step(
                skipped=bool(result[SKIPPED]),
                loss_scale=scale,
                weights=weights.hexdigest(),
                memory=[hash_of(t) for t in memory],
                memory_norms=[float(t.double().norm()) for t in memory],
            )
        )
        return result

    return train_step


def _record_saves(run: MegatronRun) -> None:
    """Record the files that every save leaves behind, and when."""
    from megatron.training import checkpointing, get_args

    tracker_name, schedule = checkpointing.get_checkpoint_tracker_filename, checkpointing.schedule_async_save

    def state(folder: str) -> dict[str, Any]:
        tracker = Path(tracker_name(folder))
        return {
            "whole": [p.parent.parent.name for p in sorted(Path(folder).glob("iter_*/optimus_cc/topology.json"))],
            "tracker": tracker.read_text() if tracker.exists() else None,
        }

    @functools.wraps(tracker_name)
    def noting_tracker(checkpoints_path: str) -> str:
        run.saves.append({"tracker's turn": state(checkpoints_path)})
        return tracker_name(checkpoints_path)

    @functools.wraps(schedule)
    def noting_schedule(request: Any) -> None:
        folder = get_args().save
        run.saves.append({"background": state(folder)})
        request.finalize_fns[:] = [noting(folder, finish) for finish in request.finalize_fns]
        schedule(request)

    def noting(folder: str, finish: Callable[[], None]) -> Callable[[], None]:
        def finish_and_note() -> None:
            finish()
            run.saves.append({"finished": state(folder)})

        return finish_and_note

    checkpointing.get_checkpoint_tracker_filename = noting_tracker
    checkpointing.schedule_async_save = noting_schedule


def _record_end(run: MegatronRun, model: list[torch.nn.Module]) -> None:
    from megatron.core import parallel_state

    run.stage = parallel_state.get_pipeline_model_parallel_rank()
    run.tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    run.data_rank = parallel_state.get_data_parallel_rank()
    parameters = dict(named_parameters(model))
    run.weights = {name: hash_of(p) for name, p in parameters.items()}
    run.gradient_bytes = {name: p.main_grad.nbytes for name, p in parameters.items() if hasattr(p, "main_grad")}
    run.tied = {name: run.weights[name] for name, p in parameters.items() if getattr(p, "shared_embedding", False)}
    run.split_over_tensor_ranks = {n: bool(getattr(p, "tensor_model_parallel", False)) for n, p in parameters.items()}
    with_buckets = [chunk for chunk in model if hasattr(chunk, "bucket_groups")]
    run.buckets = sum(len(group.buckets) for chunk in with_buckets for group in chunk.bucket_groups)
    run.expert_buckets = sum(len(chunk.expert_parallel_bucket_groups) for chunk in with_buckets)
    if (session := recording.current()) is not None:
        run.ours = recording.read(session)


def named_parameters(model: list[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters, with the number of the model chunk in front of their names."""
    return ((f"{index}.{name}", p) for index, chunk in enumerate(model) for name, p in chunk.named_parameters())


def _random_state() -> str:
    """Return sha256 of the states of all generators that training draws from; dropout, on a CPU, draws from
    torch's own.
    """
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    states = [torch.get_rng_state(), *get_cuda_rng_tracker().get_states().values()]
    others = pickle.dumps((numpy.random.get_state(), random.getstate()))
    return hashlib.sha256("".join(map(hash_of, states)).encode() + others).hexdigest()


def last_stage_losses(runs: Sequence[MegatronRun]) -> list[float]:
    """Return the training losses, after checking that all ranks that have them have the same."""
    known = [run.losses for run in runs if None not in run.losses]
    assert known and all(losses == known[0] for losses in known), "last-stage ranks disagree about the loss"
    return [loss for loss in known[0] if loss is not None]


def relative_gap(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference between two loss curves of equal length."""
    assert len(losses) == len(expected) > 0
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def _loss(losses: dict[str, Any]) -> float | None:
    value = losses.get("lm loss") if losses else None
    return None if value is None else float(value)
