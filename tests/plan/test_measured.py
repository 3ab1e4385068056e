"""Plans calibrated on the user's own measurements: a log of Megatron, and a table of nccl-tests."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from optimus_cc_ext import cli
from optimus_cc_ext.plan import PlanError
from optimus_cc_ext.plan.flags import job_of
from optimus_cc_ext.plan.hardware import CLUSTERS, Cluster
from optimus_cc_ext.plan.iteration import iteration
from optimus_cc_ext.plan.measured import calibrated, read_run, with_nccl_tests
from optimus_cc_ext.plan.seconds import Group, all_reduce, all_to_all

ARGUMENTS = {
    "world_size": 32, "num_layers": 52, "hidden_size": 1920, "num_attention_heads": 20, "seq_length": 1024,
    "padded_vocab_size": 51200, "tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2,
    "micro_batch_size": 2, "global_batch_size": 64, "bf16": True, "use_distributed_optimizer": True,
    "add_bias_linear": True, "gradient_accumulation_fusion": True, "attention_backend": "AttnBackend.auto",
    "cp_comm_type": "['p2p']", "moe_token_dispatcher_type": "allgather", "q_lora_rank": None, "fp8": None,
}  # fmt: skip
FLAGS = ["--num-layers", "52", "--hidden-size", "1920", "--num-attention-heads", "20", "--seq-length", "1024",
         "--padded-vocab-size", "51200", "--tensor-model-parallel-size", "4", "--pipeline-model-parallel-size", "2",
         "--micro-batch-size", "2", "--global-batch-size", "64", "--use-distributed-optimizer"]  # fmt: skip
SECONDS = (9.0, 2.1, 2.0, 2.02, 1.98, 2.0)


def log(folder: Path, seconds: Sequence[float] = SECONDS, more: str = "", **arguments: object) -> Path:
    """Write what Megatron's first and last rank print, each to a file of its own; return the folder."""
    table = "".join(f"  {name} {'.' * 20} {value}\n" for name, value in (ARGUMENTS | arguments).items() if value != "")
    (folder / "host0.txt").write_text(f"------ arguments ------\n{table}--- end of arguments ---\n{more}\n")
    (folder / "host1.txt").write_text(
        "".join(
            f" [2026-01-01] iteration {count:>8}/{len(seconds):>8} | consumed samples: 64 | elapsed time per iteration "
            f"(ms): {1e3 * each:.1f} | learning rate: 1E-4 | lm loss: 7.1E+00 | loss scale: 1.0 |\n"
            for count, each in enumerate(seconds, 1)
        )
    )
    return folder


def test_a_log_gives_the_job_and_the_seconds_of_its_second_half(tmp_path: Path) -> None:
    run = read_run(log(tmp_path))
    expected, _ = job_of(FLAGS, 32)
    assert run.job == expected and run.seconds == 2.0 and run.lines == 6
    assert 0 < run.spread < 0.02


def test_arguments_without_16_bits_are_a_job_in_fp32(tmp_path: Path) -> None:
    job = read_run(log(tmp_path, bf16=False, add_bias_linear=False, disable_bias_linear=None)).job
    assert (job.precision, job.value_bytes, job.gradient_bytes, job.model.biases) == ("fp32", 4, 4, False)


def test_a_mixtures_arguments_are_read(tmp_path: Path) -> None:
    job = read_run(
        log(tmp_path, num_experts=8, expert_model_parallel_size=4, expert_tensor_parallel_size=1,
            moe_layer_freq="[0, " + ", ".join("1" * 51) + "]", moe_token_dispatcher_type="alltoall")
    ).job  # fmt: skip
    assert job.model.mixture and (job.model.mixture.layers, job.ep, job.dispatcher) == (51, 4, "alltoall")


def test_an_option_of_the_log_that_no_plan_contains_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = log(tmp_path, window_size="(128, 0)", recompute_modules="['core_attn']")
    assert cli.main(["plan", "--cluster", "a100-100gbe", "--from", str(path)]) == 0
    said = capsys.readouterr().out
    assert "left out: --window-size 128 0 (attention to a window" in said and "--recompute-modules" not in said


def test_vanilla_takes_the_logs_seconds_after_calibration(tmp_path: Path) -> None:
    run = read_run(log(tmp_path))
    cluster = calibrated(CLUSTERS["a100-100gbe"], run)
    assert iteration(cluster, run.job).seconds == pytest.approx(2.0, rel=1e-6)
    assert cluster.error == pytest.approx(max(run.spread, 0.01))
    assert cluster.coding_scale == pytest.approx(cluster.software_scale) and cluster.software_scale > 2


def test_the_answer_is_about_the_log_and_on_other_nodes_has_the_published_band(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--cluster", "a100-100gbe", "--from", str(log(tmp_path))]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert f"calibrated on {tmp_path}: 2.000 s an iteration (median of the last 3 of 6" in said
    assert "vanilla: 2.000 s per iteration" in said and "(iterations of the log within 1 %)" in said
    assert "2.4B parameters on 32 x A100, 8 on each node" in said and "DP gradients: yes" in said
    assert cli.main([*words, "--nodes", "8"]) == 0
    said = capsys.readouterr().out
    assert "on 64 x A100" in said and "within 16 %" in said


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"world_size": ""}, "no argument world_size: give a log with the table 'arguments'"),
        ({"seconds": SECONDS[:3]}, "3 lines with 'elapsed time per iteration (ms)', at least 4 are needed"),
        ({"more": "optimus-cc: compressed activations (int8) on megatron-core 0.19.2"}, "the run is compressed"),
        ({"seconds": [1e-4] * 6}, "messages alone take"),
        ({"hidden_size": ""}, "no argument hidden_size: give a log with the table"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp: not modelled"),
    ],
)
def test_a_log_that_cannot_be_used_is_refused_with_what_is_missing(
    tmp_path: Path, changes: dict[str, object], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = log(tmp_path, **changes)  # type: ignore[arg-type]
    assert cli.main(["plan", "--cluster", "a100-100gbe", "--from", str(path)]) == 2
    said = capsys.readouterr().err
    assert complaint in said and said.count("\n") == 1
    assert cli.main(["plan", "--from", str(path)]) == 2
    assert "give --cluster, which the log of --from does not say" in capsys.readouterr().err
    assert cli.main(["plan", "--cluster", "a100-100gbe", "--from", str(tmp_path / "none")]) == 2
    assert "give a log, or a folder with *.txt" in capsys.readouterr().err


def nccl_tests(cluster: Cluster, name: str, ranks: int, per_node: int) -> str:
    """Return what nccl-tests would print on `cluster`."""
    travel, group = {"all_reduce_perf": all_reduce, "alltoall_perf": all_to_all}[name], Group(ranks, per_node, 1)
    places = "".join(
        f"#  Rank {rank:>2} Group  0 Pid 1 on   node{rank // per_node} device {rank % per_node} [0x07] A100\n"
        for rank in range(ranks)
    )
    rows = "".join(
        f"{size:>12} {size // 4:>12} float sum -1 {1e6 * travel(cluster, group, size):.2f} 0.0 0.0 0 1.0 0.0 0.0 0\n"
        for size in (8, 1 << 20, 1 << 30)
    )
    return f"# {name}\n#\n# Using devices\n{places}#\n#       size count type redop root time algbw busbw\n{rows}"


@pytest.mark.parametrize("name", ["all_reduce_perf", "alltoall_perf"])
def test_nccl_tests_give_rate_and_latency_of_the_network(tmp_path: Path, name: str) -> None:
    true, path = CLUSTERS["a100-100gbe"], tmp_path / "out.txt"
    path.write_text(nccl_tests(true, name, 16, 8))
    wrong = replace(true, network=replace(true.network, node_rate=1e9, hop=1e-3))
    found, said = with_nccl_tests(wrong, path)
    assert found.network.node_rate == pytest.approx(true.network.node_rate, rel=0.02)
    assert found.network.hop == pytest.approx(true.network.hop, rel=0.05)
    assert f"{name} over 16 ranks on 2 nodes: 10 GB/s a node" in said


def test_nccl_tests_inside_a_node_give_nvlinks_rate(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    path.write_text(nccl_tests(CLUSTERS["h100-ndr400"], "all_reduce_perf", 8, 8))
    found, _ = with_nccl_tests(CLUSTERS["a100-100gbe"], path)
    assert found.gpu.nvlink == pytest.approx(CLUSTERS["h100-ndr400"].gpu.nvlink, rel=0.02)
    assert found.network == CLUSTERS["a100-100gbe"].network


@pytest.mark.parametrize(
    ("lost", "complaint"),
    [
        ("all_reduce_perf", "it lacks the name all_reduce_perf"),
        ("#  Rank", "it lacks lines '#  Rank"),
        ("float", "it lacks a table"),
    ],
)
def test_another_output_is_refused_with_what_is_missing(tmp_path: Path, lost: str, complaint: str) -> None:
    path = tmp_path / "out.txt"
    path.write_text(nccl_tests(CLUSTERS["paper"], "all_reduce_perf", 16, 8).replace(lost, "#"))
    with pytest.raises(PlanError, match=complaint):
        with_nccl_tests(CLUSTERS["paper"], path)
