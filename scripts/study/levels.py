"""Error of the summed gradient in one level and in two, by the product's own reducers on real ranks.

    python -m scripts.study.levels --nodes 4 --members 2

Every replica's gradient is Gaussian, and replicas have a share of its variance in common: 0, 10 and 50 %. Each format
reduces the same gradients with the distributed optimizer, over ranks of this machine that stand for nodes. The table
has |sum - exact sum| / |exact sum|. A block's error is proportional to the values that are encoded: two levels, which
encode sums of nodes, lose up to the root of the members more than one level in the same format if replicas agree.
"""

import argparse
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from optimus_cc_ext.collectives.exchange import ExchangePlan
from optimus_cc_ext.collectives.groups import Groups
from optimus_cc_ext.collectives.messages import BlockCodecs, Tools
from optimus_cc_ext.collectives.nodes import Node
from optimus_cc_ext.compressors.fast import fast_codec
from optimus_cc_ext.techniques.grid import RankPlace
from optimus_cc_ext.techniques.groups import NewGroups
from optimus_cc_ext.tools.report.table import Cell, Table

SHARES = (0.0, 0.1, 0.5)
"""Shares of the variance of a replica's gradient that all replicas have in common."""

VARIANTS = ((1, "int4"), (2, "int4"), (1, "int8"), (2, "int8"))
"""Number of levels, and format, of each column of the table."""

Errors = dict[tuple[float, int, str], float]
"""Relative error of the sum, by (share of common gradient, number of levels, format)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Reduce gradients on real ranks, and print the table of errors."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.study.levels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=4, help="number of nodes (%(default)s)")
    parser.add_argument("--members", type=int, default=2, help="replicas on each node (%(default)s)")
    parser.add_argument("--numel", type=int, default=1 << 20, help="values of the gradient (%(default)s)")
    given = parser.parse_args(arguments)
    errors = measure(given.nodes, given.members, given.numel)
    rows: list[tuple[Cell, ...]] = [
        (f"{share:.0%}", *(f"{errors[share, levels, format]:.4f}" for levels, format in VARIANTS)) for share in SHARES
    ]
    columns = (
        "in common",
        *(f"{format}, {'one level' if levels == 1 else 'two levels'}" for levels, format in VARIANTS),
    )
    title = f"Relative error of the sum over {given.nodes} nodes of {given.members} replicas"
    print(Table(columns, rows, title).markdown())
    return 0


def measure(nodes: int, members: int, numel: int) -> Errors:
    """Return the errors that ranks of this machine measure; `numel` is rounded up to whole shards of 128 values."""
    ranks = nodes * members
    numel = -(-numel // (ranks * 128)) * ranks * 128
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_reduce, (members, ranks, numel, folder), nprocs=ranks)
        parts = [torch.load(Path(folder) / str(rank)) for rank in range(ranks)]
    sums = {key: [sum(part[key][index] for part in parts) for index in (0, 1)] for key in parts[0]}
    return {key: (lost / of) ** 0.5 for key, (lost, of) in sums.items()}


def _reduce(rank: int, members: int, ranks: int, numel: int, folder: str) -> None:
    """Reduce on one rank, and write (|error|^2, |sum|^2) of its shard for each variant."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=5))
    places = [
        RankPlace(rank=each, stage=0, tensor_rank=0, node=Node(f"{socket.gethostname()} {each // members}"))
        for each in range(ranks)
    ]
    in_levels = {
        1: Groups(dist.group.WORLD),
        2: NewGroups(places, dist.group.WORLD, None).in_levels(dist.group.WORLD, two=True),
    }
    own = slice(rank * (numel // ranks), (rank + 1) * (numel // ranks))
    found = {}
    for share in SHARES:
        gradients = [_gradient(each, share, numel) for each in range(ranks)]
        exact = sum(gradient[own].double() for gradient in gradients)
        for levels, format in VARIANTS:
            flat, groups = gradients[rank].clone(), in_levels[levels]
            codecs = BlockCodecs(*(fast_codec(name, seed=1, rotated=True) for name in (format, "int8")))
            plan = ExchangePlan(
                numel=numel, coded=[(0, numel)], dtype=flat.dtype, ranks=ranks, sharded=True, formats=codecs.formats,
                levels=groups.levels, place=groups.place,
            )  # fmt: skip
            plan.bind(groups, Tools(device=flat.device, codecs=codecs)).reduce(flat)
            lost = (flat[own].double() - exact).square().sum()
            found[share, levels, format] = (float(lost), float(torch.as_tensor(exact).square().sum()))
    torch.save(found, Path(folder) / str(rank))
    dist.destroy_process_group()


def _gradient(rank: int, share: float, numel: int) -> torch.Tensor:
    """Make the gradient of a replica: Gaussian, of which all replicas have `share` of the variance in common."""
    common, own = (torch.randn(numel, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1 + rank))
    return common.mul_(share**0.5).add_(own, alpha=(1 - share) ** 0.5)


if __name__ == "__main__":
    sys.exit(main())
