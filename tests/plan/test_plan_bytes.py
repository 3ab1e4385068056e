"""The planner's closed forms compared with the plans of training: bytes of an iteration, class by class."""

import pytest
import torch

from optimus_cc_ext.config import OptimusConfig, classes
from optimus_cc_ext.config.presets import Layout
from optimus_cc_ext.placement import Placement
from optimus_cc_ext.techniques.bucket_rules import ParameterRecord
from optimus_cc_ext.tools.doctor.estimate import Gpt, OnNodes, bytes_by_class, places_of
from optimus_cc_ext.tools.plan.hardware import CLUSTERS
from optimus_cc_ext.tools.plan.iteration import rank_costs, schedule_of
from optimus_cc_ext.tools.plan.model import Job
from optimus_cc_ext.tools.plan.shapes import MODELS, Mixture, Model
from optimus_cc_ext.tools.plan.timeline import Switches, When

SMALL = Model(layers=8, hidden=1024, heads=16, sequence=1024, gated=True, groups=4, ffn=2816, tied=False)
EXPERTS = Mixture(experts=4, ffn=2048, layers=4)
LOCAL = Model(layers=4, hidden=1024, heads=16, sequence=1024, ffn=4096, biases=False, mixture=EXPERTS, vocabulary=1024)
JOBS = {
    "8.3b": Job(model=MODELS["8.3b"], gpus=128, tp=8, pp=4, micro_batch=8, batch=512),
    "2.5b": Job(model=MODELS["2.5b"], gpus=16, tp=1, pp=4, micro_batch=2, batch=64),
    "2.5b, interleaved": Job(model=MODELS["2.5b"], gpus=8, tp=2, pp=2, vpp=2, micro_batch=2, batch=16),
    "18b, one stage": Job(model=MODELS["18b"], gpus=32, tp=8, micro_batch=1, batch=8, sequence_parallel=True),
    "small, untied": Job(model=SMALL, gpus=8, tp=1, pp=4, micro_batch=4, batch=32),
    "local experts": Job(model=LOCAL, gpus=4, tp=1, micro_batch=1, batch=8),
    "experts apart": Job(model=LOCAL, gpus=4, tp=1, ep=2, micro_batch=1, batch=8),
}
CONFIGS = {
    "dense": {},
    "paper": {
        "compressed_backprop_format": "low-rank", "fused_embedding_sync": True, "dp_compression_format": "low-rank",
    },
    "all low-rank": {
        "compressed_backprop_format": "low-rank", "compressed_backprop_messages": "all",
        "dp_compression_format": "low-rank",
    },
    "int8": {
        "pipeline_forward_format": "int8", "compressed_backprop_format": "int8", "dp_compression_format": "int8",
        "fused_embedding_sync_format": "int8",
    },
    "int4, first stage": {
        "compressed_backprop_format": "int4", "dp_compression_format": "int4", "dp_compression_stages": 1,
    },
}  # fmt: skip


def gpt_of(job: Job) -> Gpt:
    """Return the model as doctor reads it from a launch line, without positions and the last norm."""
    model, vectors = job.model, [(job.model.hidden,)] * 4
    matrices = [
        ParameterRecord(shape=each.on_rank(job.tp)[::-1], expert=each.routed, router=each.router)
        for each in model.matrices
        for _ in range(each.copies // (job.ep if each.routed else 1))
    ]
    small = [*[(each.shape[0],) for each in matrices if model.biases], *vectors]
    layers = [*matrices, *(ParameterRecord(shape=shape) for shape in small)] * job.layers_per_stage
    shape = (model.vocabulary // job.tp, model.hidden)
    words = ParameterRecord(shape=shape, tied=model.tied and job.pp > 1, embedding=True)
    return Gpt(
        stages=[
            [*layers, *[words] * (min(1, copies) if model.tied else copies)]
            for stage in range(job.pp)
            for copies in [(stage == 0) + (stage == job.pp - 1)]
        ],
        message=torch.Size((job.message_rows, 1, model.hidden)),
        pipeline_dtype=torch.bfloat16,
        gradient_dtype=torch.float32,
        parameter_dtype=torch.bfloat16,
        tensor_parallel=job.tp,
        expert_replicas=job.expert_replicas if job.ep > 1 else 0,
    )


def planned(job: Job, config: OptimusConfig) -> dict[str, float]:
    """Return the bytes of all ranks in one iteration by class, from the planner's costs; gradients include the
    embedding.
    """
    named = config.dp_compression_stages
    chosen = (
        frozenset(range(named if isinstance(named, int) else job.pp))
        if config.is_on(classes.DP_GRADIENTS)
        else frozenset()
    )
    switches = Switches.of(config, job.pp).where("DP gradients", chosen)
    schedule, found = schedule_of(job.pp, job.vpp, job.micro_batches), dict.fromkeys(("gradients", "gather"), 0.0)
    ranks, last = rank_costs(CLUSTERS["paper"], job, config), job.pp * job.vpp - 1
    for rank in ranks:
        sent = {(cost.name, cost.when): switches.sent(cost, rank.stage).nbytes for cost in rank.classes}
        activations = sum(w.forward and w.chunk * job.pp + rank.stage < last for w in schedule.passes(rank.stage))
        found["forward"] = found.get("forward", 0) + activations * sent["pipeline forward", When.ACTIVATION]
        found["gradients"] += sent["DP gradients", When.AFTER_BACKWARD]
        if rank.stage in (0, job.pp - 1):
            found["gradients"] += sent["embedding", When.AFTER_BACKWARD]
        if rank.stage == 0:
            found["gather"] += sent["parameter gather", When.AFTER_STEP]
    found["backward"] = 0.0
    for receiver in range(job.pp if job.vpp > 1 else job.pp - 1):
        (cost,) = (cost for cost in ranks[(receiver + 1) % job.pp].classes if cost.when is When.GRADIENT)
        for message in schedule.messages(receiver):
            dense = switches.epilogue_only and not message.epilogue
            found["backward"] += (cost.dense if dense else switches.sent(cost, receiver)).nbytes
    return {name: nbytes * job.tp * job.replicas for name, nbytes in found.items()}


def plans(job: Job, config: OptimusConfig) -> dict[str, int]:
    """Return the bytes of all ranks in one iteration by class, from the plans of training, as doctor computes them."""
    layout = Layout(
        stages=job.pp,
        data_parallel=job.dp,
        tied_embeddings=job.model.tied,
        distributed_optimizer=job.distributed_optimizer,
        instances=job.instances,
        exact_bits=(job.exact_bits, 5.0),
    )
    schedule = schedule_of(job.pp, job.vpp, job.micro_batches)
    places = places_of(Placement(tensor=job.tp, data=job.dp, pipeline=job.pp, ranks_per_node=8))
    on = OnNodes.of(config, places, layout)
    asked = {name: sent for name, (_, sent) in bytes_by_class(gpt_of(job), layout, config, schedule, on).items()}
    return {
        "forward": asked.get("pipeline forward", 0),
        "backward": asked.get("pipeline backward", 0),
        "gradients": asked["DP gradients"] + asked.get("embedding", 0),
        "gather": asked.get("parameter gather", 0),
    }


def config_for(job: Job, form: str, **more: object) -> OptimusConfig:
    """Return a configuration of the classes that this layout has, as a preset would choose."""
    allowed = {"dp_compression"}
    allowed |= {"compressed_backprop", "pipeline_forward"} if job.pp > 1 else set()
    allowed |= {"fused_embedding_sync"} if job.pp > 1 and job.model.tied else set()
    named = {name: value for name, value in CONFIGS[form].items() if name.startswith((*allowed, "low_rank"))}
    return OptimusConfig(**named | more)


@pytest.mark.parametrize("bits", [2.0, 5.0])
def test_bits_that_the_learning_rate_lets_expect_are_in_the_planners_and_in_trainings_own_plans(bits: float) -> None:
    job = JOBS["18b, one stage"].replace(distributed_optimizer=True, exact_bits=bits)
    config = OptimusConfig(param_gather_format="exact")
    assert planned(job, config)["gather"] == pytest.approx(plans(job, config)["gather"], rel=0.01)
    assert plans(job, config)["gather"] == pytest.approx(bits / 16 * plans(job, OptimusConfig())["gather"], rel=0.01)


CASES = [(name, form, sharded) for name in JOBS for form in CONFIGS for sharded in (False, True)]
EMBEDDING, PAIR = (
    "an embedding that is encoded in its bucket is planned dense",
    "the replicas' part of a fused embedding is planned dense, and the sum over its two stages both ways",
)
KNOWN = {
    ("2.5b", "int4, first stage", False): (EMBEDDING, 1.038),
    ("18b, one stage", "int8", True): (EMBEDDING, 1.047),
    ("small, untied", "int8", False): (EMBEDDING, 2.575),
    ("8.3b", "int8", True): (PAIR, 1.101),
    ("2.5b, interleaved", "int8", True): (PAIR, 1.212),
}
"""Cases in which the planner's gradients differ from the plans': the reason, and planned over sent bytes."""


def reason(job: Job, config: OptimusConfig) -> str | None:
    """Return why the planner's bytes of gradients differ from the plans'; None: they do not."""
    low_rank = config.dp_compression_format == "low-rank"
    if config.fused_embedding_sync_format != "dense" and job.distributed_optimizer:
        return PAIR
    return (
        EMBEDDING
        if config.is_on(classes.DP_GRADIENTS) and not low_rank and not config.is_on(classes.EMBEDDING)
        else None
    )


def measured(name: str, form: str, sharded: bool) -> tuple[str | None, dict[str, float], dict[str, int]]:
    job = JOBS[name].replace(distributed_optimizer=sharded)
    config = config_for(job, form)
    return reason(job, config), planned(job, config), plans(job, config)


@pytest.mark.parametrize(("name", "form", "sharded"), CASES)
def test_the_planners_bytes_are_those_of_the_plans(name: str, form: str, sharded: bool) -> None:
    differs, ours, theirs = measured(name, form, sharded)
    assert (ours["forward"], ours["backward"]) == (theirs["forward"], theirs["backward"])
    # Plans leave vectors dense, and each of T tensor-parallel ranks holds some of them whole; the planner splits all
    # vectors and encodes them with the blocks. The difference is at most 1.5 %, where low rank sends little but vectors
    # (18b, T = 8).
    assert differs or ours["gradients"] == pytest.approx(theirs["gradients"], rel=0.016)


@pytest.mark.parametrize(("name", "form", "sharded"), list(KNOWN))
def test_where_the_planners_bytes_are_others_it_is_known_why_and_by_how_much(
    name: str, form: str, sharded: bool
) -> None:
    differs, ours, theirs = measured(name, form, sharded)
    assert differs == KNOWN[name, form, sharded][0]
    assert ours["gradients"] / theirs["gradients"] == pytest.approx(KNOWN[name, form, sharded][1], abs=0.001)


@pytest.mark.parametrize("form", ["dense", "int8", "int4"])
@pytest.mark.parametrize("name", [name for name, job in JOBS.items() if job.model.tied])
def test_the_planners_gather_is_that_of_the_plans(name: str, form: str) -> None:
    # The planner counts the stage with the most parameters, which with one stage is the only one.
    whole, config = JOBS[name], OptimusConfig(param_gather_format=form)
    job = whole.replace(pp=1, vpp=1, gpus=whole.gpus // whole.pp, distributed_optimizer=True)
    # Among values of 4 bits, vectors that stay in 16 bits weigh four times as much.
    assert planned(job, config)["gather"] == pytest.approx(plans(job, config)["gather"], rel=0.006)


@pytest.mark.parametrize("form", ["dense", "int8", "int4"])
@pytest.mark.parametrize("instances", [2, 4])
def test_the_planners_bytes_between_instances_are_those_of_the_plans(form: str, instances: int) -> None:
    job = JOBS["2.5b"].replace(gpus=64, distributed_optimizer=True, instances=instances)
    config = OptimusConfig(dp_compression_format=form)
    # The planner sums the embedding dense; the plans encode it in its bucket, 4 % of a stage's values.
    close = 0.016 if form == "dense" else 0.05
    assert planned(job, config)["gradients"] == pytest.approx(plans(job, config)["gradients"], rel=close)
