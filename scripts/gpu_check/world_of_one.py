"""Checks that need NCCL and streams, over a process group of one process; on a CPU over gloo."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.collectives.reducers import Reduction, SideStream
from optimus_cc_ext.compressors.fast import fast_compressor
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import PIPELINE_BACKWARD
from optimus_cc_ext.techniques.compressed_backprop import CompressedBackprop
from optimus_cc_ext.techniques.schedule import NonInterleaved
from scripts.bench.compressors.bucket import Bucket, one_process, reducer

__all__ = ["messages", "reduction"]

MESSAGES = 100
STEPS = 5


def reduction(device: torch.device) -> Iterator[dict[str, Any]]:
    """Compare two reductions: by the hook's handle on a side stream, beside a busy main stream; and in line."""
    on_gpu = device.type == "cuda"
    hidden, layers, rank = (1024, 8, 128) if on_gpu else (64, 2, 4)
    shapes = ((3 * hidden, hidden), (hidden, 4 * hidden))
    beside, in_line = (Bucket.random(layers, shapes, hidden, device, seed=18) for _ in range(2))
    with one_process(device) as group:
        ours, theirs = (reducer(bucket, rank, fast_compressor(), group) for bucket in (beside, in_line))
        side = SideStream(device)
        for step in range(STEPS):
            # The stream is kept busy, so that the gradients are written late: a reduction that does not wait for them
            # reads old values.
            _keep_busy(device)
            for bucket in (beside, in_line):
                bucket.flat.copy_(Bucket.random(layers, shapes, hidden, device, seed=step).flat)
            handle = Reduction([ours], [beside.flat], [ours], side, whole=False)
            _keep_busy(device)
            handle.wait()
            theirs.reduce(in_line.flat)
            for each in (ours, theirs):
                each.states.commit({})
        if not ours.encoded == theirs.encoded == STEPS * layers * len(shapes):
            raise SystemExit(f"{ours.encoded} and {theirs.encoded} matrices were coded in {STEPS} steps")
        residuals = zip(ours.states.residuals(), theirs.states.residuals(), strict=True)
        if not torch.equal(beside.flat, in_line.flat) or not all(torch.equal(*pair) for pair in residuals):
            raise SystemExit("a reduction beside the main stream leaves other bits than one in line")
    yield {"case": f"{layers} layers of hidden {hidden}, rank {rank}, {STEPS} steps", "bits": "equal"}


def _keep_busy(device: torch.device) -> None:
    """Keep the current stream busy for some tens of milliseconds."""
    if device.type == "cuda":
        torch.cuda._sleep(50_000_000)


def messages(device: torch.device) -> Iterator[dict[str, Any]]:
    """Check messages of a link to itself, in bf16: message plus old residual, minus what arrived, is the new
    residual.
    """
    on_gpu = device.type == "cuda"
    shape = (1024, 2, 1024) if on_gpu else (16, 2, 48)
    config = OptimusConfig(
        compressed_backprop_format="low-rank", compressed_backprop_rank=16 if on_gpu else 4,
        compressed_backprop_messages="all",
        compression_seed=18,
    )  # fmt: skip
    ours, others = (CompressedBackprop(config, PIPELINE_BACKWARD) for _ in range(2))
    for technique in (ours, others):
        technique.connect_to(0, 1, rank=0, peer_rank=0)
    sender, receiver = ours.sending, others.sending
    assert sender is not None and receiver is not None
    generator, carried = torch.Generator().manual_seed(18), torch.zeros(shape, device=device)
    with one_process(device):
        for number in range(MESSAGES):
            for link in (sender, receiver):
                link.begin(NonInterleaved(2, 1))
            sent = torch.randn(shape, generator=generator).to(device, torch.bfloat16)
            arrived = torch.empty_like(sent)
            sending, receiving = sender.send(sent), receiver.receive(arrived)
            requests = []
            if on_gpu:
                operations = [dist.P2POp(dist.isend, sending.tensor, 0), dist.P2POp(dist.irecv, receiving.tensor, 0)]
                requests = dist.batch_isend_irecv(operations)
            else:  # gloo sends nothing to itself
                receiving.tensor.copy_(sending.tensor)
            # The calls come in the same order as in the hook.
            for step in (sending.after_post, receiving.after_post, *(request.wait for request in requests)):
                step()
            for transfer in (sending, receiving):
                transfer.after_wait()
            ours.states.commit({})
            (residual,) = ours.states.residuals()
            if not torch.equal(residual.view(shape), (sent.float() + carried) - arrived.float()):
                raise SystemExit(f"message {number}: the sender's residual is not what the receiver's copy lacks")
            carried.copy_(residual.view(shape))
    yield {"case": f"{MESSAGES} messages, bf16", "bits": "equal", "over NCCL": "yes" if on_gpu else None}
