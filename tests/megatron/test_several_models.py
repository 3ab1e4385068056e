"""Law: several models in one job train as each of them does alone, whatever the order of their steps.

A policy (two stages, two replicas, tied, balanced), a critic and an encoder over all ranks with process groups of their
own (one stage, untied; int8, and low rank with residuals), and a frozen reference without DDP.
"""

import os
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

import optimus_cc_ext
from optimus_cc_ext import OptimusConfig
from tests.forked_ranks import run_ranks
from tests.megatron import own_loops

STEPS = 50
NAMES = ("policy", "critic", "encoder", "reference")


def settings(name: str) -> OptimusConfig | str:
    if name == "policy":
        return "balanced"
    if name == "critic":
        return OptimusConfig(dp_compression_format="int8")
    return OptimusConfig(dp_compression_format="low-rank", dp_compression_rank=2, _force_compression=True)


@dataclass
class Trained:
    """Model of the job, with the objects that train it."""

    model: Any
    groups: Any
    optimizer: Any
    handle: Any

    def step(self, batch: int) -> str:
        """Take a step, and return the hash of its gradients."""
        own_loops.pass_of(self.model, self.groups, batch=batch)
        digest = own_loops.digest(self.model)
        for parameter in self.model.parameters():
            parameter.grad = parameter.main_grad
        self.optimizer.step()
        return digest

    def residuals(self) -> list[torch.Tensor]:
        return [state.residual.committed.clone() for state in self.handle._session.gradients.states]


def over_all_ranks() -> Any:
    groups = own_loops.groups_of_ones_own(1)
    groups.dp = groups.dp_cp = dist.new_group(list(range(dist.get_world_size())))
    return groups


def trained(name: str) -> Trained:
    groups = None if name == "policy" else over_all_ranks()
    if name == "policy":
        model = own_loops.build(2)
        optimizer = own_loops.optimizer_of(model)
    else:
        model = own_loops.build(1, groups, tied=False, hidden=16 if name == "critic" else 24)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # A trial would choose by the seconds of this machine.
    handle = optimus_cc_ext.compress(model, optimizer, settings(name), compression_trial=False)
    return Trained(model, groups, optimizer, handle)


def groups_of_this_rank() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def job(names: tuple[str, ...]) -> dict[str, Any]:
    """Train these models in the order that all jobs share, and return what each one's steps left."""
    own_loops.start(2)
    os.environ["OPTIMUS_CC_NODE"] = f"node {dist.get_rank()}"  # the preset `balanced` compresses between nodes only
    reference = own_loops.build(2).module
    models: dict[str, Trained] = {}
    made: list[int] = []
    for name in names:
        models[name] = trained(name)
    before, order = groups_of_this_rank(), random.Random(7)
    digests: dict[str, list[str]] = {name: [] for name in names}
    for number in range(STEPS):
        name = order.choice(NAMES)
        if name == "reference" and len(names) > 1:
            with torch.no_grad():
                own_loops.pass_of(reference, forward_only=True)
        if name not in names:
            continue
        others = {other: model.residuals() for other, model in models.items() if other != name}
        digests[name].append(models[name].step(number))
        for other, residuals in others.items():
            assert all(map(torch.equal, residuals, models[other].residuals())), f"{name} touched {other}'s residuals"
        made.append(groups_of_this_rank())
    metrics = {name: model.handle.metrics() for name, model in models.items()}
    for model in models.values():
        model.handle.remove()
    return {
        "digests": digests, "leaked": max(made) - before, "metrics": metrics, "left": before - groups_of_this_rank(),
    }  # fmt: skip


@pytest.mark.full
def test_each_of_several_models_trains_as_it_does_alone() -> None:
    together = run_ranks(4, job, NAMES[:3], timeout=150)
    for name in NAMES[:3]:
        alone = run_ranks(4, job, (name,), timeout=100)
        for rank, other in zip(together, alone, strict=True):
            assert len(rank["digests"][name]) > STEPS / 8
            assert rank["digests"][name] == other["digests"][name], name
    for rank in together:
        assert rank["leaked"] == 0, "no step makes a process group"
        # Each of three handles has a group of this rank alone, and one has a group for the tied embedding.
        assert rank["left"] == 4, "the groups that the handles made"
        for name in NAMES[:3]:
            raw, sent = (rank["metrics"][name][f"optimus-cc/DP gradients {kind} bytes"] for kind in ("raw", "sent"))
            assert 0 < sent < raw, name
