"""Inputs of the planner's costs: tiles, bytes, one queue per node, constants with a source."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from optimus_cc_ext.announce import COMPRESSION_STATE, MESSAGE_BUFFERS
from optimus_cc_ext.compressors.blocks import BlockLayout, Codec
from optimus_cc_ext.compressors.formats import FORMATS
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.placement import Placement
from optimus_cc_ext.tools.plan import PlanError, traffic, variants
from optimus_cc_ext.tools.plan.hardware import CLUSTERS, GPUS, Constant, cluster_of, network_of
from optimus_cc_ext.tools.plan.inside import inside
from optimus_cc_ext.tools.plan.iteration import breakdown, iteration
from optimus_cc_ext.tools.plan.memory import check_memory, memory
from optimus_cc_ext.tools.plan.model import Job
from optimus_cc_ext.tools.plan.seconds import Group, all_reduce, all_to_all, gemm, layer, moved, reduce_scatter, send
from optimus_cc_ext.tools.plan.shapes import MODELS, Mixture, Model
from optimus_cc_ext.tools.plan.traffic import (
    DENSE,
    activation_message,
    gradient_message,
    gradient_reduction,
    low_rank_values,
    parameter_gather,
)
from optimus_cc_ext.tools.plan.variants import Band
from tests.formats import formats_of
from tests.shell_scripts import ROOT

A100, CLUSTER = GPUS["A100"], CLUSTERS["a100-hdr200"]
JOB = Job(model=MODELS["8.3b"], gpus=128, tp=8, pp=4, micro_batch=8, batch=512)


def test_every_constant_says_where_it_comes_from() -> None:
    for part in (*GPUS.values(), *(cluster.network for cluster in CLUSTERS.values())):
        for name, value in vars(part).items():
            if isinstance(value, float):
                assert isinstance(value, Constant) and value.source, (part.name, name)
                assert value.kind in ("measured", "specified", "fitted", "assumed")
    fitted = [
        n for gpu in GPUS.values() for n, v in vars(gpu).items() if isinstance(v, Constant) and v.kind == "fitted"
    ]
    assert len(fitted) == 6  # each of the GPUs has at most three fitted constants


def test_a_gemm_pays_for_whole_waves_of_tiles_and_never_runs_faster_than_its_bytes() -> None:
    full = gemm(A100, 128 * 108, 256 * 10, 4096)
    assert full == pytest.approx(2 * 128 * 108 * 2560 * 4096 / (A100.bf16 * A100.gemm_efficiency))
    assert gemm(A100, 128 * 108 + 1, 256 * 10, 4096) > 1.02 * full
    thin = gemm(A100, 65536, 16, 65536)
    assert thin >= 2 * 65536 * 65536 / A100.memory_rate


def test_full_recomputation_adds_one_forward_pass_and_selective_only_the_attention() -> None:
    none, selective, full = (layer(A100, JOB.replace(flash=False, recompute=r)) for r in ("none", "sel", "full"))
    assert full.backward == pytest.approx(none.backward + none.forward)
    assert none.backward < selective.backward < full.backward
    assert none.forward == full.forward


def test_a_micro_batchs_gradient_moves_8_bytes_a_value_10_in_a_kernel_of_its_own_and_18_cast_before() -> None:
    ways = (layer(A100, JOB.replace(accumulation=way)).backward for way in ("fused", "added", "cast"))
    fused, added, cast = (seconds * A100.memory_rate * A100.memory_efficiency for seconds in ways)
    values = JOB.model.layer_parameters / JOB.tp
    assert (added - fused, cast - added) == (pytest.approx(2 * values), pytest.approx(8 * values))


def test_ranks_of_a_node_share_its_one_queue() -> None:
    alone, eight = send(CLUSTER, 1e8, 1, True), send(CLUSTER, 1e8, 8, True)
    assert eight - CLUSTER.network.hop == pytest.approx(8 * (alone - CLUSTER.network.hop))
    assert send(CLUSTER, 1e8, 8, False) < eight
    # Eight rings that share one node's network line take eight times as long as one ring.
    shared = reduce_scatter(CLUSTERS["25gbe"], Group(4, 1, 8), 1e8)
    assert shared == pytest.approx(8 * reduce_scatter(CLUSTERS["25gbe"], Group(4, 1, 1), 1e8), rel=0.01)


def test_groups_are_megatrons() -> None:
    assert Group.strided(4, 8, 8) == Group(4, 1, 8)  # with 8 tensor-parallel ranks a node has one replica of each
    assert Group.strided(16, 2, 8) == Group(16, 4, 2)
    assert Group.strided(16, 1, 8) == Group(16, 8, 1) and Group.strided(16, 1, 8).nodes == 2


def test_small_messages_cost_latency_and_large_rings_lose_bandwidth() -> None:
    assert all_reduce(CLUSTER, Group(64, 8, 1), 8) > 20e-6
    small, large = Group(16, 8, 1), Group(1024, 8, 1)
    assert reduce_scatter(CLUSTER, large, 1e9) > 1.5 * reduce_scatter(CLUSTER, small, 1e9)
    assert all_reduce(CLUSTER, Group(1, 1, 1), 1e9) == 0.0


def test_an_all_to_all_has_no_sums_on_the_way() -> None:
    """With two full nodes, half of each rank's values have to leave the node; a ring sends them once per node."""
    two_nodes = Group(16, 8, 1)
    assert all_to_all(CLUSTER, two_nodes, 1e9) > 3 * reduce_scatter(CLUSTER, two_nodes, 1e9)


def test_a_format_that_is_in_no_table_has_no_costs() -> None:
    config = OptimusConfig()
    object.__setattr__(config, "pipeline_forward_format", "int5")
    with pytest.raises(ValueError, match=f"'int5' is no block format: there are {', '.join(FORMATS)}"):
        activation_message(CLUSTER, JOB, config)


@pytest.mark.parametrize("form", formats_of("compressed_backprop_format"))
def test_blocks_send_as_many_bytes_as_a_codec_writes(form: str) -> None:
    config, values = OptimusConfig(compressed_backprop_format=form), JOB.rows * JOB.model.hidden
    sent, forward = gradient_message(CLUSTER, JOB, config), activation_message(CLUSTER, JOB, config)
    # A codec aligns the parts of a message to 16 bytes.
    assert 0 <= Codec(form).message_bytes(BlockLayout.of_one(values), torch.bfloat16) - sent.nbytes < 32
    assert sent.remember == 0.0 and forward.nbytes == 2 * values
    lep = gradient_message(CLUSTER, JOB, OptimusConfig(compressed_backprop_format=form, lazy_error_propagation=True))
    # For the residual, the sender decodes its message once more, and reads and writes the sum.
    assert lep.remember > lep.decode == sent.decode
    assert lep.encode > sent.encode


def test_low_rank_sends_its_factors_and_nothing_where_nothing_is_saved() -> None:
    sent = gradient_message(CLUSTER, JOB, OptimusConfig(compressed_backprop_format="low-rank"))
    assert sent.nbytes == 2 * 16 * (JOB.rows + JOB.model.hidden)
    all_of_it = OptimusConfig(compressed_backprop_format="low-rank", compressed_backprop_rank=4096)
    assert gradient_message(CLUSTER, JOB, all_of_it).nbytes == 2 * JOB.rows * JOB.model.hidden
    assert low_rank_values(JOB, OptimusConfig(dp_compression_format="low-rank", dp_compression_rank=4096)) == (0, 0)


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("form", [*formats_of("dp_compression_format"), "low-rank"])
def test_on_a_slow_line_compressed_gradients_are_reduced_in_less_than_half_the_time(
    form: str, distributed: bool
) -> None:
    job, cluster = JOB.replace(distributed_optimizer=distributed), CLUSTERS["10gbe"]
    ours = iteration(cluster, job, OptimusConfig(dp_compression_format=form))
    dense = iteration(cluster, job)
    left, was = ours.times.reductions, dense.times.reductions
    # The last norm is on the last stage alone.
    assert was[0] == pytest.approx(was[-1], rel=1e-4) and was[-1] > 1.05 * was[1]
    # Middle stages hold no embedding.
    assert left[1] < 0.5 * was[1] and ours.seconds < dense.seconds


@pytest.mark.parametrize("form", formats_of("param_gather_format"))
def test_on_a_slow_line_a_compressed_gather_takes_its_share_of_the_bytes_and_little_more(form: str) -> None:
    least = FORMATS[form].bits / (8 * JOB.value_bytes)
    job, cluster = JOB.replace(distributed_optimizer=True), CLUSTERS["10gbe"]
    ours, dense = (
        iteration(cluster, job, config).times.after_step for config in (OptimusConfig(param_gather_format=form), DENSE)
    )
    assert least * dense < ours < (least + 0.05) * dense
    # By default no part of the reduction is overlapped; with overlap, the rest after the backward pass shrinks as well.
    beside = [
        iteration(cluster, job.replace(overlap_param_gather=True), config).times.after_step
        for config in (OptimusConfig(param_gather_format=form), DENSE)
    ]
    assert beside[0] < 0.7 * beside[1] and beside[1] < dense
    assert iteration(cluster, JOB, OptimusConfig(param_gather_format=form)).times.after_step == 0.0


def test_memory_holds_residuals_and_says_by_how_much_it_does_not_fit() -> None:
    low_rank = OptimusConfig(dp_compression_format="low-rank", compressed_backprop_format="low-rank")
    assert memory(JOB)[COMPRESSION_STATE] == memory(JOB)[MESSAGE_BUFFERS] == 0.0
    # The state is little more than the residual of all matrices in fp32, kept twice.
    matrices = 2 * 4 * 12 * JOB.model.hidden**2 * 18 / 8
    assert memory(JOB, low_rank)[COMPRESSION_STATE] == pytest.approx(matrices, rel=0.35)
    halved = replace(low_rank, compression_state_dtype="bf16")
    assert memory(JOB, halved)[COMPRESSION_STATE] == pytest.approx(
        memory(JOB, low_rank)[COMPRESSION_STATE] / 2, rel=0.1
    )
    # int8 messages have 8.125 bits a value in each of two directions, up to a bound; the residual of an activation
    # gradient is in bf16.
    int8 = OptimusConfig(dp_compression_format="int8", message_memory=10_000)
    parameters = JOB.stage_parameters + JOB.embedding_share
    assert memory(JOB, int8)[MESSAGE_BUFFERS] == pytest.approx(2 * 8.125 / 8 * JOB.stage_parameters, rel=0.01)
    bounded = memory(JOB, replace(int8, message_memory=256))[MESSAGE_BUFFERS]
    assert 0.85 * 256e6 < bounded <= 256e6, "all slices are equal, and one more of them would be too large"
    lep = OptimusConfig(compressed_backprop_format="int4", lazy_error_propagation=True)
    assert memory(JOB, lep)[COMPRESSION_STATE] == 2 * JOB.rows * JOB.model.hidden
    messages = OptimusConfig(compressed_backprop_format="low-rank", lazy_error_propagation=True)
    assert memory(JOB, messages)[COMPRESSION_STATE] == 2 * 4 * JOB.rows * JOB.model.hidden
    # int4 messages have 4.125 bits a value; a rank keeps its own quarter encoded, and a slice's values in bf16.
    job, gather = JOB.replace(distributed_optimizer=True), OptimusConfig(param_gather_format="int4")
    # Slots fit the layers, because the tied embedding has a bucket of its own.
    layers, slices = JOB.stage_parameters, 4.125 / 4 * JOB.stage_parameters // 64e6 + 1
    expected = 4.125 / 8 * (parameters / job.dp + 4 / slices * layers) + 2 * layers / job.dp / slices
    assert memory(job, gather)[MESSAGE_BUFFERS] == pytest.approx(expected, rel=0.02)
    assert memory(JOB, gather)[MESSAGE_BUFFERS] == 0.0
    big = Job(model=MODELS["175b"], gpus=64, tp=8, pp=4, batch=64)
    with pytest.raises(PlanError, match=r"does not fit: a rank needs \d+\.\d GB, \d+\.\d GB more than the A100 has"):
        check_memory(CLUSTER, big)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"gpus": 100}, "100 GPUs do not divide among 32 tensor x pipeline ranks"),
        ({"pp": 16}, "72 layers do not divide among 16 stages x chunks"),
        ({"vpp": 5}, "72 layers do not divide among 20 stages x chunks"),
        ({"batch": 100}, "a batch of 100 does not divide among 4 replicas x micro-batches of 8: give a multiple of 32"),
        ({"vpp": 2, "batch": 32 * 6}, "the interleaved schedule needs"),
        ({"micro_batch": 0}, "micro_batch: 0 is not a positive number"),
        ({"tp": 16, "gpus": 256}, "24 heads do not divide among 16 tensor ranks"),
        ({"model": Model(layers=72, hidden=3071, heads=24)}, "3071 hidden do not divide among 24 heads"),
        ({"model": Model(layers=0, hidden=3072, heads=24)}, "positive number of layers"),
    ],
)
def test_layouts_that_do_not_divide_are_refused(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        JOB.replace(**changes)


def test_a_cluster_is_any_gpu_on_any_network() -> None:
    mine = cluster_of("h100-roce200x8")
    assert (mine.gpu, mine.network, mine.gpus_per_node) == (GPUS["H100"], network_of("roce200x8"), 8)


def test_a_cluster_file_changes_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"gpu": "H100", "network": "100gbe", "memory": 9.4e10, "gpus_per_node": 4}))
    mine = cluster_of(str(path))
    assert (mine.gpu.memory, mine.gpus_per_node, mine.network.node_rate) == (9.4e10, 4, 1e10)
    assert isinstance(mine.gpu.memory, Constant) and mine.gpu.memory.source == str(path)
    assert mine.gpu.bf16 == GPUS["H100"].bf16 and mine.network.name == "100gbe"
    path.write_text(json.dumps({"gpu": "H100", "network": "100gbe", "node_rate": 9e9}))
    assert (mine := cluster_of(str(path))).network.name == "100gbe as in mine.json" and mine.network.node_rate == 9e9


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "A cluster file contains"),
        ('{"gpu": "H100"}', "'network'. A cluster file contains"),
        ('{"gpu": "H150", "network": "ndr8"}', "unknown GPU 'H150': did you mean H100"),
        ('{"gpu": "H100", "network": "ndr8", "memroy": 1}', "unknown field 'memroy': did you mean memory"),
        ('{"gpu": "H100", "network": "ndr8", "memory": -1}', "memory: -1 is not a positive number"),
    ],
)
def test_a_bad_cluster_file_is_refused(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(content)
    with pytest.raises(PlanError, match=complaint):
        cluster_of(str(path))


def test_unknown_names_get_the_near_ones() -> None:
    with pytest.raises(PlanError, match="--cluster a100-hdr: unknown network 'hdr': did you mean hdr8"):
        cluster_of("a100-hdr")
    with pytest.raises(PlanError, match="unknown network 'ndr0': did you mean ndr8"):
        network_of("ndr0")
    with pytest.raises(PlanError, match=r"no_such_file\.json"):
        cluster_of("no_such_file.json")


@pytest.mark.parametrize("per_node", [2, 4, 8])
@pytest.mark.parametrize("before_data", [False, True])
@pytest.mark.parametrize(("tp", "dp", "pp"), [(2, 4, 4), (1, 2, 4), (2, 2, 2), (4, 2, 4), (1, 8, 2)])
def test_what_crosses_nodes_in_the_plan_is_what_the_placement_of_ranks_says(
    tp: int, dp: int, pp: int, before_data: bool, per_node: int
) -> None:
    job = Job(model=MODELS["8.3b"], gpus=tp * dp * pp, tp=tp, pp=pp, batch=64, pipeline_before_data=before_data)
    ranks = Placement(tensor=tp, data=dp, pipeline=pp, ranks_per_node=per_node, pipeline_before_data=before_data)
    crossing, _ = ranks.crossing_hops()
    assert sum(job.hop_crosses(stage, per_node) for stage in range(pp - 1)) == crossing
    replicas = Group.strided(dp, job.replica_stride, per_node)
    assert replicas.per_node == ranks.members_on_a_node("data")
    assert (replicas.nodes == 1) == ranks.stays_inside("data")


def test_the_order_of_ranks_decides_which_technique_the_plan_finds_worth_its_while() -> None:
    cluster = CLUSTERS["a100-100gbe"]
    usual = Job(model=MODELS["2.5b"], gpus=32, tp=2, pp=4, batch=64)
    other = usual.replace(pipeline_before_data=True)
    backprop = OptimusConfig(compressed_backprop_format="int8")
    gradients = OptimusConfig(dp_compression_format="int8")

    def gain(job: Job, config: OptimusConfig) -> float:
        return iteration(cluster, job).seconds / iteration(cluster, job, config).seconds

    # If a node is a stage, all hops cross nodes and no gradient does; if a node is a pipeline, it is the other way
    # round.
    assert gain(usual, backprop) > gain(other, backprop)
    assert gain(other, gradients) > gain(usual, gradients)
    assert iteration(cluster, usual).seconds != iteration(cluster, other).seconds


MIXTURE = Model(
    layers=8, hidden=2048, heads=16, gated=True, tied=False, biases=False,
    mixture=Mixture(experts=64, top_k=8, ffn=768, layers=8),
)  # fmt: skip
EXPERTS = Job(
    model=MIXTURE, gpus=64, ep=16, micro_batch=1, batch=64, distributed_optimizer=True, dispatcher="alltoall"
)  # fmt: skip


def test_tokens_go_to_experts_and_back_in_16_bits_over_the_network_between_nodes() -> None:
    cluster, per_node = CLUSTERS["a100-100gbe"], 8
    found = inside(cluster, EXPERTS)["experts' exchange"]
    # Half of a rank's tokens, counted once for each of 8 experts, leave its node of 8 ranks, there and back.
    leaving = 2 * EXPERTS.rows * 8 * 2048 * 2 * (16 - per_node) / 16
    assert found.forward == pytest.approx(leaving * per_node / cluster.network.node_rate, rel=0.01)
    assert found.backward == found.forward
    assert inside(cluster, EXPERTS.replace(recompute="full"))["experts' exchange"].backward == 2 * found.backward
    assert inside(cluster, EXPERTS.replace(ep=8))["experts' exchange"].forward < found.forward / 10
    once_a_node = inside(cluster, EXPERTS.replace(dispatcher="flex"))["experts' exchange"].forward
    # 8 experts of a token are on both of two nodes with probability 1 - 2 / 2**8.
    assert once_a_node == pytest.approx(found.forward * (2 - 2 / 2**8) / 8, rel=0.01)
    assert inside(cluster, EXPERTS.replace(dispatcher="allgather"))["experts' exchange"].forward > once_a_node
    whole, hidden = (iteration(cluster, EXPERTS.replace(expert_overlap=overlap)) for overlap in (False, True))
    assert hidden.seconds < whole.seconds
    parts = breakdown(EXPERTS, whole)
    assert parts["expert dispatch"] == parts["expert gradient"] == pytest.approx(8 * found.forward)


def test_tokens_in_8_bits_take_half_of_the_line_and_the_seconds_of_coding_them() -> None:
    cluster, config = CLUSTERS["a100-100gbe"], OptimusConfig(expert_dispatch_format="int8", expert_exchange="direct")
    plain = breakdown(EXPERTS, iteration(cluster, EXPERTS))
    ours, slow = (
        breakdown(EXPERTS, iteration(replace(cluster, coding_scale=scale), EXPERTS, config)) for scale in (1.0, 2.0)
    )
    # A block of 128 values has its scale in 2 further bytes.
    assert ours["expert dispatch"] == pytest.approx(plain["expert dispatch"] * 8.125 / 16, rel=0.01)
    assert ours["expert gradient"] == pytest.approx(plain["expert gradient"])
    # Each of 8 layers encodes the tokens that it sends and decodes those that arrive, to the experts and back. Coding a
    # value moves its 2 bytes in bf16 and its 8.125 bits in int8.
    values = EXPERTS.rows * 8 * 2048
    once = 5e-6 + moved(cluster.gpu, values * (2 + 8.125 / 8))
    assert ours["compression"] == pytest.approx(8 * 4 * once, rel=0.01)
    assert slow["compression"] == pytest.approx(2 * ours["compression"])
    assert plain["compression"] == 0


def test_kernels_of_routed_experts_are_slow_and_those_of_shared_ones_are_not() -> None:
    gpu = GPUS["A100"]
    twice = replace(gpu, mixture_efficiency=2 * gpu.mixture_efficiency)

    def saved(shared: int) -> float:
        assert MIXTURE.mixture
        job = EXPERTS.replace(model=replace(MIXTURE, mixture=replace(MIXTURE.mixture, shared=shared)))
        return layer(gpu, job).forward - layer(twice, job).forward

    assert saved(4096) == pytest.approx(saved(0)) and saved(0) > 0


def test_where_a_reduce_scatter_sends_as_much_as_an_all_reduce_it_costs_as_much() -> None:
    cluster = CLUSTERS["10gbe"]
    gloo = replace(cluster, network=replace(cluster.network, scatters_twice=True))
    job = Job(model=MODELS["2.5b"], gpus=16, batch=16, distributed_optimizer=True)
    usual, sharded, on_gloo = (
        gradient_reduction(place, each, DENSE, 10**9, 0, 0)
        for place, each in ((cluster, job.replace(distributed_optimizer=False)), (cluster, job), (gloo, job))
    )
    assert on_gloo == usual and on_gloo.nbytes == 2 * sharded.nbytes


def test_experts_gradients_are_reduced_over_the_replicas_of_experts_alone() -> None:
    cluster, routed = CLUSTERS["a100-100gbe"], EXPERTS.routed_on(0)
    assert (EXPERTS.replicas, EXPERTS.expert_replicas) == (64, 4)
    assert routed == MIXTURE.routed_parameters // 16 > 4 * EXPERTS.parameters_on(0) / 16

    def added(job: Job, config: OptimusConfig) -> float:
        """Return the bytes that the routed experts add to a rank's reduction."""
        own = job.parameters_on(0), 0
        with_experts, without = (gradient_reduction(cluster, job, config, *own, count) for count in (routed, 0))
        return with_experts.nbytes - without.nbytes

    dense = added(EXPERTS, DENSE)
    assert dense == pytest.approx(4 * routed * 3 / 4)
    assert added(EXPERTS.replace(gpus=16), DENSE) == 0.0, "no expert has a second replica"
    assert added(EXPERTS, OptimusConfig(dp_compression_format="low-rank")) == pytest.approx(dense), (
        "low rank leaves experts dense"
    )
    assert added(EXPERTS, OptimusConfig(dp_compression_format="int8")) < 0.3 * dense


def test_more_ranks_of_a_sequence_compute_less_and_exchange_keys_and_values() -> None:
    cluster, long = CLUSTERS["a100-hdr200"], replace(MODELS["8.3b"], sequence=32768)
    one = Job(model=long, gpus=8, tp=4, micro_batch=1, batch=8)
    two = one.replace(cp=2)
    assert (two.replicas, two.dp, two.rows) == (2, 1, 16384)
    assert layer(A100, two).forward < 0.6 * layer(A100, one).forward
    exchanged = {way: inside(cluster, two.replace(cp_exchange=way))["context parallel"] for way in ("p2p", "allgather")}
    assert 0 < exchanged["p2p"].forward < exchanged["allgather"].forward
    assert inside(cluster, one)["context parallel"].forward == 0.0


def test_low_rank_costs_what_an_h200_measured() -> None:
    """18 layers of 8.3B at tensor-parallel size 8 and rank 128: 12.2 ms to encode and 2.5 to decode (docs/evidence.md);
    the planner also orthogonalises Q, and groups matrices in another way, so it may differ by a quarter.
    """
    shapes = ((1152, 3072), (3072, 384), (1536, 3072), (3072, 1536))
    products = sum(3 * traffic._product(GPUS["H100"], n, m, 128, 18) for n, m in shapes)
    assert products + len(shapes) * traffic._orthogonalized(128) == pytest.approx(14.7e-3, rel=0.25)


@pytest.mark.parametrize("name", ["2.5b", "8.3b"])
def test_the_papers_models_have_the_shapes_of_the_launcher_and_of_the_papers_scripts(name: str) -> None:
    planned = MODELS[name]
    launcher = re.search(rf"^ *{name}\) shape=\(([\d ]+)\)", (ROOT / "scripts/pretrain_gpt.sh").read_text(), re.M)
    paper = re.search(
        rf"^ *{name}\) layers=(\d+) hidden=(\d+) heads=(\d+)", (ROOT / "scripts/paper/common.sh").read_text(), re.M
    )
    assert launcher is not None and paper is not None
    shape = (planned.layers, planned.hidden, planned.heads)
    assert shape == tuple(map(int, paper.groups()))
    assert (*shape, planned.sequence) == tuple(map(int, launcher[1].split()[:4]))


def test_the_band_of_exact_messages_reaches_from_2_to_5_bits_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    job, config = replace(JOB, distributed_optimizer=True), OptimusConfig(param_gather_format="exact")
    nbytes = [parameter_gather(replace(CLUSTER, exact_bits=bits), job, config).nbytes for bits in (2, 5)]
    assert nbytes[1] / nbytes[0] == pytest.approx(2.5)
    assert nbytes[0] < parameter_gather(CLUSTER, job, config).nbytes < nbytes[1]
    fewer = replace(job, exact_bits=2)
    assert parameter_gather(CLUSTER, fewer, config).nbytes == nbytes[0], "bits that the learning rate lets expect"
    gain = Band(CLUSTER, job).gain(config)
    for name in ("LEAST_BITS", "MOST_BITS"):
        monkeypatch.setattr(variants, name, job.exact_bits)
    without = Band(CLUSTER, job).gain(config)
    assert gain.planned == without.planned and gain.least < without.least and gain.most > without.most
