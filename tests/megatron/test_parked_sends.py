"""Law: no wait on the compute stream for a compressed message that is sent, in Megatron's own schedules over gloo."""

import pytest

from tests.megatron import runs as table
from tests.megatron.specs import Run, full, uses

pytestmark = pytest.mark.ci


def compressed_sends(run: Run) -> list[dict]:
    sends = [send for rank in run.ranks for send in rank.probed["sends"] if send["compressed"]]
    assert {send["role"] for send in sends} == {"send_prev", "send_next"}, "messages are sent in both directions"
    return sends


@uses(table.SENDS[0], *map(full, table.SENDS[1:]))
def test_no_compressed_send_is_waited_for_before_the_next_computation(runs):
    sends = compressed_sends(runs)
    assert not any(send["batched"] for send in sends)
    assert sum(send["waits before computing"] for send in sends) == 0


@uses(*table.SENDS, table.BATCHED_SENDS)
def test_every_compressed_send_is_waited_for_once_by_the_end_of_its_iteration(runs):
    assert {send["waits before computing"] + send["waits later"] for send in compressed_sends(runs)} == {1}


@uses(table.BATCHED_SENDS)
def test_of_batched_calls_only_those_that_receive_too_are_waited_for(runs):
    sends = compressed_sends(runs)
    assert all(send["batched"] for send in sends)
    assert {send["receives"]: send["waits before computing"] for send in sends} == {True: 1, False: 0}


@uses((table.BATCHED_SENDS, table.BATCHED_SENDS_OFF))
def test_batched_calls_do_not_stop_for_the_device_while_messages_are_compressed_and_megatrons_setting_comes_back(runs):
    compressed, off = ([rank.probed for rank in run.ranks] for run in runs)
    assert [rank["synchronised"] for rank in compressed] == [0, 0]
    assert all(rank["synchronised"] > 0 for rank in off), "off means off"
    assert all(rank["batch_p2p_sync"] is True for rank in [*compressed, *off])


@uses(tuple(table.SENDS[:2]))
def test_overlapping_warm_up_and_flush_changes_no_loss(runs):
    plain, flushed = ([rank.losses for rank in run.ranks] for run in runs)
    assert plain == flushed
