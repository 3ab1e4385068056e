"""`install(OptimusConfig(...))`, for those with their own training loop: no flags of ours on any command line."""

import pytest

import optimus_cc_ext
from optimus_cc_ext import OptimusConfig
from tests.megatron.optimus_runs import PP2_DP2, install, run_optimus

FLAGS = ["--optimus-cc", "--compressed-backprop-rank", "4", "--dp-compression-rank", "4"]


def _install_with_config() -> None:
    optimus_cc_ext.install(
        OptimusConfig(
            compressed_backprop=True,
            compressed_backprop_rank=4,
            fused_embedding_sync=True,
            dp_compression=True,
            dp_compression_rank=4,
            compression_seed=1234,  # Megatron's default --seed, which the flags take
            compression_forecast=False,
        )
    )


def test_a_configuration_and_its_flags_train_alike():
    by_flags = run_optimus(PP2_DP2, FLAGS)
    by_config = run_optimus(PP2_DP2, before=_install_with_config, ours_are_known=False)
    for a, b in zip(by_flags, by_config, strict=True):
        assert a.losses == b.losses
        assert a.weights == b.weights
        assert a.probed["traffic"] == b.probed["traffic"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--use-distributed-optimizer", "--ddp-reduce-scatter-with-fp32-accumulation"], "--ddp-reduce-scatter"),
        (["--untie-embeddings-and-output-weights"], "--fused-embedding-sync"),
    ],
)
def test_what_is_not_supported_is_refused_there_too(flags, named):
    with pytest.raises(AssertionError, match=named):
        run_optimus(PP2_DP2, flags, before=_install_with_config, ours_are_known=False, timeout=60)


def _install_and_uninstall() -> None:
    install()
    optimus_cc_ext.uninstall()


def test_uninstall_gives_megatron_back():
    from tests.megatron_runs import run_megatron

    vanilla = run_megatron(4, PP2_DP2[1])
    after = run_megatron(4, PP2_DP2[1], before=_install_and_uninstall)
    assert [run.losses for run in after] == [run.losses for run in vanilla]
    assert [run.weights for run in after] == [run.weights for run in vanilla]
