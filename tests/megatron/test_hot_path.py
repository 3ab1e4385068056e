"""Law: no sync on the hot path, in Megatron's own training loop with everything on."""

from tests.megatron.runs import SAVED_SHARDED, WATCHED
from tests.megatron.specs import in_ci, uses


@uses(in_ci(WATCHED), in_ci(SAVED_SHARDED))
def test_after_the_first_iteration_nothing_is_allocated_and_the_host_asks_nothing(runs):
    asked = [rank.asked for rank in runs.ranks]
    seen = {name for rank in asked for name in rank}
    watched = {"PipelineLink.send.after_post", "PipelineLink.receive.after_wait", "LowRankReducer.finish"}
    assert watched < seen
    assert {f"{name}: {what}" for rank in asked for name, calls in rank.items() for what in calls} == set()
