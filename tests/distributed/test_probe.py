"""Measured rates of links: the time of a transfer, on every rank of a pipeline, and the ranks' names if it fails."""

import datetime

import pytest
import torch
import torch.distributed as dist

from optimus_cc_ext.errors import OptimusError
from optimus_cc_ext.forecast import probe
from optimus_cc_ext.forecast.probe import Collective, probe_collective, probe_link
from optimus_cc_ext.forecast.timeline import Rate
from tests.forked_ranks import run_ranks

CPU = torch.device("cpu")


def test_a_rate_makes_seconds_of_bytes() -> None:
    assert Rate(0.5, 100.0).seconds(200) == 2.5
    assert Rate(0.5, 100.0).seconds(0) == 0, "nothing takes no time, not even a latency"


def test_latency_and_rate_are_those_of_the_link_whatever_disturbs_single_transfers(monkeypatch) -> None:
    clock, calls = [0.0], []
    monkeypatch.setattr(probe, "_slowest", lambda seconds, *_: seconds)
    monkeypatch.setattr(probe.time, "perf_counter", lambda: clock[0])

    def exchange(nbytes: int) -> float:
        calls.append(nbytes)
        disturbance = 0.5 if len(calls) % 3 == 0 else 0.0
        clock[0] += 0.002 + nbytes / 5e6 + disturbance
        return float(nbytes)

    found = probe._probed(exchange, CPU, [], "")
    assert found is not None
    assert found.latency == pytest.approx(0.002) and found.bytes_per_second == pytest.approx(5e6)
    assert max(calls) == probe._LARGE, "on a slow link no more is sent than is needed"


def _probe() -> tuple[Rate | None, ...]:
    dist.init_process_group("gloo")
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    everyone = [dist.group.WORLD]
    return (
        probe_link(dist.group.WORLD, CPU, everyone, batched=True),
        probe_link(alone, CPU, everyone, batched=True),
        probe_collective(alone, CPU, everyone, Collective.ALL_REDUCE),
        *(probe_collective(dist.group.WORLD, CPU, everyone, collective) for collective in Collective),
    )


def test_every_rank_of_a_pipeline_finds_a_rate_and_one_alone_finds_none() -> None:
    for link, *found in run_ranks(3, _probe, timeout=60):
        assert found[:2] == [None, None]
        assert len(found[2:]) == len(Collective)
        for rate in (link, *found[2:]):
            # The rate of the loopback interface is higher than a slow network's and lower than that of memory.
            assert 1e6 < rate.bytes_per_second < 1e11 and 0 <= rate.latency < 1


def _sent_by_a_probe() -> dict[str, object]:
    """Return, by collective, the bytes that the probe counts for an exchange over 3 ranks."""
    dist.init_process_group("gloo")
    probe._probed = lambda exchange, *_: exchange(12_000)
    return {each.name: probe_collective(dist.group.WORLD, CPU, [], each) for each in Collective}


def test_bytes_of_a_probe_are_counted_as_traffic_is() -> None:
    """The 12,000 bytes are those of a ring, or of two messages of 4,000 to each of the other ranks."""
    expected = {"ALL_REDUCE": 16_000, "REDUCE_SCATTER": 8_000, "ALL_TO_ALL": 8_000, "ALL_GATHER": 8_000}
    assert run_ranks(3, _sent_by_a_probe, timeout=60) == [expected] * 3


def _probe_pairs() -> tuple[Rate | None, bool]:
    dist.init_process_group("gloo")
    batches, batch = [], dist.batch_isend_irecv
    dist.batch_isend_irecv = lambda operations: batches.append(1) or batch(operations)
    return probe_link(dist.group.WORLD, CPU, [dist.group.WORLD], batched=False), bool(batches)


def test_where_training_posts_messages_one_by_one_so_does_the_probe() -> None:
    """Otherwise NCCL would make a communicator of the whole pipeline for the probe's batch, which training never
    uses.
    """
    for rate, in_batches in run_ranks(4, _probe_pairs, timeout=60):
        assert rate is not None and not in_batches


def _lose_a_rank() -> str:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2))
    dist.barrier()
    if dist.get_rank() == 1:
        return ""
    try:
        probe_link(dist.group.WORLD, CPU, [dist.group.WORLD], batched=True)
    except OptimusError as error:
        return str(error)
    return "no error"


def test_a_rank_that_is_gone_ends_the_measurement_with_a_name_and_not_with_a_hang() -> None:
    said, _ = run_ranks(2, _lose_a_rank, timeout=60)
    assert said.startswith("rank 0: measuring the links: a transfer between the stages on ranks [0, 1]: ")
