"""Tokens that leave a node once, in Megatron's real loop: dispatched as Megatron does, and trained as vanilla does.

Nodes are pretended. In the runs in dense formats every dispatch is compared with Megatron's own all-to-all.
"""

from dataclasses import replace
from functools import partial

import pytest

from tests.megatron import interventions, shadows
from tests.megatron.runs import MIXTURE
from tests.megatron.specs import Layout, Run, RunSpec, full, in_ci, uses

EP4: Layout = (4, "--expert-model-parallel-size 4")
ON_NODES_OF_2 = (partial(interventions.nodes_of, 2),)
ONCE = "--expert-exchange once-a-node"
BOTH = "--expert-dispatch-format int8 --expert-gradient-format int8"

VANILLA = RunSpec(
    name="tokens direct", layout=EP4,
    flags=f"{MIXTURE} --num-experts 8 --hidden-size 128 --num-layers 2 --train-iters 3",
)  # fmt: skip


def once(vanilla: RunSpec, name: str, ours: str = ONCE, ranks: int = 2) -> RunSpec:
    """Return the run with tokens once to each node of so many ranks, each dispatch compared with Megatron's own."""
    before = (partial(interventions.nodes_of, ranks), shadows.shadow_dispatches)
    return replace(vanilla.but(name, ours=ours), before=before, probe=shadows.shadowed)


def both(name: str, layout: Layout = EP4, flags: str = "", ranks: int = 2) -> tuple[RunSpec, RunSpec]:
    vanilla = replace(VANILLA.but(f"tokens direct, {name}", flags=flags), layout=layout)
    return vanilla, once(vanilla, f"tokens once a node, {name}", ranks=ranks)


LAYOUTS = [
    both("top 1", flags="--moe-router-topk 1 --moe-router-pre-softmax"),
    both("top 8", flags="--moe-router-topk 8"),
    both("capacity", flags="--moe-expert-capacity-factor 1.0"),
    both("shared experts overlap", flags="--moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap"),
    both(
        "like DeepSeek-V3", flags="--moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2 "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-load-balancing-type "
        "seq_aux_loss --moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap --mtp-num-layers 1 "
        "--position-embedding-type rope --no-rope-fusion",
    ),
    both("recomputed", flags="--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    both("MoE layers recomputed", flags="--recompute-granularity selective --recompute-modules moe"),
    both("TP2", (4, f"{EP4[1]} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1")),
    both(
        "interleaved PP2", (8, f"{EP4[1]} --pipeline-model-parallel-size 2"),
        flags="--num-layers 4 --num-layers-per-virtual-pipeline-stage 1",
    ),
    both("EP8 on 2 nodes", (8, "--expert-model-parallel-size 8"), flags="--num-experts 16", ranks=4),
    both("EP8 on 4 nodes", (8, "--expert-model-parallel-size 8"), flags="--num-experts 16"),
]  # fmt: skip


def assert_alike(vanilla: Run, ours: Run, layers: int = 2) -> None:
    # A token of one expert goes to one node in both ways, and the bits of its experts besides.
    most = 1.02 if "--moe-router-topk 1 " in vanilla.spec.flags else 1.0
    for rank, plain in zip(ours.ranks, vanilla.ranks, strict=True):
        if plain.losses[0] is not None:  # the last stage has them
            assert rank.losses == pytest.approx(plain.losses, rel=2e-6)
        assert rank.grad_norms == pytest.approx(plain.grad_norms, rel=2e-5)
        assert len(rank.probed) >= layers and sum(rank.probed) > 0, "dispatches were compared"
        raw, sent = rank.ours.leaving
        assert 0 < sent < most * raw
    assert any("tokens leave a node once" in line for line in ours.said)


@pytest.mark.ci
@uses(both("EP4"))
def test_tokens_that_leave_a_node_once_train_as_vanilla_within_the_rounding_of_fp32(runs):
    assert_alike(*runs)


@uses(*(full(*case) for case in LAYOUTS))
def test_tokens_that_leave_a_node_once_train_as_vanilla_in_every_layout(runs):
    assert_alike(*runs)


BY_SEQUENCE = [replace(run, before=(*run.before, shadows.experts_by_sequence)) for run in both("experts by sequence")]


@uses(full(*BY_SEQUENCE))
def test_a_router_may_give_a_token_more_experts_than_the_flag_says(runs):
    assert_alike(*runs)


GRAPHS = once(VANILLA, "tokens once a node, numbers at the all-to-all")
GRAPHS = replace(GRAPHS, before=(*GRAPHS.before, shadows.numbers_at_the_all_to_all))


@uses(full(VANILLA, GRAPHS))
def test_numbers_are_counted_where_partial_cuda_graphs_leave_the_dispatchers_attributes(runs):
    assert_alike(*runs)


CODED = replace(VANILLA.but("tokens once a node in int8", ours=BOTH), before=ON_NODES_OF_2)
CODED_DIRECT = CODED.but("tokens direct in int8", ours="--expert-exchange direct")


@uses(in_ci(VANILLA, CODED, CODED_DIRECT))
def test_rows_of_8_bits_go_once_a_node_where_auto_finds_that_it_saves(runs):
    vanilla, coded, direct = runs
    assert coded.ranks[0].losses == pytest.approx(vanilla.ranks[0].losses, rel=1e-3)
    assert coded.ranks[0].losses != vanilla.ranks[0].losses
    once, (raw, sent) = (
        sum(rank.ours.leaving[1] for rank in coded.ranks),
        (sum(rank.ours.leaving[side] for rank in direct.ranks) for side in (0, 1)),
    )
    # There and back a row of 128 values has 512 bytes, or 130 in int8, and once a probability beside it. What leaves a
    # node besides is alike in all runs.
    tokens = (raw - sent) / (1 - (2 * 130 + 4) / (2 * 512 + 4))
    rest, coded_tokens = raw - tokens, sent - (raw - tokens)
    # 8 experts, top 2, on 2 nodes: 0.79 of the copies are left.
    assert (once - rest) / coded_tokens == pytest.approx(0.79, abs=0.08)
    assert any("tokens leave a node once: 2 nodes of 2 ranks" in line for line in coded.said)
    assert not any("tokens leave a node once" in line for line in direct.said)


BALANCED = "--optimus-cc balanced --no-dp-compression --compression-trial"
ON_TRIAL = [
    replace(
        VANILLA.but(f"tokens on trial, {way}", ours=BALANCED),
        before=(*ON_NODES_OF_2, partial(interventions.forced_way, dense=way == "dense")),
    )
    for way in ("dense", "compressed")
]  # fmt: skip


@uses(in_ci(VANILLA, *ON_TRIAL))
def test_a_trials_dense_steps_are_megatrons_own_exchange(runs):
    vanilla, dense, compressed = runs
    for plain, ours in zip(vanilla.ranks, dense.ranks, strict=True):
        assert ours.losses == plain.losses and ours.weights == plain.weights
        assert len(set(ours.ours.leaving)) == 1
    assert compressed.ranks[0].ours.leaving[1] < 0.8 * compressed.ranks[0].ours.leaving[0]


_SAVED = "--train-iters 4 --lr-decay-iters 4 --ckpt-format torch"
WHOLE = replace(
    VANILLA.but("tokens once a node, 4 iterations", flags=_SAVED, ours=f"{BOTH} {ONCE}"), before=ON_NODES_OF_2
)
SAVED = WHOLE.but("tokens once a node, saved", flags="--save {here} --save-interval 2 --exit-interval 2")
RESUMED = WHOLE.but("tokens once a node, resumed", flags="--load {loaded}", loaded=SAVED)


@uses(full(WHOLE, RESUMED))
def test_a_resumed_run_ends_where_the_whole_run_ends(runs):
    whole, resumed = runs
    for rank, other in zip(whole.ranks, resumed.ranks, strict=True):
        assert other.losses == rank.losses[2:] and other.weights == rank.weights
