"""Placement of ranks on nodes, compared with Megatron's own numbering of ranks."""

import pytest

from optimus_cc_ext.placement import Placement, placement_line

# Each layout has the sizes of tensor, context, data and pipeline parallelism, in this order.
LAYOUTS = [
    (1, 1, 4, 1), (2, 1, 1, 4), (2, 1, 4, 4), (4, 1, 2, 2), (8, 1, 4, 4), (1, 2, 2, 2), (2, 2, 2, 2), (1, 1, 1, 8),
    (4, 2, 1, 4), (8, 1, 16, 1), (3, 1, 2, 5), (2, 4, 3, 1),
]  # fmt: skip


@pytest.mark.parametrize("pipeline_before_data", [False, True])
@pytest.mark.parametrize(("tensor", "context", "data", "pipeline"), LAYOUTS)
def test_groups_are_those_of_megatrons_own_rank_generator(
    tensor: int, context: int, data: int, pipeline: int, pipeline_before_data: bool
) -> None:
    from megatron.core.parallel_state import RankGenerator

    order = "tp-cp-ep-pp-dp" if pipeline_before_data else "tp-cp-ep-dp-pp"
    theirs = RankGenerator(tp=tensor, ep=1, dp=data, pp=pipeline, cp=context, order=order)
    ours = Placement(
        tensor=tensor, context=context, data=data, pipeline=pipeline, pipeline_before_data=pipeline_before_data
    )
    for kind, token in (("tensor", "tp"), ("context", "cp"), ("data", "dp"), ("pipeline", "pp")):
        assert sorted(ours.groups(kind)) == sorted(theirs.get_ranks(token)), kind


def test_the_order_alone_decides_whether_pipelines_or_replicas_cross() -> None:
    by_stage = Placement(tensor=2, data=4, pipeline=4, ranks_per_node=8)
    by_pipeline = Placement(tensor=2, data=4, pipeline=4, ranks_per_node=8, pipeline_before_data=True)
    assert by_stage.crossing_hops() == (3, 3) and by_stage.stays_inside("data")
    assert by_pipeline.crossing_hops() == (0, 3) and not by_pipeline.stays_inside("data")
    assert (by_stage.members_on_a_node("data"), by_pipeline.members_on_a_node("data")) == (4, 1)
    assert placement_line(by_stage) == (
        "placement tp-cp-dp-pp, 8 ranks a node: tensor-parallel groups and data-parallel groups stay inside nodes, "
        "3 of 3 pipeline hops cross nodes"
    )
    assert placement_line(by_pipeline) == (
        "placement tp-cp-pp-dp, 8 ranks a node: tensor-parallel groups stay inside nodes, data-parallel groups span "
        "nodes, 0 of 3 pipeline hops cross nodes"
    )


def test_uneven_nodes_count_the_pipeline_with_most_crossings() -> None:
    assert Placement(tensor=1, pipeline=3, data=2, ranks_per_node=4).crossing_hops() == (1, 2)
    assert not Placement(tensor=3, data=2, ranks_per_node=4).stays_inside("tensor")
