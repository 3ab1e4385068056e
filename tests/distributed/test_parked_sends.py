"""A compressed message that is being sent is parked, and by the end of the iteration it is sent or its failure is
reported.
"""

import datetime
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import PIPELINE_FORWARD
from optimus_cc_ext.errors import OptimusError
from optimus_cc_ext.hooks import p2p_communication
from optimus_cc_ext.metrics.traffic import Traffic
from optimus_cc_ext.techniques.compressed_backprop import CompressedForward
from tests.forked_ranks import run_ranks

LARGE = (64, 2**20)
"""Shape of an activation whose message is too large for a socket to take it over as a whole."""


def _send_to_a_rank_that_is_gone(batched: bool) -> str:
    from megatron.core.pipeline_parallel import p2p_communication as megatrons

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
    dist.barrier()
    if dist.get_rank() == 1:
        return ""
    forward = CompressedForward(OptimusConfig(pipeline_forward_format="int8"), PIPELINE_FORWARD)
    session = SimpleNamespace(
        transfers=forward.transfers, traffic=Traffic(), leaving_roles=frozenset()
    )  # fmt: skip
    sessions = SimpleNamespace(with_pipeline=lambda _: session)
    wraps = {seam.target.partition(":")[2]: wrap for seam, wrap in p2p_communication.wraps(sessions)}
    name = "_batched_p2p_ops" if batched else "_p2p_ops"
    requests = wraps[name](getattr(megatrons, name))(
        tensor_send_prev=None, tensor_recv_prev=None, tensor_recv_next=None, tensor_send_next=torch.ones(LARGE),
        group=dist.group.WORLD, prev_pipeline_rank=1, next_pipeline_rank=1,
    )  # fmt: skip
    for request in requests if batched else requests.values():
        request.wait()
    try:
        forward.end()
    except OptimusError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    "batched",
    [
        pytest.param(True, id="batched", marks=pytest.mark.ci),
        pytest.param(False, id="one by one", marks=pytest.mark.full),
    ],
)
def test_a_receiver_that_is_gone_is_named_at_the_end_of_the_iteration_and_nothing_hangs(batched) -> None:
    said, _ = run_ranks(2, _send_to_a_rank_that_is_gone, batched, timeout=60)
    assert said.startswith("rank 0 could not send a compressed message to rank 1: ")
