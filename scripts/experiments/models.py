"""Models, layouts, and a training of a model on a layout as Megatron's command line. A model is one record of
`MODELS`.
"""

import argparse
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import cast

from optimus_cc_ext.config import OptimusConfig, presets
from optimus_cc_ext.errors import OptimusError
from optimus_cc_ext.tools.cpu.shared_gpu import Device, device_for
from optimus_cc_ext.tools.data import PreparedData

VALIDATION_SHARE = 10
"""Percent of the text, in whole documents from its end, that is used for validation."""

_LAYOUT = re.compile(
    r"(?:tp(?P<tp>[1-9]\d*))?pp(?P<pp>[1-9]\d*)dp(?P<dp>[1-9]\d*)(?P<zero>z1)?(?:n(?P<beside>[1-9]\d*))?"
)


_RANKS = "--expert-model-parallel-size"


class ExperimentError(OptimusError, ValueError, argparse.ArgumentTypeError):
    """Error of an experiment that cannot be made as requested. The message says why and what to do; argparse prints it,
    too.
    """


@dataclass(frozen=True)
class Model:
    """A model and its batch. Layers are given per stage, so that the depth follows the layout. Without further flags
    the model is a GPT with tied embeddings.
    """

    layers_per_stage: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    """Number of tokens of the tokenizer; Megatron pads it to a multiple of 128 for each tensor-parallel rank."""

    micro_batch: int
    """Number of sequences in a micro-batch."""

    micro_batches: int
    """Number of micro-batches of each replica in an iteration."""

    flags: str = ""
    """Megatron's flags of an architecture other than GPT's."""

    @property
    def tied(self) -> bool:
        """True if the output layer shares the input embedding's weights."""
        return "--untie-embeddings-and-output-weights" not in self.flags

    @property
    def expert_parallel(self) -> int:
        """Number of ranks that share the experts of a layer; 0 without experts."""
        words = self.flags.split()
        return int(words[words.index(_RANKS) + 1]) if _RANKS in words else 0


# The embedding is a quarter of a stage's parameters, not most of them, so that the proportions of the traffic are
# somewhat like a real model's.
_GPT = Model(4, hidden=256, heads=4, sequence=128, vocabulary=4096, micro_batch=2, micro_batches=4)
_LLAMA = replace(
    _GPT,
    flags="--swiglu --position-embedding-type rope --normalization RMSNorm --group-query-attention"
    " --num-query-groups 2 --untie-embeddings-and-output-weights --disable-bias-linear",
)
_EXPERTS = (
    " --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512 --moe-aux-loss-coeff 0.01"
    " --moe-token-dispatcher-type alltoall --expert-model-parallel-size"
)
_MOE = replace(_LLAMA, layers_per_stage=2, flags=f"{_LLAMA.flags}{_EXPERTS} 1")
# These models fill a GPU of 80 GB with four ranks; the records are of two stages and two replicas.
_GPT_1B = Model(
    8, hidden=2048, heads=16, sequence=1024, vocabulary=32000, micro_batch=2, micro_batches=8,
    flags="--untie-embeddings-and-output-weights",
)  # fmt: skip
_LLAMA_1B = replace(_GPT_1B, flags=f"{_LLAMA.flags} --num-query-groups 4")
_BIASED_EXPERTS = (
    " --num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 256 --moe-router-load-balancing-type none"
    " --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3"
    " --moe-token-dispatcher-type alltoall --expert-model-parallel-size"
)

MODELS: Mapping[str, Model] = {
    "gpt": _GPT,
    "llama": _LLAMA,
    # Models that differ in their width alone: in one stage 2, 7, 17 and 60 million parameters.
    **{
        f"{name}-h{hidden}": replace(model, layers_per_stage=8, hidden=hidden, heads=hidden // 64)
        for name, model in (("gpt", _GPT), ("llama", _LLAMA))
        for hidden in (128, 256, 384, 768)
    },
    # Embedding and output layer together hold a tenth of the parameters, as in published models of this size.
    "llama-350m": replace(_LLAMA, layers_per_stage=12, hidden=1024, heads=16, sequence=512, vocabulary=16384),
    # FSDP2 gathers the weights and reduces the gradients of each micro-batch by themselves, so there are only two.
    "llama-fsdp2": replace(
        _LLAMA, micro_batch=4, micro_batches=2, flags=f"{_LLAMA.flags} --use-torch-fsdp2 --ckpt-format torch_dist"
    ),
    "llama-muon": replace(_LLAMA, flags=f"{_LLAMA.flags} --optimizer muon"),
    "moe": _MOE,
    "moe-ep2": replace(_MOE, flags=f"{_LLAMA.flags}{_EXPERTS} 2"),
    "moe-bias-ep2": replace(_MOE, flags=f"{_LLAMA.flags}{_BIASED_EXPERTS} 2"),
    # Two ranks of a node share experts with two of another one, so that tokens can leave a node once.
    "moe-ep4": replace(_MOE, flags=f"{_LLAMA.flags}{_EXPERTS} 4"),
    "moe-bias-ep4": replace(_MOE, flags=f"{_LLAMA.flags}{_BIASED_EXPERTS} 4"),
    "moe-ep8": replace(_MOE, flags=f"{_LLAMA.flags}{_EXPERTS} 8"),
    "test": Model(1, hidden=64, heads=2, sequence=32, vocabulary=512, micro_batch=1, micro_batches=4),
    "tiny": Model(1, hidden=64, heads=2, sequence=64, vocabulary=512, micro_batch=2, micro_batches=4),
    # The micro-batches are chosen so that DP gradients are 8 times the forward activations, as for the paper's 8.3B
    # model; `proportions` of the cluster benchmark computes the ratio.
    "small": Model(4, hidden=256, heads=4, sequence=128, vocabulary=1024, micro_batch=1, micro_batches=12),
    "deep": Model(8, hidden=256, heads=4, sequence=128, vocabulary=1024, micro_batch=4, micro_batches=6),
    # Four ranks share the experts of each layer, so most of the traffic is tokens. Coding grows with the width and
    # computation with its square, and real models are wider than the other models here.
    "experts": replace(
        _MOE,
        hidden=512,
        vocabulary=1024,
        micro_batches=2,
        flags=f"{_LLAMA.flags}{_EXPERTS} 4 --moe-ffn-hidden-size 1024",
    ),
    # As many copies of a token as published mixtures send: 32 experts, of which each token goes to 8.
    "experts-top8": replace(
        _MOE,
        hidden=512,
        vocabulary=1024,
        micro_batches=2,
        flags=f"{_LLAMA.flags}{_EXPERTS} 4 --num-experts 32 --moe-router-topk 8 --moe-ffn-hidden-size 256",
    ),
    "gpt-1b": _GPT_1B,
    "llama-1b": _LLAMA_1B,
    "moe-1b": replace(
        _LLAMA_1B,
        layers_per_stage=4,
        hidden=1024,
        flags=f"{_LLAMA_1B.flags}{_EXPERTS} 4 --num-experts 16 --moe-ffn-hidden-size 2048"
        " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "wide": Model(4, hidden=384, heads=6, sequence=128, vocabulary=1536, micro_batch=3, micro_batches=6),
}
"""Models by name.

The quickstart trains `gpt`. The study also trains `llama`, both in several widths (`gpt-h128`), `llama-fsdp2` (sharded
by torch's FSDP2), `llama-muon` (trained by Muon, for which it needs the package emerging_optimizers), and mixtures of
experts: in `moe` every replica holds all experts, in `moe-ep2`, `moe-ep4` and `moe-ep8` so many replicas share them,
and `moe-bias-ep2` and `moe-bias-ep4` have twice as many experts of half the size, balanced by a bias in place of an
auxiliary loss. The study's tests train `test`; the cluster benchmark trains the others.
"""


@dataclass(frozen=True, order=True)
class Layout:
    """Arrangement of the ranks. The tensor-parallel ranks of one stage and replica share a host and its loopback, and
    so do `beside` replicas of a stage.
    """

    tensor: int = 1
    stages: int = 2
    replicas: int = 2
    sharded: bool = False
    """True if Megatron's distributed optimizer shards the gradients, with parameters in bf16 as usual."""

    beside: int = 1
    """Number of replicas of a stage on each host; a divisor of `replicas`."""

    @property
    def hosts(self) -> int:
        """Number of hosts: one for each stage of `beside` replicas."""
        return self.stages * self.replicas // self.beside

    @property
    def ranks_per_host(self) -> int:
        """Number of ranks on each host."""
        return self.tensor * self.beside

    def __str__(self) -> str:
        tensor, beside = f"tp{self.tensor}" if self.tensor > 1 else "", f"n{self.beside}" if self.beside > 1 else ""
        return f"{tensor}pp{self.stages}dp{self.replicas}{'z1' if self.sharded else ''}{beside}"

    @staticmethod
    def parsed(text: str) -> "Layout":
        """Read a layout such as pp2dp2, tp2pp4dp2, pp2dp2z1 with the distributed optimizer and bf16, or pp1dp4n2 with
        two replicas on each host.

        Raises:
            ExperimentError: the text is no layout, or its single host would have no links.
        """
        match = _LAYOUT.fullmatch(text)
        if match is None:
            raise ExperimentError(f"{text!r} is not a layout. Give [tpT]ppPdpD[z1][nL], such as pp4dp2 or tp2pp2dp2")
        layout = Layout(
            int(match["tp"] or 1), int(match["pp"]), int(match["dp"]), bool(match["zero"]), int(match["beside"] or 1)
        )
        if layout.replicas % layout.beside:
            raise ExperimentError(f"{text!r}: {layout.replicas} replicas cannot be dealt out {layout.beside} to a host")
        if layout.hosts < 2:
            raise ExperimentError(f"{text!r}: a single host has no links. Give at least two stages or two replicas")
        return layout


@dataclass(frozen=True, kw_only=True)
class Training:
    """Training of a model on a layout, with its schedule, its seed, and the device of its ranks."""

    model: Model = MODELS["gpt"]
    layout: Layout = Layout()
    iterations: int = 80
    learning_rate: float = 6e-4
    schedule: int | None = None
    """Iterations of the learning rate's schedule; None: as many as the training has."""

    seed: int = 1234
    evaluation_iterations: int = 8
    """Global batches in each validation."""

    device: Device = "cpu"
    """Device of the ranks. On GPUs the training is in bf16."""

    @property
    def processes(self) -> int:
        """Number of ranks on all hosts together."""
        return self.layout.hosts * self.layout.ranks_per_host

    @property
    def layers(self) -> int:
        """Number of layers of the whole model."""
        return self.model.layers_per_stage * self.layout.stages

    @property
    def global_batch(self) -> int:
        """Sequences of all replicas in an iteration."""
        return self.model.micro_batch * self.model.micro_batches * self.layout.replicas

    @property
    def evaluation_interval(self) -> int:
        """Iterations between two validations. A run has up to eight validations, the last at its end."""
        return self.iterations // max(count for count in range(1, 9) if self.iterations % count == 0)

    @property
    def parameters(self) -> int:
        """Number of weights of a GPT, with the tied embedding counted once."""
        hidden = self.model.hidden
        matrices = 12 * hidden**2
        vectors = 13 * hidden  # a layer has two norms of 2 vectors each, and biases of 3 + 1 + 4 + 1
        return self.layers * (matrices + vectors) + (self.model.vocabulary + self.model.sequence + 2) * hidden

    def flags(self) -> list[str]:
        """Return the flags that all variants share. They have no dropout, so that losses differ by the compression
        only.

        Weights begin with a standard deviation of hidden^-1/2, which is Megatron's 0.02 at a hidden size of 2500. At
        0.02, a model as narrow as these has residual streams that pass through zero early on, where a layer norm's
        gradient has no bound, and single iterations with fifty times the gradient hide the effect of compression.
        """
        model, layout = self.model, self.layout
        flags = f"""
            --pipeline-model-parallel-size {layout.stages} --num-layers {self.layers}
            --hidden-size {model.hidden} --num-attention-heads {model.heads}
            --seq-length {model.sequence} --max-position-embeddings {model.sequence}
            --hidden-dropout 0 --attention-dropout 0 --init-method-std {model.hidden**-0.5:.4f}
            --micro-batch-size {model.micro_batch} --global-batch-size {self.global_batch}
            --train-iters {self.iterations} --seed {self.seed}
            --lr {self.learning_rate} --min-lr {self.learning_rate / 10} --lr-decay-style cosine
            --lr-warmup-fraction 0.1 --adam-beta2 0.95 --weight-decay 0.01 --clip-grad 1.0
            --eval-interval {self.evaluation_interval} --eval-iters {self.evaluation_iterations}
            --split {100 - VALIDATION_SHARE},{VALIDATION_SHARE},0 --num-workers 0
            --tokenizer-type HuggingFaceTokenizer
            --log-interval 1 --log-timers-to-tensorboard --timing-log-level 0
            {f"--tensor-model-parallel-size {layout.tensor}" if layout.tensor > 1 else ""}
            {f"--lr-decay-iters {self.schedule}" if self.schedule else ""}
            {"--use-distributed-optimizer --bf16" if layout.sharded else ""}
            {model.flags}
        """
        if self.device != "cpu":
            # The fused kernels of these flags are off by default on a CPU; on a GPU they need Apex and Transformer
            # Engine, which the environment lacks.
            flags += """ --bf16 --transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion
                --no-persist-layer-norm --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion
                --no-bias-swiglu-fusion"""
        return shlex.split(flags)

    def check(self, text: PreparedData) -> None:
        """Refuse a layout that cannot divide the model, or a text with fewer tokens than the training reads.

        Raises:
            ExperimentError: names what does not fit, and the cure.
        """
        model, layout = self.model, self.layout
        words = shlex.split(model.flags)
        given = dict(pairwise(words))
        parts = {
            "attention heads": (model.heads, layout.tensor),
            "query groups": (int(given.get("--num-query-groups", model.heads)), layout.tensor),
            "replicas": (layout.replicas, int(given.get("--expert-model-parallel-size", 1))),
        }
        for name, (number, by) in parts.items():
            if number % by:
                raise ExperimentError(
                    f"layout {layout}: {number} {name} cannot be divided by {by}. Give another layout"
                )
        tokens = self.iterations * self.global_batch * model.sequence
        available = text.tokens * (100 - VALIDATION_SHARE) // 100
        if available < tokens:
            raise ExperimentError(
                f"{tokens:,} tokens are needed, and the text has {available:,} for training. Give a longer text, a"
                " larger --max-mb, or fewer --iterations"
            )

    def megatron_flags(self, data: PreparedData, tensorboard: Path | None = None) -> list[str]:
        """Return `flags` and the paths of the text and of the TensorBoard events."""
        paths = {
            "--data-path": data.data_prefix,
            "--tokenizer-model": data.tokenizer_dir,
            # The order of the sequences is part of the prepared data, and is replaced with it.
            "--data-cache-path": data.data_prefix.parent / "cache",
        } | ({"--tensorboard-dir": tensorboard} if tensorboard else {})
        return self.flags() + [word for flag, path in paths.items() for word in (flag, str(path))]

    def config_of(self, flags: Sequence[str], *, ignore_others: bool = False) -> OptimusConfig:
        """Return the configuration that the package makes of these flags on this layout.

        Raises:
            FlagError: a flag cannot work on this layout, or is not the package's, unless such flags are ignored.
        """
        layout = self.layout
        place = presets.Layout(
            stages=layout.stages, data_parallel=layout.replicas, tied_embeddings=self.model.tied,
            train_iters=self.iterations, seed=self.seed, distributed_optimizer=layout.sharded,
            master_copies=layout.sharded,
            expert_parallel=self.model.expert_parallel,
            row_width=presets.row_width_of(argparse.Namespace(hidden_size=self.model.hidden)),
        )  # fmt: skip
        return presets.config_of(flags, place, ignore_others=ignore_others)


def device_here(ranks: int) -> Device:
    """Return the device for `ranks` ranks on this machine: OPTIMUS_CC_DEVICE, or the best that the machine has for
    them.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return cast(Device, os.environ.get("OPTIMUS_CC_DEVICE") or device_for(ranks, gpus))
