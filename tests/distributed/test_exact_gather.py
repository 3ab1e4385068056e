"""Exact parameter gather over real ranks: all replicas have the owners' values, to the bit."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from optimus_cc_ext.collectives.exact import ExactPlan, padded
from optimus_cc_ext.collectives.groups import Groups
from optimus_cc_ext.compressors import exact
from optimus_cc_ext.compressors.exact import HEADER, raw_bytes
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import PARAM_GATHER
from optimus_cc_ext.errors import FlagError, OptimusError
from optimus_cc_ext.techniques import exact_gather
from optimus_cc_ext.techniques.bucket import Bucket
from optimus_cc_ext.techniques.exact_gather import ExactGather
from tests.forked_ranks import run_ranks
from tests.host_reads import host_reads

RANKS, STEPS = 3, 4
SIZES = (3 * 5000, 3 * 301, 3 * 3)
LONG = 3 << 19
"""Number of values whose messages have the longest lanes."""


def _start(numel: int) -> torch.Tensor:
    return (torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 0.02).bfloat16()


def _after(numel: int, step: int) -> torch.Tensor:
    """Return the owners' values after a step, whose size differs by shard; in step 2 the second shard goes astray."""
    flat, generator = _start(numel).float(), torch.Generator().manual_seed(step)
    size = torch.tensor([1e-5, 1e-4, 3e-4]).repeat_interleave(numel // RANKS)
    flat += size * step * torch.randn(numel, generator=generator)
    if step == 2:
        flat.view(RANKS, -1)[1] = torch.randn(numel // RANKS, generator=generator).exp() * 1e5
    return flat.bfloat16()


def _update(technique: ExactGather, buckets: list[Bucket], new: list[torch.Tensor]) -> None:
    written = [bucket.of_megatron for bucket in buckets]
    values = dict(zip(map(id, written), new, strict=True))

    def write(of_megatron: Any, start: int, end: int) -> None:
        of_megatron.param_data[start:end].copy_(values[id(of_megatron)][start:end])

    assert technique.update(written, write) == written


def _gather(slot_bytes: int | None, fault: str) -> list[list[int]]:
    """Gather some buckets at once, each step; return each step's bytes of messages by bucket."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.group.WORLD
    technique = ExactGather(OptimusConfig(param_gather_format="exact"), PARAM_GATHER)
    flats = [_start(numel) for numel in SIZES]
    buckets = [Bucket.of(flat) for flat in flats]
    plans = [ExactPlan(numel=each.numel(), dtype=each.dtype, ranks=RANKS, slot_bytes=slot_bytes) for each in flats]
    shards = [
        technique.add_bucket(bucket, plan, Groups(world), together=True)
        for bucket, plan in zip(buckets, plans, strict=True)
    ]
    found = []
    for step in range(STEPS):
        _update(technique, buckets, [_after(flat.numel(), step) for flat in flats])
        for flat in flats:
            own = flat.view(RANKS, -1)[rank]
            assert torch.equal(own, _after(flat.numel(), step).view(RANKS, -1)[rank]), "the owner keeps its new values"
        if fault == "another's copy" and step == 1 and rank == 0:
            flats[0][-1] += 1
        refused = fault and step == 2  # all replicas learn with the next lengths what one of them has found
        with pytest.raises(OptimusError, match="parameters of replica 2's shard differ") if refused else nullcontext():
            technique.gather(shards).wait()
        if refused:
            break
        for flat in flats[1 if fault and rank == 0 and step == 1 else 0 :]:
            assert torch.equal(flat.view(torch.int16), _after(flat.numel(), step).view(torch.int16)), f"step {step}"
        found.append([each.sent_bytes for each in shards])
    for _ in range(0 if fault else 2):
        new = [flat * 1.5 for flat in flats]
        _update(technique, buckets, new)
        for flat, values in zip(flats, new, strict=True):
            assert torch.equal(flat.view(RANKS, -1)[rank], values.view(RANKS, -1)[rank]), "each step is written"
    assert fault or not any(each.updated for each in shards), "two steps without a gather: Megatron's own follows"
    dist.barrier()
    return found


@pytest.mark.parametrize("slot_bytes", [None, 3 * 3072])
def test_all_replicas_have_the_owners_values_to_the_bit_through_steps_that_do_not_compress(
    slot_bytes: int | None,
) -> None:
    first, *others = run_ranks(RANKS, _gather, slot_bytes, "")
    assert all(each == first for each in others), "the longest message is the same on all ranks"
    still, small, astray, _ = first
    for number, numel in enumerate(SIZES):
        plan = ExactPlan(numel=numel, dtype=torch.bfloat16, ranks=RANKS, slot_bytes=slot_bytes)
        assert astray[number] == sum(plan.raw) + 16 * len(plan.raw), "one rank's raw message makes all as long"
        assert still[number] <= small[number] <= astray[number]
    assert small[0] < 0.7 * astray[0]


def _messages_on_trial(peak: float) -> list[int]:
    """Return the bytes of a step that changes nothing, on trial and afterwards."""
    dist.init_process_group("gloo")
    technique, flat = ExactGather(OptimusConfig(param_gather_format="exact"), PARAM_GATHER), _start(LONG)
    bucket, plan = Bucket.of(flat), ExactPlan(numel=LONG, dtype=flat.dtype, ranks=RANKS, bits=(1.0, peak))
    [shards], found = [technique.add_bucket(bucket, plan, Groups(dist.group.WORLD), together=True)], []
    for technique.on_trial in (True, False):
        _update(technique, [bucket], [_start(LONG)])
        technique.gather([shards]).wait()
        assert torch.equal(flat, _start(LONG))
        found.append(shards.sent_bytes)
    return found


@pytest.mark.parametrize("peak", [3.5, 5])
def test_messages_on_trial_are_as_long_as_at_the_learning_rates_peak(peak: float) -> None:
    first, *others = run_ranks(RANKS, _messages_on_trial, peak)
    assert all(each == first for each in others)
    at_peak, still = first
    numel = LONG // RANKS
    assert still < 1.5 / peak * at_peak and numel * peak / 8 < at_peak < numel * peak / 8 + 1000


def test_messages_on_trial_are_raw_if_those_of_the_peak_will_be() -> None:
    (at_peak, still), *_ = run_ranks(RANKS, _messages_on_trial, 7)
    assert at_peak == padded(raw_bytes(LONG // RANKS)) + 16 and still < 0.1 * at_peak


def _lines_of_raw_steps() -> list[str]:
    """Return the lines of 25 steps, of which the twelfth compresses and all others do not."""
    dist.init_process_group("gloo")
    technique, flat = ExactGather(OptimusConfig(param_gather_format="exact"), PARAM_GATHER), _start(SIZES[0])
    bucket, plan = Bucket.of(flat), ExactPlan(numel=SIZES[0], dtype=flat.dtype, ranks=RANKS)
    shards, said = [technique.add_bucket(bucket, plan, Groups(dist.group.WORLD), together=True)], []
    exact_gather.say = lambda line: said.append(f"{step}: {line}")
    for step in range(1, 26):
        new = flat.clone() if step == 12 else torch.randn(SIZES[0], generator=torch.Generator().manual_seed(step)).exp()
        _update(technique, [bucket], [new.bfloat16() if step % 2 or step == 12 else -new.bfloat16()])
        technique.gather(shards).wait()
    return said


def test_a_bucket_that_does_not_compress_for_ten_steps_is_named_once_on_one_of_its_ranks() -> None:
    first, *others = run_ranks(RANKS, _lines_of_raw_steps)
    assert [line.partition(":")[0] for line in first] == ["10", "22"] and others == [[], []]
    assert f"a bucket of {SIZES[0]} parameters was sent raw in 10 steps in a row" in first[0]


def _reads_of_steps() -> list[list[str]]:
    """Return what the host reads in each of three steps of two buckets, but for torch's coder, which no GPU uses."""
    dist.init_process_group("gloo")
    technique, found = ExactGather(OptimusConfig(param_gather_format="exact"), PARAM_GATHER), []
    flats, groups = [_start(SIZES[0]) for _ in range(2)], Groups(dist.group.WORLD)
    buckets = [Bucket.of(flat) for flat in flats]
    shards = [
        technique.add_bucket(bucket, ExactPlan(numel=len(flat), dtype=flat.dtype, ranks=RANKS), groups)
        for bucket, flat in zip(buckets, flats, strict=True)
    ]
    exact.encode = lambda old, new, message, kernels=None: torch.full((), 1000, dtype=torch.int32)
    exact.decode = lambda message, values, kernels=None, *, raw: torch.ones((), dtype=torch.bool)
    for step in range(3):
        technique.on_trial = step == 1
        with host_reads() as reads:
            _update(technique, buckets, [_after(len(flat), step) for flat in flats])
            assert not reads, "encoding waits for nothing"
            for each in shards:
                technique.gather([each]).wait()
        found.append(reads)
    return found


def test_the_host_reads_once_a_step_how_long_all_messages_are_and_nothing_else() -> None:
    assert run_ranks(RANKS, _reads_of_steps) == [[["tolist"]] * 3] * RANKS


def test_a_replica_that_another_wrote_differently_ends_the_run_and_is_named() -> None:
    run_ranks(RANKS, _gather, None, "another's copy")


@pytest.mark.parametrize("numel", [3, 3 * 1000, 3 * 100_000])
def test_slices_cover_a_shard_once_and_raw_messages_fit_their_slot(numel: int) -> None:
    plan = ExactPlan(numel=numel, dtype=torch.bfloat16, ranks=3, slot_bytes=100_000)
    assert [at for span in plan.spans for at in range(numel // 3)[span]] == list(range(numel // 3))
    assert max(plan.gather_bytes) <= 100_000
    for span, raw, kept in zip(plan.spans, plan.raw, plan.kept, strict=True):
        assert raw == padded(raw_bytes(span.stop - span.start)) and kept >= HEADER and kept % 8 == 0


def test_a_slot_too_small_for_the_ranks_is_refused_with_its_flag() -> None:
    with pytest.raises(FlagError, match=r"--message-memory: .* need 2.62 MB. Give at least 3"):
        ExactPlan(numel=1 << 20, dtype=torch.bfloat16, ranks=256, slot_bytes=250_000).spans  # noqa: B018
