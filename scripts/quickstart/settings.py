"""What is trained, and how each of the two runs is written on Megatron's command line."""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.data import PreparedData
from optimus_cc_ext.errors import OptimusError
from optimus_cc_ext.flags import add_flags, request_from
from optimus_cc_ext.resolve import Layout, resolve

__all__ = ["RUNS", "TINY", "QuickstartError", "Settings", "check_flags", "check_text", "remarks"]

RUNS = ("vanilla", "compressed")
"""In this order. Their names are also those of their folders."""

_VALIDATION_SHARE = 10
"""Percent of the text, whole documents from its end."""


class QuickstartError(OptimusError):
    """The quickstart cannot go on. The message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A small GPT with tied embeddings on 2 pipeline stages x 2 data-parallel replicas, and its schedule.

    The defaults take about 5 minutes on 2 idle cores. The embedding is a quarter of what a stage holds, not most of
    it, so that the traffic has something of a real model's proportions.
    """

    layers: int = 8
    hidden: int = 256
    heads: int = 4
    sequence: int = 128
    vocabulary: int = 4096
    micro_batch: int = 2
    """Sequences in a micro-batch."""

    micro_batches: int = 4
    """Micro-batches of each replica in an iteration."""

    stages: int = 2
    replicas: int = 2
    iterations: int = 160
    learning_rate: float = 6e-4
    seed: int = 1234
    evaluation_iterations: int = 4
    """Global batches in each validation."""

    backprop_rank: int = 8
    dp_rank: int = 64
    """The paper's 16 and 128 belong to a hidden size of 3072. What error feedback holds back arrives about hidden /
    rank iterations later, which a run this short feels: hence a larger share of the hidden size than the paper's."""

    @property
    def processes(self) -> int:
        """How many ranks torchrun starts."""
        return self.stages * self.replicas

    @property
    def global_batch(self) -> int:
        """Sequences in an iteration, of all replicas."""
        return self.micro_batch * self.micro_batches * self.replicas

    @property
    def evaluation_interval(self) -> int:
        """Iterations between two validations: up to twelve of them in a run, the last at its end."""
        return self.iterations // max(count for count in range(1, 13) if self.iterations % count == 0)

    @property
    def parameters(self) -> int:
        """Weights of the model, the tied embedding counted once."""
        matrices = 12 * self.hidden**2
        vectors = 13 * self.hidden  # two norms of 2, biases of 3 + 1 + 4 + 1
        return self.layers * (matrices + vectors) + (self.vocabulary + self.sequence) * self.hidden + 2 * self.hidden

    @property
    def model(self) -> str:
        """In words."""
        return (
            f"{self.layers} layers, hidden {self.hidden}, {self.heads} heads, sequence {self.sequence}, vocabulary"
            f" {self.vocabulary:,}, tied embeddings"
        )

    @property
    def layout(self) -> str:
        """In words."""
        return (
            f"{self.stages} pipeline stages x {self.replicas} data-parallel replicas = {self.processes} processes,"
            f" {self.micro_batches} micro-batches of {self.micro_batch} sequences per replica"
        )

    def megatron_flags(self, data: PreparedData, tensorboard: Path) -> list[str]:
        """The flags that both runs share. No dropout: what differs between the curves is the compression."""
        flags = f"""
            --pipeline-model-parallel-size {self.stages} --num-layers {self.layers}
            --hidden-size {self.hidden} --num-attention-heads {self.heads}
            --seq-length {self.sequence} --max-position-embeddings {self.sequence}
            --hidden-dropout 0 --attention-dropout 0
            --init-method-std {self.hidden**-0.5:.4f}
            --micro-batch-size {self.micro_batch} --global-batch-size {self.global_batch}
            --train-iters {self.iterations} --seed {self.seed}
            --lr {self.learning_rate} --min-lr {self.learning_rate / 10} --lr-decay-style cosine
            --lr-warmup-fraction 0.1 --adam-beta2 0.95 --weight-decay 0.01 --clip-grad 1.0
            --eval-interval {self.evaluation_interval} --eval-iters {self.evaluation_iterations}
            --split {100 - _VALIDATION_SHARE},{_VALIDATION_SHARE},0 --num-workers 0
            --tokenizer-type HuggingFaceTokenizer
            --log-interval 1 --log-timers-to-tensorboard --timing-log-level 0
        """
        paths = {
            "--data-path": data.data_prefix,
            "--tokenizer-model": data.tokenizer_dir,
            # Which sequence comes when: part of the prepared data, and replaced with it.
            "--data-cache-path": data.data_prefix.parent / "cache",
            "--tensorboard-dir": tensorboard,
        }
        return shlex.split(flags) + [word for flag, path in paths.items() for word in (flag, str(path))]

    def technique_flags(self, run: str, further: Sequence[str]) -> list[str]:
        """Our flags of one run: none for vanilla, whose traffic is still counted; `further` come last and win."""
        if run == "vanilla":
            return []
        flags = f"""
            --optimus-cc --compressed-backprop-rank {self.backprop_rank} --dp-compression-rank {self.dp_rank}
        """
        return [*shlex.split(flags), *further]


TINY = Settings(
    layers=2, hidden=64, heads=2, sequence=32, vocabulary=512, micro_batch=1, iterations=3,
    evaluation_iterations=1, backprop_rank=2, dp_rank=4,
)  # fmt: skip
"""For tests: seconds, not minutes."""


def check_flags(settings: Settings, further: Sequence[str]) -> OptimusConfig:
    """What the compressed run will do, known before the vanilla run has taken its minutes.

    Raises:
        QuickstartError: `further` holds something else than Optimus-CC flags, which would make the runs incomparable.
        FlagError: a flag that cannot work here.
    """
    parser = add_flags(argparse.ArgumentParser(prog="quickstart ... --", allow_abbrev=False, add_help=False))
    args, unknown = parser.parse_known_args(settings.technique_flags("compressed", further))
    if unknown:
        raise QuickstartError(
            f"{unknown[0]}: not an Optimus-CC flag. Only these may follow --, as all else must be the same in both runs"
        )
    layout = Layout(
        stages=settings.stages, data_parallel=settings.replicas, tied_embeddings=True,
        train_iters=settings.iterations, seed=settings.seed,
    )  # fmt: skip
    return resolve(request_from(args), layout).config


def remarks(settings: Settings, config: OptimusConfig) -> list[str]:
    """Where and why the compressed run is not the paper's setting, each in a sentence."""
    said = [
        f"Ranks {config.compressed_backprop_rank} (activation gradients) and {config.dp_compression_rank}"
        f" (data-parallel gradients) are chosen for hidden {settings.hidden}; the paper's 16 and 128 are for 3072."
    ]
    if config.compressed_backprop_messages == "epilogue":
        said.append(
            f"On each pipeline link {settings.stages - 1} of {settings.micro_batches} gradient messages is of the"
            " epilogue, and only that one is compressed."
        )
    if config.residual_across_iterations == "drop":
        said.append(
            "What lazy error propagation leaves after an iteration is dropped, not carried: it would be added to the"
            " gradient of other text, with updated weights; in short trials that cost more than it mended."
        )
    return said


def check_text(settings: Settings, data: PreparedData) -> None:
    """Refuse a text from which Megatron cannot cut a training and a validation part.

    Raises:
        QuickstartError: there are too few documents or too few tokens.
    """
    # Megatron cuts between documents, so that 10 % must be at least one of them, and one of average length
    # must fill a sequence and the token after it.
    documents = 2 * 100 // _VALIDATION_SHARE
    if data.documents < documents:
        raise QuickstartError(
            f"--input: {data.documents} documents cannot be cut into a training and a validation part, which are"
            f" whole documents. Give at least {documents}, or a single text file: it is cut every 16 KiB"
        )
    tokens = documents * (settings.sequence + 1)
    if data.tokens < tokens:
        raise QuickstartError(
            f"--input: {data.tokens} tokens are too few for sequences of {settings.sequence} in a training and a"
            f" validation part. Give a text of at least {tokens} tokens"
        )
