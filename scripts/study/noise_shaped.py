"""Training of vanilla Megatron in which each replica's gradients are multiplied by a random weight. This adds noise to
their sum that has the covariance of the noise which the sum has anyway.

torchrun ... -m optimus_cc_ext scripts/study/noise_shaped.py <Megatron's flags>
"""

import torch
from megatron.core import parallel_state
from megatron.training import get_args

from scripts.study.law import SHAPED
from scripts.study.noise import train_with


def weights(replicas: int, seed: int) -> torch.Tensor:
    """Return one random number for each replica, with mean 0 and standard deviation `SHAPED`. Their sum is 0."""
    values = torch.randn(replicas, generator=torch.Generator().manual_seed(seed))
    return SHAPED * (replicas / (replicas - 1)) ** 0.5 * (values - values.mean())


def weighted(gradients: torch.Tensor, generator: torch.Generator) -> None:
    """Multiply this replica's gradients by 1 plus its random number of this iteration.

    All buckets and stages of a replica have the same number. The generator is not used, because each rank has another
    one, and all ranks have to draw the same numbers.
    """
    args = get_args()
    drawn = weights(parallel_state.get_data_parallel_world_size(), 1_000_003 * args.seed + args.curr_iteration)
    gradients.mul_(1 + float(drawn[parallel_state.get_data_parallel_rank()]))


if __name__ == "__main__":
    train_with(weighted)
