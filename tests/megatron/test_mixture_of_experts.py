"""Mixture of experts, with and without expert parallelism, tied and untied: routed experts dense, the rest as ever."""

import shlex
from datetime import timedelta
from typing import Any

import torch

import optimus_cc_ext
from tests.launches import launch
from tests.megatron.optimus_runs import PP2_DP2, relative_gap, run_optimus, session_facts
from tests.megatron.test_lossless_limits import FE, LOSSLESS_CB, LOSSLESS_SC, TOLERANCE
from tests.megatron_runs import last_stage_losses, run_megatron

MIXTURE = shlex.split("""
    --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01
    --moe-ffn-hidden-size 64 --disable-bias-linear --train-iters 5
""")
# A stage's 2 layers have 2 attention matrices and a router each, beside the experts'.
COMPRESSED = 6


def _mixture_facts(model: list[torch.nn.Module], optimizer: Any) -> dict[str, Any]:
    session = optimus_cc_ext.current_session()
    assert session is not None
    groups = [session.alone] if session.embedding is None else [session.alone, session.embedding._group]
    return session_facts(model, optimizer) | {
        "expert_buckets": sum(len(chunk.expert_parallel_bucket_groups) for chunk in model),
        "groups": [(group.group_desc, _timeout(group)) for group in groups],
    }


def _timeout(group: Any) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


def _assert_lossless(flags: list[str], techniques: list[str]) -> list[dict[str, Any]]:
    vanilla = run_megatron(4, [*PP2_DP2[1], *flags])
    runs = run_optimus(PP2_DP2, [*flags, *techniques], probe=_mixture_facts)
    assert relative_gap(last_stage_losses(runs), last_stage_losses(vanilla)) < TOLERANCE
    # Adam hides a wrong scale, norms show it. Routing is a choice: in later iterations rounding can send a token
    # to another expert, which moves norms by some 1e-4; a wrong scale would move them by a factor.
    first, *later = zip(runs[0].grad_norms, vanilla[0].grad_norms, strict=True)
    assert relative_gap(*([norm] for norm in first)) < TOLERANCE
    assert relative_gap(*zip(*later, strict=True)) < 1e-3
    facts = [run.probed for run in runs]
    for place in facts:
        assert all(place["sent"] or place["received"])
        # The first stage has the position embedding as well.
        assert place["compressed_matrices"] == COMPRESSED + (place["stage"] == 0)
    return facts


def test_experts_in_groups_of_their_own_stay_dense_and_our_groups_have_names_and_megatrons_timeout():
    flags = ["--expert-model-parallel-size", "2", "--overlap-grad-reduce", "--ddp-average-in-collective"]
    timeout = ["--distributed-timeout-minutes", "7"]
    for place in _assert_lossless([*MIXTURE, *flags, *timeout], [*LOSSLESS_CB, *LOSSLESS_SC, *FE]):
        assert place["expert_buckets"] > 0
        seven = timedelta(minutes=7)
        assert place["groups"] == [("OPTIMUS_CC_ALONE", seven), ("OPTIMUS_CC_EMBEDDING", seven)]


def test_experts_among_the_others_stay_dense_and_untied_models_do_without_fused_embedding_sync():
    flags = [*MIXTURE, "--untie-embeddings-and-output-weights", "--use-distributed-optimizer"]
    # The preset, at full rank: it leaves fused embedding sync out.
    preset = ["--optimus-cc", *LOSSLESS_CB[1:], *LOSSLESS_SC[1:]]
    for place in _assert_lossless(flags, preset):
        assert place["expert_buckets"] == 0
        assert place["traffic"]["embedding"] == (0, 0)
        assert [name for name, _ in place["groups"]] == ["OPTIMUS_CC_ALONE"]
    said = launch([*PP2_DP2[1], *flags, *preset])
    assert said.accepted
    assert "optimus-cc: --optimus-cc leaves out fused embedding sync: the embeddings are not tied" in said.ours


def _bytes_of_experts_and_others(model: list[torch.nn.Module], optimizer: Any) -> dict[str, Any]:
    parameters = {name: p.main_grad.nbytes for chunk in model for name, p in chunk.named_parameters()}
    experts = sum(nbytes for name, nbytes in parameters.items() if ".experts." in name)
    return session_facts(model, optimizer) | {"experts": experts, "others": sum(parameters.values()) - experts}


def test_traffic_of_experts_is_counted_over_their_own_replicas():
    flags = [*MIXTURE, "--expert-model-parallel-size", "2", "--train-iters", "2"]
    for run in run_optimus(
        (4, flags), ["--dp-compression", "--dp-compression-rank", "4"], probe=_bytes_of_experts_and_others
    ):
        raw, sent = run.probed["traffic"]["DP gradients"]
        # 2 iterations, 2 V (D - 1) / D each: 4 replicas of all but the experts, 2 of every expert.
        assert raw == 2 * (run.probed["others"] * 3 / 2 + run.probed["experts"])
        assert 0 < sent < raw
