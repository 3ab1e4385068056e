"""Computes the traffic of a rank, so that small models can be given a large model's proportions."""

import math
from dataclasses import dataclass

from scripts.experiments.models import Layout, Model


@dataclass(frozen=True)
class Proportions:
    """Number of values that one rank sends in an iteration without compression, by class."""

    dp: float
    """Number of values of a stage's layers' gradients, sent by a ring all-reduce over the replicas."""

    forward: float
    """Number of values of activations for the next stage; their gradients for the stage before are as many."""

    embedding: float
    """Number of values of one copy of the tied embedding on this rank."""

    embedding_share: float
    """`embedding` as a fraction of the parameters of a stage's layers."""

    @property
    def dp_to_forward(self) -> float:
        """Ratio of gradients to the pipeline's forward traffic; NaN without a pipeline."""
        return self.dp / self.forward if self.forward else math.nan

    def __str__(self) -> str:
        return (
            f"{self.dp / 1e6:.3g} M values of gradients, {self.forward / 1e6:.3g} M forward and as many backward,"
            f" DP {self.dp_to_forward:.1f} times forward, embedding {self.embedding_share:.1%} of a stage's layers"
        )


PAPER = Proportions(dp=390e6, forward=50e6, embedding=20e6, embedding_share=20 / 255)
"""Traffic of the 8.3B model at TP8 PP4 DP4 (arXiv 2301.09830), where the tensor-parallel ranks share the work of
sending an activation. 18 layers of a stage are 255 M values a rank, and a ring over 4 replicas sends 1.5 times as many.
"""


def proportions(model: Model, layout: Layout) -> Proportions:
    """Return the traffic of a rank of a middle stage, with 12 hidden^2 values in each layer.

    Without sequence parallelism, every tensor-parallel rank sends whole activations.
    """
    layers = 12 * model.hidden**2 * model.layers_per_stage / layout.tensor
    tokens = model.sequence * model.micro_batch * model.micro_batches
    embedding = model.vocabulary * model.hidden / layout.tensor
    forward = float(tokens * model.hidden) if layout.stages > 1 else 0.0
    return Proportions(layers * 2 * (layout.replicas - 1) / layout.replicas, forward, embedding, embedding / layers)
