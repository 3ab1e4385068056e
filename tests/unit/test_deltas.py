"""Deltas of weights that leave training: copies become the new model to the bit, or are refused untouched."""

import pytest
import torch

from optimus_cc_ext import deltas
from optimus_cc_ext.errors import OptimusError
from tests.unit.test_exact_codec import same, trained


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
    return old, new


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_random_tensors_come_through_to_the_bit_and_old_ones_stay() -> None:
    for seed in range(60):
        old, new = tensors(seed)
        before = [each.clone() for each in old]
        found = deltas.apply(old, deltas.encode(old, new))
        assert [(each.shape, each.dtype, bits(each)) for each in found] == [(n.shape, n.dtype, bits(n)) for n in new]
        assert all(bits(each) == bits(copy) for each, copy in zip(old, before, strict=True))


@pytest.mark.parametrize("step, times", [(1e-6, 30), (1e-5, 5), (1e-4, 4)])
def test_small_steps_take_few_bytes(step: float, times: int) -> None:
    old, new = trained(1 << 20, 0.2 * step, torch.bfloat16)
    delta = deltas.encode([old], [new])
    assert len(delta) * times < old.nbytes
    assert same(deltas.apply([old], delta)[0], new)


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
