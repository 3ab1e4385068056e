"""Output of nccl-tests on a planned cluster, in the forms of its versions."""

from collections.abc import Sequence

from optimus_cc_ext.tools.plan.hardware import Cluster
from optimus_cc_ext.tools.plan.seconds import Group, all_reduce, all_to_all, reduce_scatter

__all__ = ["nccl_tests"]

_TRAVEL = {
    "all_reduce_perf": (all_reduce, 2, "sum"), "alltoall_perf": (all_to_all, 1, "none"),
    "all_gather_perf": (reduce_scatter, 1, "none"),
}  # fmt: skip
_TODAY = """\
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
_OLD = """\
#                                                     out-of-place                       in-place
#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)                     (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""


def nccl_tests(
    cluster: Cluster, name: str, ranks: int, per_node: int, *, old: bool = False,
    sizes: Sequence[int] = tuple(1 << power for power in range(3, 34)), limits: bool = True,
) -> str:  # fmt: skip
    """Return what nccl-tests prints on `cluster`; `old` is the form of 2019 to 2021, without a root."""
    (travel, times, operation), group = _TRAVEL[name], Group(ranks, per_node, 1)
    head = f"./build/{name} -b {sizes[0]} -e {sizes[-1]} -f 2\n" if old else f"# Collective test starting: {name}\n"
    if limits:
        head += f"# nThread 1 nGpus 1 minBytes {sizes[0]} maxBytes {sizes[-1]} step: 2(factor) warmup iters: 5\n"
    places = "".join(
        f"#  {'' if old else ' '}Rank {rank:2d} {'' if old else 'Group  0 '}Pid {4000 + rank} on   "
        f"node{rank // per_node} device {rank % per_node:2d} [0x{rank % per_node:02x}] NVIDIA A100\n"
        for rank in range(ranks)
    )
    rows = ""
    for size in sizes:
        micros = 1e6 * travel(cluster, group, size)
        time = f"{micros:7.0f}" if micros >= 1e4 else f"{micros:7.1f}" if micros >= 100 else f"{micros:7.2f}"
        rate = size / float(time) / 1e3
        numbers = f"{time} {rate:7.2f} {rate * times * (ranks - 1) / ranks:7.2f}"
        root, wrong = ("", "  2e-07") if old else ("     -1 ", "     0")
        rows += f"{size:12d} {size // 4:13d}     float {operation:>7} {root}{numbers} {wrong} {numbers} {wrong}\n"
    tail = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 3.14159\n#\n"
    return f"{head}#\n# Using devices\n{places}#\n{_OLD if old else _TODAY}{rows}{tail}"
