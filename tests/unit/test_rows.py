"""Rows in few bits, one message for each row of a matrix: torch and Triton compared with the literal reference."""

import pytest
import torch
from torch import Tensor

from optimus_cc_ext.compressors import blocks
from optimus_cc_ext.compressors.blocks import Codec
from optimus_cc_ext.compressors.formats import BLOCK
from optimus_cc_ext.compressors.triton import blocks as block_launches
from optimus_cc_ext.compressors.triton import launches
from optimus_cc_ext.compressors.triton.blocks import TritonCodec
from scripts.bench.compressors.compiled import compiling
from tests.formats import ALL, LOSSY, SIGNS, near_limit, reference_of
from tests.interpreted import assert_holds_in_tritons_interpreter

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
RUNS_HERE = launches.AVAILABLE and (GPU or launches.INTERPRETED)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
needs_triton = pytest.mark.skipif(not launches.AVAILABLE, reason="triton is missing, or older than 3.6")
WIDTH = 3 * BLOCK


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(n: int, dtype: torch.dtype, width: int = WIDTH) -> Tensor:
    """Draw multiples of 2^-4 to +-8, which 16 bits hold, and whose rotation has the same sums in any order."""
    return gaussian(n, width).mul_(2).clamp_(-8, 8).mul_(16).round_().div_(16).to(dtype)


def codec_of(format: str, rotated: bool, kind: type[Codec] = Codec) -> Codec:
    return kind(format, signs=SIGNS if rotated else None)


@ALL
@pytest.mark.parametrize("width", [BLOCK, WIDTH])
@DTYPES
def test_rows_are_those_of_the_reference_to_the_byte_in_parts_of_any_length(monkeypatch, format, rotated, dtype, width):
    codec, reference, rows = codec_of(format, rotated), reference_of(format, rotated), exact(5, dtype, width)
    message = codec.encode_rows(rows)
    assert message.shape == (5, codec.row_bytes(width))
    assert torch.equal(message, reference.encode_rows(rows))
    assert torch.equal(codec.decode_rows(message, dtype), reference.decode_rows(message, dtype))
    monkeypatch.setattr(blocks, "AT_ONCE", 2)  # codecs take two blocks at once, so that parts end inside of rows
    assert torch.equal(codec.encode_rows(rows), message)
    assert torch.equal(codec.decode_rows(message, dtype), reference.decode_rows(message, dtype))


@ALL
def test_a_row_is_coded_alike_alone_and_among_others(format, rotated):
    codec, rows = codec_of(format, rotated), gaussian(50, WIDTH)
    together = codec.encode_rows(rows)
    for row, message in zip(rows.split(1), together.split(1), strict=True):
        assert torch.equal(codec.encode_rows(row), message)
    # An all-to-all deals rows out and mixes them with those of other ranks.
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    shuffled, expected = codec.decode_rows(together[order], rows.dtype), codec.decode_rows(together, rows.dtype)[order]
    assert torch.equal(shuffled, expected)


@ALL
def test_there_may_be_no_row(format, rotated):
    codec, none = codec_of(format, rotated), torch.empty(0, WIDTH, dtype=torch.bfloat16)
    message = codec.encode_rows(none)
    assert message.shape == (0, codec.row_bytes(WIDTH))
    found = codec.decode_rows(message, none.dtype)
    assert found.shape == none.shape and found.dtype == none.dtype


def test_rows_of_8_bits_take_8_125_bits_a_value_and_other_widths_are_refused():
    assert codec_of("int8", True).row_bytes(2048) == 2080
    with pytest.raises(ValueError, match="a row of 200 values does not divide into blocks of 128"):
        codec_of("int8", True).row_bytes(200)


@LOSSY
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_block_and_changes_no_bit_of_another_row(format, rotated, poison):
    codec, rows = codec_of(format, rotated), gaussian(4, WIDTH)
    clean = codec.decode_rows(codec.encode_rows(rows), rows.dtype)
    rows[2, BLOCK + 5] = poison
    found = codec.decode_rows(codec.encode_rows(rows), rows.dtype)
    assert not found[2, BLOCK : 2 * BLOCK].isfinite().any()
    found[2, BLOCK : 2 * BLOCK] = clean[2, BLOCK : 2 * BLOCK]
    assert torch.equal(found, clean)


@LOSSY
def test_finite_rows_near_fp16s_limit_never_become_infinite(format, rotated):
    rows, codec = near_limit(), codec_of(format, rotated)
    found = codec.decode_rows(codec.encode_rows(rows), rows.dtype)
    assert found.isfinite().all()
    poisoned = rows.clone()
    poisoned[1, 3] = torch.inf
    found_too = codec.decode_rows(codec.encode_rows(poisoned), rows.dtype)
    assert not found_too[1].isfinite().any() and torch.equal(found_too[2:], found[2:])


@needs_triton
@pytest.mark.skipif(RUNS_HERE, reason="they run in this process")
@pytest.mark.full
def test_the_row_kernels_hold_in_tritons_interpreter():
    assert_holds_in_tritons_interpreter(__file__, "TestRowKernels")


@needs_triton
@pytest.mark.skipif(launches.INTERPRETED or GPU, reason="compiles without a GPU what a GPU would compile anyway")
@pytest.mark.parametrize(
    "capability, format, dtype",
    [
        pytest.param(80, "int4", torch.float32, marks=pytest.mark.full),
        pytest.param(90, "int8", torch.bfloat16, marks=pytest.mark.full),
        pytest.param(120, "int8", torch.bfloat16, marks=pytest.mark.full),
    ],
)
def test_row_kernels_compile_for_gpus(tmp_path, capability, format, dtype):
    codec = codec_of(format, capability != 120, TritonCodec)
    with compiling(capability, tmp_path) as compiled:
        codec.decode_rows(codec.encode_rows(exact(4, dtype)), dtype)
    assert len(compiled) == 2
    # Compute capability 12.0 has 99 KiB of shared memory per program; the other capabilities have more.
    assert max(kernel.metadata.shared for kernel in compiled) <= 99 * 1024


class TestRowKernels:
    __test__ = RUNS_HERE

    @pytest.fixture(autouse=True)
    def _few_programs(self, monkeypatch) -> None:
        if launches.INTERPRETED:
            monkeypatch.setattr(block_launches, "ROWS", 16)

    @LOSSY
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.filterwarnings("ignore::RuntimeWarning")  # in Triton's interpreter numpy warns of 0 / 0
    def test_rows_and_what_is_decoded_are_torchs_to_the_bit(self, format, rotated, dtype):
        ours, torchs = codec_of(format, rotated, TritonCodec), codec_of(format, rotated)
        rows = exact(7, dtype).to(DEVICE)  # 21 blocks are more than one program takes in Triton's interpreter
        rows[3] = 0
        message = ours.encode_rows(rows)
        assert torch.equal(message, torchs.encode_rows(rows))
        assert torch.equal(ours.decode_rows(message, dtype), torchs.decode_rows(message, dtype))

    @LOSSY
    @pytest.mark.filterwarnings("ignore::RuntimeWarning")  # in Triton's interpreter numpy warns of 0 / 0
    def test_what_is_not_finite_stays_in_its_block(self, format, rotated):
        codec, rows = codec_of(format, rotated, TritonCodec), gaussian(3, WIDTH).to(DEVICE)
        rows[1, 5] = torch.nan
        finite = codec.decode_rows(codec.encode_rows(rows), rows.dtype).isfinite()
        assert not finite[1, :BLOCK].any()
        assert finite[1, BLOCK:].all() and finite[0].all() and finite[2].all()
