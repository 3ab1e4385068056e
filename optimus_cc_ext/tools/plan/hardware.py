"""GPUs, networks and clusters by name. Every constant carries its kind (measured, specified, fitted, assumed) and
source.

Units are bytes, seconds, and operations per second. At most three constants per GPU type are fitted, only on the rows
of `validate.Row.fitted` and, for mixtures of experts, those of recipes.csv.
"""

import difflib
import json
import re
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Self

from optimus_cc_ext.tools.plan import PlanError


class Constant(float):
    """A number with its source."""

    kind: str
    source: str

    def __new__(cls, value: float, kind: str, source: str) -> Self:
        """Make a constant; `kind` is measured, specified, fitted or assumed."""
        self = super().__new__(cls, value)
        self.kind, self.source = kind, source
        return self


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU and its links to the other GPUs of its node."""

    name: str
    bf16: float
    """Dense tensor-core operations per second in bf16; fp16 is as fast."""

    fp8: float
    processors: int
    memory_rate: float
    memory: float
    nvlink: float
    """Bus bandwidth of an all-reduce within the node."""

    gemm_efficiency: float
    """Share of the peak that a GEMM reaches if its tiles fill all processors."""

    memory_efficiency: float
    """Share of the memory's peak rate (`memory_rate`) that kernels reach."""

    layer_overhead: float
    """Further seconds of a forward pass through one layer: launches, gaps, casts of weights; a backward pass has twice
    that.
    """

    mixture_efficiency: float
    """Share of the speed of a dense layer's kernels that those of routed experts reach: many small GEMMs, padding,
    permutations of tokens, and waits for the host.
    """


_SHEET = ("specified", "vendor's data sheet")
_NARAYANAN = "odd rows of Narayanan et al. 2021, table 1, full-recompute rows of Korthikanti et al. 2022, table 5"
_MLPERF = "MLPerf Training GPT-3 v3.0 to v4.1, <= 1,536 GPUs"

GPUS = {
    "A100": Gpu(
        name="A100",
        bf16=Constant(312e12, *_SHEET),
        fp8=Constant(312e12, "specified", "no fp8: runs in 16 bits"),
        processors=108,
        memory_rate=Constant(2039e9, *_SHEET),
        memory=Constant(80e9, *_SHEET),
        nvlink=Constant(232e9, "measured", "nccl-tests, one DGX A100"),
        gemm_efficiency=Constant(0.799, "fitted", _NARAYANAN),
        memory_efficiency=Constant(0.666, "fitted", _NARAYANAN),
        layer_overhead=Constant(0.0, "fitted", f"{_NARAYANAN}; nothing is left for it"),
        mixture_efficiency=Constant(0.45, "assumed", "as H100: no public run of a mixture on A100s was found"),
    ),
    "H100": Gpu(
        name="H100",
        bf16=Constant(989e12, *_SHEET),
        fp8=Constant(1979e12, *_SHEET),
        processors=132,
        memory_rate=Constant(3350e9, *_SHEET),
        memory=Constant(80e9, *_SHEET),
        nvlink=Constant(370e9, "measured", "nccl-tests, one DGX H100; 480 GB/s with SHARP"),
        gemm_efficiency=Constant(0.72, "fitted", _MLPERF),
        memory_efficiency=Constant(
            0.666, "assumed", "as A100: the rows are of one model, and do not tell it from the GEMMs"
        ),
        layer_overhead=Constant(2.8e-4, "fitted", _MLPERF),
        mixture_efficiency=Constant(0.45, "fitted", "mixtures of recipes.csv, newest releases"),
    ),
}


def _like_h100(
    name: str, bf16: float, fp8: float, processors: int, memory: float, memory_rate: float, nvlink: Constant
) -> Gpu:
    """Return a GPU that reaches the H100's shares of its own data sheet: no public run was held against it."""
    return replace(
        GPUS["H100"], name=name, bf16=Constant(bf16, *_SHEET), fp8=Constant(fp8, *_SHEET), processors=processors,
        memory=Constant(memory, *_SHEET), memory_rate=Constant(memory_rate, *_SHEET), nvlink=nvlink,
        **{share: Constant(getattr(GPUS["H100"], share), "assumed", "as H100") for share in (
            "gemm_efficiency", "memory_efficiency", "layer_overhead", "mixture_efficiency")},
    )  # fmt: skip


_SHARE = "the share of NVLink's rate that nccl-tests reach on a DGX H100"
GPUS |= {each.name: each for each in (
    _like_h100("H200", 989e12, 1979e12, 132, 141e9, 4.8e12, Constant(370e9, "assumed", "as H100: the same links")),
    _like_h100("B200", 2250e12, 4500e12, 148, 180e9, 8e12, Constant(740e9, "assumed", f"1.8 TB/s, {_SHARE}")),
    _like_h100("GB200", 2500e12, 5000e12, 148, 186e9, 8e12, Constant(740e9, "assumed", f"1.8 TB/s, {_SHARE}")),
    _like_h100("MI300X", 1307e12, 2615e12, 304, 192e9, 5.3e12,
               Constant(330e9, "assumed", "7 links of 64 GB/s each way, 3/4 of them")),
    _like_h100("GB10", 125e12, 250e12, 48, 128e9, 273e9,
               Constant(273e9, "specified", "one GPU a node: the rate of its memory")),
)}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Network:
    """The network between nodes: one queue per node and direction, shared by the node's ranks."""

    name: str
    node_rate: float
    """Bytes per second that all NICs of a node together can send."""

    hop: float
    """Latency in seconds between ranks on different nodes."""

    rdma: bool = True
    """True if NICs read the memory of other nodes: DeepEP and HybridEP run, and large rings lose bandwidth by
    `seconds.RING_SHARE`.
    """

    scatters_twice: bool = False
    """True if a reduce-scatter sends as many bytes as an all-reduce, as gloo's does; NCCL's sends half of them."""

    exchange_share: float = Constant(1.0, "assumed", "full duplex")
    """Share of the rate that a message between stages reaches while another message comes the other way."""

    all_to_all_share: float = Constant(1.0, "assumed", "as a ring's")
    """Share of the rate that an all-to-all reaches."""


_HOP = Constant(14e-6, "measured", "NCCL 2.x tuning.cc: network hop of a ring, protocol Simple")
_TCP_HOP = Constant(
    60e-6, "measured", "facts of p3dn: small all-reduces of 163, 320, 630 us on 2, 4, 8 nodes, per step"
)
_LINES = {
    # Gbit/s of one NIC, and the share of it that large messages reach.
    "hdr": (200, Constant(0.96, "measured", "nccl-tests: 8 x HDR200 reach 192 of 200 GB/s")),
    "ndr": (400, Constant(0.94, "measured", "nccl-tests: 8 x NDR400 reach 370 to 380 of 400 GB/s")),
    "edr": (100, Constant(0.96, "assumed", "as HDR")),
    "opa": (
        100,
        Constant(0.8, "assumed", "Omni-Path: no clean measurement found; 15 to 42 of 400 Gbit/s are reported, too"),
    ),
    "roce100x": (100, Constant(0.8, "measured", "8 x 100G RoCE: 70 GB/s on 3 nodes, 100 on 2, 58 on 4 and 5")),
    "roce200x": (200, Constant(0.96, "measured", "200G RDMA: 24 GB/s")),
    "roce400x": (400, Constant(0.96, "measured", "400G RDMA: 48 GB/s")),
    "efa": (100, Constant(0.8, "assumed", "EFA, 4 of p4d, 32 of p5: as RoCE; no clean measurement was found")),
}
_TCP = {
    "200gbe": (200, Constant(0.8, "assumed", "as 100 GbE")),
    "100gbe": (100, Constant(0.8, "measured", "100 GbE, TCP: 10 GB/s")),
    "40gbe": (40, Constant(0.9, "assumed", "as 25 GbE")),
    "25gbe": (25, Constant(0.9, "assumed", "no measured source found")),
    "10gbe": (10, Constant(0.9, "assumed", "no measured source found")),
    "1gbe": (1, Constant(0.94, "specified", "TCP's payload of a full frame")),
}


def network_of(name: str) -> Network:
    """Return a network by name: a family and the number of NICs per node (`hdr8`, `roce200x8`), or Ethernet with one
    NIC (`100gbe`).

    Raises:
        PlanError: the name is unknown.
    """
    if name in _TCP:
        gigabits, share = _TCP[name]
        return Network(name=name, node_rate=_rate(gigabits, share), hop=_TCP_HOP, rdma=False)
    if (match := re.fullmatch(r"(hdr|ndr|edr|opa|efa|roce\d00x)([1-9]\d*)", name)) and match[1] in _LINES:
        gigabits, share = _LINES[match[1]]
        return Network(name=name, node_rate=_rate(int(match[2]) * gigabits, share), hop=_HOP)
    raise PlanError(_unknown("network", name, [*_TCP, *(f"{family}8" for family in _LINES), "hdr4", "opa4"]))


def _rate(gigabits: int, share: Constant) -> Constant:
    """Return the bytes per second of a node's lines, of which messages reach `share`."""
    return Constant(gigabits / 8 * 1e9 * share, share.kind, share.source)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster of equal nodes."""

    gpu: Gpu
    network: Network
    gpus_per_node: int = 8
    software_scale: float = 1.0
    """Factor on computation time for training software that is slower than Megatron-LM as its authors ran it."""

    coding_scale: float = 1.0
    """Factor on the seconds that `traffic` assumes for compressing."""

    exact_bits: float | None = None
    """Bits of a value in exact messages, in place of those that the job's learning rate lets expect."""

    memory_scale: float = 1.0
    """Factor on the bytes that a rank is estimated to need: at most 1, because the user's run fits."""

    error: float = 0.0
    """Relative error of computation's seconds, as measured on the user's run; 0: that of published runs."""


CLUSTERS = {
    name: Cluster(gpu=GPUS[gpu], network=network_of(network))
    for name, gpu, network in (
        ("a100-hdr200", "A100", "hdr8"), ("paper", "A100", "hdr1"), ("h100-ndr400", "H100", "ndr8"),
        ("a100-100gbe", "A100", "100gbe"), ("25gbe", "A100", "25gbe"), ("10gbe", "A100", "10gbe"),
    )
}  # fmt: skip


def gpu_of(name: str) -> Gpu:
    """Return a GPU by name; raises PlanError if the name is unknown."""
    if name not in GPUS:
        raise PlanError(_unknown("GPU", name, list(GPUS)))
    return GPUS[name]


def _named(gpu: str, network: Network) -> Cluster:
    return Cluster(gpu=gpu_of(gpu), network=network, gpus_per_node={"GB10": 1, "GB200": 4}.get(gpu, 8))


def _network_in(content: dict[str, Any]) -> Network:
    """Return the network of a cluster file, which may have any name if the file has its rate and latency."""
    name = str(content.pop("network"))
    try:
        return network_of(name)
    except PlanError:
        if not {"node_rate", "hop"} <= content.keys():
            raise
        return Network(name=name, node_rate=content["node_rate"], hop=content["hop"])


def cluster_of(name: str) -> Cluster:
    """Return a preset cluster, one of a GPU and a network (h100-100gbe), or one from a JSON file: {"gpu": "A100",
    "network": "hdr8"}, plus fields that differ.

    Raises:
        PlanError: the name or a field is unknown, or a value is not a positive number.
    """
    if name in CLUSTERS:
        return CLUSTERS[name]
    if not name.endswith(".json"):
        gpu, dash, network = name.partition("-")
        if not dash:
            others = ", GPU-NETWORK such as h100-100gbe, or a file whose name ends in .json"
            raise PlanError(_unknown("cluster", name, list(CLUSTERS)) + others)
        try:
            return _named(gpu.upper(), network_of(network))
        except PlanError as error:
            raise PlanError(f"--cluster {name}: {error}, or give a cluster file with what differs") from None
    try:
        content = json.loads(Path(name).read_text(encoding="utf-8"))
        cluster = _named(content.pop("gpu"), _network_in(content))
    except PlanError:
        raise
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise PlanError(f'{name}: {error}. A cluster file contains {{"gpu": ..., "network": ...}}') from error
    own = ("gpus_per_node", "software_scale", "coding_scale")
    owner = {field: part for part in ("gpu", "network") for field in vars(getattr(cluster, part))}
    known = [*own, *(field for field in owner if field not in ("name", "rdma", "scatters_twice"))]
    for field, value in content.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < inf:
            raise PlanError(f"{name}: {field}: {value!r} is not a positive number")
        if field not in known:
            raise PlanError(f"{name}: {_unknown('field', field, known)}")
        if field in ("processors", "gpus_per_node") and value != int(value):
            raise PlanError(f"{name}: {field}: {value!r} is not a whole number")
        if field == "processors":
            cluster = replace(cluster, gpu=replace(cluster.gpu, processors=int(value)))
        elif field in own:
            cluster = replace(cluster, **{field: type(getattr(cluster, field))(value)})
        else:
            part = replace(getattr(cluster, owner[field]), **{field: Constant(value, "measured", name)})
            cluster = replace(cluster, **{owner[field]: part})
    if any(owner.get(field) == "network" for field in content):
        words = f"{cluster.network.name} as in {Path(name).name}"
        cluster = replace(cluster, network=replace(cluster.network, name=words))
    return cluster


def _unknown(kind: str, name: str, known: list[str]) -> str:
    by_lower = {k.lower(): k for k in known}
    near = difflib.get_close_matches(name.lower(), list(by_lower), n=3, cutoff=0.5)
    these = [by_lower[k] for k in near] or known
    return f"unknown {kind} {name!r}: {'did you mean' if near else 'there are'} {', '.join(these)}"
