"""What the chosen flags could recover at most: 1F1B, simulated, with their bytes, and compression for nothing.

Bytes alone do not say it: those that a computation hides gain nothing when they go. So the schedule is simulated
(`optimus_cc_ext.forecast.timeline`), with passes as long as the measured iteration on unshaped links says.
"""

import argparse
from collections.abc import Sequence

from optimus_cc_ext import resolve
from optimus_cc_ext.compressors import effective_rank, packed_numel, pays
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.flags import add_flags, request_from
from optimus_cc_ext.forecast.decide import EmbeddingBytes, Measured, forecast
from optimus_cc_ext.forecast.probe import Rate
from optimus_cc_ext.metrics.traffic import all_reduce_bytes
from optimus_cc_ext.techniques.schedule import NonInterleaved
from optimus_cc_ext.techniques.selective_stage_compression import stages_to_compress
from scripts.bench.cluster.model import Layout, Model

_VALUE = 4
"""Bytes: everything travels in fp32."""

_CHOICE = "--dp-compression-stages auto: of "
_PADDED_TO = 128
"""Of the vocabulary, for each tensor-parallel rank (Megatron's --make-vocab-size-divisible-by)."""


def config_of(flags: Sequence[str], layout: Layout) -> OptimusConfig:
    """What the package makes of a variant's flags on this layout."""
    args, _ = add_flags(argparse.ArgumentParser()).parse_known_args(list(flags))
    facts = resolve.Layout(stages=layout.stages, data_parallel=layout.replicas, tied_embeddings=True, train_iters=1)
    return resolve.resolve(request_from(args), facts).config


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
        return found.plain, found.ours

    plain, ours = seconds(bits / 8)
    free, _ = seconds(float("inf"))
    return (plain - ours) / (plain - free) if plain > free else None


def _rank(model: Model, layout: Layout, config: OptimusConfig, stage: int, rate: Rate, unshaped: float) -> Measured:
    # On unshaped links the first stage waits for P - 1 micro-batches and computes all of its own.
    micro_batch = unshaped / (model.micro_batches + layout.stages - 1)
    rows, hidden = model.sequence * model.micro_batch, model.hidden
    matrices = _matrices(model, layout)
    dense = model.layers_per_stage * _vectors(model, layout)
    dense += model.sequence * hidden if stage == 0 else 0
    dense += 2 * hidden if stage == layout.stages - 1 else 0
    embedding = _padded_vocabulary(model, layout) // layout.tensor * hidden * _VALUE

    def summed(values: int) -> int:
        return all_reduce_bytes(values * _VALUE, layout.replicas)

    return Measured(
        stage=stage, forward=micro_batch / 3, backward=2 * micro_batch / 3,
        link=rate if layout.stages > 1 else None, dense_sum=rate, factor_sum=rate,
        message_bytes=rows * hidden * _VALUE,
        compressed_message_bytes=_factors(rows, hidden, config.compressed_backprop_rank) * _VALUE,
        dense_bytes=summed(dense + sum(n * m for n, m in matrices)),
        compressed_bytes=summed(dense + sum(_factors(n, m, config.dp_compression_rank) for n, m in matrices)),
        embedding=EmbeddingBytes(
            with_replicas=all_reduce_bytes(embedding, layout.replicas),
            with_pair=all_reduce_bytes(embedding, 2) if layout.stages > 1 else 0,
            fused=all_reduce_bytes(embedding, 2 * layout.replicas),
        ) if stage in (0, layout.stages - 1) else EmbeddingBytes(),
    )  # fmt: skip


def _matrices(model: Model, layout: Layout) -> list[tuple[int, int]]:
    """(rows, columns) of the weights of a stage's layers, on one tensor-parallel rank."""
    h, t = model.hidden, layout.tensor
    return [(3 * h // t, h), (h, h // t), (4 * h // t, h), (h, 4 * h // t)] * model.layers_per_stage


def _vectors(model: Model, layout: Layout) -> int:
    """Values in the biases and norms of a layer: those of two products are split over tensor-parallel ranks."""
    return (3 + 4) * model.hidden // layout.tensor + (1 + 1 + 4) * model.hidden


def _factors(rows: int, columns: int, compression_rank: int) -> int:
    if not pays(rows, columns, compression_rank):
        return rows * columns
    return packed_numel(rows, columns, effective_rank(rows, columns, compression_rank))


def _padded_vocabulary(model: Model, layout: Layout) -> int:
    multiple = _PADDED_TO * layout.tensor
    return -(-model.vocabulary // multiple) * multiple
