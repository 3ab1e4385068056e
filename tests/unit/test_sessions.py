"""Law: a message is compressed only by the session of its pipeline, in the innermost open pass."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.hooks import finalize_model_grads
from optimus_cc_ext.hooks.sessions import Sessions


def _session(pipeline: str) -> Any:
    """Make a session with a place in the grid, whose pipeline group is known by a name."""
    return SimpleNamespace(grid=SimpleNamespace(is_pipeline=lambda group: group == pipeline))


def test_a_message_belongs_to_the_session_whose_pipeline_it_travels() -> None:
    sessions, policy, critic, unplaced = Sessions(), _session("policy"), _session("critic"), SimpleNamespace(grid=None)
    find: Any = sessions.with_pipeline
    assert find("policy") is None, "no pass is open"
    with sessions.passing([unplaced, policy, critic]):
        assert [find(group) for group in ("policy", "critic", "somebody else's")] == [policy, critic, None]


def test_a_pass_inside_a_pass_hides_the_outer_one_until_it_ends() -> None:
    sessions, policy = Sessions(), _session("policy")
    find: Any = sessions.with_pipeline
    with sessions.passing([policy]):
        with sessions.passing([]):
            assert find("policy") is None, "the pass of a vanilla model, or an evaluation"
        assert find("policy") is policy
    assert find("policy") is None


def test_a_pass_in_another_thread_hides_nothing() -> None:
    sessions, policy = Sessions(), _session("policy")
    find: Any = sessions.with_pipeline
    with ThreadPoolExecutor(1) as generation, sessions.passing([policy]):
        other = sessions.passing([])
        generation.submit(other.__enter__).result()
        assert find("policy") is policy and generation.submit(find, "policy").result() is None
        generation.submit(other.__exit__, None, None, None).result()
        assert find("policy") is policy


class _Recomputed(torch.autograd.Function):
    """Looks for the session of the group "experts" in the backward pass, as a recomputed layer does."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, sessions: Sessions, found: list[Any]) -> torch.Tensor:
        ctx.looked_for = sessions, found
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        sessions, found = ctx.looked_for
        found.append(sessions.with_experts_on("experts"))
        return *gradients, None, None


def test_a_layer_recomputed_in_autograds_thread_belongs_to_the_open_pass() -> None:
    sessions, policy, found = Sessions(), _session("policy"), list[Any]()
    policy.grid.has_experts_on = lambda group: group == "experts"
    find: Any = sessions.with_experts_on
    loss = _Recomputed.apply(torch.ones(1, requires_grad=True), sessions, found).sum()
    with ThreadPoolExecutor(1) as autograd, sessions.passing([policy]):
        assert autograd.submit(find, "experts").result() is None, "generation in another thread"
        autograd.submit(loss.backward, retain_graph=True).result()
        with sessions.passing([]):
            loss.backward(retain_graph=True)
    with ThreadPoolExecutor(1) as autograd:
        autograd.submit(loss.backward).result()
    assert found == [policy, None, None], "in another thread, in a pass without compression, and outside of all passes"


class _Stub:
    """Stand-in for a session, with the attributes that the tested code reads."""

    config = OptimusConfig()
    steps_are_announced = False


def test_the_tied_embedding_of_a_model_without_a_session_is_left_to_megatron() -> None:
    compressed, vanilla, sessions, summed = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), Sessions(), []
    vanilla.weight.shared_embedding = True
    sessions.add(compressed, _Stub())  # type: ignore[arg-type]
    finalize_model_grads.all_reduce_word_embedding(sessions, summed.append, [compressed, vanilla])
    assert summed == [[compressed, vanilla]]
