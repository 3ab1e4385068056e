"""Law: a message is compressed only by the session of its pipeline, in the innermost open pass."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

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
