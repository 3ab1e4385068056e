"""Rate and latency of a network, or inside one node the rate of NVLink, from the output of nccl-tests."""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from optimus_cc_ext.tools.plan import PlanError
from optimus_cc_ext.tools.plan.hardware import Cluster, Constant
from optimus_cc_ext.tools.plan.measured import solved
from optimus_cc_ext.tools.plan.seconds import Group, all_reduce, all_to_all, reduce_scatter
from optimus_cc_ext.tools.report.log_lines import without_prefix

_COLLECTIVES: dict[str, tuple[Callable[[Cluster, Group, float], float], int]] = {
    "all_reduce_perf": (all_reduce, 2), "alltoall_perf": (all_to_all, 1), "all_gather_perf": (reduce_scatter, 1),
    "reduce_scatter_perf": (reduce_scatter, 1),
}  # fmt: skip
"""Tests by name: the seconds of each, and how often it sends (ranks - 1) / ranks of its bytes."""

LATENCY_BYTES, RATE_BYTES = 1 << 16, 1 << 24
"""Largest message that gives a latency, and smallest one that gives a rate."""

FASTEST = 4e12
"""Bytes per second of a node beyond which a table must be wrong; four GPUs of an NVL72 send 3.6e12."""

_NAME = re.compile(r"\b([a-z]\w*?_perf)(?:_mpi)?\b")
_ALONE = " (nccl-tests built without MPI=1 tests every GPU alone)"
_LIMITS = re.compile(r"minBytes (\d+) maxBytes (\d+) step: (\d+)\((factor|bytes)\)")
_REDUCED = re.compile(r"Reducing maxBytes to (\d+)")
_RANK = re.compile(r"[#\s]*Rank\s+(\d+)\b.*?\bon\s+(\S+) device +(\d+ \[\S+\])")


@dataclass
class _Table:
    """The output of one test."""

    name: str | None
    number: int
    gpus: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Host, and device, of each rank."""
    seconds: dict[float, float] = field(default_factory=dict)
    rates: dict[float, tuple[float, float]] = field(default_factory=dict)
    """GB/s of each size, of the algorithm and of the bus."""
    most: float = 0.0
    """Smallest size that the last row must have; 0: unknown."""


def with_nccl_tests(cluster: Cluster, path: Path) -> tuple[Cluster, str]:
    """Return the cluster with the network's rate and latency as nccl-tests measured them, and a line about them. A test
    inside one node gives NVLink's rate; a table of large sizes gives no latency.

    Raises:
        PlanError: the file is missing, or is no whole output of one test of nccl-tests; the message names the line.
    """
    name, table = _read(path)
    nodes, ranks, sizes = len({host for host, _ in table.gpus.values()}), len(table.gpus), table.seconds
    group, (travel, _), least, most = Group(ranks, -(-ranks // nodes), 1), _COLLECTIVES[name], min(sizes), max(sizes)

    def place(rate: float, hop: float) -> Cluster:
        line = Constant(rate, "measured", str(path))
        if nodes == 1:
            return replace(cluster, gpu=replace(cluster.gpu, nvlink=line))
        words = f"{cluster.network.name}, as measured"
        # A ring that crosses nodes proves that NVLink is at least as fast.
        return replace(
            cluster,
            gpu=replace(cluster.gpu, nvlink=line) if rate > cluster.gpu.nvlink else cluster.gpu,
            network=replace(cluster.network, name=words, node_rate=line, hop=Constant(hop, "measured", str(path))),
        )

    def rate_for(hop: float) -> float:
        return 1 / max(1e-15, solved(lambda slow: travel(place(1 / max(slow, 1e-15), hop), group, most), sizes[most]))

    def hop_for(rate: float) -> float:
        return solved(lambda slow: travel(place(rate, slow / 1e6), group, least), sizes[least]) / 1e6

    # The largest message gives the rate for a latency, the smallest one the latency for a rate.
    hop = hop_for(rate_for(cluster.network.hop)) if least < most and least <= LATENCY_BYTES else cluster.network.hop
    if (rate := rate_for(hop)) > FASTEST:
        raise PlanError(f"--nccl-tests {path}, line {table.number}: {rate / 1e9:.3g} GB/s a node, more than any "
                        "network has: give a table with larger messages (-e 1G)")  # fmt: skip
    said = f"{path}: {name} over {ranks} ranks on {nodes} nodes: {rate / 1e9:.3g} GB/s"
    return place(rate, hop), f"{said} {'inside a node' if nodes == 1 else f'a node, {1e6 * hop:.3g} us a hop'}"


def _read(path: Path) -> tuple[str, _Table]:
    """Return the collective, and the last table of the file."""

    def refuse(number: int, reason: str) -> NoReturn:
        raise PlanError(f"--nccl-tests {path}, line {number}: {reason}. Give the whole output of one test")

    try:
        lines = [without_prefix(line) for line in path.read_text("utf-8", "replace").splitlines()]
    except OSError as error:
        raise PlanError(f"--nccl-tests {path}: {error.strerror}: give the output of all_reduce_perf") from None
    name, most, tables = None, 0.0, list[_Table]()
    for number, line in enumerate(lines, 1):
        name = match[1] if (match := _NAME.search(line)) else name
        if match := _LIMITS.search(line):
            least, last, step = (int(each) for each in match.group(1, 2, 3))
            most = _last_size(least, last, step, match[4] == "factor")
        if (match := _REDUCED.search(line)) and tables:
            tables[-1].most = min(tables[-1].most, int(match[1]) / 2)
        if re.match(r"[#\s]*Rank\s", line):
            if not tables or tables[-1].seconds:
                tables.append(_Table(name, number, most=most))
            gpus = tables[-1].gpus
            if (match := _RANK.match(line)) is None or gpus.get(int(match[1]), match.group(2, 3)) != match.group(2, 3):
                refuse(number, f"this rank's line is cut, or another one has its number{_ALONE}")
            gpus[int(match[1])] = match[2], match[3]
        elif tables and re.match(r"\s*\d+(\s|$)", line):
            if (row := _row(line.split())) is None:
                refuse(number, "no column of this row is a time in us, followed by the size over that time: it is cut")
            if row[0]:
                tables[-1].seconds[row[0]], tables[-1].rates[row[0]] = row[1], row[2:]
    if not tables:
        refuse(len(lines), "no line '#  Rank  0 .. on HOST' up to here, which is the last one")
    table, known = tables[-1], list(dict.fromkeys(each.name for each in tables if each.name))
    name = next(iter(known), None) or next((each for each in _COLLECTIVES if each in path.name), None)
    if len(known) > 1:
        refuse(table.number, f"{' and '.join(known)} are in one file, the last one from here on: keep one of them")
    if name not in _COLLECTIVES:
        refuse(table.number, f"neither the lines before nor the file's name say {', '.join(_COLLECTIVES)}")
    if len(table.gpus) < 2 or sorted(table.gpus) != list(range(len(table.gpus))):
        refuse(table.number, f"lines '#  Rank  0 .. on HOST' list ranks {', '.join(map(str, sorted(table.gpus)))}: two "
               f"or more are needed, from 0 on{_ALONE}")  # fmt: skip
    if len(set(table.gpus.values())) < len(table.gpus):
        refuse(table.number, "two ranks have one host and one GPU: hosts of one name cannot be told apart")
    if not table.seconds:
        refuse(table.number, "no row of sizes follows")
    (rate, bus), count = table.rates[max(table.rates)], len(table.gpus)
    if abs(bus - rate * _COLLECTIVES[name][1] * (count - 1) / count) > 0.011 + 0.002 * bus:
        refuse(table.number, f"{count} ranks are listed from here on, and a bus rate of {bus} GB/s for {rate} is not "
               "theirs: a line is cut")  # fmt: skip
    if max(table.seconds) < RATE_BYTES:
        refuse(table.number, f"the largest message has {max(table.seconds):.0f} bytes, which gives no rate: test up to "
               "-e 1G")  # fmt: skip
    if max(table.seconds) < table.most:
        refuse(len(lines), f"the table ends at {max(table.seconds):.0f} bytes, and -e says more: it is cut")
    return name, table


def _last_size(least: int, most: int, step: int, factor: bool) -> float:
    """Return the size of the last row, less what is rounded down to whole values on each rank."""
    if not factor:
        return 0.99 * (most - (most - least) % max(1, step))
    while least and step > 1 and least * step <= most:
        least *= step
    return 0.99 * least


def _row(cells: list[str]) -> tuple[float, float, float, float] | None:
    """Return the size, the seconds, and the rates of algorithm and bus, out of place, of a row; None if it has none.

    Versions of nccl-tests have different columns before the time: operation and root are there, empty or absent. The
    time is known by the next column, the rate.
    """
    for triple in zip(cells[2:], cells[3:], cells[4:], strict=False):
        with suppress(ValueError):
            size, (micros, rate, bus) = float(cells[0]), map(float, triple)
            if micros > 0:
                agree = abs(size / micros / 1e3 - rate) <= max(0.006, 0.006 * rate)
                return (size, micros / 1e6, rate, bus) if agree else None
    return None
