"""Shapes of a model: its matrices, their number, and how tensor and expert parallelism split them."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """One weight matrix of a layer, before any split."""

    inputs: int
    outputs: int
    split: Literal["outputs", "inputs", "none"]
    """Side that tensor-parallel ranks split; `none`: each holds the whole matrix."""

    layers: int
    """Number of layers that have this matrix."""

    bias: bool = False
    copies: int = 1
    """Number of matrices of this kind in a layer: the number of experts, or 1."""

    routed: bool = False
    """True for a matrix of a routed expert, which has a process group of its own."""

    router: bool = False

    @property
    def parameters(self) -> int:
        """Number of parameters in all layers, biases included."""
        return self.layers * self.copies * (self.inputs + self.bias) * self.outputs

    def on_rank(self, ranks: int) -> tuple[int, int]:
        """Return (inputs, outputs) on one of `ranks` tensor-parallel ranks."""
        by_inputs, by_outputs = (ranks if self.split == side else 1 for side in ("inputs", "outputs"))
        return self.inputs // by_inputs, self.outputs // by_outputs


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """A mixture of experts in place of a layer's MLP. Every expert is assumed to get equally many tokens."""

    experts: int
    top_k: int = 2
    ffn: int
    """Hidden size of a routed expert."""

    shared: int = 0
    """Hidden size of the shared experts together; 0: there are none."""

    layers: int
    """Number of layers with a mixture; the others have a dense MLP."""


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Sizes of multi-latent attention (MLA), with Megatron's defaults."""

    query_rank: int = 0
    """Size of the compressed queries; 0: queries are not compressed."""

    key_value_rank: int = 512
    head: int = 128
    positions: int = 64
    """Size of a head's part with rotary positions."""

    value: int = 128


@dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of a GPT, in numbers of values."""

    layers: int
    hidden: int
    heads: int
    sequence: int = 2048
    vocabulary: int = 51200
    """Size of the padded vocabulary, as Megatron pads it."""

    ffn: int = 0
    """Hidden size of the MLP; 0: four times `hidden`, or with `gated` two thirds of that."""

    groups: int = 0
    """Number of key and value heads; 0: as many as `heads`."""

    head_size: int = 0
    """Size of one head; 0: `hidden` divided by `heads`."""

    gated: bool = False
    """True for SwiGLU, whose MLP has three matrices."""

    tied: bool = True
    biases: bool = True
    """True if every linear layer has a bias."""

    qkv_bias: bool = False
    rms_norm: bool = False
    """True for norms without a bias."""

    head_norms: bool = False
    """True if queries and keys are normalised."""

    positions: int = 0
    """Number of learned positions; 0 for rotary ones."""

    mixture: Mixture | None = None
    latent: Latent | None = None
    predictors: int = 0
    """Number of layers of multi-token prediction (MTP), all on the last stage."""

    @property
    def inner(self) -> int:
        """The hidden size of a dense MLP."""
        return self.ffn or (int(4 * self.hidden * 2 / 3) // 64 * 64 if self.gated else 4 * self.hidden)

    @property
    def head_width(self) -> int:
        """The number of values of a head's query."""
        if self.latent:
            return self.latent.head + self.latent.positions
        return self.head_size or self.hidden // self.heads

    @property
    def attention(self) -> tuple[Matrix, ...]:
        """The matrices of attention, in the order of the forward pass."""
        hidden, heads = self.hidden, self.heads

        def matrix(
            inputs: int, outputs: int, split: Literal["outputs", "inputs", "none"], bias: bool = False
        ) -> Matrix:
            return Matrix(inputs=inputs, outputs=outputs, split=split, layers=self.layers, bias=bias)

        if (latent := self.latent) is None:
            qkv = self.head_width * (heads + 2 * (self.groups or heads))
            return matrix(hidden, qkv, "outputs", self.biases or self.qkv_bias), matrix(
                heads * self.head_width, hidden, "inputs", self.biases
            )
        query = latent.query_rank
        return (
            *([matrix(hidden, query, "none")] if query else []),
            matrix(query or hidden, heads * self.head_width, "outputs"),
            matrix(hidden, latent.key_value_rank + latent.positions, "none"),
            matrix(latent.key_value_rank, heads * (latent.head + latent.value), "outputs"),
            matrix(heads * latent.value, hidden, "inputs", self.biases),
        )

    def _mlp(self, inner: int, layers: int, *, bias: bool, copies: int = 1, routed: bool = False) -> tuple[Matrix, ...]:
        up, back = inner * (2 if self.gated else 1), inner
        return (
            Matrix(
                inputs=self.hidden, outputs=up, split="outputs", layers=layers, bias=bias, copies=copies, routed=routed
            ),
            Matrix(
                inputs=back, outputs=self.hidden, split="inputs", layers=layers, bias=bias, copies=copies, routed=routed
            ),
        )

    @property
    def dense_layers(self) -> int:
        """The number of layers with a dense MLP."""
        return self.layers - (self.mixture.layers if self.mixture else 0)

    @property
    def mlp(self) -> tuple[Matrix, ...]:
        """The two matrices of the dense MLP; empty if no layer has one."""
        return self._mlp(self.inner, self.dense_layers, bias=self.biases) if self.dense_layers else ()

    @property
    def shared_experts(self) -> tuple[Matrix, ...]:
        """The two matrices of the shared experts; empty if there are none."""
        mixture = self.mixture
        return self._mlp(mixture.shared, mixture.layers, bias=False) if mixture and mixture.shared else ()

    @property
    def routed_experts(self) -> tuple[Matrix, ...]:
        """The router's matrix and the two matrices of every routed expert; empty without a mixture."""
        if (mixture := self.mixture) is None:
            return ()
        router = Matrix(
            inputs=self.hidden, outputs=mixture.experts, split="none", layers=mixture.layers, router=True
        )  # fmt: skip
        return router, *self._mlp(
            mixture.ffn, mixture.layers, bias=self.biases, copies=mixture.experts, routed=True
        )  # fmt: skip

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The matrices of all layers, without embeddings and MTP."""
        return *self.attention, *self.mlp, *self.shared_experts, *self.routed_experts

    def norm(self, width: int) -> int:
        """Return the number of parameters of a norm over `width` values."""
        return width if self.rms_norm else 2 * width

    @property
    def _vectors(self) -> int:
        """The number of parameters of a layer's norms."""
        normed = 0
        if self.head_norms and self.latent:
            normed = self.norm(self.latent.query_rank) + self.norm(self.latent.key_value_rank)
        elif self.head_norms:
            normed = 2 * self.norm(self.head_width)
        return 2 * self.norm(self.hidden) + normed

    @cached_property
    def routed_parameters(self) -> int:
        """Number of parameters of all routed experts."""
        return sum(matrix.parameters for matrix in self.matrices if matrix.routed)

    @cached_property
    def shared_parameters(self) -> int:
        """Number of parameters of all layers without the routed experts, biases and norms included."""
        return self.layers * self._vectors + sum(each.parameters for each in self.matrices if not each.routed)

    @cached_property
    def layer_parameters(self) -> int:
        """Mean number of parameters of a layer without routed experts."""
        return self.shared_parameters // self.layers

    @property
    def predictor_parameters(self) -> int:
        """Number of parameters of the MTP layers, which are like the last layer, without routed experts."""
        joint = 2 * self.hidden * self.hidden + 3 * self.norm(self.hidden)
        kinds = (
            (self.attention, self.shared_experts, self.routed_experts[:1])
            if self.mixture
            else (self.attention, self.mlp)
        )
        layer = sum(each.parameters // each.layers for kind in kinds for each in kind)
        return self.predictors * (joint + self._vectors + layer)

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters of the token embedding."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        predicted = self.predictor_parameters
        if self.mixture:
            predicted += self.predictors * self.routed_parameters // self.mixture.layers
        ends = self.embedding_parameters * (1 if self.tied else 2) + self.positions * self.hidden
        return self.shared_parameters + self.routed_parameters + predicted + ends + self.norm(self.hidden)


_LLAMA = Model(
    layers=1, hidden=1, heads=1, groups=8, sequence=8192, vocabulary=128256, gated=True, tied=False, biases=False,
    rms_norm=True,
)  # fmt: skip
_QWEN = replace(_LLAMA, groups=4, head_size=128, sequence=4096, vocabulary=151936, head_norms=True)

MODELS = {
    "2.5b": Model(layers=52, hidden=1920, heads=24, sequence=1024, vocabulary=51200),
    "8.3b": Model(layers=72, hidden=3072, heads=24, sequence=1024, vocabulary=51200),
    "18b": Model(layers=40, hidden=6144, heads=48),
    "39b": Model(layers=48, hidden=8192, heads=64),
    "76b": Model(layers=60, hidden=10240, heads=80),
    "175b": Model(layers=96, hidden=12288, heads=96),
    "530b": Model(layers=105, hidden=20480, heads=128),
    "1t": Model(layers=128, hidden=25600, heads=160),
    "llama3-8b": replace(_LLAMA, layers=32, hidden=4096, heads=32, ffn=14336),
    "llama3-70b": replace(_LLAMA, layers=80, hidden=8192, heads=64, ffn=28672),
    "llama3.1-405b": replace(_LLAMA, layers=126, hidden=16384, heads=128, ffn=53248),
    "qwen3-30b": replace(_QWEN, layers=48, hidden=2048, heads=32, mixture=Mixture(
        experts=128, top_k=8, ffn=768, layers=48
    )),
    "qwen3-235b": replace(_QWEN, layers=94, hidden=4096, heads=64, mixture=Mixture(
        experts=128, top_k=8, ffn=1536, layers=94
    )),
    "deepseek-v3": replace(
        _LLAMA, layers=61, hidden=7168, heads=128, groups=0, sequence=4096, vocabulary=129280, ffn=18432,
        head_norms=True, predictors=1, latent=Latent(query_rank=1536),
        mixture=Mixture(experts=256, top_k=8, ffn=2048, shared=2048, layers=58),
    ),
    "gpt-oss-120b": Model(
        layers=36, hidden=2880, heads=64, head_size=64, groups=8, sequence=4096, vocabulary=201088, gated=True,
        tied=False, rms_norm=True, mixture=Mixture(experts=128, top_k=4, ffn=2880, layers=36),
    ),
}  # fmt: skip
"""The paper's two models (section 9), those of Narayanan et al. 2021 (table 1), and six of today's, with the shapes of
Megatron-Bridge's recipes; GPT-OSS attends to all tokens here; half of its layers really attend to 128 only.
"""
