"""Triton's path through Megatron's real loop, in the interpreter and under the sanitizer: it trains as torch's does."""

import os
import shlex
from functools import partial

import pytest
import torch

from optimus_cc_ext.compressors import fast
from optimus_cc_ext.compressors.triton import launches
from tests import sanitizer
from tests.interpreted import assert_holds_in_tritons_interpreter
from tests.megatron import runs
from tests.megatron_runs import last_stage_losses, relative_gap, run_megatron

needs_triton = pytest.mark.skipif(not launches.AVAILABLE, reason="triton is missing, or older than 3.6")
elsewhere = pytest.mark.skipif(launches.INTERPRETED, reason="they run in this process")

SEEN: list[tuple] = []
"""In a rank: the sanitizer, its reports, and the names of the kernels that have run."""


@needs_triton
@elsewhere
@pytest.mark.full
def test_a_short_run_holds_in_tritons_interpreter() -> None:
    assert_holds_in_tritons_interpreter(__file__, "TestTritonPath and odd_shards")


@needs_triton
@elsewhere
@pytest.mark.full
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("case", ["two_stages", "two_levels"])
def test_balanced_holds_in_tritons_interpreter(case: str) -> None:
    assert_holds_in_tritons_interpreter(__file__, f"TestTritonPath and {case}", timeout=1200)


def _install(ranks_in_node: int, path: str) -> None:
    from optimus_cc_ext.hooks import start

    os.environ["OPTIMUS_CC_NODE"] = f"ranks:{ranks_in_node}"
    if path == "triton":
        _watch_kernels()
    start()


def _watch_kernels() -> None:
    from triton.runtime import interpreter

    fast._triton_applies = lambda: True
    context, names, call = sanitizer.sanitized(), set(), interpreter.GridExecutor.__call__

    def named(executor, *args, **kwargs) -> None:
        names.add(executor.fn.__name__)
        call(executor, *args, **kwargs)

    interpreter.GridExecutor.__call__ = named
    SEEN.append((context, context.__enter__(), names))  # a context that is dropped would end


def _seen(model: list[torch.nn.Module], optimizer: object) -> tuple[list[str], set[str]]:
    return SEEN[0][1:] if SEEN else ([], set())


BASE = f"--bf16 {runs.OVERLAPPED} {runs.NO_DROPOUT} {runs.BALANCED} --no-compression-trial"
CASES = {
    # On three ranks, a shard ends inside of a parameter; two of them have fewer blocks than the third.
    "odd_shards": (
        3, 1, "--train-iters 2 --global-batch-size 6 --num-layers 1 --dp-compression-format int4 "
        "--param-gather-format int4 --hidden-size 96 --ffn-hidden-size 200",
    ),
    "two_stages": (4, 1, f"{runs.PP2[1]} --train-iters 4 --global-batch-size 8 {runs.SMALL_BUCKETS}"),
    "two_levels": (4, 2, f"--train-iters 4 --global-batch-size 8 {runs.SMALL_BUCKETS}"),
}  # fmt: skip
"""Ranks, ranks of a node, and flags of each run."""


class TestTritonPath:
    __test__ = launches.INTERPRETED

    @pytest.mark.timeout(1200)
    @pytest.mark.parametrize("case", CASES)
    def test_losses_are_those_of_torchs_path_and_no_kernel_leaves_its_tensors(self, case: str) -> None:
        ranks, in_node, flags = CASES[case]
        torchs, tritons = (
            run_megatron(
                ranks, shlex.split(f"{BASE} {flags}"), before=partial(_install, in_node, path), probe=_seen, timeout=900
            )
            for path in ("torch", "triton")
        )
        for rank in tritons:
            reports, kernels = rank.probed
            assert not reports, reports[:5]
            assert kernels >= {"encode_blocks", "add_up_blocks", "copy_values", "add_up_values"}
        assert not torchs[0].probed[1]
        # Codes of rotated blocks may be one apart, because sums in fp32 have another order.
        losses, expected = last_stage_losses(tritons), last_stage_losses(torchs)
        assert relative_gap(losses, expected) < 1e-4
