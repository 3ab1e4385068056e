"""A grid of plans of one job: on several networks, with several replicas on a node, batches and formats.

Each point is planned from a command line of its own, which `optimus-cc plan` accepts, so a reader can repeat any of
them.
"""

import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
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

TITLES = {
    "yours": "your flags", "balanced": "balanced: 8 bits", "DP gradients int4": "gradients in 4 bits",
    "paper": "the paper: low rank",
}  # fmt: skip
"""Names of the formats on the page."""

MODELS = {
    "8.3b": "GPT 8.3B", "llama3-8b": "Llama 3 8B", "llama3-70b": "Llama 3 70B", "llama3.1-405b": "Llama 3.1 405B",
    "qwen3-30b": "Qwen3 30B", "qwen3-235b": "Qwen3 235B", "deepseek-v3": "DeepSeek V3", "gpt-oss-120b": "GPT-OSS 120B",
}  # fmt: skip
"""Names of the planner's models on the page."""

LOSSES = {
    "balanced": "+0.006 % of validation loss, measured on a GPT of 7.4 million parameters",
    "DP gradients int4": "+0.094 % of validation loss, measured on a Llama-like model of 10 million parameters",
    "paper": "+0.995 % of validation loss, measured on a GPT of 7.4 million parameters",
}
"""Increase of validation loss by each format, as docs/evidence.md gives it."""

UNDECIDED = "undecided for a mixture of experts"

FIRST = "100gbe"
"""Network that the page shows first, because a reader has something to decide there."""

BATCHES = (0.25, 1, 4)
"""Factors of the job's batch. A larger batch takes fewer reductions per token."""

VARIED = ("--tensor-model-parallel-size", "--global-batch-size")


def without(words: Sequence[str], flags: Collection[str]) -> list[str]:
    """Return the words of a command line without these flags and their values."""
    pairs = zip(["", *words], words, strict=False)
    return [
        word
        for before, word in pairs
        if word.partition("=")[0] not in flags and (before not in flags or word.startswith("--"))
    ]


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
        return [*without(self.flags, VARIED), VARIED[0], str(tp), VARIED[1], str(batch)]


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

    model: str
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
    """Points, in the order of network, replicas, batch and format."""

    mixture: bool = False

    def command(self, cell: Cell) -> str:
        """Return the command that plans one point."""
        return f"{self.typed}{_link(cell.network)} -- {cell.megatron} {cell.flags}"

    def table(self) -> Table:
        """Return one row for each point."""
        columns = (
            "model", "network", "replicas on a node", "batch", "format", "vanilla s", "seconds", "gain %", "from %",
            "to %", "verdict", "command or reason",
        )  # fmt: skip
        rows = [
            (
                self.model, cell.network, cell.replicas, cell.batch, cell.format, *cell.numbers,
                cell.gain.verdict if cell.gain else "", self.command(cell) if cell.gain else cell.reason,
            )
            for cell in self.cells
        ]  # fmt: skip
        return Table(columns, rows, title=self.title, name="grid")

    def lookup(self) -> dict[str, Any]:
        """Return the axes, the points, and the parts of their commands, as the page looks them up.

        A point is vanilla's seconds, the gain as planned, at least and at most in percent, the word of its answer, and
        the place of its flags; a point without a plan is the place of its reason.
        """
        ours = list(dict.fromkeys(cell.flags for cell in self.cells))
        reasons = list(dict.fromkeys(cell.reason for cell in self.cells if not cell.gain))
        replicas, batches = ({str(each): each for each in numbers} for numbers in (self.replicas, self.batches))
        titles = {form: TITLES.get(form, form) for form in self.formats}
        return {
            "model": self.model, "title": self.title, "start": self.start,
            "axes": {"net": self.networks, "replicas": replicas, "batch": batches, "format": titles},
            "points": [
                [cell.numbers[0], *cell.numbers[2:], cell.gain.word, ours.index(cell.flags)] if cell.gain
                else reasons.index(cell.reason)
                for cell in self.cells
            ],
            "reasons": reasons, "typed": self.typed, "flags": ours,
            "losses": {form: UNDECIDED if self.mixture else LOSSES.get(form, "") for form in self.formats},
            "link": {network: _link(network) for network in self.networks},
            "megatron": {f"{cell.replicas}|{cell.batch}": cell.megatron for cell in self.cells if cell.gain},
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
    here = Group.strided(job.replicas, job.replica_stride, per_node).per_node
    replicas = tuple(n for n in (1, 2, 4, 8, 16) if n <= per_node and per_node % n == 0)
    if mixture := job.model.mixture is not None:
        replicas = (here,)  # another tensor-parallel size would spread the experts over other nodes
    batches = tuple(dict.fromkeys(max(1, int(job.batch * factor)) for factor in BATCHES))
    networks = dict(NETWORKS)
    own, first = cluster.network.name, FIRST
    if cluster.network not in map(network_of, NETWORKS):
        networks[own], first = own, own
    formats = ({"yours": " ".join(question.own)} if question.own else {}) | FORMATS
    places, cells = [*product(networks, replicas, batches)], list[Cell]()
    for done, (network, count, batch) in enumerate(places):
        progress(done, len(places))
        cells += _cells(question, network, count, batch, formats, job.replica_stride // job.tp)
    model = question.model or f"{job.model.parameters / 1e9:.1f}B parameters"
    title = f"{MODELS.get(model, model)} on {question.gpus} {cluster.gpu.name}s"
    start = first, here if here in replicas else replicas[0], job.batch, next(iter(formats))
    typed = shlex.join(["optimus-cc", "plan", *question.typed])
    return PlanGrid(model, title, typed, networks, replicas, batches, tuple(formats), start, tuple(cells), mixture)


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
