"""The trial at a run's start compiles all kernels that its steps launch; interpreted, as in test_triton_kernels.py."""

import dataclasses
import inspect
import re

import pytest
import torch
from torch import Tensor

from optimus_cc_ext.collectives.groups import Groups
from optimus_cc_ext.compressors.blocks import BlockLayout
from optimus_cc_ext.compressors.formats import FORMATS
from optimus_cc_ext.compressors.triton import launches, trial
from optimus_cc_ext.compressors.triton.blocks import TritonCodec
from optimus_cc_ext.compressors.triton.low_rank import TritonLowRank
from optimus_cc_ext.config import DataParallelCompressionConfig, OptimusConfig
from optimus_cc_ext.config.classes import PIPELINE_BACKWARD
from optimus_cc_ext.techniques.bucket_rules import ParameterRecord
from optimus_cc_ext.techniques.compressed_backprop import CompressedBackprop
from optimus_cc_ext.techniques.low_rank_gradients import LowRankPlan, LowRankTools
from optimus_cc_ext.techniques.schedule import NonInterleaved
from optimus_cc_ext.techniques.state import FactorStates
from scripts.bench.compressors.bucket import one_process
from tests.interpreted import assert_holds_in_tritons_interpreter
from tests.low_rank_steps import gaussian

if launches.AVAILABLE:
    from optimus_cc_ext.compressors.triton import block_kernels, kernels

DEVICE = "cpu"


@pytest.mark.skipif(not launches.AVAILABLE, reason="triton is missing, or older than 3.6")
@pytest.mark.skipif(launches.INTERPRETED, reason="they run in this process")
@pytest.mark.full
def test_what_is_tried_holds_in_tritons_interpreter() -> None:
    assert_holds_in_tritons_interpreter(__file__, "TestTrial")


class Launched:
    """Properties by which Triton compiles a kernel anew, of each kernel launched (and not run) in the meantime: dtypes,
    constants, and whether numbers and addresses are multiples of 16.
    """

    def __init__(self, monkeypatch) -> None:
        self.keys: set = set()
        self._patch = monkeypatch

    def __enter__(self) -> None:
        for module in (kernels, block_kernels):
            for name in [name for name, value in vars(module).items() if hasattr(value, "fn") and name[0] != "_"]:
                self._patch.setattr(module, name, _Noting(name, getattr(module, name), self.keys))

    def __exit__(self, *unused) -> None:
        self._patch.undo()


class _Noting:
    def __init__(self, name: str, kernel, keys: set) -> None:
        self.name, self.kernel, self.keys = name, kernel, keys

    def __getitem__(self, grid):
        def launch(*args, **kwargs) -> None:
            named = inspect.signature(self.kernel.fn).bind_partial(*args).arguments
            free, anywhere = (self.kernel.kwargs[name] or () for name in ("do_not_specialize", ALIGNMENT))
            constants = tuple((n, value) for n, value in kwargs.items() if n not in free and n != "share")
            numbers = tuple(_compiled_for(v, name in anywhere) for name, v in named.items() if name not in free)
            self.keys.add((self.name, numbers, constants))

        return launch


ALIGNMENT = "do_not_specialize_on_alignment"


def _compiled_for(value, anywhere: bool = False):
    if isinstance(value, tuple):
        return tuple(map(_compiled_for, value))
    if isinstance(value, Tensor):
        return value.dtype, anywhere or value.data_ptr() % 16 == 0
    return value if value in (None, 1) else value % 16 == 0


def _send_and_receive(rows: int, columns: int, dtype: torch.dtype, state_dtype: torch.dtype, feedback: bool) -> None:
    config = OptimusConfig(
        compressed_backprop_format="low-rank", compressed_backprop_rank=16, compressed_backprop_messages="all",
        lazy_error_propagation=feedback, compression_seed=18, _force_compression=True,
        compression_state_dtype="fp32" if state_dtype == torch.float32 else "bf16",
    )  # fmt: skip
    sender, receiver = (CompressedBackprop(config, PIPELINE_BACKWARD) for _ in range(2))
    for technique in (sender, receiver):
        technique.compressor = TritonLowRank()
        technique.connect_to(0, 1, rank=0, peer_rank=0)
    sender, receiver = sender.sending, receiver.sending
    gradient = gaussian(rows, 1, columns, dtype=dtype)
    for link in (sender, receiver):
        link.begin(NonInterleaved(2, 1))
    sending, receiving = sender.send(gradient), receiver.receive(torch.empty_like(gradient))
    receiving.tensor.copy_(sending.tensor)
    sending.after_post()
    receiving.after_wait()


class _OfOneMatrix(Groups):
    """Groups in which this rank's optimizer reads the first matrix alone."""

    def own_range(self, numel: int) -> tuple[int, int]:
        return 0, 64 * 128


def _reduce(group, dtype: torch.dtype, state_dtype: torch.dtype, feedback: bool) -> None:
    flat = gaussian(1, 1, 4 * 64 * 128).flatten().to(dtype)
    plan = LowRankPlan(
        numel=flat.numel(),
        low_rank=[ParameterRecord(shape=(64, 128), start=start) for start in range(0, flat.numel(), 64 * 128)],
        dense=(), dtype=dtype, ranks=1, rank=16,
    )  # fmt: skip
    config = DataParallelCompressionConfig(
        dp_compression_format="low-rank", dp_compression_rank=16, dp_error_feedback=feedback
    )
    for groups in (Groups(group), _OfOneMatrix(group)):
        tools = LowRankTools(
            device=flat.device, compressor=TritonLowRank(), config=config, states=FactorStates(16), name="", seed=18,
            salt="", state_dtype=state_dtype,
        )  # fmt: skip
        reducer = dataclasses.replace(plan, sharded=isinstance(groups, _OfOneMatrix)).bind(groups, tools)
        for whole in (False, True):
            reducer.reduce(flat, whole)
        reducer.states.commit({})


def _encode_and_decode(format: str, dtype: torch.dtype, align: int) -> None:
    codec = TritonCodec(format, signs=torch.ones(128))
    layout = BlockLayout([[(align, 512 - align)], [(512, 512)]], [[(1024, 64)], [(1088, 64)]])
    for kind in {torch.float32, dtype}:
        values = gaussian(1, 1, 2048).flatten().to(kind)
        messages = torch.empty(2, codec.message_bytes(layout, kind), dtype=torch.uint8, device=DEVICE)
        codec.encode(values, layout, messages)
        codec.decode(messages, layout, values)
        codec.decode_onto(messages, layout, values)
        codec.decode_add(messages[:1].expand(4, -1), layout, 1, values)
    rows = gaussian(1, 5, 384).to(dtype)[0]
    codec.decode_rows(codec.encode_rows(rows), dtype)


class TestTrial:
    __test__ = launches.INTERPRETED

    def test_all_kernels_are_tried_and_one_that_fails_is_named(self, monkeypatch) -> None:
        monkeypatch.setattr(trial, "_SIZE", 64)  # the sizes are small, because Triton's interpreter is slow
        everything = [3], ["int8"], torch.device(DEVICE), [torch.bfloat16]
        assert trial.failure(*everything) is None

        def no_compiler(*args, **kwargs):
            raise RuntimeError("Failed to find C compiler.\nSet CC")

        for name in ("project_sum", "orthogonalize", "back_project", "subtract_reconstruction", "reconstruct"):
            with monkeypatch.context() as patch:
                patch.setattr(launches, name, no_compiler)
                assert trial.failure(*everything) == "RuntimeError: Failed to find C compiler."
        for name in ("encode", "decode", "decode_add"):
            with monkeypatch.context() as patch:
                patch.setattr(TritonCodec, name, no_compiler)
                assert trial.failure(*everything) == "RuntimeError: Failed to find C compiler."

    @pytest.mark.parametrize("format", FORMATS)
    def test_the_kernels_of_every_format_pass(self, monkeypatch, format) -> None:
        monkeypatch.setattr(trial, "_SIZE", 192)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert trial.failure([], [format], torch.device(DEVICE), [dtype], row_width=256) is None

    @pytest.mark.parametrize(
        "format, step, spoil, reason",
        [
            ("int8", "encode", lambda codec, parts, out: parts[2][0].add_(1), "int8, torch.bfloat16: codes .* by 1"),
            ("int4", "encode", lambda codec, parts, out: parts[2][1].add_(0x10), "int4, torch.bfloat16: codes .* by 1"),
            ("int8", "encode", lambda codec, parts, out: parts[1].view(torch.int16).add_(1), "messages differ"),
            ("int8", "encode", lambda codec, parts, out: parts[0][5].add_(1), "messages differ"),
            (
                "int8", "encode", lambda codec, parts, out: parts[2].bitwise_xor_(2) if codec.rotated else None,
                "int8, rotated, torch.bfloat16: codes differ from torch's by 2",
            ),
            ("int4", "decode", lambda codec, parts, out: out.mul_(1.01), "decoded values differ"),
            ("int4", "decode_add", lambda codec, parts, out: out.mul_(1.01), "sums of decoded values differ"),
            (
                "int4", "decode_add", lambda codec, parts, out: out.mul_(1.1) if codec.rotated else None,
                "int4, rotated, torch.bfloat16: sums of decoded values differ",
            ),
        ],
    )  # fmt: skip
    def test_kernels_whose_results_are_not_torchs_fail(self, monkeypatch, format, step, spoil, reason) -> None:
        monkeypatch.setattr(trial, "_SIZE", 192)
        right = getattr(TritonCodec, step)

        def wrong(codec, *arguments, **how) -> None:
            right(codec, *arguments, **how)
            layout, out = arguments[1], arguments[-1]
            parts = codec._split(out[0], layout, torch.bfloat16) if step == "encode" else ()
            spoil(codec, parts, out)

        monkeypatch.setattr(TritonCodec, step, wrong)
        failure = trial.failure([], [format], torch.device(DEVICE), [torch.bfloat16])
        assert failure is not None and re.match(f"ArithmeticError: .*{reason}", failure)

    @pytest.mark.parametrize(
        "step, spoil, reason",
        [
            ("encode_rows", lambda message: message[:, -2:].view(torch.int16).add_(1), "the scales of rows differ"),
            ("encode_rows", lambda message: message[:, :128].bitwise_xor_(2), "codes differ from torch's by 2"),
            ("decode_rows", lambda out: out.mul_(1.01), "decoded rows differ"),
        ],
    )
    def test_row_kernels_whose_results_are_not_torchs_fail(self, monkeypatch, step, spoil, reason) -> None:
        monkeypatch.setattr(trial, "_SIZE", 64)
        right = getattr(TritonCodec, step)

        def wrong(codec, *arguments) -> Tensor:
            result = right(codec, *arguments)
            spoil(result)
            return result

        monkeypatch.setattr(TritonCodec, step, wrong)
        failure = trial.failure([], ["int8"], torch.device(DEVICE), [torch.float32], row_width=128)
        assert failure is not None and re.match(f"ArithmeticError: int8, .*{reason}", failure)
        assert trial.failure([], ["int8"], torch.device(DEVICE), [torch.float32]) is None, "there are no rows"

    def test_rotated_codes_may_be_one_apart(self, monkeypatch) -> None:
        monkeypatch.setattr(trial, "_SIZE", 192)
        right = TritonCodec.encode

        def one_apart(codec, values, layout, out) -> None:
            right(codec, values, layout, out)
            if codec.rotated:
                codes = codec._split(out[0], layout, values.dtype)[2].view(torch.int8)
                codes[0, :7] -= codes[0, :7].sign()

        monkeypatch.setattr(TritonCodec, "encode", one_apart)
        assert trial.failure([], ["int8"], torch.device(DEVICE), [torch.bfloat16]) is None

    @pytest.mark.parametrize(
        "dtype, state_dtype, feedback",
        [
            (torch.float32, torch.float32, True), (torch.bfloat16, torch.bfloat16, True),
            (torch.float16, torch.float32, False), (torch.bfloat16, torch.float32, False),
        ],
    )  # fmt: skip
    def test_a_first_step_launches_nothing_that_was_not_tried(self, monkeypatch, dtype, state_dtype, feedback) -> None:
        tried, launched = (Launched(monkeypatch) for _ in range(2))
        with tried:
            # The launches only compile and compute nothing, so the comparison with torch is left out.
            monkeypatch.setattr(trial, "_agree", lambda equal, otherwise: None)
            dtypes = sorted({torch.float32, dtype}, key=str)
            found = trial.failure(
                [16], list(FORMATS), torch.device(DEVICE), dtypes, state_dtype, [True], [4, 8, 16], row_width=384
            )
            assert found is None
        # Sizes are multiples of 16, as in real models; products are split into few partial sums and into many.
        with launched, one_process(torch.device(DEVICE)) as group:
            for rows, columns in ((32, 64), (64, 96), (64, 1056), (512, 128)):
                _send_and_receive(rows, columns, dtype, state_dtype, feedback)
            for bucket_dtype in {torch.float32, dtype} - {torch.float16}:
                _reduce(group, bucket_dtype, state_dtype, feedback)
            for format in FORMATS:
                for align in (16, 8, 4):
                    _encode_and_decode(format, dtype, align)
        assert launched.keys and sorted(map(str, launched.keys - tried.keys)) == []
