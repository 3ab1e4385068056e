"""Agreement of all ranks of a model before any of them sends: on their settings, and on all that equal bits depend
on.
"""

from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist

from optimus_cc_ext.compressors import fast
from optimus_cc_ext.compressors.formats import SUM_FORMAT, block_format
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import CLASSES
from optimus_cc_ext.config.presets import Layout
from optimus_cc_ext.errors import RanksDisagree
from optimus_cc_ext.techniques.grid import Grid, RankPlace
from optimus_cc_ext.techniques.groups import names_of
from optimus_cc_ext.techniques.nodes import VARIABLE, nodes_line, this_node
from optimus_cc_ext.techniques.state import state_dtype

__all__ = ["Machine", "agree"]


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


def agree(grid: Grid, config: OptimusConfig, layout: Layout | None) -> tuple[list[RankPlace], list[str]]:
    """Everyone's place in the grid, and what there is to say. Collective over all ranks of the model.

    Kernels that cannot be compiled on one rank are used on none.

    Raises:
        RanksDisagree: on all ranks: two run with different settings, or compute with what gives different bits, or
            one of them did not come; or OPTIMUS_CC_NODE is set for some of them only.
    """
    kernels, failure = _kernels(config, grid.dtype)
    rank = dist.get_rank()
    place = replace(
        grid.place, names=names_of(rank), node=this_node(rank),
        pipeline=() if grid.pipeline_group is None else tuple(dist.get_process_group_ranks(grid.pipeline_group)),
    )  # fmt: skip
    mine = (place, config, layout, _machine(kernels), failure)
    grid.meet()
    everyone = grid.gather(mine)
    for other, other_config, other_layout, *_ in everyone:
        if (other_config, other_layout) != (config, layout):
            raise RanksDisagree(
                f"rank {place.rank} and rank {other.rank} run with different settings: "
                f"{config}, {layout} against {other_config}, {other_layout}. Start all ranks with the same flags."
            )
    places = [other for other, *_ in everyone]
    named, unnamed = ([other.rank for other in places if other.node.chosen is chosen] for chosen in (True, False))
    if named and unnamed:
        raise RanksDisagree(
            f"{VARIABLE} is set on rank {named[0]} and not on rank {unnamed[0]}: which ranks share a node is not "
            "known. Set it on all ranks, or on none."
        )
    fallen = [(other.rank, reason) for other, *_, reason in everyone if reason is not None]
    if fallen:
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
    for rank, reason in fallen[:1]:
        notes.append(
            f"Triton's kernels do not work on rank {rank} ({reason}): all ranks compress with torch, which takes "
            "longer. They need a C compiler and Python's headers on every node"
        )
    return places, notes


def _kernels(config: OptimusConfig, dtype: torch.dtype) -> tuple[str, str | None]:
    """Ask `fast.kernels` for what this configuration uses on a model of this dtype, whose gradients may be fp32."""
    ranks = {getattr(config, f"{each.name}_rank") for each in CLASSES if config.format_of(each) == "low-rank"}
    chosen = {config.low_rank_wire, *map(config.format_of, CLASSES)}
    formats = {format for name in chosen if (format := block_format(name)) is not None}
    # Sums of gradients are sent back in this format.
    formats |= {SUM_FORMAT} if formats else set()
    remembered = state_dtype(config.compression_state_dtype)
    return fast.kernels(sorted(ranks), sorted(formats), {torch.float32, dtype}, remembered)


def _machine(kernels: str) -> Machine:
    # The CPU runtime answers torch.cuda's queries, with a device of the name "cpu".
    processor = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return Machine(processor=processor, torch=torch.__version__, kernels=kernels, backend=dist.get_backend_config())
