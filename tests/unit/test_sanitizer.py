"""The sanitizer, a fixture of all tests in Triton's interpreter, sees the faults that it is for, and no others."""

import pytest
import torch

from optimus_cc_ext.compressors.triton import launches
from tests.interpreted import assert_holds_in_tritons_interpreter

if launches.AVAILABLE:
    import triton
    import triton.language as tl

    @triton.jit
    def copy(values, out, numel, far, BLOCK: tl.constexpr):
        """Copy `numel` values, each program BLOCK of them, to places that are `far` values further for each program."""
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at + tl.program_id(0) * far, tl.load(values + at, mask=at < numel), mask=at < numel)

    @triton.jit
    def copy_at(values, out, start, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
        """Copy BLOCK values from `start` on, which is a multiple of ALIGN."""
        at = tl.multiple_of(start + tl.arange(0, BLOCK), ALIGN)
        tl.store(out + at, tl.load(values + at))

    @triton.jit
    def copy_pairs(values, out, BLOCK: tl.constexpr):
        """Copy two values to each place."""
        at = tl.arange(0, BLOCK)
        tl.store(out + at // 2, tl.load(values + at))


@pytest.mark.skipif(not launches.AVAILABLE, reason="triton is missing, or older than 3.6")
@pytest.mark.skipif(launches.INTERPRETED, reason="they run in this process")
@pytest.mark.ci
def test_the_sanitizer_sees_faults_in_tritons_interpreter() -> None:
    assert_holds_in_tritons_interpreter(__file__, "TestSanitizer")


class TestSanitizer:
    __test__ = launches.INTERPRETED

    def test_a_launch_within_its_tensors_is_not_reported(self) -> None:
        values, out = torch.randn(100), torch.zeros(100)
        copy[(7,)](values, out, 100, 0, BLOCK=16)
        copy[(7,)](values, values, 100, 0, BLOCK=16)
        copy_at[(1,)](values, out, 32, BLOCK=4, ALIGN=1)
        assert torch.equal(out, values)

    @pytest.mark.parametrize(
        "numel, given, room, seen",
        [(100, 90, 100, "load: 6 of 16 outside"), (100, 100, 90, "store: 6 of 16 outside")],
    )
    def test_an_element_behind_a_tensor_is_reported_and_left_alone(self, sanitized, numel, given, room, seen) -> None:
        values, out = torch.ones(112), torch.zeros(112)
        copy[(7,)](values[:given], out[:room], numel, 0, BLOCK=16)
        assert seen in sanitized[0] and "copy, program (5, 0, 0)" in sanitized[0]
        assert len(sanitized) == 2, "programs 5 and 6 go too far"
        assert out.sum() == 90
        sanitized.clear()

    def test_memory_of_no_argument_is_reported(self, sanitized) -> None:
        copy[(1,)](torch.ones(16), torch.zeros(16), 16, 1 << 40, BLOCK=16)
        copy[(2,)](torch.ones(32), torch.zeros(32), 32, -(1 << 40), BLOCK=16)
        [report] = sanitized
        assert "store: 16 of 16 outside" in report
        sanitized.clear()

    def test_gaps_of_a_strided_tensor_are_outside(self, sanitized) -> None:
        copy[(1,)](torch.ones(16)[::2], torch.zeros(16), 8, 0, BLOCK=16)
        [report] = sanitized
        assert "load: 4 of 8 outside" in report
        sanitized.clear()

    @pytest.mark.parametrize(
        "programs, far, seen",
        [
            (2, -8, "program (1, 0, 0): store: race: bytes that this launch has stored"),
            (2, -64, "program (1, 0, 0): store: race: bytes that another program has loaded"),
            (3, -32, "program (2, 0, 0): load: race: bytes that this launch has stored"),
        ],
    )
    def test_programs_that_touch_the_same_bytes_race(self, sanitized, programs: int, far: int, seen: str) -> None:
        memory = torch.ones(96)
        copy[(programs,)](memory[:48], memory[48:], 48, far, BLOCK=16)
        assert any(seen in report for report in sanitized)
        sanitized.clear()

    def test_one_store_that_writes_a_place_twice_is_reported(self, sanitized) -> None:
        copy_pairs[(1,)](torch.ones(16), torch.zeros(8), BLOCK=16)
        [report] = sanitized
        assert "race: bytes that the same store writes twice" in report
        sanitized.clear()

    def test_a_false_multiple_is_reported(self, sanitized) -> None:
        copy_at[(1,)](torch.ones(64), torch.zeros(64), 8, BLOCK=1, ALIGN=8)
        assert not sanitized
        copy_at[(1,)](torch.ones(64), torch.zeros(64), 12, BLOCK=1, ALIGN=8)
        [report] = sanitized
        assert report == "copy_at: multiple_of: 12 is no multiple of 8"
        sanitized.clear()
