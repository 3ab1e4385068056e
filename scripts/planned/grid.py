"""A grid of plans of one job: on several networks, with several replicas on a node, batches and formats.

Each point is planned from a command line of its own, which `optimus-cc plan` accepts, so a reader can repeat any of
them.
"""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.tools.plan import PlanError
from optimus_cc_ext.tools.plan.flags import job_of
from optimus_cc_ext.tools.plan.hardware import Cluster, network_of
from optimus_cc_ext.tools.plan.memory import check_memory
from optimus_cc_ext.tools.plan.model import layout_of
from optimus_cc_ext.tools.plan.seconds import Group
from optimus_cc_ext.tools.plan.variants import VARIANTS, Band, Gain, config_in, fitting
from optimus_cc_ext.tools.report.table import Table

__all__ = ["NETWORKS", "Cell", "PlanGrid", "Question", "planned_grid"]

NETWORKS = {
    "10gbe": "10 GbE", "25gbe": "25 GbE", "100gbe": "100 GbE", "hdr1": "1 x 200G", "ndr1": "1 x 400G",
    "hdr4": "4 x 200G", "hdr8": "8 x 200G", "ndr8": "8 x 400G",
}  # fmt: skip
"""Networks of a grid, from the slowest on: the name of each in the planner, and the lines of one node."""

FORMATS = {
    "balanced": VARIANTS["balanced"], "DP gradients int4": VARIANTS["DP gradients int4"], "paper": VARIANTS["paper"],
}  # fmt: skip
"""Our flags of each format; `fitting` leaves out flags of classes of which a layout sends nothing."""

BATCHES = (0.25, 1, 4)
"""Factors of the job's batch. A larger batch takes fewer reductions per token."""

VARIED = ("--tensor-model-parallel-size", "--global-batch-size")


@dataclass(frozen=True)
class Question:
    """The words of a plan's command line that a grid varies."""

    typed: Sequence[str]
    """Words for cluster, nodes and model."""

    cluster: Cluster
    gpus: int
    model: str | None
    flags: Sequence[str]
    """Megatron's flags."""

    own: Sequence[str]
    """Our flags on the user's command line; if there are any, they are one more format of the grid."""

    def megatron(self, tp: int, batch: int) -> list[str]:
        """Return Megatron's flags with another tensor-parallel size and batch."""
        kept, words = [], iter(self.flags)
        for word in words:
            if word in VARIED:
                next(words)
            elif not word.startswith(tuple(f"{flag}=" for flag in VARIED)):
                kept.append(word)
        return [*kept, VARIED[0], str(tp), VARIED[1], str(batch)]


@dataclass(frozen=True)
class Cell:
    """One point of a grid: the seconds and the gain of a format, or the reason for which there are none."""

    network: str
    replicas: int
    """Number of replicas on each node."""

    batch: int
    format: str
    megatron: str = ""
    """Megatron's flags of this point."""

    flags: str = ""
    """Our flags of this point."""

    vanilla: float = 0.0
    """Seconds of vanilla's iteration."""

    gain: Gain | None = None
    reason: str = ""

    @property
    def numbers(self) -> list[float | None]:
        """Vanilla's seconds, the format's seconds, and the planned, smallest and largest gain in percent."""
        if self.gain is None:
            return [None] * 5
        shares = (self.gain.planned, self.gain.least, self.gain.most)
        seconds = (self.vanilla, self.vanilla * (1 - self.gain.planned))
        return [*(float(f"{each:.5g}") for each in seconds), *(round(100 * share, 2) for share in shares)]


@dataclass(frozen=True)
class PlanGrid:
    """All points of a grid, and the values of its axes."""

    title: str
    typed: str
    """The beginning of each point's command, up to the model."""

    networks: dict[str, str]
    replicas: tuple[int, ...]
    batches: tuple[int, ...]
    formats: tuple[str, ...]
    start: tuple[str, int, int, str]
    """Network, replicas, batch and format of the point that the page shows first."""

    cells: tuple[Cell, ...]

    def command(self, cell: Cell) -> str:
        """Return the command that plans one point."""
        return f"{self.typed}{_link(cell.network)} -- {cell.megatron} {cell.flags}"

    def table(self) -> Table:
        """Return one row for each point."""
        columns = (
            "network", "replicas on a node", "batch", "format", "vanilla s", "seconds", "gain %", "from %", "to %",
            "verdict", "command or reason",
        )  # fmt: skip
        rows = [
            (
                cell.network, cell.replicas, cell.batch, cell.format, *cell.numbers,
                cell.gain.verdict if cell.gain else "", self.command(cell) if cell.gain else cell.reason,
            )
            for cell in self.cells
        ]  # fmt: skip
        return Table(columns, rows, title=self.title, name="grid")

    def lookup(self) -> dict[str, Any]:
        """Return the axes, the points by network, replicas, batch and format, and the parts of their commands, as the
        page looks them up.
        """
        ours = list(dict.fromkeys(cell.flags for cell in self.cells))
        return {
            "axes": {
                "network": self.networks, "replicas": self.replicas, "batch": self.batches, "format": self.formats
            },
            "start": self.start,
            "points": {
                "|".join(map(str, (cell.network, cell.replicas, cell.batch, cell.format))): [
                    *cell.numbers, cell.gain.verdict, ours.index(cell.flags)
                ] if cell.gain else cell.reason
                for cell in self.cells
            },
            "typed": self.typed,
            "link": {network: _link(network) for network in self.networks},
            "megatron": {f"{cell.replicas}|{cell.batch}": cell.megatron for cell in self.cells if cell.gain},
            "flags": ours,
        }  # fmt: skip


def _link(network: str) -> str:
    return f" --sweep link={network}" if network in NETWORKS else ""


def planned_grid(question: Question, progress: Callable[[int, int], None]) -> PlanGrid:
    """Plan all points of a grid.

    Args:
        progress: called with the number of finished points and of all points.

    Raises:
        PlanError: the job itself cannot be planned.
    """
    cluster = question.cluster
    job, _ = job_of(question.flags, question.gpus, question.model)
    per_node = cluster.gpus_per_node
    replicas = tuple(n for n in (1, 2, 4, 8, 16) if n <= per_node and per_node % n == 0)
    batches = tuple(dict.fromkeys(max(1, int(job.batch * factor)) for factor in BATCHES))
    networks = dict(NETWORKS)
    own, first = cluster.network.name, "hdr1"
    if cluster.network not in map(network_of, NETWORKS):
        networks[own], first = own, own
    formats = ({"yours": " ".join(question.own)} if question.own else {}) | FORMATS
    places, cells = [*product(networks, replicas, batches)], list[Cell]()
    for done, (network, count, batch) in enumerate(places):
        progress(done, len(places))
        cells += _cells(question, network, count, batch, formats, job.replica_stride // job.tp)
    model = question.model or f"{job.model.parameters / 1e9:.1f}B parameters"
    title = f"{model} on {question.gpus} x {cluster.gpu.name}"
    here = Group.strided(job.replicas, job.replica_stride, per_node).per_node
    start = first, here if here in replicas else replicas[0], job.batch, next(iter(formats))
    typed = shlex.join(["optimus-cc", "plan", *question.typed])
    return PlanGrid(title, typed, networks, replicas, batches, tuple(formats), start, tuple(cells))


def _cells(
    question: Question, network: str, replicas: int, batch: int, formats: dict[str, str], stages_between: int
) -> Iterator[Cell]:
    """Yield the points of one network, number of replicas on a node, and batch."""
    cluster = question.cluster
    if network in NETWORKS:
        cluster = replace(cluster, network=network_of(network))
    tp = max(1, cluster.gpus_per_node // replicas // stages_between)
    megatron = question.megatron(tp, batch)
    try:
        job, _ = job_of(megatron, question.gpus, question.model)
        group = Group.strided(job.replicas, job.replica_stride, cluster.gpus_per_node)
        if group.per_node != replicas:
            raise PlanError(f"tensor parallelism of {tp} puts {group.per_node} replicas on a node")
        check_memory(cluster, job, error=0.0)
        band = Band(cluster, job)
    except PlanError as error:
        yield from (Cell(network, replicas, batch, name, reason=str(error)) for name in formats)
        return
    for name, flags in formats.items():
        words = flags.split() if name == "yours" else fitting(flags.split(), layout_of(job))
        try:
            config = config_in(words, job)
            check_memory(cluster, job, config, error=0.0)
        except (FlagError, PlanError) as error:
            yield Cell(network, replicas, batch, name, reason=str(error))
            continue
        yield Cell(
            network, replicas, batch, name, shlex.join(megatron), shlex.join(words), band.vanilla.seconds,
            band.gain(config),
        )  # fmt: skip
