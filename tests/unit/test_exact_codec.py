"""Exact differences: messages bring any 16-bit values to the bit, in few bits where steps are small."""

import math

import pytest
import torch

from optimus_cc_ext.compressors import exact

SPECIAL = [math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-40, 1.0, -1.0, 3e38, 6e-8, -6e-8]
DTYPES = [torch.bfloat16, torch.float16]
PIECE = exact.LANES * exact.STEPS
CHUNK = 2 * PIECE


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "_CHUNK", CHUNK)
    monkeypatch.setattr(exact, "TOGETHER", exact.LANES)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits, those of NaN and of negative zero included."""
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def sent(old: torch.Tensor, new: torch.Tensor, capacity: int | None = None) -> tuple[int, torch.Tensor]:
    """Return the bytes of a message, and what its receiver has; memory holds ones before, and what follows it stays."""
    raw, before = exact.raw_bytes(new.numel()), old.clone()
    message = torch.full((max(capacity or raw, exact.HEADER) // 4 * 4 + 8,), 255, dtype=torch.uint8)
    nbytes = int(exact.encode(old, new, message[:-8]))
    if nbytes == raw:
        message = torch.cat([message[: exact.HEADER], new.view(torch.uint8)])
    else:
        assert (message[-8:] == 255).all()
    assert nbytes <= raw and same(old, before)
    received = old.clone()
    assert exact.decode(message[:nbytes], received, raw=nbytes == raw)
    return nbytes, received


def patterns(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return values of any bit patterns."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, (numel,), generator=generator, dtype=torch.int16).view(dtype)


def trained(numel: int, step: float, dtype: torch.dtype, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights of an initial scale of 0.02 before and after a step of Adam's size."""
    generator = torch.Generator().manual_seed(seed)
    master = torch.randn(numel, generator=generator) * 0.02
    return master.to(dtype), (master - step * torch.randn(numel, generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pair_of_unusual_values_comes_through_to_the_bit(dtype: torch.dtype) -> None:
    values = torch.tensor(SPECIAL).to(dtype)
    old, new = values.repeat_interleave(len(values)), values.repeat(len(values))
    _, received = sent(old, new)
    assert same(received, new)


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_tensors_of_many_kinds_come_through_to_the_bit(dtype: torch.dtype) -> None:
    for seed in range(300):
        generator = torch.Generator().manual_seed(seed)
        numel = int(torch.randint(0, 400, (), generator=generator))
        old = patterns(numel, dtype, seed)
        if seed % 3 == 0:
            new = patterns(numel, dtype, seed + 1000)
        elif seed % 3 == 1:  # a few steps of the last place, over the limits of patterns, too
            steps = torch.randint(-3, 4, (numel,), generator=generator, dtype=torch.int16)
            new = (old.view(torch.int16) + steps).view(dtype)
        else:
            old, new = trained(numel, 10.0 ** -(seed % 7), dtype, seed)
        nbytes, received = sent(old, new)
        assert same(received, new), f"seed {seed}"
        assert nbytes <= exact.raw_bytes(numel)


@pytest.mark.parametrize("numel", [1, 3, 4, 5, 63, 64, 65, PIECE, PIECE + 1, CHUNK, CHUNK + 7])
def test_lengths_around_those_of_steps_pieces_and_chunks_come_through(numel: int) -> None:
    old, new = trained(numel, 1e-4, torch.bfloat16)
    assert same(sent(old, new)[1], new)


def test_lanes_of_a_short_message_have_fewer_steps_and_any_number_of_them_comes_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exact, "TOGETHER", 2048)
    steps = {1: 32, 1 << 16: 32, (1 << 16) + 1: 64, (1 << 17) + 1: 128, 1 << 18: 128, (1 << 18) + 1: 256, 1 << 24: 256}
    assert {numel: exact.steps_of(numel) for numel in steps} == steps
    for numel in (1 << 16, (1 << 17) - 5, (1 << 17) + 1, (1 << 18) + 1):
        old, new = trained(numel, 1e-4, torch.bfloat16)
        assert same(sent(old, new)[1], new)


def test_a_view_that_begins_anywhere_is_encoded_as_its_copy() -> None:
    old, new = trained(5003, 1e-4, torch.bfloat16)
    for start in range(1, 5):
        nbytes, received = sent(old[start:], new[start:])
        assert same(received, new[start:]) and nbytes == sent(old[start:].clone(), new[start:].clone())[0]


def test_small_steps_take_few_bits_and_no_step_about_one() -> None:
    # bf16 has 8 bits of precision, so weights of 0.02 change by a few last places in a step of 3e-4, in the mean.
    for step, bits in ((3e-4, 5.0), (1e-4, 3.2), (1e-5, 1.6), (0.0, 1.07)):
        old, new = trained(1 << 17, step, torch.bfloat16)
        assert sent(old, new)[0] * 8 / old.numel() < bits, step


def test_the_place_of_the_exponent_follows_from_the_dtype() -> None:
    old, new = trained(1 << 16, 1e-4, torch.float16)
    as_others = (each.view(torch.int16) for each in (old, new))
    assert sent(old, new)[0] * 8 / old.numel() < 6.2 < sent(*as_others)[0] * 8 / old.numel()


def test_steps_across_zero_are_as_small_as_others() -> None:
    # Patterns of small numbers of both signs are far apart, and next to each other in the order of the numbers.
    random = torch.Generator().manual_seed(1)
    places = [torch.randint(-4, 4, (20_000,), generator=random, dtype=torch.int16) for _ in range(2)]
    old, new = (torch.where(at < 0, at ^ 0x7FFF, at).view(torch.bfloat16) for at in places)
    nbytes, received = sent(old, new)
    assert same(received, new) and nbytes * 8 / old.numel() < 4.1


def test_parts_that_step_differently_have_shifts_of_their_own() -> None:
    parts = [trained(PIECE, step, torch.bfloat16, seed) for seed, step in enumerate((1e-5, 1e-3))]
    alone = sum(sent(*part)[0] for part in parts)
    together, _ = sent(*map(torch.cat, zip(*parts, strict=True)))
    assert together <= alone


def test_one_value_that_goes_astray_costs_little() -> None:
    old, new = trained(1 << 15, 1e-4, torch.bfloat16)
    usual, _ = sent(old, new)
    new[77] = math.nan
    nbytes, received = sent(old, new)
    assert same(received, new) and nbytes <= usual + 4


def test_values_that_do_not_compress_are_sent_raw_and_no_longer() -> None:
    old, new = patterns(5000, torch.bfloat16, 1), patterns(5000, torch.bfloat16, 2)
    nbytes, received = sent(old, new)
    assert nbytes == exact.raw_bytes(5000) and same(received, new)


def test_a_message_that_does_not_fit_its_memory_is_sent_raw() -> None:
    old, new = trained(5000, 1e-4, torch.bfloat16)
    needed, _ = sent(old, new)
    assert needed < exact.raw_bytes(5000)
    assert sent(old, new, needed)[0] == needed
    nbytes, received = sent(old, new, needed - 4)
    assert nbytes == exact.raw_bytes(5000) and same(received, new)


def test_messages_are_the_same_each_time_and_in_chunks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = trained(40_000, 1e-4, torch.bfloat16)
    messages = []
    for fill, chunk in ((0, CHUNK), (255, PIECE), (7, 3 * PIECE)):
        monkeypatch.setattr(exact, "_CHUNK", chunk)
        message = torch.full((80_000,), fill, dtype=torch.uint8)
        messages.append(message[: exact.encode(old, new, message)])
    assert torch.equal(messages[0], messages[1]) and torch.equal(messages[0], messages[2])


@pytest.mark.parametrize("raw", [False, True])
def test_other_old_values_are_noticed_and_only_raw_values_are_written(raw: bool) -> None:
    old, new = trained(3003, 1e-4, torch.bfloat16)
    new = patterns(3003, torch.bfloat16, 1) if raw else new
    message = torch.zeros(6000, dtype=torch.uint8)
    nbytes = exact.encode(old, new, message)
    assert (nbytes == exact.raw_bytes(3003)) == raw
    message = torch.cat([message[: exact.HEADER], new.view(torch.uint8)]) if raw else message[:nbytes]
    for at in (0, 1500, 3000, 3002):
        other = old.clone()
        other.view(torch.int16)[at] ^= 1
        before = other.clone()
        assert not exact.decode(message, other, raw=raw) and same(other, new if raw else before)


@pytest.mark.parametrize("numel", [7, 2 * CHUNK + 7])
def test_old_values_that_have_changed_places_are_noticed(numel: int) -> None:
    """A loop may exchange experts, or rows of an embedding, between the step and its gather."""
    old, new = trained(numel, 1e-4, torch.bfloat16)
    message = torch.zeros(2 * numel // 8 * 8 + 8, dtype=torch.uint8)
    nbytes = exact.encode(old, new, message)
    raw = bool(nbytes == exact.raw_bytes(numel))
    message = torch.cat([message[:16], new.view(torch.uint8)]) if raw else message[:nbytes]
    for start, length in ((0, 1), (numel - 2, 1), (0, 3), (CHUNK - 4, 4), (0, CHUNK), (4096, 1024)):
        if start + 2 * length <= numel:
            other = old.clone()
            other[start : start + 2 * length] = old[start : start + 2 * length].view(2, -1).flip(0).view(-1)
            assert not same(other, old) and not exact.decode(message, other, raw=raw), (start, length)
    assert exact.decode(message, old.clone(), raw=raw)
