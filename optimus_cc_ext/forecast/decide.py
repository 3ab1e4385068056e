"""What compression will gain on this run's links, from what every rank measured: rules only, the same on every rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.forecast.probe import Rate
from optimus_cc_ext.forecast.timeline import (
    INDIFFERENT,
    StageCost,
    iteration_seconds,
    last_backward_ends,
    left_after_backward,
    smallest_useful,
)
from optimus_cc_ext.techniques.schedule import Message, Schedule

__all__ = ["EmbeddingBytes", "Forecast", "Measured", "forecast"]

_FREE = Rate(0.0, float("inf"))
_TITLES = {
    "--pipeline-forward-format": "pipeline forward, compressed",
    "--compressed-backprop": "pipeline backward, compressed",
    "--fused-embedding-sync": "embedding, fused",
    "--dp-compression": "DP gradients, compressed",
}
_CURES = {"--dp-compression": ", or give --dp-compression-stages auto"}


@dataclass(frozen=True, kw_only=True)
class EmbeddingBytes:
    """What the tied embedding's reduction moves on a rank of the first or the last stage, as in `traffic`."""

    with_replicas: int = 0
    """Among the replicas, where that is not fused with the pair of stages."""

    with_pair: int = 0
    """Then between the first and the last stage."""

    fused: int = 0
    """Instead of both, or, with the distributed optimizer, instead of the second."""

    fused_with_replicas: int = 0
    """With the distributed optimizer, instead of the first."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One rank's times in seconds and sizes in bytes."""

    stage: int
    forward: float
    """One pass through one model chunk."""

    backward: float
    link: Rate | None
    """To the next stage; None with one stage."""

    dense_sum: Rate | None
    """Vanilla Megatron's gradient reduction over the replicas, in the bytes that a ring moves; None: one replica."""

    factor_sum: Rate | None
    """An all-reduce over the replicas."""

    message_bytes: int = 0
    """An activation, or its gradient as it is."""

    compressed_message_bytes: int = 0
    """The same gradient, compressed; that of `message_bytes` where nothing would be saved."""

    compress: float = 0.0
    """One message, before it leaves."""

    decompress: float = 0.0
    remember: float = 0.0
    """What the sender does once it has left."""

    compressed_activation_bytes: int = 0
    """The activation, compressed."""

    encode: float = 0.0
    """One activation, before it leaves."""

    decode: float = 0.0
    dense_bytes: int = 0
    """The gradients, without the tied embedding, as vanilla Megatron reduces them."""

    compressed_bytes: int = 0
    """The same, compressed."""

    second_phase: float = 0.5
    """The share of these that is sent when what was sent first has arrived: Q, or sums."""

    compress_gradients: float = 0.0
    """Compressing and decompressing all of them."""

    buckets: int = 1
    """How many buckets are reduced while the backward pass goes on; 1: the reduction begins after it."""

    embedding: EmbeddingBytes = EmbeddingBytes()
    gather_bytes: int = 0
    """The parameters that the distributed optimizer gathers after its step."""

    compressed_gather_bytes: int = 0
    """The same, compressed; that of `gather_bytes` where they are gathered as they are."""

    code_parameters: float = 0.0
    """Encoding what a step changed, and decoding what all replicas' did."""

    lacking: int = 0
    """Of the memory that residuals and factors of its gradients would take, what this rank's GPU has not."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Predicted seconds from the beginning of an iteration to its reduced gradients."""

    plain: float
    """Nothing compressed or fused."""

    ours: float
    without: Mapping[str, float]
    """Ours, but without one technique, by the name of its flag."""

    compressed_stages: frozenset[int]
    """Whose gradients are compressed."""

    stages: int
    link: float
    """Bytes per second between stages; 0 with one stage."""

    replicas: float
    """Bytes per second of sums over replicas; 0 with one replica."""

    plain_gather: float
    """Seconds that the distributed optimizer's gather of the parameters takes, dense; 0 without it."""

    gather: float
    """The same, ours."""

    warmups: Mapping[str, float]
    """The share of the iterations in which a technique waits, by the name of its flag: not in the predicted ones."""

    lacking: Mapping[int, int] = field(default_factory=dict)
    """By stage that could not be chosen: bytes that one of its GPUs lacks for residuals and factors."""

    def lines(self) -> list[str]:
        """For the terminal: the links, what is gained, class by class, and what does not pay."""
        rates = (self.link, "between stages"), (self.replicas, "among replicas")
        links = ", ".join(f"{rate / 1e6:.1f} MB/s {where}" for rate, where in rates if rate)
        lines = [
            f"forecast from measured times ({links}): the gradients of an iteration are reduced after "
            f"{1e3 * self.ours:.0f} ms instead of {1e3 * self.plain:.0f} ms ({_change(self.ours, self.plain)})",
            *(f"forecast: {_TITLES[flag]}: {self._verdict(flag)}" for flag in self.without),
        ]
        if self.plain_gather:
            lines.append(
                f"forecast: parameter gather: {1e3 * self.gather:.0f} ms beside that, {self._gather_verdict()}"
            )
        for stage, nbytes in sorted(self.lacking.items()):
            lines.append(
                f"forecast: stage {stage} is not compressed: its GPUs lack {nbytes / 1e6:.0f} MB for residuals. "
                "--compression-state-dtype bf16 halves them, and --dp-compression-format int4 has none"
            )
        if self.warmups:
            flags = ", ".join(f"{flag} {share:g}" for flag, share in self.warmups.items())
            lines.append(f"forecast: this is after the warm-up ({flags}); until then what waits gains nothing")
        return lines

    def _gather_verdict(self) -> str:
        plain, ours = self.plain_gather, self.gather
        if ours == plain:
            return "as in vanilla Megatron"
        pays = "" if ours < plain else ". It does not pay here: give --param-gather-format dense"
        return f"instead of {1e3 * plain:.0f} ms ({_change(ours, plain)}){pays}"

    def _verdict(self, flag: str) -> str:
        without, where = self.without[flag], ""
        if flag == "--dp-compression":
            if not self.compressed_stages:
                return "no stage's reduction is worth compressing"
            where = f" on stages {', '.join(map(str, sorted(self.compressed_stages)))} of {self.stages}"
        change = f"{1e3 * (self.ours - without):+.0f} ms ({_change(self.ours, without)}){where}"
        if self.ours > without * (1 + INDIFFERENT):
            return f"{change}. It does not pay here: leave out {flag}{_CURES.get(flag, '')}"
        return change if self.ours < without * (1 - INDIFFERENT) else f"{change}, nothing to speak of"


def forecast(
    everyone: Sequence[Measured], schedule: Schedule, config: OptimusConfig, stages: frozenset[int] | None
) -> Forecast:
    """What an iteration takes, with and without each technique that is switched on.

    Args:
        everyone: what all ranks measured.
        schedule: of an iteration.
        config: what is switched on.
        stages: whose gradients are compressed; None: choose them.
    """
    grid = [[m for m in everyone if m.stage == stage] for stage in range(schedule.stages)]
    costs = [_stage_cost(ranks) for ranks in grid]
    all_messages = config.compressed_backprop_messages == "all"
    forward, backprop = config.pipeline_forward_format != "dense", config.compressed_backprop
    fused = config.fused_embedding_sync

    def ends(forward: bool, backprop: bool) -> list[float]:
        def compressed(message: Message) -> bool:
            return backprop and (all_messages or message.epilogue)

        return last_backward_ends(schedule, costs, compressed, compressed_activations=forward)

    def reductions(compressed: bool, fused: bool) -> list[float]:
        """By stage: what its slowest rank takes after its last backward pass."""
        return [max(_left_to_reduce(m, compressed, fused) for m in ranks) for ranks in grid]

    def embedding(fused: bool) -> float:
        """What comes after the first and the last stage have reduced their gradients."""
        return max(
            (m.factor_sum or m.link or _FREE).seconds(m.embedding.fused if fused else m.embedding.with_pair)
            for m in everyone
        )

    def seconds(forward: bool, backprop: bool, fused: bool, compressed: frozenset[int]) -> float:
        by_stage = zip(reductions(False, fused), reductions(True, fused), strict=True)
        chosen = [small if stage in compressed else dense for stage, (dense, small) in enumerate(by_stage)]
        return iteration_seconds(ends(forward, backprop), chosen, embedding(fused))

    lacking: dict[int, int] = {}
    if not config.dp_compression:
        stages = frozenset()
    elif stages is None:
        by_stage = reductions(False, fused), reductions(True, fused)
        stages = smallest_useful(ends(forward, backprop), *by_stage, embedding(fused))
        most = {stage: max(m.lacking for m in grid[stage]) for stage in stages}
        lacking = {stage: nbytes for stage, nbytes in most.items() if nbytes}
        stages -= lacking.keys()
    without = {
        "--pipeline-forward-format": (forward, seconds(False, backprop, fused, stages)),
        "--compressed-backprop": (backprop, seconds(forward, False, fused, stages)),
        "--fused-embedding-sync": (fused, seconds(forward, backprop, False, stages)),
        "--dp-compression": (config.dp_compression, seconds(forward, backprop, fused, frozenset())),
    }
    warmups = {
        "--compressed-backprop-warmup": (backprop, config.compressed_backprop_warmup),
        "--dp-compression-warmup": (config.dp_compression, config.dp_compression_warmup),
    }
    return Forecast(
        plain=seconds(False, False, False, frozenset()),
        ours=seconds(forward, backprop, fused, stages),
        without={flag: found for flag, (is_on, found) in without.items() if is_on},
        compressed_stages=stages,
        stages=schedule.stages,
        link=_mean_rate([m.link for m in everyone]),
        replicas=_mean_rate([m.factor_sum for m in everyone]),
        plain_gather=max((m.factor_sum or _FREE).seconds(m.gather_bytes) for m in everyone),
        gather=max((m.factor_sum or _FREE).seconds(m.compressed_gather_bytes) + m.code_parameters for m in everyone),
        lacking=lacking,
        warmups={flag: share for flag, (is_on, share) in warmups.items() if is_on and share},
    )


def _stage_cost(ranks: Sequence[Measured]) -> StageCost:
    """Computation is what the stage's ranks take on average, transfers what the slowest of them takes."""

    def mean(name: str) -> float:
        return fmean(getattr(m, name) for m in ranks)

    def slowest(name: str) -> float:
        return max((m.link or _FREE).seconds(getattr(m, name)) for m in ranks)

    return StageCost(
        activation=slowest("message_bytes"),
        gradient=slowest("message_bytes"),
        compressed_gradient=slowest("compressed_message_bytes"),
        compressed_activation=slowest("compressed_activation_bytes"),
        **{
            name: mean(name)
            for name in ("forward", "backward", "compress", "decompress", "remember", "encode", "decode")
        },
    )


def _left_to_reduce(m: Measured, compressed: bool, fused: bool) -> float:
    """What is left of a rank's reduction over its replicas after its last backward pass, in seconds."""
    dense, factors = m.dense_sum or _FREE, m.factor_sum or _FREE
    embedding = dense.seconds(m.embedding.fused_with_replicas if fused else m.embedding.with_replicas)
    if not compressed:
        return left_after_backward(dense.seconds(m.dense_bytes) + embedding, m.backward, m.buckets)
    # A bucket's second phase begins when it is waited for.
    both = factors.seconds(m.compressed_bytes) + m.compress_gradients
    second = m.second_phase * both
    return left_after_backward(both - second + embedding, m.backward, m.buckets) + second


def _mean_rate(rates: Sequence[Rate | None]) -> float:
    known = [rate.bytes_per_second for rate in rates if rate is not None]
    return fmean(known) if known else 0.0


def _change(new: float, old: float) -> str:
    return f"{100 * (new / old - 1):+.1f} %" if old else "0.0 %"
