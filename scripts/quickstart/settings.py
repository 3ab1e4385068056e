"""What is trained, and how each of the two runs is written on Megatron's command line."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import cast

from optimus_cc_ext.config import OptimusConfig, presets
from optimus_cc_ext.config.presets import Layout
from optimus_cc_ext.data import PreparedData
from optimus_cc_ext.devices.shared_gpu import Device, device_for
from optimus_cc_ext.errors import OptimusError

__all__ = [
    "BALANCED", "RUNS", "TINY", "QuickstartError", "Settings", "check_flags", "check_text", "config_of", "device_here",
]  # fmt: skip

RUNS = ("vanilla", "compressed")
"""In this order. Their names are also those of their folders."""

BALANCED = "--optimus-cc balanced --dp-compression-stages all"
"""The compressed run's flags. All stages: the preset's `auto` goes by the links, which change on the way here, and on
unshaped ones there would be nothing to choose."""

_VALIDATION_SHARE = 10
"""Percent of the text, whole documents from its end."""


class QuickstartError(OptimusError):
    """The quickstart cannot go on. The message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A small GPT with tied embeddings on 2 pipeline stages x 2 data-parallel replicas, and its schedule.

    The defaults take 8 minutes on 2 idle cores without AVX-512. The embedding is a quarter of what a stage holds, not
    most of it, so that the traffic has something of a real model's proportions.
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
    iterations: int = 80
    learning_rate: float = 6e-4
    seed: int = 1234
    evaluation_iterations: int = 8
    """Global batches in each validation."""

    device: Device = "cpu"
    """What the ranks train on; on GPUs in bf16."""

    rate: str = "100mbit"
    """Of every link, both ways, where hosts can be had. Vanilla's iteration then waits for the network about as long as
    it computes, as large models do between nodes: that ratio counts, not the rate of so small a model's links."""

    shaped: bool = True
    """Whether every rank has a host of its own, with such links; else all share this machine."""

    shaped_iterations: int = 20
    """At most so many, and the first half, are on shaped links: enough to time. The losses do not depend on the links,
    and the other iterations are sooner done without them."""

    vanilla_band: float | None = 0.0035
    """How far the same batches in another order move vanilla's own validation loss, as a fraction of it, by the study
    (`python -m scripts.study --variants vanilla,other-order --seeds 1 --iterations 80`); None: not known for such a
    training."""

    backprop_rank: int = 8
    dp_rank: int = 64
    """Of the study's low-rank variants. The paper's 16 and 128 belong to a hidden size of 3072. What error feedback
    holds back arrives about hidden / rank iterations later, which a run this short feels: hence a larger share."""

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
        """Iterations between two validations: up to eight of them in a run, the last at its end."""
        return self.iterations // max(count for count in range(1, 9) if self.iterations % count == 0)

    @property
    def shaping_ends(self) -> int:
        """The last iteration on shaped links; 0 where there are none."""
        return min(self.shaped_iterations, self.iterations // 2) if self.shaped else 0

    @property
    def links(self) -> str:
        """The shaped ones, in words."""
        return f"links of {self.rate[:-4]} {self.rate[-4].upper()}bit/s"

    @property
    def spans(self) -> dict[str, tuple[int, float]]:
        """First and last iteration of what is timed, by where it ran."""
        # The first three set up and try links and compressors; while the links change, an iteration is of neither kind.
        if not self.shaped:
            return {"on one machine": (4, inf)}
        return {
            self.links: (4, self.shaping_ends),
            "unshaped links": (self.shaping_ends + 2, inf),
        }

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

    @property
    def hosts(self) -> str:
        """In words."""
        return (
            f"{self.processes} network namespaces of this machine, whose links the kernel holds at {self.rate} both"
            f" ways for the first {self.shaping_ends} iterations, and not at all for the others"
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
        if self.device != "cpu":
            # As on a CPU without Apex and Transformer Engine, which the environment has not.
            flags += """ --bf16 --transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion
                --no-persist-layer-norm --no-bias-gelu-fusion --no-bias-dropout-fusion"""
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
        return [] if run == "vanilla" else [*BALANCED.split(), *further]


TINY = Settings(
    layers=2, hidden=64, heads=2, sequence=32, vocabulary=512, micro_batch=1, iterations=8, rate="20mbit",
    vanilla_band=None, evaluation_iterations=1, backprop_rank=2, dp_rank=4,
)  # fmt: skip
"""For tests: seconds, not minutes."""


def device_here(ranks: int) -> Device:
    """What so many ranks train on here: OPTIMUS_CC_DEVICE, or what this machine has for them."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return cast(Device, os.environ.get("OPTIMUS_CC_DEVICE") or device_for(ranks, gpus))


def check_flags(settings: Settings, further: Sequence[str]) -> OptimusConfig:
    """What the compressed run will do, known before the vanilla run has taken its minutes.

    Raises:
        FlagError: a flag that is not Optimus-CC's, which would make the runs incomparable, or that cannot work here.
    """
    return config_of(settings, settings.technique_flags("compressed", further))


def config_of(settings: Settings, flags: Sequence[str]) -> OptimusConfig:
    """What these flags of ours do here; raises what `check_flags` does."""
    layout = Layout(
        stages=settings.stages, data_parallel=settings.replicas, tied_embeddings=True,
        train_iters=settings.iterations, seed=settings.seed,
    )  # fmt: skip
    return presets.config_of(flags, layout)


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
