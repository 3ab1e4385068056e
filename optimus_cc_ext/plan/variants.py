"""What compression makes of a job: seconds, gain and its band for each technique and format, alone and together."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.flags import add_flags, request_from
from optimus_cc_ext.plan import PlanError
from optimus_cc_ext.plan.hardware import Cluster
from optimus_cc_ext.plan.iteration import Iteration, iteration
from optimus_cc_ext.plan.memory import check_memory
from optimus_cc_ext.plan.model import Job
from optimus_cc_ext.plan.traffic import DENSE
from optimus_cc_ext.plan.validate import BAND
from optimus_cc_ext.resolve import Layout, resolve

__all__ = ["VARIANTS", "Band", "Gain", "Variant", "best", "config_of", "variants"]

VARIANTS = {
    "CB low-rank": "--compressed-backprop",
    "CB low-rank, all": "--compressed-backprop --compressed-backprop-messages all",
    "CB int8": "--compressed-backprop-format int8",
    "CB int4": "--compressed-backprop-format int4",
    "CB fp8": "--compressed-backprop-format fp8",
    "forward int8": "--pipeline-forward-format int8",
    "forward fp8": "--pipeline-forward-format fp8",
    "DP low-rank": "--dp-compression",
    "DP int8": "--dp-compression-format int8",
    "DP int4": "--dp-compression-format int4",
    "FE": "--fused-embedding-sync",
    "FE int8": "--fused-embedding-sync-format int8",
    "FE int4": "--fused-embedding-sync-format int4",
    "gather int8": "--param-gather-format int8",
    "gather int4": "--param-gather-format int4",
    "paper": "--optimus-cc",
    "paper, auto stages": "--optimus-cc --dp-compression-stages auto",
    "balanced": "--optimus-cc balanced",
    "int8": "--pipeline-forward-format int8 --compressed-backprop-format int8 --dp-compression-format int8 "
    "--fused-embedding-sync-format int8",
    "int8, gradients int4": "--pipeline-forward-format int8 --compressed-backprop-format int4 "
    "--dp-compression-format int4 --fused-embedding-sync-format int4",
}
"""Flags by name: each technique and format alone, then together."""

WORTH = 0.01
"""A gain below it is none."""

LINE, CODING = 0.75, 2.0
"""How far a link's rate and compression's cost may be off, as factors: assumed."""


@dataclass(frozen=True)
class Gain:
    """Shares of vanilla's seconds that are saved: as planned, at least, at most."""

    planned: float
    least: float
    most: float

    @property
    def verdict(self) -> str:
        """Whether it pays: all of the band says so, or none of it."""
        return "pays" if self.least > WORTH else "does not pay" if self.most < WORTH else "cannot be told"


@dataclass(frozen=True)
class Variant:
    """One way to compress, and what it gains."""

    name: str
    flags: str
    config: OptimusConfig
    result: Iteration
    gain: Gain
    memory: float


def config_of(flags: Sequence[str], job: Job) -> OptimusConfig:
    """Of our flags, as training would resolve them on this layout; FlagError where it would refuse them."""
    parser = add_flags(argparse.ArgumentParser(allow_abbrev=False))
    layout = Layout(
        stages=job.pp,
        data_parallel=job.dp,
        tied_embeddings=job.model.tied,
        distributed_optimizer=job.distributed_optimizer,
        master_copies=job.value_bytes == 2,
    )
    return resolve(request_from(parser.parse_args(list(flags))), layout).config


class Band:
    """A job's iterations as planned, and with all that is uncertain against compression, then for it."""

    def __init__(self, cluster: Cluster, job: Job) -> None:
        off = BAND[cluster.gpu.name]
        self._job, self._corners = job, [
            replace(
                cluster,
                network=replace(cluster.network, node_rate=cluster.network.node_rate * line),
                coding_scale=cluster.coding_scale * coding,
                software_scale=cluster.software_scale * computation,
            )
            for line, coding, computation in ((1, 1, 1), (1 / LINE, CODING, 1 + off), (LINE, 1 / CODING, 1 - off))
        ]  # fmt: skip
        self._plain = [iteration(corner, job) for corner in self._corners]
        self.vanilla = self._plain[0]

    def gain(self, config: OptimusConfig) -> Gain:
        """Of `config`."""
        pairs = zip(self._corners, self._plain, strict=True)
        gains = [1 - iteration(corner, self._job, config).seconds / plain.seconds for corner, plain in pairs]
        return Gain(gains[0], min(gains), max(gains))


def variants(cluster: Cluster, job: Job, own: Sequence[str] = ()) -> list[Variant]:
    """Vanilla, then all that this layout allows and memory holds; `own` are the flags that were asked for.

    Raises:
        PlanError: vanilla does not fit, or what was asked for.
        FlagError: what was asked for is refused.
    """
    band = Band(cluster, job)
    found = [Variant("vanilla", "", DENSE, band.vanilla, Gain(0.0, 0.0, 0.0), check_memory(cluster, job))]
    asked = {"yours": " ".join(own)} if own else {}
    for name, flags in (asked | VARIANTS).items():
        try:
            config = config_of(flags.split(), job)
            used = check_memory(cluster, job, config)
        except (FlagError, PlanError):
            if name in asked:
                raise
            continue
        found.append(Variant(name, flags, config, iteration(cluster, job, config), band.gain(config), used))
    return found


def best(found: Sequence[Variant]) -> Variant:
    """The one that surely gains most; vanilla where none pays."""
    paying = [variant for variant in found if variant.gain.verdict == "pays"]
    return max(paying, key=lambda variant: variant.gain.planned, default=found[0])
