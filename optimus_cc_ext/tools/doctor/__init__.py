"""`optimus-cc doctor`: checks whether this machine, and a launch line on it, would train, and estimates the traffic.

May import the whole package, but nothing may import it, except `cli`. Start reading at `examine`, below; `verdict.py`
runs Megatron's own validation, `estimate.py` computes bytes.
"""

import argparse
import dataclasses
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from optimus_cc_ext.announce import COMPRESSION_STATE
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import CLASSES, TrafficClass
from optimus_cc_ext.config.presets import Layout, cost_of_shards, describe, share_of_copies
from optimus_cc_ext.errors import FlagError, OptimusError, require_megatron, require_torch
from optimus_cc_ext.placement import Placement, placement_line
from optimus_cc_ext.tools.doctor.command_line import CommandLine, read_command_line
from optimus_cc_ext.tools.doctor.findings import Diagnosis, Finding
from optimus_cc_ext.tools.doctor.machine import find_checkout, kernels, packages, seams
from optimus_cc_ext.tools.doctor.target import HERE, check_target, default_target, emulate

__all__ = ["examine"]

REFUSED = 2
"""Exit status of training that is ended by a refusal of Optimus-CC or by Megatron's parser."""


def examine(
    words: Sequence[str],
    world_size: int | None = None,
    ranks_per_node: int | None = None,
    target: str | None = None,
) -> Diagnosis:
    """Examine this machine and, if `words` is not empty, a command line.

    Args:
        words: flags of Megatron's and ours, or a whole launch line, with variables in front of it.
        world_size: processes of the run; None: the number in the command line, else one.
        ranks_per_node: processes on each node; None: the number in the command line, else 8.
        target: the machine that will train, one of `doctor.target.TARGETS`; None: `here` if this machine has a usable
            GPU, otherwise h100. Without a command line this machine is examined.
    """
    broken = REFUSED if words else 1
    try:
        line = read_command_line(words)
        if line.uncounted is not None and world_size is None:
            raise line.uncounted
        find_checkout(line.script)
        require_torch()
        target = (target or default_target()) if words else HERE
        check_target(target)
        device = _prepare(target)
    except FlagError as error:
        return Diagnosis(Finding("flags", str(error), "FAIL"), REFUSED, packages())
    except (OptimusError, RuntimeError, ValueError) as error:
        return Diagnosis(Finding("this machine", str(error), "FAIL"), broken, packages())
    machine = [*packages(), Finding("device", device, "ok"), kernels(), *seams()]
    for finding in machine:
        if finding.mark == "FAIL":
            verdict = Finding("this machine", f"{finding.subject}: {finding.state}", "FAIL")
            return Diagnosis(verdict, broken, [other for other in machine if other is not finding])
    if not words:
        return Diagnosis(Finding("this machine", f"training would start: {device}", "ok"), 0, machine)
    report = _examine_line(
        line,
        target,
        world_size if world_size is not None else line.world_size,
        ranks_per_node or line.ranks_per_node or 8,
    )
    seam = [finding for finding in machine if finding.subject.startswith("seam ")]
    report.findings += [finding for finding in machine if finding not in seam]
    report.findings.append(Finding("seams", f"all {len(seam)} functions of Megatron to wrap are as expected", "ok"))
    return report


def _prepare(target: str) -> str:
    """Choose the device as training would on the target; return the line about the device.

    Raises:
        OptimusError: Megatron is missing; the message names the cure.
    """
    from optimus_cc_ext.tools.cpu import cpu_runtime

    require_megatron()
    if target == HERE:
        return cpu_runtime.activate().removeprefix("optimus-cc: ")
    emulate(target)
    return f"judged for {target}, which need not be here; --target here judges this machine"


def _examine_line(line: CommandLine, target: str, world_size: int | None, ranks_per_node: int) -> Diagnosis:
    from optimus_cc_ext.collectives.nodes import rdma_cards
    from optimus_cc_ext.hooks import launched
    from optimus_cc_ext.hooks.facts import layout_from
    from optimus_cc_ext.tools.doctor.estimate import places_of
    from optimus_cc_ext.tools.doctor.tokens import about_dispatchers
    from optimus_cc_ext.tools.doctor.verdict import in_words, validate

    verdict = validate(line, 1 if world_size is None else world_size, target)
    notes = [Finding("note", note) for note in verdict.notes]
    if line.script is not None and not Path(line.script).is_file():
        notes.append(
            Finding(
                "script", f"{line.script} is not on this machine, so flags that it adds or checks are unknown", "warn"
            )
        )
    if verdict.exit_code:
        reason = verdict.reason
        if world_size is None and verdict.args is None:
            reason += "\n(checked for one process: give --world-size N, or the whole torchrun or srun line)"
        if line.script is not None and ("unrecognized arguments" in reason or "did you mean" in reason):
            reason += f"\n({Path(line.script).name} may have flags of its own: doctor knows those of Megatron's parser)"
        mark: Literal["FAIL", "warn"] = "FAIL" if verdict.known else "warn"
        if (args := verdict.refused) is not None and args.num_experts:
            notes += about_dispatchers(args, places_of(_placement(args, ranks_per_node)), layout_from(args))
        return Diagnosis(Finding(target, reason, mark), verdict.exit_code, notes, {"target": target})
    launch, args = launched(), verdict.args
    assert launch is not None and launch.config is not None and launch.layout is not None and args is not None
    config, layout = launch.config, launch.layout
    placement = _placement(args, ranks_per_node)
    try:
        lines, inside = _lines_about_nodes(config, placement, layout, rdma_cards() if target == HERE else 0)
    except FlagError as error:
        return Diagnosis(Finding(target, str(error), "FAIL"), REFUSED, notes, {"target": target})
    try:
        numbers, estimates = _estimated(args, layout, config, placement, here=target == HERE)
    except _CannotTrain as error:
        return Diagnosis(Finding(target, f"Megatron: {error}", "FAIL"), 1, notes, {"target": target})
    except Exception as error:  # the line trains, whatever its estimates need
        numbers, estimates = {}, [Finding("estimates", f"none: {in_words(error)}", "warn")]
    state = numbers.get("memory_per_rank", {}).get(COMPRESSION_STATE, 0) // 2  # kept twice in memory
    saves = _saves(args, config, placement, state * args.world_size, here=target == HERE)
    if saves and saves[0].mark == "FAIL":
        return Diagnosis(dataclasses.replace(saves[0], subject=target), REFUSED, notes, {"target": target})
    placed = [Finding("placement", placement_line(placement).removeprefix("placement "))] if args.world_size > 1 else []
    placed += [Finding("nodes", line) for line in lines]
    formats = {traffic.tag: config.format_of(traffic) for traffic in CLASSES}
    travels = ", ".join(
        f"{each.tag} {'dense (inside nodes)' if each in inside else config.format_of(each)}" for each in CLASSES
    )
    return Diagnosis(
        Finding(target, f"training would start: {describe(config, inside)}", "ok"),
        findings=[
            Finding("formats", travels),
            Finding("layout", _layout(args)),
            *placed,
            *_shards(args, config),
            *saves,
            *notes,
            *estimates,
        ],
        facts={
            "target": target,
            "formats": formats,
            "world_size": args.world_size,
            "config": dataclasses.asdict(config),
            "layout": dataclasses.asdict(layout),
            **numbers,
        },
    )


def _layout(args: argparse.Namespace) -> str:
    sizes = {"tensor": args.tensor_model_parallel_size, "pipeline": args.pipeline_model_parallel_size,
             "context": args.context_parallel_size, "data": args.data_parallel_size}  # fmt: skip
    grid = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "no parallelism"
    experts = f", expert {args.expert_model_parallel_size}" if args.expert_model_parallel_size > 1 else ""
    return f"{args.world_size} ranks: {grid}{experts}; {_micro_batches(args)} micro-batches an iteration"


def _placement(args: argparse.Namespace, ranks_per_node: int) -> Placement:
    return Placement(
        tensor=args.tensor_model_parallel_size, context=args.context_parallel_size, data=args.data_parallel_size,
        pipeline=args.pipeline_model_parallel_size, ranks_per_node=ranks_per_node,
        pipeline_before_data=args.use_tp_pp_dp_mapping,
        expert=args.expert_model_parallel_size if args.num_experts else 1,
        expert_tensor=args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
    )  # fmt: skip


def _lines_about_nodes(
    config: OptimusConfig, placement: Placement, layout: Layout, cards: int
) -> tuple[list[str], frozenset[TrafficClass]]:
    """Return the lines that the run would log about traffic inside nodes and about levels, and the classes that are
    left dense because nothing of them leaves a node.

    Raises:
        FlagError: two levels are asked for, and no group of replicas has them.
    """
    from optimus_cc_ext.techniques.crossing import crossing_lines, exchange_lines, left_dense
    from optimus_cc_ext.tools.doctor.estimate import places_of

    if not config.any_technique:
        return [], frozenset()
    places = places_of(placement)
    whole = len({place.node for place in places}) == 1 and len(places) > 1
    lines = ["the whole job fits one node: nothing leaves it"] if whole else []
    lines += crossing_lines(config, places, layout.instances)
    lines += exchange_lines(config, places, layout, cards)
    return lines, left_dense(config, places, layout.instances)


def _shards(args: argparse.Namespace, config: OptimusConfig) -> list[Finding]:
    """Return the finding about shards that begin where kernels cannot load 16 bytes at once; empty: there are none."""
    if not args.use_distributed_optimizer or args.ddp_pad_buckets_for_high_nccl_busbw:
        return []
    cost = cost_of_shards(config, args.data_parallel_size * args.context_parallel_size)
    return [] if cost is None else [Finding("shards", cost)]


def _saves(
    args: argparse.Namespace, config: OptimusConfig, placement: Placement, nbytes: float, *, here: bool
) -> list[Finding]:
    """Return the findings about the folder to which ranks save their state: `nbytes` or less of all ranks together."""
    if not args.save or not any(map(config.remembers, CLASSES)):
        return []
    folder = Path(args.save).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if here and not os.access(there, os.W_OK):
        return [Finding("saves", f"--save: {there} cannot be written, and low rank has a state to save", "FAIL")]
    found = []
    if args.world_size > placement.ranks_per_node:
        found.append(Finding("saves", f"all nodes have to see {folder}: each rank writes its state there"))
    if here and (free := shutil.disk_usage(there).free) < nbytes:
        room = f"{_size(free)} are free in {there}, and the state takes at most {_size(nbytes)}"
        found.append(Finding("saves", room, "warn"))
    return found


def _micro_batches(args: argparse.Namespace) -> int:
    return int(max(1, args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)))


class _CannotTrain(OptimusError):
    """A model that Megatron cannot build on the machine that trains it."""


def _estimated(
    args: argparse.Namespace, layout: Layout, config: OptimusConfig, placement: Placement, *, here: bool
) -> tuple[dict[str, Any], Sequence[Finding]]:
    """Return the estimates twice: as numbers of bytes for JSON, and as findings, with warnings.

    Args:
        here: True if this machine trains.
    """
    import torch

    from optimus_cc_ext.tools.doctor.estimate import (
        OnNodes,
        bytes_by_class,
        gpt_from,
        places_of,
        tokens_of,
        without_gain,
    )
    from optimus_cc_ext.tools.doctor.memory import compression_memory
    from optimus_cc_ext.tools.doctor.shapes import NotBuilt
    from optimus_cc_ext.tools.doctor.tokens import about_dispatchers
    from optimus_cc_ext.tools.doctor.verdict import in_words, memory_bytes, schedule_from

    micro_batches, found = _micro_batches(args), []
    memory = memory_bytes(args, micro_batches)
    numbers: dict[str, Any] = {"memory_per_rank": memory}
    local, gpt = here and args.transformer_impl == "local", None
    try:
        gpt = gpt_from(args, trained_here=local)
    except Exception as error:  # Megatron's model code raises errors of many classes
        if local and not isinstance(error, NotBuilt):
            raise _CannotTrain(in_words(error)) from error
        said = f"not estimated, nor the memory of compression: {in_words(error)}"
        found.append(Finding("traffic", said, "warn"))
    if gpt is not None:
        asked = gpt, layout, config, schedule_from(args, micro_batches)
        places = places_of(placement)
        on = OnNodes.of(config, places, layout)
        found += about_dispatchers(args, places, layout)
        if (tokens := tokens_of(gpt, layout)) is not None:
            share = share_of_copies(layout.routing, on.experts.nodes) if on.experts.two else None
            found += [Finding("tokens", line) for line in tokens.lines(config, share)]
            if on.experts.two and args.moe_shared_expert_overlap:
                said = (
                    "--moe-shared-expert-overlap: with CUDA_DEVICE_MAX_CONNECTIONS=1 the second hop of a token waits "
                    "for the first one in the only queue, and shared experts wait behind it"
                )
                found.append(Finding("tokens", said))
        memory |= compression_memory(*asked, on, nccl=args.distributed_backend == "nccl")
        traffic = bytes_by_class(*asked, on)
        numbers["bytes_per_iteration"] = {name: {"raw": raw, "sent": sent} for name, (raw, sent) in traffic.items()}
        numbers["parameters_by_stage"] = [sum(math.prod(each.shape) for each in stage) for stage in gpt.stages]
        found += [Finding("flags", text, "warn") for text in without_gain(*asked)]
        found += [
            Finding("bytes per iteration", f"{name}: {_size(sent)} of {_size(raw)} ({100 * sent / raw:.1f} %)")
            for name, (raw, sent) in traffic.items()
        ]
    needed, kinds = sum(memory.values()), (f"{name} {_size(nbytes)}" for name, nbytes in memory.items() if nbytes)
    there = torch.cuda.get_device_properties(0).total_memory
    if needed > there:
        found.append(Finding("memory", f"{_size(needed)} a rank is more than the {_size(there)} of the target", "warn"))
    said = f"at most {', '.join(kinds)} (estimates: Megatron's, for activations the planner's, for compression ours)"
    return numbers, [*found, Finding("memory per rank", said)]


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.3f} MB"
