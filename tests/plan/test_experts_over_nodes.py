"""Experts over several nodes: what the planner says about tokens that leave a node once, and about HybridEP."""

from dataclasses import replace

import pytest
import torch

from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.collectives.nodes import Levels
from optimus_cc_ext.config.classes import EXPERT_DISPATCH, EXPERT_GRADIENT
from optimus_cc_ext.config.presets import share_of_copies
from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.tools import cli
from optimus_cc_ext.tools.doctor.tokens import ExpertLayers, Tokens
from optimus_cc_ext.tools.plan.hardware import Cluster, cluster_of
from optimus_cc_ext.tools.plan.inside import experts
from optimus_cc_ext.tools.plan.iteration import iteration
from optimus_cc_ext.tools.plan.model import Job
from optimus_cc_ext.tools.plan.shapes import MODELS, Model
from optimus_cc_ext.tools.plan.variants import Band, config_in, with_best_dispatcher

_V3 = MODELS["deepseek-v3"]
LIKE_V3 = replace(_V3, layers=9, predictors=0, mixture=replace(_V3.mixture, layers=8))
"""DeepSeek-V3's layers, as many as 4 nodes hold."""

BALANCED = "--optimus-cc balanced"
BOTH = f"{BALANCED} --expert-dispatch-format int8"


def over(nodes: int, model: Model = MODELS["qwen3-30b"], **changes: object) -> Job:
    asked = {"ep": 8 * nodes, "batch": 64 * nodes, "gradient_bytes": 2, "dispatcher": "alltoall"}
    overlap = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    return Job(model=model, gpus=8 * nodes, **asked | overlap | changes)


def seconds(cluster: Cluster, job: Job, flags: str) -> float:
    return iteration(cluster, job, config_in(flags.split(), job)).seconds


def plan(link: str, dispatcher: str) -> int:
    """Plan Qwen3 30B with its experts over four nodes, as a user does."""
    job = f"--expert-model-parallel-size 32 --global-batch-size 256 --moe-token-dispatcher-type {dispatcher}"
    return cli.main(["plan", "--cluster", f"h100-{link}", "--nodes", "4", "--model", "qwen3-30b", "--", *job.split()])


@pytest.mark.ci
@pytest.mark.parametrize("model", [MODELS["qwen3-30b"], LIKE_V3], ids=["Qwen3 30B", "like DeepSeek-V3"])
@pytest.mark.parametrize("link", ["10gbe", "100gbe"])
def test_on_ethernet_tokens_once_a_node_are_far_faster_than_alltoall(model: Model, link: str) -> None:
    cluster = cluster_of(f"h100-{link}")
    for nodes, least in ((4, 2.4), (8, 1.8)):
        job = over(nodes, model)
        vanilla = Band(cluster, job).vanilla.seconds
        assert vanilla == iteration(cluster, job).seconds, "HybridEP takes RDMA"
        assert vanilla / seconds(cluster, job, BALANCED) > least
        assert vanilla / seconds(cluster, job, BOTH) > 2.5
        assert vanilla / seconds(cluster, job, f"{BALANCED} --expert-exchange direct") < 1.4


@pytest.mark.parametrize("chosen", ["dense", "int8"])
@pytest.mark.parametrize("nodes", [2, 4])
def test_the_planner_sends_the_bytes_that_doctor_counts(chosen: str, nodes: int) -> None:
    job, cluster = over(nodes), cluster_of("h100-100gbe")
    config = OptimusConfig(
        expert_dispatch_format=chosen, expert_gradient_format=chosen, expert_exchange="once-a-node"
    )  # fmt: skip
    mixture = ExpertLayers(layers=1, experts=128, probability=0, rows_per_token=8)
    tokens = Tokens(number=job.rows * 8, dtype=torch.bfloat16, hidden=2048, mixture=mixture)
    forward, _, backward = experts(cluster, job, config)
    for cost, traffic in ((forward, EXPERT_DISPATCH), (backward, EXPERT_GRADIENT)):
        counted = tokens.once(traffic, chosen, Levels(nodes=nodes, members=8), (128, 8, 8))
        assert cost.compressed.nbytes == pytest.approx(counted.sent, rel=1e-6)
        # Hop 1 of one rank, on the line that 8 ranks share, cannot take less than its bytes.
        assert cost.compressed.transfer > 8 * counted.leaving / cluster.network.node_rate


def test_with_rdma_vanilla_is_planned_with_hybridep_where_that_is_faster(capsys: pytest.CaptureFixture[str]) -> None:
    job = over(4)
    for link, hybrid in (("100gbe", False), ("roce100x1", True), ("ndr8", True)):
        cluster = cluster_of(f"h100-{link}")
        assert (with_best_dispatcher(cluster, job) is not job) is hybrid
        assert with_best_dispatcher(cluster, over(4, ep=8)).dispatcher == "alltoall", "nothing leaves a node"
    for link, faster in (("ndr1", "balanced"), ("ndr8", "HybridEP without compression")):
        assert plan(link, "alltoall") == 0
        said = capsys.readouterr().out
        assert "vanilla is planned with HybridEP (--moe-token-dispatcher-type flex" in said
        assert f"the fastest here: {faster}" in said


def test_a_plan_says_when_hybridep_is_given_where_no_rdma_is(capsys: pytest.CaptureFixture[str]) -> None:
    for link, runs in (("100gbe", False), ("roce100x1", True)):
        assert plan(link, "flex --moe-flex-dispatcher-backend hybridep") == 0
        assert ("takes RDMA between nodes" in capsys.readouterr().out) is not runs


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ep": 8}, "all of a group's ranks share a node"),
        ({"expert_overlap": True}, "--overlap-moe-expert-parallel-comm"),
        ({"etp": 2, "ep": 16}, "--expert-tensor-parallel-size above 1"),
    ],
)
def test_once_a_node_is_refused_where_training_refuses_it_and_auto_goes_direct(
    changes: dict[str, object], reason: str
) -> None:
    job, cluster = over(4, **changes), cluster_of("h100-100gbe")
    with pytest.raises(FlagError, match=f"--expert-exchange: tokens cannot go once a node: {reason}"):
        seconds(cluster, job, "--expert-exchange once-a-node")
    if not job.expert_overlap:
        assert seconds(cluster, job, BALANCED) == seconds(cluster, job, f"{BALANCED} --expert-exchange direct")


def test_a_token_of_one_expert_goes_direct() -> None:
    model = replace(MODELS["qwen3-30b"], mixture=replace(MODELS["qwen3-30b"].mixture, experts=32, top_k=1))
    job, cluster = over(4, model), cluster_of("h100-100gbe")
    assert share_of_copies((32, 1, 1), 4) == 1.0
    assert seconds(cluster, job, BALANCED) == seconds(cluster, job, f"{BALANCED} --expert-exchange direct")
