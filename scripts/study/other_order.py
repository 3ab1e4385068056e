"""Training of the package's own entry point with the same batches, last first, which shows the effect of their order
alone.

torchrun ... -m optimus_cc_ext scripts/study/other_order.py <Megatron's flags>
"""

import functools
from typing import Any

from megatron.training import get_args
from torch.utils.data import Subset

from optimus_cc_ext.tools import pretrain_gpt

build_datasets = pretrain_gpt.build_datasets


@functools.wraps(build_datasets)  # the copy keeps `is_distributed`, which Megatron reads
def build_last_first(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Build the datasets of training, validation and test; the samples of the training dataset are in reverse order."""
    training, *others = build_datasets(*args, **kwargs)
    samples = get_args().train_iters * get_args().global_batch_size
    return (training and Subset(training, range(samples - 1, -1, -1)), *others)


if __name__ == "__main__":
    pretrain_gpt.build_datasets = build_last_first
    pretrain_gpt.main()
