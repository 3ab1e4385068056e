"""Blocks of values in few bits: their errors, and the properties that hold without error."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from optimus_cc_ext.compressors import blocks
from optimus_cc_ext.compressors.blocks import BlockLayout, Codec
from optimus_cc_ext.compressors.fast import fast_codec
from optimus_cc_ext.compressors.formats import BLOCK, FORMATS
from tests.allocations import Watch
from tests.formats import ALL, LOSSY, SIGNS, near_limit, reference_of

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
SCATTERED = BlockLayout(
    [[(640, 300), (3, 128), (131, 200)], [], [(1000, 1)]], [[(350, 5), (355, 2)], [(600, 30)], [(1010, 3)]]
)
"""Layout of 1100 values: ranges that join, short blocks, a message with nothing encoded, and one with a single
value.
"""


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def t3(numel: int) -> Tensor:
    """Draw from Student's t with 3 degrees of freedom, which has heavy tails."""
    return gaussian(numel) / (gaussian(3, numel, seed=1).square().sum(0) / 3).sqrt()


def codec_of(format: str, rotated: bool) -> Codec:
    return Codec(format, signs=SIGNS if rotated else None)


def encoded(codec: Codec, values: Tensor, layout: BlockLayout | None = None) -> Tensor:
    layout = layout or BlockLayout.of_one(values.numel())
    messages = torch.zeros(layout.messages, codec.message_bytes(layout, values.dtype), dtype=torch.uint8)
    codec.encode(values, layout, messages)
    return messages


def passed(codec: Codec, values: Tensor, layout: BlockLayout | None = None) -> Tensor:
    """Return the decoded values, and NaN in places to which no value is sent."""
    out = torch.full_like(values, torch.nan)
    codec.decode(encoded(codec, values, layout), layout or BlockLayout.of_one(values.numel()), out)
    return out


def error(found: Tensor, values: Tensor) -> float:
    return float((found.double() - values.double()).norm() / values.double().norm())


@LOSSY
def test_finite_values_near_fp16s_limit_never_become_infinite(format: str, rotated: bool) -> None:
    values, codec = near_limit().flatten(), codec_of(format, rotated)
    layout, messages = BlockLayout.of_one(values.numel()), encoded(codec, values)
    assert passed(codec, values).isfinite().all()
    onto = torch.zeros_like(values)
    codec.decode_onto(messages, layout, onto)
    assert torch.equal(onto, passed(codec, values))
    # A sum of several senders is infinite where it is without compression, too.
    codec.decode_add(messages.repeat(2, 1), layout, 0, onto)
    assert not onto[:BLOCK].isfinite().any()


# --- as defined -------------------------------------------------------------------------------------------


@ALL
@DTYPES
def test_messages_are_those_of_the_reference_to_the_byte_where_rotations_are_exact(format, rotated, dtype) -> None:
    # The values are multiples of 2^-6 to +-8: fp16 and fp32 hold them, and fp32 also their sums.
    values = gaussian(1100).mul_(2).clamp_(-8, 8).mul_(64).round_().div_(64).to(dtype)
    found = encoded(codec_of(format, rotated), values, SCATTERED)
    expected = torch.zeros_like(found)
    reference_of(format, rotated).encode(values, SCATTERED, expected)
    assert torch.equal(found, expected)


@ALL
def test_elsewhere_rotation_moves_a_code_by_one_at_most_and_decoding_is_the_references_to_the_bit(
    format, rotated
) -> None:
    layout, codec, reference = BlockLayout.of_one(300 * BLOCK), codec_of(format, rotated), reference_of(format, rotated)
    # Block sizes go from 1e-20 to 1e20, with at least a power of ten between any two consecutive blocks.
    values = (gaussian(300, BLOCK) * torch.logspace(-20, 20, 300)[torch.arange(300) * 7 % 300, None]).flatten()
    found = encoded(codec, values)
    expected = torch.zeros_like(found)
    reference.encode(values, layout, expected)
    if rotated:
        ((_, scales, codes),) = (codec._split(message, layout, values.dtype) for message in found)
        ((_, expected_scales, expected_codes),) = (codec._split(each, layout, values.dtype) for each in expected)
        assert torch.equal(scales, expected_scales)
        apart = [
            (reference.numbers(mine) - reference.numbers(other)).abs()
            for mine, other in zip(codes, expected_codes, strict=True)
        ]
        # Sums of codec and reference differ by rounding, 2^-24 of a block's length; steps between codes are 2^-7 (int8)
        # and 2^-3 (int4) of its largest value.
        assert torch.stack(apart).max() <= 1 and torch.stack(apart).mean() < 1e-4
    else:
        assert torch.equal(found, expected)
    out, expected_out = torch.empty_like(values), torch.empty_like(values)
    codec.decode(found, layout, out)
    reference.decode_add(found, layout, 0, expected_out)
    assert torch.equal(out, expected_out)


@ALL
@DTYPES
def test_several_senders_are_added_up_in_fp32_and_rounded_once(format, rotated, dtype) -> None:
    codec = codec_of(format, rotated)
    sent = torch.stack([encoded(codec, gaussian(1100, seed=seed).to(dtype), SCATTERED)[0] for seed in range(3)])
    out, expected = torch.zeros(2, 1100, dtype=dtype)
    codec.decode_add(sent, SCATTERED, 0, out)
    reference_of(format, rotated).decode_add(sent, SCATTERED, 0, expected)
    if rotated:
        # Sums over a block are rounded in fp32, which may round the 16-bit result to the other neighbour.
        torch.testing.assert_close(out, expected, rtol=torch.finfo(dtype).eps, atol=1e-5)
    else:
        assert torch.equal(out, expected)


def test_one_sender_is_decoded_alike_by_itself_and_in_any_piece() -> None:
    """Results do not depend on which blocks are decoded together: here all at once, and one by one."""
    codec, values = codec_of("int8", True), gaussian(5000)
    together = passed(codec, values)
    for start in range(0, 5000, BLOCK):
        message = encoded(codec, values[start : start + BLOCK])
        alone = torch.empty_like(values[start : start + BLOCK])
        codec.decode(message, BlockLayout.of_one(alone.numel()), alone)
        assert torch.equal(alone, together[start : start + BLOCK])


# --- what is lost -----------------------------------------------------------------------------------------


def outliers() -> tuple[Tensor, Tensor]:
    """Make 160 rows of 12800 channels, every 100th of them 30 times as large; return them, and a mask of the other
    channels.
    """
    large = torch.arange(12800) % 100 == 50
    return gaussian(160, 12800) * torch.where(large, 30.0, 1.0), ~large


@LOSSY
def test_the_error_of_gaussian_values_is_the_tables(format, rotated) -> None:
    values = gaussian(1 << 21)
    assert error(passed(codec_of(format, rotated), values), values) == pytest.approx(
        FORMATS[format].gaussian_error, rel=0.1
    )


@pytest.mark.parametrize(
    "format, rotated, of_t3, beside_outliers",
    [
        ("int8", False, 0.014, 0.071),
        ("int8", True, None, 0.013),
        ("int4", False, 0.223, None),
        ("int4", True, 0.109, None),
    ],
)
def test_errors_are_those_that_others_simulated(format, rotated, of_t3, beside_outliers) -> None:
    codec = codec_of(format, rotated)
    if of_t3 is not None:
        values = t3(1 << 21)
        assert error(passed(codec, values), values) == pytest.approx(of_t3, rel=0.1)
    if beside_outliers is not None:
        values, others = outliers()
        found = passed(codec, values.flatten()).view_as(values)
        assert error(found[:, others], values[:, others]) == pytest.approx(beside_outliers, rel=0.1)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("replicas, reduced, gathered", [(4, 0.074, 0.074), (16, 0.040, 0.041)])
def test_a_mean_over_replicas_loses_less_than_one_of_them(rotated, replicas, reduced, gathered) -> None:
    """Replicas share half of their variance. They are reduced by an all-to-all in int4; the mean is gathered in
    int8.
    """
    numel = 1 << 18
    shared, layout, codec = gaussian(numel), BlockLayout.of_one(numel), codec_of("int4", rotated)
    gradients = [shared + gaussian(numel, seed=1 + replica) for replica in range(replicas)]
    mean, found = sum(gradients) / replicas, torch.empty(numel)
    codec.decode_add(torch.cat([encoded(codec, gradient) for gradient in gradients]), layout, 0, found)
    found /= replicas
    assert error(found, mean) == pytest.approx(reduced, rel=0.1)
    assert error(passed(codec_of("int8", rotated), found), mean) == pytest.approx(gathered, rel=0.1)


def test_errors_of_a_tensor_of_many_parts_are_those_of_a_sample() -> None:
    codec, values, noted = codec_of("int4", True), gaussian(200 * 300), []
    layout = BlockLayout([[(start, 256) for start in range(0, values.numel(), 300)]])
    messages = encoded(codec, values, layout)
    codec.errors(values, layout, messages, lambda sent, lost, _: noted.append([sent.norm(), lost.norm()]))
    assert len(noted) == blocks.MEASURED_PARTS == 32
    sent, lost = torch.tensor(noted).norm(dim=0)
    # 64 blocks have an error of 11.7 % each, give or take a tenth of it, so their mean is within 4 %.
    assert lost / sent == pytest.approx(codec.format.gaussian_error, rel=0.04)


@ALL
def test_what_it_says_that_it_lost_is_what_did_not_arrive(format, rotated) -> None:
    codec, values, noted = codec_of(format, rotated), gaussian(1100), []
    messages = encoded(codec, values, SCATTERED)
    codec.errors(values, SCATTERED, messages, lambda sent, lost, _: noted.append((sent.clone(), lost.clone())))
    coded = passed(codec, values, SCATTERED)
    for ranges in SCATTERED.dense:
        for start, length in ranges:
            coded[start : start + length] = torch.nan
    arrived = ~coded.isnan()
    energy = sum(sent.square().sum() for sent, _ in noted)
    torch.testing.assert_close(energy, values[arrived].square().sum())
    lost = sum(part.square().sum() for _, part in noted)
    torch.testing.assert_close(lost, (values - coded)[arrived].square().sum())


# --- what never is ----------------------------------------------------------------------------------------


def test_a_message_that_is_skipped_is_not_touched() -> None:
    codec, values = codec_of("int8", True), gaussian(1100)
    messages, some = (
        torch.zeros(SCATTERED.messages, codec.message_bytes(SCATTERED, values.dtype), dtype=torch.uint8)
        for _ in range(2)
    )
    codec.encode(values, SCATTERED, messages)
    codec.encode(values, SCATTERED, some, skipped=0)
    assert not some[0].any() and torch.equal(some[1:], messages[1:])


@ALL
@DTYPES
def test_all_sizes_and_ranges_arrive_and_nothing_beside_them_is_touched(format, rotated, dtype) -> None:
    # The error of a few values may be three times that of many values.
    codec, bound = codec_of(format, rotated), 3 * FORMATS[format].gaussian_error
    values = gaussian(1100).to(dtype)
    for numel in (1, 127, 128, 129, 1100):
        assert error(passed(codec, values[:numel]), values[:numel]) <= bound
    found = passed(codec, values, SCATTERED)
    untouched = torch.ones(1100, dtype=torch.bool)
    for coded, dense in zip(SCATTERED.pieces, SCATTERED.dense, strict=True):
        for piece in coded:
            part = slice(piece.start, piece.start + piece.numel)
            assert error(found[part], values[part]) <= bound
            untouched[part] = False
        for start, length in dense:
            assert torch.equal(found[start : start + length], values[start : start + length])
            untouched[start : start + length] = False
    assert found[untouched].isnan().all() and untouched.sum() == 1100 - 629 - 40


@ALL
def test_a_message_is_as_long_as_its_layout_says(format, rotated) -> None:
    codec = codec_of(format, rotated)
    for numel in (1 << 20, 1 << 20 | 1):
        nbytes = codec.message_bytes(BlockLayout.of_one(numel), torch.float32)
        blocks = math.ceil(numel / BLOCK)
        assert 0 <= nbytes - blocks * BLOCK * FORMATS[format].bits_per_value / 8 < 32
    assert codec.message_bytes(BlockLayout([[], []]), torch.float32) == 0
    codec.encode(torch.ones(3), BlockLayout([[], []]), torch.empty(2, 0, dtype=torch.uint8))
    messages = encoded(codec, gaussian(300))
    with pytest.raises(ValueError, match=r"1 messages of \d+ bytes do not fit into \(1, \d+\)"):
        codec.decode(messages[:, 1:], BlockLayout.of_one(300), torch.empty(300))


@ALL
def test_zeros_arrive_as_zeros_and_do_not_change_their_neighbours(format, rotated) -> None:
    codec, values = codec_of(format, rotated), gaussian(3 * BLOCK)
    alone = passed(codec, values)
    values[BLOCK : 2 * BLOCK] = 0
    found = passed(codec, values)
    assert (found[BLOCK : 2 * BLOCK] == 0).all()
    assert torch.equal(found[:BLOCK], alone[:BLOCK]) and torch.equal(found[2 * BLOCK :], alone[2 * BLOCK :])


@LOSSY
@DTYPES
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_reaches_the_result_and_stays_in_its_block(format, rotated, dtype, poison) -> None:
    codec, values, layout = codec_of(format, rotated), gaussian(300).to(dtype), BlockLayout.of_one(300)
    well = passed(codec, values)
    values[200] = poison
    messages = torch.cat([encoded(codec, values), encoded(codec, torch.ones_like(values))])
    for senders in (1, 2):
        out = torch.empty_like(values)
        codec.decode_add(messages[:senders], layout, 0, out)
        assert not out[BLOCK : 2 * BLOCK].isfinite().any()
        assert out[:BLOCK].isfinite().all() and out[2 * BLOCK :].isfinite().all()
    assert torch.equal(passed(codec, values)[:BLOCK], well[:BLOCK])


def test_exact_sends_what_it_is_given() -> None:
    codec = fast_codec("fp32", seed=1, rotated=True)
    values = torch.cat([gaussian(1100) * 1e30, torch.tensor([torch.inf, 1e-42])])
    layout = BlockLayout([[(0, 700)], [(700, 402)]])
    messages, out = torch.empty(2, codec.message_bytes(layout, values.dtype), dtype=torch.uint8), torch.empty(1102)
    codec.encode(values, layout, messages)
    codec.decode(messages, layout, out)
    assert torch.equal(out, values)


# --- and what it costs ------------------------------------------------------------------------------------


def assert_nothing_new(work: Callable[[], None]) -> None:
    work()
    with Watch() as watch:
        work()
    assert watch.allocated == watch.read_by_host == []


@ALL
@DTYPES
def test_nothing_is_allocated_once_the_shapes_have_been_seen(format, rotated, dtype) -> None:
    codec, values = codec_of(format, rotated), gaussian(1100).to(dtype)
    messages = encoded(codec, values, SCATTERED)
    several = messages[:1].repeat(3, 1)

    def step() -> None:
        codec.encode(values, SCATTERED, messages)
        codec.decode(messages, SCATTERED, values)
        codec.decode_add(several, SCATTERED, 0, values)
        codec.errors(values, SCATTERED, messages, lambda *part: None)

    assert_nothing_new(step)


def test_memory_does_not_grow_with_the_tensor() -> None:
    codec = codec_of("int4", True)
    values = torch.zeros(1 << 22)
    passed(codec, values)
    assert codec._scratch.nbytes < values.nbytes / 3


def test_signs_are_private_and_the_same_for_all_who_know_the_seed() -> None:
    before = torch.random.get_rng_state()
    values, (one, same, other) = gaussian(300), (fast_codec("int4", seed=seed, rotated=True) for seed in (1, 1, 2))
    found = [encoded(codec, values) for codec in (one, same, other)]
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert torch.equal(torch.random.get_rng_state(), before)


def test_nothing_is_differentiated() -> None:
    codec, values = codec_of("int8", True), gaussian(300).requires_grad_()
    out = torch.empty(300, requires_grad=True)
    codec.decode(encoded(codec, values), BlockLayout.of_one(300), out)
    assert out.grad_fn is None
