"""Triton's coder of exact differences writes torch's messages to the bit; in the interpreter or on a GPU, as in
test_triton_kernels.py.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from optimus_cc_ext.compressors import exact
from optimus_cc_ext.compressors.triton import exact as launched
from optimus_cc_ext.compressors.triton import launches, trial
from scripts.bench.compressors.compiled import compiling, loops, stack
from tests.host_reads import host_reads
from tests.interpreted import assert_holds_in_tritons_interpreter
from tests.unit.test_exact_codec import DTYPES, SPECIAL, patterns, same, trained

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
BOTH = (launched, None)
RUNS_HERE = launches.AVAILABLE and (GPU or launches.INTERPRETED)
needs_triton = pytest.mark.skipif(not launches.AVAILABLE, reason="triton is missing, or older than 3.6")


@needs_triton
@pytest.mark.skipif(RUNS_HERE, reason="they run in this process")
@pytest.mark.full
def test_the_exact_kernels_hold_in_tritons_interpreter() -> None:
    assert_holds_in_tritons_interpreter(__file__, "TestExactKernels")


@needs_triton
@pytest.mark.full
@pytest.mark.skipif(launches.INTERPRETED or GPU, reason="compiles without a GPU what a GPU would compile anyway")
def test_a_value_takes_at_most_40_instructions_of_an_h100_and_no_kernel_spills(tmp_path: Path) -> None:
    numel = exact.STEPS * exact.TOGETHER
    old, words = torch.zeros(numel, dtype=torch.int16), torch.zeros(numel, dtype=torch.int32)
    tables = torch.zeros(exact.first_word(numel) - exact.HEADER, dtype=torch.uint8)
    with compiling(90, tmp_path) as compiled:
        launched.code(old, old, False, tables, words)
        launched.restore(old, False, tables, words)
    assert [kernel.metadata.name for kernel in compiled] == ["measure", "pack", "unpack"]
    for kernel in compiled:
        name, (whole, *steps) = kernel.metadata.name, loops(kernel)
        of_value = max(steps) / launched.exact_kernels.UNROLLED.value
        # What is outside of loops, above all the choice of a shift, runs once for a lane of 256 values.
        assert of_value + (whole - sum(steps)) / exact.STEPS <= 40, name
        assert stack(kernel) == 0, f"{name}: spilled registers lie on the stack"


class TestExactKernels:
    __test__ = RUNS_HERE

    @pytest.fixture(autouse=True)
    def _short_pieces(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """In the interpreter a step takes milliseconds."""
        if launches.INTERPRETED:
            short = {"STEPS": 32, "SAMPLED": 16, "TOGETHER": exact.LANES, "_CHUNK": 2 * 32 * exact.LANES}
            for name, value in short.items():
                monkeypatch.setattr(exact, name, value)
                if hasattr(launched.exact_kernels, name):
                    monkeypatch.setattr(launched.exact_kernels, name, type(launched.exact_kernels.LANES)(value))
        exact._powers.cache_clear()
        yield
        exact._powers.cache_clear()

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("pieces, more, step", [(0, 700, 1e-4), (0, 1100, 1e-3), (1, 0, 0.0), (2, 77, 3e-4)])
    def test_messages_are_torchs_to_the_bit_and_restore_the_new_values(
        self, dtype: torch.dtype, pieces: int, more: int, step: float
    ) -> None:
        numel = pieces * exact.STEPS * exact.LANES + more
        old, new = trained(numel, step, dtype)
        # Far and unusual ones, in the first and in the last steps.
        new[5 : 5 + len(SPECIAL)] = torch.tensor(SPECIAL).to(dtype)
        old[-len(SPECIAL) :] = torch.tensor(SPECIAL).to(dtype)
        old, new = old.to(DEVICE), new.to(DEVICE)
        messages = [torch.full((2 * numel // 4 * 4,), fill, dtype=torch.uint8, device=DEVICE) for fill in (3, 255)]
        lengths = [exact.encode(old, new, message, each) for message, each in zip(messages, BOTH, strict=True)]
        assert lengths[0] == lengths[1] < exact.raw_bytes(numel)
        assert torch.equal(*(message[: lengths[0]] for message in messages))
        assert all((message[lengths[0] :] == fill).all() for message, fill in zip(messages, (3, 255), strict=True))

        for each in BOTH:
            values = old.clone()
            assert exact.decode(messages[0][: lengths[0]], values, each, raw=False) and same(values, new)

    def test_a_message_that_does_not_fit_is_raw_and_the_memory_behind_it_stays(self) -> None:
        old, new = (each.to(DEVICE) for each in trained(2000, 1e-4, torch.bfloat16))
        memory = torch.full((4000,), 7, dtype=torch.uint8, device=DEVICE)
        length = exact.encode(old, new, memory)
        memory.fill_(7)
        for room, expected in ((length, length), (length - 4, exact.raw_bytes(2000)), (16, exact.raw_bytes(2000))):
            assert [exact.encode(old, new, memory[:room], each) for each in BOTH] == [expected] * 2
            assert (memory[length:] == 7).all()

    def test_other_old_values_are_noticed_and_nothing_outside_is_read(self) -> None:
        numel = exact.STEPS * exact.LANES + 300
        old, new = trained(numel, 1e-4, torch.bfloat16)
        message = torch.zeros(2 * numel // 4 * 4, dtype=torch.uint8, device=DEVICE)
        others = [patterns(numel, torch.bfloat16, 1), new, old.roll(1), torch.zeros_like(old)]
        others += [torch.cat([old[64:128], old[:64], old[128:]])]
        length = exact.encode(old.to(DEVICE), new.to(DEVICE), message, launched)
        for other in others:
            values = torch.full((numel + 64,), 9.0, dtype=torch.bfloat16, device=DEVICE)
            values[:numel] = other.to(DEVICE)
            assert not exact.decode(message[:length], values[:numel], launched, raw=False)
            assert (values[numel:] == 9).all()

    @pytest.mark.parametrize("room", [4000, 1000, 16])
    def test_the_host_reads_nothing_of_a_message_and_nothing_of_its_receiver(self, room: int) -> None:
        """On a GPU each read would wait for all work of the stream."""
        old, new = (each.to(DEVICE) for each in trained(2000, 1e-4, torch.bfloat16))
        message, values = torch.zeros(4000, dtype=torch.uint8, device=DEVICE), old.clone()
        exact.encode(old, new, message, launched)  # powers are made once
        with host_reads() as reads:
            exact.encode(old, new, message[:room], launched)
            for raw in (False, True):
                exact.decode(torch.cat([message, message[:16]]), values, launched, raw=raw)
        assert not reads
        with host_reads() as reads:
            message[:4].tolist(), bool(message[0])
        assert len(reads) == 2

    def test_the_trial_notices_messages_and_values_that_are_not_torchs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def failure() -> str | None:
            return trial.failure([], ["exact"], torch.device(DEVICE), [torch.float32, torch.bfloat16])

        assert failure() is None
        code, restore = launched.code, launched.restore
        monkeypatch.setattr(launched, "code", lambda *args: (code(*args)[0] + 1, code(*args)[1]))
        assert failure() == "ArithmeticError: exact, torch.bfloat16: messages differ from torch's"
        monkeypatch.setattr(launched, "code", code)
        monkeypatch.setattr(launched, "restore", lambda patterns, *rest: restore(patterns.clone(), *rest))
        assert failure() == "ArithmeticError: exact, torch.bfloat16: messages differ from torch's"
