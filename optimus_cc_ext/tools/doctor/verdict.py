"""Verdict on a command line, from Megatron's own argument validation with ours around it."""

import argparse
import contextlib
import io
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from optimus_cc_ext.errors import FlagError, OptimusError
from optimus_cc_ext.patching import Patches
from optimus_cc_ext.techniques.schedule import NonInterleaved, Schedule
from optimus_cc_ext.tools.doctor.command_line import CommandLine
from optimus_cc_ext.tools.doctor.shapes import fake_world
from optimus_cc_ext.tools.doctor.target import HERE, KNOWN_VARIABLES, listed, missing
from optimus_cc_ext.tools.plan import PlanError
from optimus_cc_ext.tools.plan.memory import activation_bytes
from optimus_cc_ext.tools.plan.model import Job
from optimus_cc_ext.tools.plan.shapes import Latent, Mixture, Model

_OURS = "optimus-cc: "


@dataclass
class Verdict:
    """The way in which training would begin, or end before its first iteration."""

    exit_code: int = 0
    """Exit status with which training would end before its first iteration; 0: training would begin."""

    reason: str = ""
    """The reason why training would not begin."""

    notes: list[str] = field(default_factory=list)
    """Lines that training would print before its first iteration."""

    args: argparse.Namespace | None = None
    refused: argparse.Namespace | None = None
    """Megatron's arguments where Megatron takes them and we refuse a flag."""

    known: bool = True
    """False if nothing can be said, because arguments come from a checkpoint that is not here."""


class _NotHere(OptimusError):
    """A checkpoint whose arguments cannot be read on this machine."""


def validate(line: CommandLine, world_size: int, target: str = HERE) -> Verdict:
    """Parse and validate a command line as rank 0 of `world_size` processes; this process cannot be used further
    afterwards.

    Megatron ends the process in several ways (assertions, exit(), errors of its parser); all of them are caught. An
    environment variable that the line does not give is unknown on another machine than this one: it takes the value
    that Megatron asks for, and a note names that value.
    """
    from optimus_cc_ext.hooks import start

    if refusal := _not_launched_by_us(line):
        return Verdict(2, str(refusal))
    sys.argv = [line.script or "pretrain_gpt.py", *line.flags]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world_size))
    os.environ.update(line.environment)
    start()
    unknown = {} if target == HERE else {k: v for k, v in KNOWN_VARIABLES.items() if k not in line.environment}
    needed: list[str] = []
    while True:
        verdict = _one_validation(line, target)
        name = next((name for name in unknown if verdict.exit_code and name in verdict.reason), None)
        if name is None:
            break
        os.environ[name] = unknown.pop(name)
        needed.append(f"{name}={os.environ[name]}")
    if needed:
        verdict.notes.append(
            f"{target} needs the environment variables {', '.join(needed)}, which the launch line does not set"
        )
    return verdict


def _one_validation(line: CommandLine, target: str) -> Verdict:
    from megatron.training import arguments

    output, verdict, args = io.StringIO(), Verdict(), argparse.Namespace()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            args = arguments.parse_args(_flags_of_script(line))
            if getattr(args, "use_checkpoint_args", False):
                _take_arguments_of_checkpoint(args, target)
            arguments.validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
            verdict.args = args
            _what_follows(args, line, target)
        except _NotHere as error:
            verdict.exit_code, verdict.reason, verdict.known = 2, str(error), False
        except SystemExit as ended:
            verdict.exit_code = ended.code if isinstance(ended.code, int) else 1
            verdict.reason = _last_line(output.getvalue())
            verdict.refused = args if hasattr(args, "data_parallel_size") else None
        except Exception as error:
            verdict.exit_code, verdict.reason = 1, f"Megatron: {in_words(error)}"
    said = (text.removeprefix(_OURS) for text in output.getvalue().splitlines() if text.startswith(_OURS))
    verdict.notes = [text for text in said if not text.startswith("error: ") and " on megatron-core " not in text]
    if verdict.args is not None:
        verdict.notes += _about_the_target(verdict.args, line, target)
    return verdict


def _take_arguments_of_checkpoint(args: argparse.Namespace, target: str) -> None:
    """Let Megatron take the arguments that it would take from a checkpoint, as it does before it validates them."""
    from megatron.training.checkpointing import load_args_from_checkpoint

    for name in ("pretrained_checkpoint", "load"):
        folder = getattr(args, name, None)
        if folder and target != HERE and not Path(folder, "latest_checkpointed_iteration.txt").is_file():
            raise _NotHere(
                "no verdict: with --use-checkpoint-args the sizes come from a checkpoint, and on this machine there is "
                f"none in {folder}. Run doctor where it is, or give the sizes on the line instead"
            )
        load_args_from_checkpoint(args, load_arg=name)


def _flags_of_script(line: CommandLine) -> Callable[[Any], Any] | None:
    """Return the function that adds Model Optimizer's flags; None if the checkout's script or Megatron has none. The
    function needs no package.
    """
    script = Path(line.script) if line.script is not None else None
    if script is None or not script.is_file() or "add_modelopt_args" not in script.read_text(errors="replace"):
        return None
    try:
        from megatron.post_training.arguments import add_modelopt_args
    except ImportError:
        return None
    return add_modelopt_args  # type: ignore[no-any-return]


def _about_the_target(args: argparse.Namespace, line: CommandLine, target: str) -> Iterator[str]:
    """Yield the lines about what the machine that trains needs beside this command line."""
    if target != HERE and (packages := missing(args)):
        yield f"not installed here, and needed on the machine that trains: {listed(packages)}"
    if not line.launched and (refusal := _entrys_refusal(args)):
        yield f"{refusal.flag}: the built-in entry cannot run this line; a checkout's pretrain_gpt.py can"


def _not_launched_by_us(line: CommandLine) -> FlagError | None:
    """Return a refusal if plain `torchrun pretrain_gpt.py` is used and the checkout is not patched for our flags."""
    if line.ours or line.script is None or not Path(line.script).is_file():
        return None
    if "optimus_cc_ext" in Path(line.script).read_text(errors="replace"):
        return None
    reason = "the script is not patched, so it does not know Optimus-CC's flags"
    return FlagError(line.script, reason, f"Launch it by -m optimus_cc_ext {line.script}, or patch the checkout")


_WHEN_BUILT: tuple[tuple[Callable[[Any], Any], str], ...] = (
    (
        lambda args: args.calculate_per_token_loss and args.ddp_average_in_collective,
        "Cannot average in collective when calculating per-token loss!",
    ),
    (
        lambda args: args.use_distributed_optimizer and args.optimizer == "sgd",
        "--use-distributed-optimizer: only Adam and optimizers with an init_state_fn are supported, not SGD",
    ),
    (
        lambda args: args.moe_shared_expert_intermediate_size is not None and args.add_bias_linear,
        "bias is not supported in the shared experts, please set '--disable-bias-linear' instead.",
    ),
    (
        lambda args: args.multi_latent_attention and args.transformer_impl == "local",
        "--multi-latent-attention: the local DotProductAttention does not take it; it needs Transformer Engine",
    ),
    (
        lambda args: (
            args.num_experts and isinstance(args.moe_layer_freq, list) and len(args.moe_layer_freq) != args.num_layers
        ),
        "--moe-layer-freq: the list has another length than --num-layers",
    ),
)
"""Conditions on which Megatron ends only when it builds model, buffers or optimizer, with its message: in
core/distributed/distributed_data_parallel.py, core/optimizer/distrib_optimizer.py,
core/transformer/moe/shared_experts.py, core/transformer/multi_latent_attention.py and
core/models/gpt/gpt_layer_specs.py.
"""


def _what_follows(args: argparse.Namespace, line: CommandLine, target: str) -> None:
    """Run the checks that training makes after it has validated its arguments and before it contacts other ranks."""
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator
    from megatron.training import training
    from megatron.training.arguments import core_transformer_config_from_args

    if getattr(args, "step_batch_size_schedule", None) is None and getattr(args, "rampup_batch_size", None) is None:
        ConstantNumMicroBatchesCalculator(
            args.global_batch_size, args.micro_batch_size, args.data_parallel_size,
            getattr(args, "decrease_batch_size_if_needed", False), args.rank,
        )  # fmt: skip
    if line.script is None and line.launched and (refusal := _entrys_refusal(args)):
        print(refusal, flush=True)
        raise SystemExit(2)
    core_transformer_config_from_args(args)
    for name in ("get_megatron_optimizer_config", "get_megatron_ddp_config"):
        if hasattr(training, name):  # Megatron 0.17 has neither function
            getattr(training, name)(args)
    for ends, reason in _WHEN_BUILT:
        if ends(args):
            raise AssertionError(reason)
    _make_groups(args)
    if target == HERE and (packages := missing(args)):
        print(f"{', '.join(packages)}: not installed, and needed for this command line", flush=True)
        raise SystemExit(1)


class _Members(NamedTuple):
    """Stand-in for a process group: making thousands of real ones, even of torch's fake ones, takes a minute."""

    ranks: Sequence[int]

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(0) if 0 in self.ranks else -1


def _make_groups(args: argparse.Namespace) -> None:
    """Let Megatron make the process groups of rank 0 in a world of fake ranks; it raises an error for a bad layout."""
    from megatron.training import initialize

    for flag, allowed in (("rerun_mode", "RerunMode"), ("error_injection_type", "RerunDiagnostic")):
        try:
            getattr(initialize, allowed)(getattr(args, flag))
        except ValueError as error:
            raise ValueError(f"--{flag.replace('_', '-')}: {error}") from error
    with fake_world(0, args.world_size), Patches() as patches:
        patches.replace(initialize, "get_args", lambda: args)
        patches.replace(dist, "new_group", lambda ranks=None, **_: _Members(tuple(ranks or range(args.world_size))))
        patches.replace(dist, "barrier", lambda *_, **__: None)
        initialize._initialize_distributed(None, None, None)


def _entrys_refusal(args: argparse.Namespace) -> FlagError | None:
    """Return the built-in entry's refusal of a line, or None."""
    try:
        from optimus_cc_ext.tools.pretrain_gpt import refuse_unsupported

        refuse_unsupported(args)
    except FlagError as error:
        return error
    except ImportError:
        return None  # this Megatron lacks modules of the built-in entry: only a checkout's script runs there
    return None


def _last_line(output: str) -> str:
    """Return the line of the captured output that says why the process ended."""
    lines = [line for line in output.splitlines() if line.strip()] or ["training ended without a message"]
    return lines[-1].removeprefix(_OURS).removeprefix("error: ").split(": error: ")[-1]


def in_words(error: Exception) -> str:
    """Return an exception's message, or its type and line: the condition of an assertion without a message."""
    if str(error) and not isinstance(error, ArithmeticError | LookupError | TypeError | AttributeError):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {frame.line} ({Path(frame.filename).name}:{frame.lineno})"


def schedule_from(args: argparse.Namespace, micro_batches: int) -> Schedule:
    """Return the 1F1B schedule that these arguments ask for."""
    from optimus_cc_ext.hooks.schedules import interleaved_schedule

    stages, chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    if chunks == 1:
        return NonInterleaved(stages, micro_batches)
    return interleaved_schedule(stages, chunks, micro_batches, args.microbatch_group_size_per_vp_stage or stages)


def memory_bytes(args: argparse.Namespace, micro_batches: int) -> dict[str, float]:
    """Return the bytes of memory of the rank that needs most: weights, gradients and optimizer by Megatron's own
    estimate, activations by the planner's.

    Megatron's theory of activations knows neither sequence parallelism without selective recomputation nor full
    recomputation. The result is empty where Megatron has no formula.
    """
    from megatron.training import theoretical_memory_usage as theory

    copy = argparse.Namespace(**vars(args))  # Megatron's estimate changes the arguments
    if copy.padded_vocab_size is None:
        copy.padded_vocab_size = copy.vocab_size or 0
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            weights = theory.compute_weight_and_optimizer_memory(copy)
    except Exception:
        return {}  # Megatron has no formula for hybrid and some other models
    found = {"weights, gradients and optimizer": float(weights)}
    with contextlib.suppress(PlanError):  # raised if heads or micro-batches do not divide
        found["activations"] = activation_bytes(_job_of(copy, micro_batches))
    return found


def _job_of(args: argparse.Namespace, micro_batches: int) -> Job:
    """Return one replica of the run for the planner. Each stage has as many layers as the largest one."""
    stages, chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    layers, tp = -(-args.num_layers // (stages * chunks)) * stages * chunks, args.tensor_model_parallel_size
    ep, etp = args.expert_model_parallel_size, args.expert_tensor_parallel_size or tp
    mixture = latent = None
    if args.num_experts:
        mixture = Mixture(
            experts=args.num_experts, top_k=args.moe_router_topk, ffn=args.moe_ffn_hidden_size, layers=layers,
            shared=args.moe_shared_expert_intermediate_size or 0,
        )  # fmt: skip
    if args.multi_latent_attention:
        latent = Latent(
            query_rank=args.q_lora_rank or 0, key_value_rank=args.kv_lora_rank, head=args.qk_head_dim,
            positions=args.qk_pos_emb_head_dim, value=args.v_head_dim,
        )  # fmt: skip
    model = Model(
        layers=layers, hidden=args.hidden_size, heads=args.num_attention_heads, ffn=args.ffn_hidden_size,
        groups=args.num_query_groups if args.group_query_attention else 0, head_size=args.kv_channels,
        sequence=args.seq_length // args.context_parallel_size, vocabulary=args.padded_vocab_size,
        gated=args.swiglu, mixture=mixture, latent=latent,
    )  # fmt: skip
    ranks = math.lcm(tp, ep * etp) if mixture else tp
    recompute = {"full": "full", "selective": "sel"}.get(args.recompute_granularity, "none")
    backend = getattr(args.attention_backend, "name", str(args.attention_backend))
    return Job(
        model=model, gpus=ranks * stages, tp=tp, pp=stages, vpp=chunks, ep=ep if mixture else 1, etp=etp,
        micro_batch=args.micro_batch_size, batch=args.micro_batch_size * micro_batches * (ranks // tp),
        recompute=recompute, sequence_parallel=args.sequence_parallel,  # type: ignore[arg-type]
        recompute_layers=args.recompute_num_layers or 0 if args.recompute_method == "block" else 0,
        recomputed=tuple(getattr(args, "recompute_modules", None) or ()) if recompute == "sel" else (),
        precision="fp8" if args.fp8 else "bf16", flash=backend not in ("unfused", "local"),
    )  # fmt: skip
