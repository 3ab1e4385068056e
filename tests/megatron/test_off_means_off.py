"""Law: installed with every technique off, a run is bit-identical to vanilla Megatron."""

import pytest

from tests.megatron.optimus_runs import PP2_DP2, TP2_PP2_DP2, run_optimus
from tests.megatron_runs import run_megatron

DROPOUT = (
    "--hidden-dropout",
    "0.1",
    "--attention-dropout",
    "0.1",
    "--eval-interval",
    "2",
    "--eval-iters",
    "1",
)


@pytest.mark.parametrize("layout", [PP2_DP2, TP2_PP2_DP2], ids=["PP2xDP2", "TP2xPP2xDP2"])
def test_installed_and_off_is_bit_identical_to_vanilla(layout):
    world_size, flags = layout
    vanilla = run_megatron(world_size, [*flags, *DROPOUT])
    off = run_optimus(layout, DROPOUT)
    for rank in range(world_size):
        # Floats compared with ==: every loss, gradient norm and weight has the same bits.
        assert off[rank].losses == vanilla[rank].losses
        assert off[rank].evaluation_losses == vanilla[rank].evaluation_losses
        assert off[rank].grad_norms == vanilla[rank].grad_norms
        assert off[rank].weights == vanilla[rank].weights
        assert off[rank].random_states == vanilla[rank].random_states


def test_compression_does_not_draw_from_torchs_random_generators():
    vanilla = run_megatron(4, [*PP2_DP2[1], *DROPOUT])
    on = run_optimus(
        PP2_DP2, [*DROPOUT, "--optimus-cc", "--compressed-backprop-rank", "4", "--dp-compression-rank", "8"]
    )
    for rank in range(4):
        assert on[rank].random_states == vanilla[rank].random_states
    assert on[-1].losses != vanilla[-1].losses, "compression was on, and must have been felt"
