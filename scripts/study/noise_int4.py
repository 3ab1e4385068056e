"""Training of vanilla Megatron with Gaussian noise of the size of int4's rounding error on every replica's gradients.

torchrun ... -m optimus_cc_ext scripts/study/noise_int4.py <Megatron's flags>
"""

import functools

from optimus_cc_ext.compressors.formats import format_named
from scripts.study.noise import block_noise, train_with

if __name__ == "__main__":
    train_with(functools.partial(block_noise, error=format_named("int4").gaussian_error))
