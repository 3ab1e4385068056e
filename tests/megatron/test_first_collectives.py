"""Law: every process group of ours that a rank uses makes its first collective before the first step, and no other
does. NCCL makes a communicator in it, which would block autograd's thread, and take memory that PyTorch holds by then.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch.distributed as dist

from tests.megatron import interventions, recording
from tests.megatron import runs as table
from tests.megatron.specs import RunSpec, full, in_ci, uses

COLLECTIVES = ("reduce", "gather", "alltoall", "all_to_all", "barrier", "broadcast", "scatter", "send", "recv")

_first: dict[str, str] = {}
_later: set[str] = set()


def note_first_collectives() -> None:
    """Note for each group whether its first collective is made in a step, and which groups are used in steps."""

    def noting(original: Any, group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        frame, in_step = sys._getframe(1), False
        while frame is not None and not in_step:
            in_step, frame = frame.f_code.co_name == "train_step", frame.f_back  # type: ignore[assignment]
        _first.setdefault(group.group_desc, "in a step" if in_step else "before")
        if in_step:
            _later.add(group.group_desc)
        return original(group, *args, **kwargs)

    for name in dir(dist.ProcessGroup):
        method = getattr(dist.ProcessGroup, name)
        if callable(method) and any(word in name for word in COLLECTIVES):
            bound = functools.partial(noting, method)
            setattr(
                dist.ProcessGroup, name, functools.wraps(method)(lambda *args, bound=bound, **kw: bound(*args, **kw))
            )


def noted(model: list[Any], optimizer: Any) -> tuple[dict[str, str], set[str], set[str]]:
    session = recording.current()
    assert session is not None and session.new_groups is not None
    return _first, _later, set(session.new_groups.made)


def run(name: str, layout: table.Layout, flags: str, ours: str, members: int = 2) -> RunSpec:
    before = (functools.partial(interventions.nodes_of, members), note_first_collectives)
    return RunSpec(name=name, layout=layout, flags=f"{flags} --train-iters 2", ours=ours, before=before, probe=noted)


PP2_DP4 = (8, "--pipeline-model-parallel-size 2")
SHARDED = run(
    "first collectives, shards",
    (4, ""),
    f"--bf16 {table.OVERLAPPED} --untie-embeddings-and-output-weights",
    f"--dp-compression-format int8 {table.GATHER}",
)
TIED_DENSE = run("first collectives, dense tied embedding", PP2_DP4, "", f"{table.FE} --dp-compression-format int8")
TIED = TIED_DENSE.but("first collectives, tied embedding in blocks", ours="--fused-embedding-sync-format int8")
ONE_STAGE = TIED_DENSE.but("first collectives, one stage compresses", ours="--dp-compression-stages 1")


@uses(SHARDED, full(TIED_DENSE), full(TIED), full(ONE_STAGE))
def test_no_group_of_ours_makes_its_first_collective_in_a_step(runs):
    for rank in runs.ranks:
        first, later, made = rank.probed
        assert later & made, "no group of ours was used"
        assert {name: first[name] for name in later & made} == dict.fromkeys(later & made, "before"), first
        assert made & first.keys() <= later, "a group that the rank does not use made a communicator"


@uses(in_ci(ONE_STAGE))
def test_a_stage_that_compresses_nothing_makes_no_communicators_of_nodes(runs):
    for place, rank in runs.by_place().items():
        first, _, made = rank.probed
        levels = {"OPTIMUS_CC_NODE_1", "OPTIMUS_CC_RAIL_1"}  # the tied embedding's groups, without levels, come first
        assert levels <= made
        assert levels & first.keys() == (levels if place[0] == 0 else set())
