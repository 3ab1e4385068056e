"""Deltas of weights that leave training: copies become the new model to the bit, or are refused untouched."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from optimus_cc_ext import deltas
from optimus_cc_ext.errors import OptimusError
from tests.allocations import Watch
from tests.unit.test_exact_codec import SPECIAL, same, trained


def tensors(seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return tensors of many dtypes and shapes, and others of any bit patterns, or with few of the values changed."""
    random = torch.Generator().manual_seed(seed)
    old, new = [], []
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.int64):
        shape = torch.randint(0, 9, (int(torch.randint(0, 4, (), generator=random)),), generator=random).tolist()
        before, after = (
            torch.randint(0, 256, (torch.Size(shape).numel() * dtype.itemsize,), generator=random, dtype=torch.uint8)
            for _ in range(2)
        )
        if seed % 2:
            after = torch.where(torch.rand(after.shape, generator=random) < 0.01, after, before)
        old.append(before.view(dtype).view(shape))
        new.append(after.view(dtype).view(shape))
        if dtype.is_floating_point and seed % 5 == 0:
            for side in (old[-1], new[-1]):
                side.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL).roll(seed)[: side.numel()].to(dtype)
    return old, new


def same_bits(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return list(map(bits, found)) == list(map(bits, expected))


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 2000), marks=pytest.mark.full)])
def test_random_tensors_come_through_to_the_bit_and_old_ones_stay(seeds: range) -> None:
    for seed in seeds:
        old, new = tensors(seed)
        before = [each.clone() for each in old]
        found = deltas.apply(old, deltas.encode(old, new))
        assert [(each.shape, each.dtype, bits(each)) for each in found] == [(n.shape, n.dtype, bits(n)) for n in new]
        assert all(bits(each) == bits(copy) for each, copy in zip(old, before, strict=True))


def test_the_high_halves_of_fp32_take_few_bits_beside_the_low_ones_which_are_noise() -> None:
    random = torch.Generator().manual_seed(1)
    old = torch.randn(1 << 19, generator=random) * 0.02
    new = old - 1e-4 * torch.randn(1 << 19, generator=random)
    delta = deltas.encode([old], [new])
    # The high half takes some 3 bits; the low one is noise, whose would-be exponents cost some bits more than 16.
    assert len(delta) < 26 / 32 * old.nbytes
    assert same_bits(deltas.apply([old], delta), [new])


@pytest.mark.parametrize("step, times", [(1e-6, 30), (1e-5, 5), (1e-4, 4)])
def test_small_steps_take_few_bytes(step: float, times: int) -> None:
    old, new = trained(1 << 20, 0.2 * step, torch.bfloat16)
    delta = deltas.encode([old], [new])
    assert len(delta) * times < old.nbytes
    assert same(deltas.apply([old], delta)[0], new)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_tensors_that_do_not_change_stay(value: float) -> None:
    same_ones = [torch.full((numel,), value, dtype=torch.bfloat16) for numel in (0, 1, 300, 65_536, 70_000)]
    delta = deltas.encode(same_ones, [each.clone() for each in same_ones])
    found = deltas.apply(same_ones, delta)
    assert all(map(same, found, same_ones)) and len(delta) < 1200


def test_many_small_tensors_cost_few_calls_and_any_dtype_may_follow_another() -> None:
    old = [torch.full((n % 7,), n, dtype=(torch.uint8, torch.float64, torch.bfloat16)[n % 3]) for n in range(200)]
    new = [each + 1 for each in old]
    with Watch() as watch:
        delta = deltas.encode(old, new)
    assert watch.calls < 9 * 2 * len(old) + 100, "what is called for each tensor only copies its bytes"
    found = deltas.apply(old, delta)
    assert same_bits(found, new) and len(delta) < 20 * len(old)
    assert all(each.untyped_storage().nbytes() < each.nbytes + 16 for each in found), "each has memory of its own"


def test_changes_far_apart_and_at_both_ends_come_through() -> None:
    old = torch.zeros(300_000, dtype=torch.bfloat16)
    for places in ([], [0], [299_999], [0, 65_535, 65_536, 299_999], [131_071]):
        new = old.clone()
        new[places] = float("nan")
        delta = deltas.encode([old], [new])
        assert len(delta) < 1000 and same(deltas.apply([old], delta)[0], new)


def test_another_copy_and_damaged_bytes_are_refused_with_a_cure() -> None:
    old, new = trained(1000, 1e-4, torch.bfloat16)
    delta, other = deltas.encode([old], [new]), old.clone()
    other.view(torch.int16)[5] ^= 1
    swapped = old.clone()
    swapped[:2] = old[:2].flip(0)
    for copy in ([other], [swapped], [old, old], []):
        with pytest.raises(OptimusError, match="not those that the bytes were made from"):
            deltas.apply(copy, delta)
    damaged = bytearray(delta)
    damaged[-3] ^= 1
    for wrong in (bytes(damaged), delta[:-1], delta + b"x", b"", delta[:20]):
        with pytest.raises(OptimusError, match="damaged"):
            deltas.apply([old], wrong)
    with pytest.raises(OptimusError, match="differ in number, shapes or dtypes"):
        deltas.encode([old], [new[:-1]])


def test_what_holds_no_plain_values_is_refused_with_its_cure(tmp_path: Path) -> None:
    plain = torch.ones(2, 2)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        sharded = distribute_tensor(plain, init_device_mesh("cpu", (1,)), [Shard(0)])
    finally:
        dist.destroy_process_group()
    # torch reads a quantized tensor's bytes with a segmentation fault.
    parts = (torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8), torch.nested.nested_tensor([plain]))
    wrong = (sharded, plain.to_sparse(), plain.to("meta"), *parts, None, "model.weight", torch.nn.Linear(2, 2))
    for each in wrong:
        for call in (lambda one: deltas.encode([one], [one]), lambda one: deltas.apply([one], b"")):
            with pytest.raises(OptimusError, match=r"is no dense tensor.*to_local\(\).*values\(\)"):
                call(each)
    own = [sharded.to_local()]
    assert same_bits(deltas.apply(own, deltas.encode(own, [plain + 1])), [plain + 1])


def test_weights_that_were_not_copied_before_the_step_are_refused() -> None:
    layer = torch.nn.Linear(3, 3)
    before = list(layer.parameters())
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(OptimusError, match=r"are the same memory.*clone"):
        deltas.encode(before, layer.parameters())
    empty = [torch.ones(0)]
    assert same_bits(deltas.apply(empty, deltas.encode(empty, empty)), empty)
    # A part of a model that is frozen needs no copy, and a conjugated view is as good as any other.
    old, new = [layer.weight.detach() - 1, layer.bias], [layer.weight, layer.bias]
    assert same_bits(deltas.apply(old, deltas.encode(old, new)), new)
    turned = [torch.randn(5, dtype=torch.complex64).conj() for _ in range(2)]
    assert same_bits(deltas.apply(turned[:1], deltas.encode(turned[:1], turned[1:])), [turned[1].resolve_conj()])


@pytest.mark.parametrize("kind", [bytearray, memoryview, lambda delta: np.frombuffer(delta, dtype=np.uint8)])
def test_bytes_may_arrive_in_any_buffer(kind: Callable[[bytes], Any]) -> None:
    old, new = trained(1000, 1e-4, torch.bfloat16)
    assert same_bits(deltas.apply([old], kind(deltas.encode([old], [new]))), [new])


@pytest.mark.ci
def test_the_documented_copy_in_another_process_follows_to_the_bit(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
    code = page.split("## Weights that leave training")[1].split("```python\n")[1].split("```")[0]
    (tmp_path / "update.py").write_text(code)
    run = subprocess.run([sys.executable, "update.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and not run.stderr, run.stderr[-3000:]
