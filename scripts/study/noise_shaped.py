"""Training of vanilla Megatron whose replicas' gradients have random weights, so that their sum gets noise with the
covariance of its own noise.

torchrun ... -m optimus_cc_ext scripts/study/noise_shaped.py <Megatron's flags>
"""

import torch
from megatron.core import parallel_state
from megatron.training import get_args

from scripts.study.law import SHAPED
from scripts.study.noise import train_with


def weights(replicas: int, seed: int) -> torch.Tensor:
    """Return what is added to the replicas' weights of 1: values of the standard deviation `SHAPED` whose sum is 0."""
    values = torch.randn(replicas, generator=torch.Generator().manual_seed(seed))
    return SHAPED * (replicas / (replicas - 1)) ** 0.5 * (values - values.mean())


def weighted(gradients: torch.Tensor, generator: torch.Generator) -> None:
    """Multiply this replica's gradients by its weight in this iteration, which is that of all its buckets and stages.

    The generator is not used: it differs from rank to rank, and all ranks have to draw the same weights.
    """
    args = get_args()
    drawn = weights(parallel_state.get_data_parallel_world_size(), 1_000_003 * args.seed + args.curr_iteration)
    gradients.mul_(1 + float(drawn[parallel_state.get_data_parallel_rank()]))


if __name__ == "__main__":
    train_with(weighted)
