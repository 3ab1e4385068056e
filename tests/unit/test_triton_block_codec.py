"""Triton's block formats compared with torch's; in the interpreter or on a GPU, as in test_triton_kernels.py."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from optimus_cc_ext.compressors.blocks import BlockLayout, Codec
from optimus_cc_ext.compressors.fast import fast_codec
from optimus_cc_ext.compressors.formats import BLOCK
from optimus_cc_ext.compressors.triton import blocks as block_launches
from optimus_cc_ext.compressors.triton import launches
from optimus_cc_ext.compressors.triton.blocks import TritonCodec
from scripts.bench.compressors.compiled import compiling
from tests.allocations import Watch
from tests.cuda_graphs import assert_replays_without_synchronisation
from tests.formats import ALL, EVERY, LOSSY, SIGNS, UNUSED, every, near_limit, reference_of, with_unused_formats
from tests.interpreted import assert_holds_in_tritons_interpreter

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
RUNS_HERE = launches.AVAILABLE and (GPU or launches.INTERPRETED)
needs_triton = pytest.mark.skipif(not launches.AVAILABLE, reason="triton is missing, or older than 3.6")
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")

DTYPES = (torch.float16, torch.float32, torch.bfloat16)
CASES = pytest.mark.parametrize(
    "format, rotated, dtype",
    [
        *((format, rotated, DTYPES[index % 3]) for index, (format, rotated) in enumerate(EVERY)),
        ("int4", True, torch.bfloat16),
        ("int8", False, torch.bfloat16),
    ],
)
# The layout has short blocks, more blocks than one program takes (16 in Triton's interpreter), and a message with a
# single encoded value.
SCATTERED = BlockLayout(
    [[(640, 300), (3, 128), (131, 200), (1100, 1300)], [(1000, 1)]], [[(350, 5), (355, 2), (400, 150)], [(600, 30)]]
)
NUMEL = 2500


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def both(format, rotated) -> tuple[TritonCodec, Codec]:
    signs = SIGNS if rotated else None
    return TritonCodec(format, signs=signs), Codec(format, signs=signs)


def encoded(codec: Codec, values: Tensor, layout: BlockLayout = SCATTERED) -> Tensor:
    nbytes = codec.message_bytes(layout, values.dtype)
    messages = torch.zeros(layout.messages, nbytes, dtype=torch.uint8, device=values.device)
    codec.encode(values, layout, messages)
    return messages


def decoded(codec: Codec, messages: Tensor, dtype: torch.dtype, layout: BlockLayout = SCATTERED) -> Tensor:
    out = torch.full((NUMEL,), torch.nan, dtype=dtype, device=messages.device)
    codec.decode(messages, layout, out)
    return out


@pytest.mark.parametrize(
    "layout", [SCATTERED, BlockLayout.of_one(3 * 8192 + 1), BlockLayout([[(0, 8193)], [(9000, 5)]])]
)
def test_tables_have_an_entry_for_each_program_and_a_message_shares_those_of_all(layout: BlockLayout) -> None:
    codec, device = both("int8", True)[0], torch.device("cpu")
    tables = codec._tables_of(layout, device)
    assert tables.blocks.nbytes + tables.dense.nbytes == layout.table_bytes > 0
    for index in range(layout.messages):
        own = codec._tables_of(layout.of_message(index), device)
        assert own.blocks.untyped_storage().data_ptr() == tables.blocks.untyped_storage().data_ptr()
        assert torch.equal(own.blocks[0], tables.blocks[index]) and torch.equal(own.dense[0], tables.dense[index])


@needs_triton
@pytest.mark.skipif(RUNS_HERE, reason="they run in this process")
@pytest.mark.full
def test_the_block_kernels_hold_in_tritons_interpreter() -> None:
    assert_holds_in_tritons_interpreter(__file__, "TestBlockKernels")


@ALL
def test_what_the_kernels_do_not_take_goes_the_parents_way(format, rotated) -> None:
    ours, parent = both(format, rotated)
    # The kernels take no values on a CPU without Triton's interpreter, and elsewhere neither fp64 nor strided values.
    values = gaussian(NUMEL, dtype=torch.float64 if RUNS_HERE else torch.float32)
    messages = encoded(ours, values)
    assert torch.equal(messages, encoded(parent, values))
    found, expected = (decoded(codec, messages, values.dtype) for codec in (ours, parent))
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    spread = gaussian(2 * NUMEL)[::2]
    assert torch.equal(encoded(ours, spread), encoded(parent, spread))


@pytest.mark.parametrize("gpus, expected", [(0, Codec), (1, TritonCodec)])
def test_training_takes_the_kernels_where_there_is_a_gpu(monkeypatch, gpus: int, expected: type) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: gpus)
    assert type(fast_codec("int4", seed=1, rotated=True)) is expected


def test_a_packing_that_the_kernels_do_not_know_goes_the_parents_way(monkeypatch) -> None:
    monkeypatch.setattr(block_launches, "_taken", lambda values, messages: True)
    monkeypatch.setattr(block_launches, "block_kernels", None, raising=False)
    ours, parent = both("fp32", False)
    values = gaussian(NUMEL)
    messages = encoded(ours, values)
    assert torch.equal(messages, encoded(parent, values))
    found, expected = (decoded(codec, messages, values.dtype).nan_to_num() for codec in (ours, parent))
    assert torch.equal(found, expected)


@needs_triton
@pytest.mark.skipif(launches.INTERPRETED or GPU, reason="compiles without a GPU what a GPU would compile anyway")
@pytest.mark.parametrize(
    "capability, format, rotated, dtype",
    [
        pytest.param(80, "int4", True, torch.float32, marks=pytest.mark.full),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                (80, "int8", False, torch.bfloat16),
                (90, "int4", True, torch.float32),
                (100, "int4", True, torch.bfloat16),
                (120, "int4", True, torch.bfloat16),
                (120, "int8", True, torch.float32),
                (90, "int8", True, torch.float16),
                (90, "int8", False, torch.bfloat16),
            ]
        ),
    ],
)
def test_they_compile_for_gpus(tmp_path, capability: int, format, rotated, dtype) -> None:
    codec, values = both(format, rotated)[0], gaussian(NUMEL, dtype=dtype)
    with compiling(capability, tmp_path) as compiled:
        messages = encoded(codec, values)
        codec.decode(messages, SCATTERED, values)
        codec.decode_onto(messages, SCATTERED, values)
        codec.decode_add(messages[:1].repeat(3, 1), SCATTERED, 0, values)
    assert len(compiled) == 8
    # Compute capability 12.0 has 99 KiB of shared memory per program; the other capabilities have more.
    assert max(kernel.metadata.shared for kernel in compiled) <= 99 * 1024


@needs_triton
@ALL
def test_launches_ask_torch_for_nothing_once_the_layout_has_been_seen(monkeypatch, format, rotated) -> None:
    class Launched:
        def __getitem__(self, grid):
            assert all(isinstance(size, int) and size > 0 for size in grid)
            return lambda *args, **kwargs: None

    pytest.importorskip("triton")
    names = ("encode_blocks", "add_up_blocks", "copy_values", "add_up_values")
    monkeypatch.setattr(block_launches, "block_kernels", SimpleNamespace(**dict.fromkeys(names, Launched())))
    monkeypatch.setattr(block_launches, "_taken", lambda values, messages: True)
    codec, values = both(format, rotated)[0], gaussian(NUMEL, dtype=torch.bfloat16)
    messages = encoded(codec, values)
    several = messages[:1].repeat(3, 1)

    def step() -> None:
        codec.encode(values, SCATTERED, messages)
        codec.decode(messages, SCATTERED, values)
        codec.decode_onto(messages, SCATTERED, values)
        codec.decode_add(several, SCATTERED, 0, values)

    step()
    with Watch() as watch:
        step()
    assert watch.allocated == watch.read_by_host == []


class Counted:
    """Stand-in for a kernel that notes each launch."""

    def __init__(self, launched: list[str], name: str, kernel: Any) -> None:
        self.launched, self.name, self.kernel = launched, name, kernel

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        self.launched.append(self.name)
        return self.kernel[grid]


class TestBlockKernels:
    __test__ = RUNS_HERE

    @pytest.fixture(autouse=True)
    def _few_programs(self, monkeypatch) -> None:
        if launches.INTERPRETED:
            monkeypatch.setattr(block_launches, "ROWS", 16)

    @CASES
    @pytest.mark.filterwarnings("ignore::RuntimeWarning")  # in Triton's interpreter numpy warns of 0 / 0
    def test_messages_and_what_is_decoded_are_torchs_to_the_bit(self, format, rotated, dtype) -> None:
        ours, torchs = both(format, rotated)
        # The values are multiples of 2^-4 to +-8, whose rotation has the same sums in any order.
        exact = gaussian(NUMEL).mul_(2).clamp_(-8, 8).mul_(16).round_().div_(16).to(dtype)
        exact[700:900] = 0
        messages = encoded(ours, exact)
        assert torch.equal(messages, encoded(torchs, exact))
        # Arbitrary values may have codes that differ by one, if blocks are rotated.
        values = (gaussian(NUMEL) * torch.logspace(-3, 3, NUMEL, device=DEVICE)).to(dtype)
        messages, expected = encoded(ours, values), encoded(torchs, values)
        found = decoded(ours, messages, dtype)
        assert torch.equal(found.nan_to_num(), decoded(torchs, messages, dtype).nan_to_num())
        # Decoding writes the values of the layout and no other element.
        assert found.isnan().sum() == NUMEL - 1929 - 187
        if not rotated:
            assert torch.equal(messages, expected)
            return
        for mine, other in zip(messages, expected, strict=True):
            (_, scales, codes), (_, expected_scales, expected_codes) = (
                torchs._split(message, SCATTERED, dtype) for message in (mine, other)
            )
            assert torch.equal(scales, expected_scales)
            apart = torchs.numbers(codes, "one") - torchs.numbers(expected_codes, "other")
            assert apart.abs().max() <= 1 and apart.abs().mean() < 1e-3

    @pytest.mark.parametrize("skipped", [0, 1])
    def test_a_message_that_is_skipped_is_not_touched_and_the_other_one_is_as_ever(self, skipped: int) -> None:
        ours, _ = both("int8", True)
        values, messages = gaussian(NUMEL), encoded(ours, gaussian(NUMEL))
        found = torch.zeros_like(messages)
        ours.encode(values, SCATTERED, found, skipped=skipped)
        assert torch.equal(found[1 - skipped], messages[1 - skipped]) and not found[skipped].any()

    @LOSSY
    @pytest.mark.filterwarnings("ignore::RuntimeWarning")  # in Triton's interpreter numpy warns of 0 / 0
    def test_values_of_any_size_become_the_codes_of_the_literal_reference(self, format, rotated) -> None:
        # The values begin with the smallest subnormal numbers, which a tensor core may flush to 0.
        sizes = 10.0 ** torch.tensor([*((-44.0, -42.0, -40.0) if launches.INTERPRETED else ()), -37, -30, -8, 0, 8, 30])
        values = (gaussian(sizes.numel(), BLOCK) * sizes.to(DEVICE)[:, None]).flatten()
        layout, ours, reference = (
            BlockLayout.of_one(values.numel()),
            both(format, rotated)[0],
            reference_of(format, rotated),
        )
        message = encoded(ours, values, layout)[0].cpu()
        expected = torch.zeros(1, message.numel(), dtype=torch.uint8)
        reference.encode(values.cpu(), layout, expected)
        (_, scales, codes), (_, expected_scales, expected_codes) = (
            ours._split(each, layout, torch.float32) for each in (message, expected[0])
        )
        # Kernel and reference add a rotation's terms in other orders, so they may round a peak to neighbours in bf16.
        assert (scales.view(torch.int16) - expected_scales.view(torch.int16)).abs().max() <= (1 if rotated else 0)
        apart = (ours.numbers(codes, "one") - ours.numbers(expected_codes, "other")).abs().amax(1)
        assert apart[scales != 0].max() <= (1 if rotated else 0)

    @pytest.mark.parametrize("format, rotated", every(UNUSED))
    def test_integers_of_widths_that_no_format_has_are_packed_as_torch_packs_them(
        self, monkeypatch, format, rotated
    ) -> None:
        with_unused_formats(monkeypatch)
        self.test_messages_and_what_is_decoded_are_torchs_to_the_bit(format, rotated, torch.float16)

    @CASES
    def test_decoded_values_are_added_to_what_is_there_as_torch_adds_them(self, format, rotated, dtype) -> None:
        ours, torchs = both(format, rotated)
        messages, there = encoded(torchs, gaussian(NUMEL, dtype=dtype)), gaussian(NUMEL, seed=1).mul_(30).to(dtype)
        found, expected = there.clone(), there.clone()
        ours.decode_onto(messages, SCATTERED, found)
        torchs.decode_onto(messages, SCATTERED, expected)
        assert torch.equal(found, expected)
        literal = there + torch.zeros_like(there).copy_(decoded(torchs, messages, dtype).nan_to_num())
        assert torch.equal(found, literal), "rounded when it is decoded, and again when it is added"

    @LOSSY
    @pytest.mark.filterwarnings("ignore::RuntimeWarning")  # in Triton's interpreter numpy warns of inf - inf
    def test_values_near_fp16s_limit_are_decoded_as_torch_decodes_them(self, format, rotated) -> None:
        ours, torchs = both(format, rotated)
        values = near_limit().flatten().to(DEVICE)
        values[3 * BLOCK + 5] = torch.inf
        layout = BlockLayout.of_one(values.numel())
        messages = encoded(torchs, values, layout)
        found, expected = torch.zeros_like(values), torch.zeros_like(values)
        ours.decode(messages, layout, found)
        torchs.decode(messages, layout, expected)
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())
        assert found[: 3 * BLOCK].isfinite().all() and not found[3 * BLOCK :].isfinite().any()
        message = torchs.encode_rows(values.view(4, BLOCK))
        found, expected = (codec.decode_rows(message, values.dtype).nan_to_num() for codec in (ours, torchs))
        assert torch.equal(found, expected)

    def test_a_bucket_of_any_number_of_messages_takes_two_launches_in_each_direction(self, monkeypatch) -> None:
        launched: list[str] = []
        for name in ("encode_blocks", "copy_values", "add_up_blocks", "add_up_values"):
            kernel = getattr(block_launches.block_kernels, name)
            monkeypatch.setattr(block_launches.block_kernels, name, Counted(launched, name, kernel))
        codec, values = both("int4", True)[0], torch.zeros(64 * 32, device=DEVICE)
        starts = range(0, values.numel(), 64)
        layout = BlockLayout([[(start, 48)] for start in starts], [[(start + 48, 16)] for start in starts])
        messages = encoded(codec, values, layout)
        assert sorted(launched) == ["copy_values", "encode_blocks"]
        for decode in (
            lambda: codec.decode(messages, layout, values),
            lambda: codec.decode_onto(messages, layout, values),
            lambda: codec.decode_add(messages, layout, 3, values),
        ):
            launched.clear()
            decode()
            assert sorted(launched) == ["add_up_blocks", "add_up_values"]

    @CASES
    @pytest.mark.parametrize("onto", [False, True])
    def test_several_senders_are_added_as_torch_adds_them(self, format, rotated, dtype, onto) -> None:
        ours, torchs = both(format, rotated)
        sent = torch.stack([encoded(torchs, gaussian(NUMEL, seed=seed, dtype=dtype))[0] for seed in range(3)])
        # `found` begins with values of the size of the sum, so that both are rounded to 16 bits equally finely.
        found, expected = (gaussian(NUMEL, seed=9, dtype=dtype).abs().add(4) for _ in range(2))
        ours.decode_add(sent, SCATTERED, 0, found, onto=onto)
        torchs.decode_add(sent, SCATTERED, 0, expected, onto=onto)
        if rotated:
            # The rotation of a sum is rounded in fp32, which may round the 16-bit result to the other neighbour.
            torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps, atol=1e-5)
        else:
            assert torch.equal(found, expected)

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")  # in Triton's interpreter numpy warns of 0 / 0
    @LOSSY
    @pytest.mark.parametrize("poison", [torch.inf, torch.nan])
    def test_what_is_not_finite_reaches_the_result_and_stays_in_its_block(self, format, rotated, poison) -> None:
        layout, (ours, _) = BlockLayout.of_one(300), both(format, rotated)
        values, out = gaussian(300), torch.empty(300, device=DEVICE)
        values[200] = poison
        messages = torch.cat([encoded(ours, values, layout), encoded(ours, torch.ones_like(values), layout)])
        for senders in (1, 2):
            ours.decode_add(messages[:senders], layout, 0, out)
            assert not out[BLOCK : 2 * BLOCK].isfinite().any()
            assert out[:BLOCK].isfinite().all() and out[2 * BLOCK :].isfinite().all()

    @needs_gpu
    @ALL
    def test_a_cuda_graph_replays_a_message_without_synchronisation(self, format, rotated) -> None:
        codec, values = both(format, rotated)[0], gaussian(NUMEL, dtype=torch.bfloat16)
        messages, out, total = encoded(codec, values), torch.zeros_like(values), torch.zeros_like(values)

        def message() -> None:
            codec.encode(values, SCATTERED, messages)
            codec.decode(messages, SCATTERED, out)
            codec.decode_add(messages[:1].expand(3, -1), SCATTERED, 0, total)

        assert_replays_without_synchronisation(message, (messages, out, total))
