"""Agreement of all ranks of a model before any of them sends: on their settings, and on all that equal bits depend
on.
"""

import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace

import torch
import torch.distributed as dist

from optimus_cc_ext.collectives.nodes import VARIABLE, nodes_line, this_node
from optimus_cc_ext.compressors import fast
from optimus_cc_ext.compressors.formats import EXACT, SUM_FORMAT, block_format
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import CLASSES, PARAM_GATHER, classes_among
from optimus_cc_ext.config.options import flag_of
from optimus_cc_ext.config.presets import Layout
from optimus_cc_ext.errors import FlagError, RanksDisagree
from optimus_cc_ext.techniques.grid import Grid, RankPlace
from optimus_cc_ext.techniques.groups import names_of
from optimus_cc_ext.techniques.state import state_dtype

_CURE = (
    "Give every node a GPU, Triton, a C compiler, Python's headers and a folder for compiled kernels "
    "(docs/troubleshooting.md)"
)


@dataclass(frozen=True)
class Machine:
    """Software and hardware with which one rank computes and sends. Equal inputs give equal bits only if all of it is
    equal.
    """

    processor: str
    """Model of the GPU, by which libraries choose their kernels; "cpu" for all CPUs."""

    torch: str
    kernels: str
    """Library that compresses: Triton with its version, or torch."""

    backend: str
    """Backend of the default process group."""


def agree(grid: Grid, config: OptimusConfig, layout: Layout | None) -> tuple[list[RankPlace], list[str], str | None]:
    """Return everyone's place in the grid, log lines, and the reason why torch computes in place of Triton's kernels.

    Collective over all ranks of the model. Kernels that do not work on one rank are used on none.

    Raises:
        RanksDisagree: on all ranks: two run with different settings, or compute with what gives different bits, or
            one of them did not come; or OPTIMUS_CC_NODE is set for some of them only.
        FlagError: on all ranks: kernels are not available on one of them, and `require_triton` is set.
    """
    kernels, failure = fast.kernels(_needed(config, grid, layout))
    if failure is None and kernels == "torch" and config.require_triton:
        failure = "there is no GPU"
    rank = dist.get_rank()
    place = replace(
        grid.place, names=names_of(rank), node=this_node(rank),
        pipeline=() if grid.pipeline_group is None else tuple(dist.get_process_group_ranks(grid.pipeline_group)),
        experts=() if grid.expert_group is None else tuple(dist.get_process_group_ranks(grid.expert_group)),
    )  # fmt: skip
    where = failure and f"on rank {rank} on {socket.gethostname()} ({failure})"
    mine = (place, config, layout, _machine(kernels), where)
    grid.meet()
    everyone = grid.gather(mine)
    # All ranks compare with the first one, and so name the same pair.
    first, first_config, first_layout, *_ = everyone[0]
    for other, other_config, other_layout, *_ in everyone:
        if different := [*_different(first_config, other_config), *_different(first_layout, other_layout)]:
            raise RanksDisagree(
                f"rank {first.rank} and rank {other.rank} run with different settings: {', '.join(different)}. "
                "Start all ranks with the same flags."
            )
    places = [other for other, *_ in everyone]
    named, unnamed = ([other.rank for other in places if other.node.chosen is chosen] for chosen in (True, False))
    if named and unnamed:
        raise RanksDisagree(
            f"{VARIABLE} is set on rank {named[0]} and not on rank {unnamed[0]}: which ranks share a node is not "
            "known. Set it on all ranks, or on none."
        )
    fallen = [where for *_, where in everyone if where is not None]
    others = f" and on {len(fallen) - 1} more" if len(fallen) > 1 else ""
    fallback = f"Triton's kernels do not work {fallen[0]}{others}" if fallen else None
    if fallback is not None:
        if config.require_triton:
            raise FlagError("--require-triton", fallback, f"{_CURE}, or leave the flag out")
        fast.use_torch()
    for other, _, _, machine, _ in everyone:
        for name, value in asdict(mine[3]).items():
            theirs = getattr(machine, name)
            if theirs != value and not (fallen and name == "kernels"):
                raise RanksDisagree(
                    f"rank {place.rank} and rank {other.rank} compute with different bits: {name} {value} against "
                    f"{theirs}. Replicas, and both ends of a link, would drift apart. Run all ranks on GPUs of one "
                    "model, in one environment."
                )
    line = nodes_line([other.node for other in places])
    notes = [] if line is None else [line]
    if fallback is not None:
        notes.append(f"{fallback}: all ranks compress with torch, which takes longer. {_CURE}")
    return places, notes, fallback


def _different(mine: OptimusConfig | Layout | None, theirs: OptimusConfig | Layout | None) -> Iterator[str]:
    """Yield what two ranks configured differently: the flag, or the fact about the layout, with both values."""
    if mine is None or theirs is None:
        if mine is not theirs:
            yield f"{mine} against {theirs}"
        return
    for name, value in ((each.name, getattr(mine, each.name)) for each in fields(mine) if each.compare):
        if (other := getattr(theirs, name)) != value:
            named = flag_of(name) if isinstance(mine, OptimusConfig) else name.replace("_", " ")
            yield f"{named} {value} against {other}"


def _needed(config: OptimusConfig, grid: Grid, layout: Layout | None = None) -> fast.Needed:
    """Return the variants of kernels that this configuration uses on a model, whose gradients may be fp32."""
    ranks = {getattr(config, f"{each.name}_rank") for each in CLASSES if config.format_of(each) == "low-rank"}
    formats = {format for each in CLASSES if (format := block_format(config.format_of(each))) is not None}
    # Sums of gradients are sent back in `SUM_FORMAT`.
    formats |= {SUM_FORMAT} if formats else set()
    formats |= {EXACT} if config.format_of(PARAM_GATHER) == EXACT else set()
    return fast.Needed(
        ranks=sorted(ranks),
        formats=sorted(formats),
        dtypes={torch.float32, grid.dtype},
        state_dtype=state_dtype(config.compression_state_dtype),
        rotated=config.block_rotation,
        align=grid.align,
        row_width=layout.row_width if layout is not None and any(map(config.is_on, classes_among("experts"))) else 0,
    )


def _machine(kernels: str) -> Machine:
    # The CPU runtime answers torch.cuda's queries, with a device of the name "cpu".
    processor = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return Machine(processor=processor, torch=torch.__version__, kernels=kernels, backend=dist.get_backend_config())
