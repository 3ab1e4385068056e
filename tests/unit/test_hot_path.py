"""Law: no sync on the hot path. After the first iteration a message allocates nothing and asks the host nothing."""

import weakref

import pytest
import torch

from optimus_cc_ext.compressors.scratch import Scratch
from optimus_cc_ext.techniques.schedule import NonInterleaved
from tests.allocations import Watch
from tests.unit.test_links import SHAPE, commit, done, gradient, link, run_iteration, states

ONE_MESSAGE = NonInterleaved(2, 1)


def test_the_watch_sees_allocations_and_host_reads() -> None:
    tensor = torch.ones(3)
    with Watch() as watch:
        tensor.add_(1).view(3, 1).mul_(2)
        torch.mul(tensor, tensor, out=tensor)
    assert watch.allocated == watch.read_by_host == []
    with Watch() as watch:
        tensor + tensor
        tensor.sum().item()
        bool((tensor > 0).all())
    assert len(watch.allocated) == 4
    assert len(watch.read_by_host) == 2


@pytest.mark.parametrize("lazy_error_propagation", [True, False])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape, rank",
    [(SHAPE, 4), ((600, 1, 2048), 16), ((600, 1, 1024), 128), (SHAPE, None)],
    ids=["small", "large", "orthogonalised in fp32", "int4"],
)
def test_a_message_allocates_nothing_and_asks_the_host_nothing(shape, rank, dtype, state_dtype, lazy_error_propagation):
    chosen = {"compressed_backprop_rank": rank} if rank else {"compressed_backprop_format": "int4"}
    sender, receiver = link(state_dtype=state_dtype, lazy_error_propagation=lazy_error_propagation, **chosen)
    gradients = [gradient(i, dtype, shape) for i in range(3)]
    run_iteration(sender, receiver, gradients)
    arrived = [torch.empty_like(g) for g in gradients]
    if rank:
        states(sender).rescale_residuals(torch.tensor(2.0))
    with Watch() as watch:
        for g, a in zip(gradients, arrived, strict=True):
            sender.begin(ONE_MESSAGE)
            receiver.begin(ONE_MESSAGE)
            sending, receiving = sender.send(g), receiver.receive(a)
            receiving.tensor.copy_(sending.tensor)
            done(sending)
            done(receiving)
            commit(sender)
    assert watch.allocated == watch.read_by_host == []
    assert all(a.isfinite().all() for a in arrived)


def test_scratch_memory_is_the_largest_users_and_what_was_too_small_is_let_go() -> None:
    scratch = Scratch()

    def take(*shape: int, name: str = "matrix", dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return scratch.take(name, torch.Size(shape), dtype, torch.device("cpu"))

    first = take(3, 2)
    assert first.shape == (3, 2) and take(3, 2) is first
    memory = weakref.ref(first.untyped_storage())
    del first
    large = take(4, 8)
    assert memory() is None
    small = take(3, 2)
    assert small.shape == (3, 2) and small.is_contiguous() and small.data_ptr() == large.data_ptr()
    assert scratch.nbytes == 4 * 8 * 4
    take(2, name="other")
    take(2, dtype=torch.bfloat16)
    assert scratch.nbytes == 4 * 8 * 4 + 2 * 4 + 2 * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: host synchronisation cannot be observed")
def test_a_message_on_a_gpu_waits_for_nothing():
    sender, receiver = link()
    gradients = [gradient(i).cuda() for i in range(3)]
    run_iteration(sender, receiver, gradients)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_iteration(sender, receiver, gradients)
    finally:
        torch.cuda.set_sync_debug_mode("default")
