"""Triton's kernels on random plans, rows and matrices: equal to torch's, and without a report of the sanitizer."""

from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor

from optimus_cc_ext.collectives.exchange import ExchangePlan
from optimus_cc_ext.collectives.messages import Formats
from optimus_cc_ext.collectives.nodes import Levels
from optimus_cc_ext.compressors.blocks import BlockLayout, Codec, blocks_in
from optimus_cc_ext.compressors.formats import BLOCK
from optimus_cc_ext.compressors.low_rank import FastLowRank
from optimus_cc_ext.compressors.triton import blocks as block_launches
from optimus_cc_ext.compressors.triton import launches
from optimus_cc_ext.compressors.triton.blocks import TritonCodec
from optimus_cc_ext.compressors.triton.low_rank import TritonLowRank
from optimus_cc_ext.slots import slot_bytes
from tests.formats import EVERY, SIGNS
from tests.interpreted import assert_holds_in_tritons_interpreter

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CODED = [(format, rotated) for format, rotated in EVERY if format in ("int8", "int4")]


@pytest.mark.skipif(not launches.AVAILABLE, reason="triton is missing, or older than 3.6")
@pytest.mark.skipif(launches.INTERPRETED, reason="they run in this process")
@pytest.mark.full
def test_random_plans_hold_in_tritons_interpreter() -> None:
    assert_holds_in_tritons_interpreter(__file__, "TestRandomPlans")


def _plan(random: Random) -> ExchangePlan:
    """Draw a bucket of coded and dense parameters, or of either kind alone, and its exchange in one level or in two."""
    align, share = random.choice([1, 2, 3, 4, 8, 16]), random.choice([(1, 1), (1, 1), (1, 0), (0, 1)])
    nodes, members = random.choice([(1, random.randint(1, 8)), (random.randint(2, 3), random.randint(2, 3))])
    numel = nodes * members * align * random.randint(1, 400 // align)
    coded, dense, start = [], [], 0
    while start < numel:
        length = min(numel - start, align * random.choice([1, 3, 40, random.randint(1, 1 + 3000 // align)]))
        [kind] = random.choices([coded, dense, []], [5 * share[0], 4 * share[1], 1])
        kind.append((start, length))
        start += length
    flat: dict = {"numel": numel, "coded": coded, "dense": dense, "dtype": torch.float32}
    sharded, formats = random.random() < 0.6, Formats("int4", "int8")
    if nodes == 1:
        return ExchangePlan(**flat, ranks=members, sharded=sharded, formats=formats)
    instances = random.random() < 0.3
    levels = Levels(nodes=nodes, members=members, instances=instances)
    place = random.randrange(members)
    return ExchangePlan(
        **flat, ranks=nodes * members, levels=levels, place=place, sharded=sharded or instances, formats=formats
    )


def _exact(random: Random, *shape: int, dtype: torch.dtype) -> Tensor:
    """Draw multiples of 2^-4 to +-8, of whose rotation any order gives the same sums, at any address of a bucket's."""
    offset, numel = random.choice([0, 0, 1, 3]), torch.Size(shape).numel()
    values = _gaussian(random, offset + numel).mul_(2).clamp_(-8, 8).mul_(16).round_().div_(16)
    return values.to(dtype)[offset:].view(shape)


def _gaussian(random: Random, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(random.randrange(1 << 30)))


def _assert_messages_equal(codec: Codec, found: Tensor, expected: Tensor, layout: BlockLayout, dtype) -> None:
    """Assert that the used parts of messages are equal, but for codes of rotated blocks, which may be one apart."""
    for index, (message, other) in enumerate(zip(found, expected, strict=True) if found.numel() else ()):
        dense = sum(length for _, length in layout.dense[index])
        blocks = sum(blocks_in(piece.numel) for piece in layout.pieces[index])
        (values, scales, codes), (values_too, scales_too, codes_too) = (
            codec._split(each, layout, dtype) for each in (message, other)
        )
        assert torch.equal(values[:dense], values_too[:dense])
        assert torch.equal(scales[:blocks], scales_too[:blocks])
        if blocks:
            apart = codec.numbers(codes[:blocks], "one") - codec.numbers(codes_too[:blocks], "other")
            assert apart.abs().max() <= (1 if codec.rotated else 0)


class TestRandomPlans:
    __test__ = launches.INTERPRETED

    @pytest.fixture(autouse=True)
    def _few_programs(self, monkeypatch) -> None:
        monkeypatch.setattr(block_launches, "ROWS", 16)

    @pytest.mark.parametrize("seed", range(20))
    def test_messages_of_any_plan_are_torchs(self, seed: int) -> None:
        random = Random(seed)
        layout, numel = (plan := _plan(random)).layouts[0], plan.numel
        format, rotated = random.choice(CODED)
        dtype, signs = random.choice(DTYPES), SIGNS if rotated else None
        ours, torchs = TritonCodec(format, signs=signs), Codec(format, signs=signs)
        values = _exact(random, numel, dtype=dtype)

        def encoded(codec: Codec, values: Tensor, layout: BlockLayout, skipped: int | None = None) -> Tensor:
            messages = torch.zeros(layout.messages, codec.message_bytes(layout, dtype), dtype=torch.uint8)
            codec.encode(values, layout, messages, skipped=skipped)
            return messages

        expected = encoded(torchs, values, layout)
        skipped = random.choice([None, 0, random.randrange(layout.messages)])
        found = encoded(ours, values, layout, skipped)
        if skipped is not None:
            found[skipped] = expected[skipped]
        _assert_messages_equal(ours, found, expected, layout, dtype)
        # One rank's own message: of its part of the bucket, as in the parameter gather, or of the whole bucket.
        index = random.randrange(layout.messages)
        start = random.choice([0, min((first for first, _ in layout.spans(index)), default=0)])
        part = values[start:]
        own = layout.of_message(index, start)
        message, decoded, wanted = encoded(torchs, part, own), part.clone(), part.clone()
        _assert_messages_equal(ours, encoded(ours, part, own), message, own, dtype)
        ours.decode(message, own, decoded)
        torchs.decode(message, own, wanted)
        assert torch.equal(decoded, wanted)
        for way in ("decode", "decode_onto"):
            decoded, wanted = values.clone(), values.clone()
            getattr(ours, way)(expected, layout, decoded)
            getattr(torchs, way)(expected, layout, wanted)
            assert torch.equal(decoded, wanted)
        senders = [encoded(torchs, _exact(random, numel, dtype=dtype), layout)[index] for _ in range(plan.ranks)]
        for onto in (False, True):
            decoded, wanted = values.clone(), values.clone()
            ours.decode_add(torch.stack(senders), layout, index, decoded, onto=onto)
            torchs.decode_add(torch.stack(senders), layout, index, wanted, onto=onto)
            # The sums of a rotation differ in fp32's last bits, which can change how they round to 16 bits.
            torch.testing.assert_close(decoded, wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-3 if rotated else 1e-5)

    @pytest.mark.parametrize("slots", [1, 2, 3])
    @pytest.mark.parametrize("seed", range(4))
    def test_slices_in_slots_that_are_used_again_are_torchs_one_message(self, seed: int, slots: int) -> None:
        random = Random(100 * slots + seed)
        one = _plan(random)
        slot = one.slice_bytes[0] // 3
        self._assert_sliced(random, one, replace(one, slot_bytes=max(slot, one._slot(1, 1))), slots)

    @pytest.mark.parametrize("slots", [1, 2, 3])
    def test_slices_of_one_megabyte_of_messages_are_torchs_one_message(self, slots: int) -> None:
        numel = 2 * 128 * 3000
        one = ExchangePlan(
            numel=numel, coded=[(0, numel - 1000)], dense=[(numel - 1000, 1000)], dtype=torch.float32, ranks=2,
            sharded=True, formats=Formats("int4", "int8"),
        )  # fmt: skip
        sliced = replace(one, slot_bytes=slot_bytes(1))
        assert len(sliced.layouts) > slots
        self._assert_sliced(Random(slots), one, sliced, slots)

    def _assert_sliced(self, random: Random, one: ExchangePlan, sliced: ExchangePlan, slots: int) -> None:
        """Encode slice after slice into slots that still hold earlier messages, and decode them onto the tensor."""
        format, rotated = random.choice(CODED)
        signs = SIGNS if rotated else None
        ours, torchs = TritonCodec(format, signs=signs), Codec(format, signs=signs)
        values = _exact(random, one.numel, dtype=torch.float32)
        decoded, wanted = values.clone(), values.clone()
        memory = [torch.full((max(sliced.slice_bytes, default=0),), 0xA5, dtype=torch.uint8) for _ in range(slots)]
        for number, layout in enumerate(sliced.layouts):
            each = torchs.message_bytes(layout, values.dtype)
            messages = memory[number % slots][: layout.messages * each].view(layout.messages, each)
            expected = torch.zeros_like(messages)
            ours.encode(values, layout, messages)
            torchs.encode(values, layout, expected)
            _assert_messages_equal(ours, messages, expected, layout, values.dtype)
            ours.decode_onto(expected, layout, decoded)
        [layout] = one.layouts
        messages = torch.zeros(layout.messages, torchs.message_bytes(layout, values.dtype), dtype=torch.uint8)
        torchs.encode(values, layout, messages)
        torchs.decode_onto(messages, layout, wanted)
        assert torch.equal(decoded, wanted)

    @pytest.mark.parametrize("seed", range(8))
    def test_rows_of_any_number_and_width_are_torchs(self, seed: int) -> None:
        random = Random(seed)
        rows, width = random.choice([0, 1, 2, 17, random.randint(3, 60)]), BLOCK * random.randint(1, 5)
        format, rotated = random.choice(CODED)
        dtype, signs = random.choice(DTYPES), SIGNS if rotated else None
        ours, torchs = TritonCodec(format, signs=signs), Codec(format, signs=signs)
        values = _exact(random, rows, width, dtype=dtype)
        message, expected = ours.encode_rows(values), torchs.encode_rows(values)
        split = width // BLOCK * ours.code_bytes
        assert torch.equal(message[:, split:], expected[:, split:])
        assert torch.equal(ours.decode_rows(expected, dtype), torchs.decode_rows(expected, dtype))
        # Rows of a wider message have a stride of their own.
        wide = torch.full((rows, expected.shape[1] + 6), 0xA5, dtype=torch.uint8)
        wide[:, : expected.shape[1]] = expected
        found = ours.decode_rows(wide[:, : expected.shape[1]], dtype)
        assert torch.equal(found, torchs.decode_rows(expected, dtype))

    @pytest.mark.parametrize("seed", range(8))
    def test_low_rank_steps_of_any_shape_and_strides_are_torchs(self, seed: int) -> None:
        random = Random(seed)
        batch, n, m = random.randint(1, 3), random.choice([1, 5, 33, 65, 130]), random.choice([1, 3, 31, 100, 200])
        r = min(n, m, random.choice([1, 4, 17, 40, 65, 128]))
        dtype, wire = random.choice(DTYPES), random.choice(DTYPES)
        ours, torchs = TritonLowRank(), FastLowRank()

        def spread(columns: int, rows: int, dtype: torch.dtype) -> Tensor:
            """Draw matrices at equal distances, as in a bucket, each of some rows of a larger one."""
            above, below, gap = (random.choice([0, 0, 1, 7]) for _ in range(3))
            distance = (above + rows + below) * columns + gap
            flat = torch.full((batch * distance,), torch.nan, dtype=dtype)
            view = flat.as_strided((batch, rows, columns), (distance, columns, 1), above * columns)
            return view.copy_(_gaussian(random, batch, rows, columns))

        matrices, q, p = spread(m, n, dtype), spread(r, m, random.choice(DTYPES[:2])), spread(r, n, torch.float32)
        residual = random.choice([None, spread(m, n, torch.float32)])
        expected = matrices.float() if residual is None else matrices.float() + residual
        total = residual if residual is not None and random.random() < 0.5 else torch.empty(batch, n, m)
        ours.project_sum(matrices, residual, q, total=total, out=p)
        assert torch.equal(total, expected)
        torch.testing.assert_close(p, expected @ q.float(), rtol=1e-4, atol=1e-4 * m**0.5)
        torch.testing.assert_close(ours.back_project(total, p), total.mT @ p, rtol=1e-4, atol=1e-3 * n**0.5)
        expected_basis = torchs.orthogonalize(p)
        basis = ours.orthogonalize(p, out=p)
        torch.testing.assert_close(basis, expected_basis, rtol=0, atol=1e-4)
        left, right, out = basis.to(wire), q.to(wire), spread(m, n, wire)
        ours.reconstruct(left, right, out=out)
        torch.testing.assert_close(
            out.float(), left.float() @ right.float().mT, rtol=2 * torch.finfo(wire).eps, atol=1e-3
        )
        ours.subtract_reconstruction(total, left, right, share=0.5)
        torch.testing.assert_close(total, expected - 0.5 * out.float(), rtol=1e-5, atol=1e-5)
        kept = out.contiguous()
        launches.copy_unless(torch.tensor(random.random() < 0.5), kept, kept.clone())
