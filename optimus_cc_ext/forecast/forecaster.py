"""When the forecast is made, from what, and what follows from it: measures the first iterations of a session.

The first pass warms up, the second is timed; before the third, all ranks try their links and compressors, exchange what
they found, and reach the same forecast from it. With `--dp-compression-stages auto` that decides which stages compress.
"""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.compressors.blocks import BlockLayout
from optimus_cc_ext.compressors.fast import fast_compressor
from optimus_cc_ext.compressors.formats import BLOCK
from optimus_cc_ext.forecast.decide import EmbeddingBytes, Forecast, Measured, forecast
from optimus_cc_ext.forecast.microbenchmark import time_activation, time_gradients, time_message, time_parameters
from optimus_cc_ext.forecast.probe import probe_collective, probe_link
from optimus_cc_ext.metrics.stopwatch import Stopwatch
from optimus_cc_ext.metrics.traffic import all_reduce_bytes, reduce_scatter_bytes
from optimus_cc_ext.session import Session
from optimus_cc_ext.techniques.block_messages import BlockMessages
from optimus_cc_ext.techniques.block_reducer import BlockCodecs
from optimus_cc_ext.techniques.fused_embedding_sync import fused_bytes, unfused_bytes
from optimus_cc_ext.techniques.schedule import Message, Schedule

__all__ = ["Forecaster"]

_TIMED_PASS = 1
"""Counted from 0. The one before allocates, compiles and connects."""


class Forecaster:
    """Of one session on one rank. Every method is called on all ranks alike."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._stopwatch = Stopwatch()
        self._passes = 0

    def before_pass(self, schedule: Schedule, gradient: torch.Tensor | None, device: torch.device) -> None:
        """An iteration's forward-backward pass is about to begin.

        Args:
            schedule: of this pass.
            gradient: like every gradient between stages; None where that is not known beforehand.
            device: where collectives take their tensors.

        Raises:
            OptimusError: a link failed while it was measured.
        """
        config = self._session.config
        wanted = config.any_technique and (config.compression_forecast or self._session.gradients.stages_are_open)
        self._stopwatch.on = wanted and self._passes == _TIMED_PASS
        if wanted and self._passes == _TIMED_PASS + 1:
            self._forecast(schedule, gradient, device)
        self._passes += 1

    def computing(self, name: str, device: torch.device) -> AbstractContextManager[None]:
        """A forward or a backward pass of one micro-batch through one model chunk."""
        return self._stopwatch.timed(name, device)

    def _forecast(self, schedule: Schedule, gradient: torch.Tensor | None, device: torch.device) -> None:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self._measure(gradient, device))
        session = self._session
        found = forecast(everyone, schedule, session.config, session.gradients.compressed_stages)
        if session.gradients.stages_are_open:
            session.gradients.choose_stages(found.compressed_stages)
        if dist.get_rank() == 0:
            _say(session, found)

    def _measure(self, gradient: torch.Tensor | None, device: torch.device) -> Measured:
        # What is tried has memory of its own: buckets' is used on their own stream.
        session, gradients = self._session, self._session.gradients
        assert session.grid is not None, "the session has no place in the grid yet"
        sharded = session.layout is not None and session.layout.distributed_optimizer
        link = probe_link(session.grid.pipeline_group, device)
        # Also on a stage without parameters, which has no replicas to sum with: the others would wait for it.
        factor_sum = dense_sum = probe_collective(gradients.replicas, device, scattered=False)
        if sharded:
            dense_sum = probe_collective(gradients.replicas, device, scattered=True)
        compress = decompress = remember = compress_gradients = 0.0
        message_bytes = compressed_bytes = gradient.nbytes if gradient is not None else 0
        ends = session.backprop.sending or session.backprop.receiving
        if gradient is not None and ends and ends.plan.compresses(Message(0, epilogue=True), gradient.shape):
            compressed_bytes = ends.message_bytes(gradient)
            of_blocks, of_factors = session.config.compressed_backprop_format, session.config.low_rank_wire
            plan = replace(
                ends.plan, codec=session.new_codec(of_blocks), factor_codec=session.new_codec(of_factors)
            )  # fmt: skip
            compress, decompress, remember = time_message(plan, gradient, fast_compressor())
        encode = decode = 0.0
        activation_bytes, forward = message_bytes, session.forward.messages
        if gradient is not None and forward is not None:
            activation_bytes = forward.nbytes(gradient)
            codec = session.new_codec(session.config.pipeline_forward_format)
            assert codec is not None
            encode, decode = time_activation(BlockMessages(codec), gradient)
        if session.config.dp_compression and session.alone is not None:
            compress_gradients = time_gradients(
                [matrix for buckets in gradients.buckets for matrix in buckets.matrices],
                alone=session.alone,
                compressor=fast_compressor(),
                config=session.config,
                state_dtype=gradients.state_dtype,
                codecs=session.new_codecs(session.config.dp_compression_format),
                wire=session.new_codec(session.config.low_rank_wire),
                sharded=sharded,
            )
        gather_bytes, code_parameters = sum(buckets.gather_bytes for buckets in gradients.buckets), 0.0
        if (codec := session.new_codec(session.config.param_gather_format)) is not None and session.alone is not None:
            code_parameters = time_parameters(session.parameters.buckets, alone=session.alone, codec=codec)
        return Measured(
            stage=session.grid.place.stage,
            forward=self._stopwatch.median("forward"),
            backward=self._stopwatch.median("backward"),
            link=link,
            dense_sum=dense_sum,
            factor_sum=factor_sum,
            message_bytes=message_bytes,
            compressed_message_bytes=compressed_bytes,
            compress=compress,
            decompress=decompress,
            remember=remember,
            compressed_activation_bytes=activation_bytes,
            encode=encode,
            decode=decode,
            dense_bytes=sum(buckets.dense_bytes for buckets in gradients.buckets),
            compressed_bytes=sum(buckets.compressed_bytes for buckets in gradients.buckets),
            second_phase=_second_phase(gradients.codecs, sharded),
            compress_gradients=compress_gradients,
            buckets=sum(buckets.overlapping for buckets in gradients.buckets) or 1,
            embedding=_embedding(session, sharded),
            gather_bytes=gather_bytes,
            compressed_gather_bytes=session.parameters.sent_bytes,
            code_parameters=code_parameters,
            lacking=_lacking(gradients.state_bytes, device),
        )


def _lacking(nbytes: int, device: torch.device) -> int:
    """Of `nbytes`, what a GPU has not at the time when training needs most of it; a CPU's memory is not asked for."""
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    room = free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return max(0, nbytes - room)


def _second_phase(codecs: BlockCodecs | None, sharded: bool) -> float:
    """The share of a reduction's bytes that moves in its second phase: Q, or the sums of blocks."""
    if codecs is None:
        return 0.5  # P and Q are of much the same size
    if sharded:
        return 0.0
    block = BlockLayout.of_one(BLOCK)
    there, back = (codec.message_bytes(block, torch.float32) for codec in codecs)
    return back / (there + back)


def _embedding(session: Session, sharded: bool) -> EmbeddingBytes:
    assert session.grid is not None
    nbytes, replicas = sum(buckets.tied_bytes for buckets in session.gradients.buckets), session.grid.data_parallel
    with_replicas = (reduce_scatter_bytes if sharded else all_reduce_bytes)(nbytes, replicas)
    if not nbytes or session.grid.stages == 1:
        return EmbeddingBytes(with_replicas=with_replicas, fused_with_replicas=with_replicas)
    codecs = session.embedding.codecs if session.embedding is not None else None
    fused = fused_bytes(nbytes, replicas, sharded=sharded, codecs=codecs)
    # Of the shards alone: what the pair sums when the replicas have.
    of_pair = fused_bytes(nbytes // replicas, 1, sharded=True, codecs=codecs) if sharded else fused
    return EmbeddingBytes(
        with_replicas=with_replicas,
        with_pair=unfused_bytes(nbytes, replicas, sharded=sharded) - with_replicas,
        fused=of_pair,
        fused_with_replicas=fused - of_pair,
    )


def _say(session: Session, found: Forecast) -> None:
    lines = found.lines() if session.config.compression_forecast else []
    if session.config.dp_compression_stages == "auto":
        chosen = ", ".join(map(str, sorted(found.compressed_stages))) or "none"
        lines.insert(0, f"--dp-compression-stages auto: of {found.stages} stages compressed: {chosen}")
    for line in lines:
        print(f"optimus-cc: {line}", flush=True)
