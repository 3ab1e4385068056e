"""Training of vanilla Megatron with noise of 1e-6 on every gradient, which shows how far any change of the rounding
moves a model.

torchrun ... -m optimus_cc_ext scripts/study/noise_1e6.py <Megatron's flags>
"""

from scripts.study.noise import relative_noise, train_with

if __name__ == "__main__":
    train_with(relative_noise)
