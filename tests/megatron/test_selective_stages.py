"""SC in Megatron: which stages are compressed, from which iteration on."""

from tests.megatron.optimus_runs import PP2_DP2, run_optimus
from tests.megatron_runs import last_stage_losses, run_megatron

SC = ("--dp-compression", "--dp-compression-rank", "4")


def test_only_the_first_n_stages_are_compressed():
    runs = run_optimus(PP2_DP2, [*SC, "--dp-compression-stages", "1"])
    for run in runs:
        raw, sent = run.probed["traffic"]["DP gradients"]
        if run.probed["stage"] == 0:
            assert run.probed["compressed_matrices"] > 0 and sent < raw
        else:
            assert run.probed["compressed_matrices"] == 0 and sent == raw


def test_warmup_is_vanilla_to_the_bit_and_compression_follows():
    vanilla = run_megatron(4, [*PP2_DP2[1], "--train-iters", "4"])
    runs = run_optimus(PP2_DP2, [*SC, "--train-iters", "4", "--dp-compression-warmup", "0.5"])
    expected, losses = last_stage_losses(vanilla), last_stage_losses(runs)
    # The loss of an iteration shows the updates before it: two uncompressed ones for the first three losses.
    assert losses[:3] == expected[:3]
    assert losses[3] != expected[3]
    assert runs[0].grad_norms[:2] == vanilla[0].grad_norms[:2]
    assert runs[0].grad_norms[2] != vanilla[0].grad_norms[2]


def test_counted_raw_traffic_is_what_vanilla_sends():
    off = run_optimus(PP2_DP2)
    on = run_optimus(PP2_DP2, ["--optimus-cc", "--compressed-backprop-rank", "4", "--dp-compression-rank", "4"])
    for vanilla, compressed in zip(off, on, strict=True):
        for traffic_class, (raw, sent) in vanilla.probed["traffic"].items():
            assert raw == sent, "nothing is compressed"
            assert compressed.probed["traffic"][traffic_class][0] == raw
