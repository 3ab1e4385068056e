"""Tokens, gradients and parameters of experts, all compressed, in every layout: exact messages reproduce vanilla, and
the replicas of an expert stay equal.
"""

from collections import Counter

from tests.megatron import runs as table
from tests.megatron.runs import Limit
from tests.megatron.specs import Layout, full, uses
from tests.megatron.test_two_levels import BF16, DP4, DP8, on_nodes
from tests.megatron_runs import last_stage_losses, relative_gap

EP = 2
MIXTURE = f"{table.MIXTURE} --expert-model-parallel-size {EP} --hidden-size 128 --untie-embeddings-and-output-weights"
WHOLE = f"{MIXTURE} --overlap-grad-reduce"
SHARDED = f"{MIXTURE} {table.OVERLAPPED}"
# Every expert has two replicas, on ranks of different tensor-parallel groups.
TP2_DP2: Layout = (4, "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1")
ROWS = "--expert-dispatch-format int8 --expert-gradient-format int8"
LOSSY = f"{ROWS} --dp-compression-format int4"
GATHERED = f"{LOSSY} --param-gather-format int4"

CASES = [
    (name, members, layout, flags, ours)
    for name, members, layout in (
        ("EP2", 1, DP4), ("TP2 x EP2, ETP1", 1, TP2_DP2), ("EP2 in two levels", 4, DP8),
    )
    for flags, ours in ((WHOLE, LOSSY), (f"{SHARDED} --bf16", GATHERED))
]  # fmt: skip


def limit(name: str, members: int, layout: Layout, flags: str, ours: str) -> Limit:
    tolerances = BF16 if "--bf16" in flags else {}
    name = f"experts: {name}, {'shards' if table.SHARDED in flags else 'whole gradients'}"
    return Limit(vanilla=on_nodes(name, members, layout, flags), ours=f"{ours} --exact-blocks", **tolerances)


LIMITS = {each.run.name: each for each in (limit(*case) for case in CASES)}


@uses(*(full(each.vanilla, each.run) for each in LIMITS.values()))
def test_exact_messages_of_experts_reproduce_vanilla(runs):
    vanilla, ours = runs
    tolerance = LIMITS[ours.spec.name]
    assert relative_gap(last_stage_losses(ours.ranks), last_stage_losses(vanilla.ranks)) < tolerance.loss
    first, *later = zip(ours.ranks[0].grad_norms, vanilla.ranks[0].grad_norms, strict=True)
    assert relative_gap(*([norm] for norm in first)) < tolerance.norm
    # Rounding can send a token to another expert, which changes norms by about 1e-4; a wrong scale or a group of the
    # wrong ranks would change them by a factor.
    assert relative_gap(*zip(*later, strict=True)) < max(1e-3, tolerance.norm)
    assert any("in two levels" in line for line in ours.said) is ("two levels" in ours.spec.name)
    for rank in ours.ranks:
        names = [name for name in rank.gradient_bytes if name.endswith("weight") and "norm" not in name]
        assert rank.ours.compressed_matrices == sum(".router." not in name for name in names)
        for name in ("expert dispatch", "expert gradient"):
            raw, sent = rank.ours.traffic[name]
            assert 0 < raw < sent, "a block of the pass-through format has the bytes of a scale beside its values"


@uses(*(full(on_nodes(f"experts in few bits: {name}", *rest)) for name, *rest in CASES))
def test_replicas_of_an_expert_stay_bit_identical(runs):
    tensor = 2 if "--tensor-model-parallel-size 2" in runs.spec.argv else 1
    for name in runs.ranks[0].weights:
        copies = Counter(rank.weights[name] for rank in runs.ranks)
        assert len(copies) <= (EP if ".experts." in name else tensor), name
        assert set(copies.values()) == {len(runs.ranks) // len(copies)}, name
    in_bf16, in_levels = "--bf16" in runs.spec.flags, any("in two levels" in line for line in runs.said)
    for rank in runs.ranks:
        # bf16 has half of fp32's bytes; probabilities, vectors and routers are sent dense.
        for name in ("expert dispatch", "expert gradient"):
            raw, sent = rank.ours.traffic[name]
            assert 0 < sent < 0.27 * raw * (2 if in_bf16 else 1), name
        # Two levels add up inside a node without compression, so only bytes between nodes are few.
        raw, sent = rank.ours.leaving if in_levels else rank.ours.traffic["DP gradients"]
        assert 0 < sent < 0.35 * raw
        raw, sent = rank.ours.traffic["parameter gather"]
        assert raw == 0 or sent < 0.5 * raw
