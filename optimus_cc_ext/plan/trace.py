"""One iteration as a trace for Perfetto (ui.perfetto.dev) or Chrome: the forecast's timeline, pass by pass.

The format is Chrome's trace event format, JSON, complete events ("X") in microseconds: a process per stage, whose
threads are its computation, its messages and its reductions.
"""

from typing import Any

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import DP_GRADIENTS
from optimus_cc_ext.forecast.timeline import last_backward_ends
from optimus_cc_ext.plan.iteration import PlannedIteration, schedule_of
from optimus_cc_ext.plan.model import Job
from optimus_cc_ext.techniques.schedule import Pass

__all__ = ["trace"]

_THREADS = ("computation", "messages", "reductions")
MOST_PASSES = 100_000
"""Beyond it fewer micro-batches are drawn than are trained: Perfetto has to load it."""


def trace(job: Job, config: OptimusConfig, result: PlannedIteration) -> dict[str, Any]:
    """The trace of `result`, the iteration of `job` and `config`; of very many micro-batches some are left out."""
    events: list[dict[str, Any]] = []
    names = ["optimizer and gather", *(f"stage {stage}" for stage in range(job.pp))]
    for process, name in enumerate(names):
        events.append({"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}})
        for thread, task in enumerate(_THREADS):
            events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": task}})

    def add(process: int, thread: int, name: str, begin: float, seconds: float) -> None:
        if seconds > 0:
            place = {"pid": process, "tid": thread, "cat": _THREADS[thread]}
            events.append({"ph": "X", "name": name, "ts": 1e6 * begin, "dur": 1e6 * seconds, **place})

    def observe(stage: int, work: Pass | None, begin: float, end: float) -> None:
        if work is None:
            add(stage + 1, 1, "message", begin, end - begin)
        else:
            way = "forward" if work.forward else "backward"
            chunk = f", chunk {work.chunk}" if job.vpp > 1 else ""
            add(stage + 1, 0, f"{way} {work.micro_batch}{chunk}", begin, end - begin)

    rounds = max(4, MOST_PASSES // (2 * job.pp * job.vpp * job.pp))
    count = min(job.micro_batches, job.pp * rounds)
    times = result.times
    ends = last_backward_ends(schedule_of(job.pp, job.vpp, count), times.costs, observe)
    reduced = [end + left for end, left in zip(ends, times.reductions, strict=True)]
    for stage, (end, left) in enumerate(zip(ends, times.reductions, strict=True)):
        form = config.format_of(DP_GRADIENTS) if stage in result.compressed_stages else "dense"
        add(stage + 1, 2, f"gradients, {form}", end, left)
    for stage in {0, job.pp - 1}:
        add(stage + 1, 2, "embedding", max(reduced[0], reduced[-1]), times.embedding)
    over = max(*reduced, max(reduced[0], reduced[-1]) + times.embedding)
    add(0, 0, "optimizer", over, result.step)
    add(0, 2, "parameter gather", over + result.step, times.after_step)
    return {"traceEvents": events, "displayTimeUnit": "ms"}
