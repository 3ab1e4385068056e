"""What the chosen flags could recover at most: 1F1B, simulated, with their bytes, and compression for nothing.

Bytes alone do not say it: those that a computation hides gain nothing when they go. So the schedule is simulated
(`optimus_cc_ext.forecast.timeline`), with passes as long as the measured iteration on unshaped links says.
"""

import argparse
from collections.abc import Sequence

import torch

from optimus_cc_ext import resolve
from optimus_cc_ext.compressors import BlockCodec
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.doctor.estimate import (
    Gpt,
    activation_bytes,
    gathered_bytes,
    gradient_bytes,
    link_plan,
    message_bytes,
)
from optimus_cc_ext.flags import add_flags, request_from
from optimus_cc_ext.forecast.decide import EmbeddingBytes, Measured, forecast
from optimus_cc_ext.forecast.forecaster import embedding_bytes, second_phase
from optimus_cc_ext.forecast.probe import Rate
from optimus_cc_ext.techniques.block_reducer import BlockCodecs
from optimus_cc_ext.techniques.schedule import Message, NonInterleaved
from optimus_cc_ext.techniques.selective_stage_compression import stages_to_compress
from scripts.bench.cluster.model import Layout, Model

_DTYPE = torch.float32
"""Of everything that travels."""

_CHOICE = "--dp-compression-stages auto: of "
_PADDED_TO = 128
"""Of the vocabulary, for each tensor-parallel rank (Megatron's --make-vocab-size-divisible-by)."""


def config_of(flags: Sequence[str], layout: Layout) -> OptimusConfig:
    """What the package makes of a variant's flags on this layout."""
    args, _ = add_flags(argparse.ArgumentParser()).parse_known_args(list(flags))
    return resolve.resolve(request_from(args), _place(layout)).config


def chooses_by_the_links(flags: Sequence[str], layout: Layout) -> bool:
    """Whether a variant measures at its start which stages it compresses."""
    config = config_of(flags, layout)
    return config.dp_compression and config.dp_compression_stages == "auto"


def chosen_stages(said: Sequence[str]) -> frozenset[int]:
    """The stages that `auto` chose, from the lines of the forecast; none where it did not say so."""
    for line in said:
        if line.startswith(_CHOICE):
            chosen = line.rsplit(": ", 1)[1]
            return frozenset() if chosen == "none" else frozenset(map(int, chosen.split(", ")))
    return frozenset()


def bound_share(
    model: Model, layout: Layout, config: OptimusConfig, auto: frozenset[int], *, bits: float, unshaped: float
) -> float | None:
    """(vanilla - ours) / (vanilla - unshaped), simulated; None where the links cost vanilla nothing.

    Args:
        auto: the stages that compress where `config` leaves that to measurements.
        bits: per second, of every link.
        unshaped: seconds of vanilla's iteration on unshaped links.
    """
    schedule = NonInterleaved(layout.stages, model.micro_batches)
    stages = stages_to_compress(config, layout.stages)
    stages = auto if stages is None else stages

    def seconds(rate: float) -> tuple[float, float]:
        ranks = [_rank(model, layout, config, stage, Rate(0.0, rate), unshaped) for stage in range(layout.stages)]
        found = forecast(ranks, schedule, config, stages)
        return found.plain + found.gather, found.ours + found.gather

    plain, ours = seconds(bits / 8)
    free, _ = seconds(float("inf"))
    return (plain - ours) / (plain - free) if plain > free else None


def _rank(model: Model, layout: Layout, config: OptimusConfig, stage: int, rate: Rate, unshaped: float) -> Measured:
    # On unshaped links the first stage waits for P - 1 micro-batches and computes all of its own.
    micro_batch = unshaped / (model.micro_batches + layout.stages - 1)
    gpt, place = _gpt(model, layout), _place(layout)
    dense, compressed = gradient_bytes(gpt, place, config, stage)
    codecs = BlockCodecs.of(config.dp_compression_format, BlockCodec)
    embedding = gpt.word_embeddings(stage, layout.stages) * gpt.embedding_bytes(_DTYPE)
    return Measured(
        stage=stage, forward=micro_batch / 3, backward=2 * micro_batch / 3,
        link=rate if layout.stages > 1 else None, dense_sum=rate, factor_sum=rate,
        message_bytes=gpt.message.numel() * _DTYPE.itemsize,
        compressed_message_bytes=message_bytes(gpt, link_plan(config, 1, 0), Message(0, epilogue=True)),
        compressed_activation_bytes=activation_bytes(gpt, config),
        dense_bytes=dense, compressed_bytes=compressed, second_phase=second_phase(codecs, layout.sharded),
        embedding=embedding_bytes(
            embedding, layout.replicas, sharded=layout.sharded, has_pair=layout.stages > 1,
            codecs=BlockCodecs.of(config.fused_embedding_sync_format, BlockCodec),
        ) if embedding else EmbeddingBytes(),
        gather_bytes=gathered_bytes(gpt, place, stage)[0] if layout.sharded else 0,
    )  # fmt: skip


def _gpt(model: Model, layout: Layout) -> Gpt:
    h, t = model.hidden, layout.tensor
    matrices = (3 * h // t, h), (h, h // t), (4 * h // t, h), (h, 4 * h // t)
    vectors = (3 * h // t,), (4 * h // t,), *[(h,)] * 6
    return Gpt(
        layers=model.layers_per_stage, layer=(*matrices, *vectors), last=((h,), (h,)),
        embedding=(_padded_vocabulary(model, layout) // t, h), positions=(model.sequence, h), tied=True,
        message=torch.Size((model.sequence, model.micro_batch, h)), tensor_parallel=t,
        pipeline_dtype=_DTYPE, gradient_dtype=_DTYPE, parameter_dtype=_DTYPE,
    )  # fmt: skip


def _place(layout: Layout) -> resolve.Layout:
    return resolve.Layout(
        stages=layout.stages, data_parallel=layout.replicas, tied_embeddings=True, train_iters=1,
        distributed_optimizer=layout.sharded,
    )  # fmt: skip


def _padded_vocabulary(model: Model, layout: Layout) -> int:
    multiple = _PADDED_TO * layout.tensor
    return -(-model.vocabulary // multiple) * multiple
