"""Plans calibrated on the user's own measurements: a log of Megatron, and a table of nccl-tests."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from optimus_cc_ext.tools import cli
from optimus_cc_ext.tools.plan import PlanError
from optimus_cc_ext.tools.plan.flags import job_of
from optimus_cc_ext.tools.plan.hardware import CLUSTERS
from optimus_cc_ext.tools.plan.iteration import iteration
from optimus_cc_ext.tools.plan.measured import calibrated, read_run
from optimus_cc_ext.tools.plan.nccl_tests import with_nccl_tests
from tests.plan.nccl_output import nccl_tests

ARGUMENTS = {
    "world_size": 32, "num_layers": 52, "hidden_size": 1920, "num_attention_heads": 20, "seq_length": 1024,
    "padded_vocab_size": 51200, "tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2,
    "micro_batch_size": 2, "global_batch_size": 64, "bf16": True, "use_distributed_optimizer": True,
    "add_bias_linear": True, "gradient_accumulation_fusion": True,
    "cp_comm_type": "['p2p']", "moe_token_dispatcher_type": "allgather", "q_lora_rank": None, "fp8": None,
}  # fmt: skip
FLAGS = ["--num-layers", "52", "--hidden-size", "1920", "--num-attention-heads", "20", "--seq-length", "1024",
         "--padded-vocab-size", "51200", "--tensor-model-parallel-size", "4", "--pipeline-model-parallel-size", "2",
         "--micro-batch-size", "2", "--global-batch-size", "64", "--use-distributed-optimizer"]  # fmt: skip
SECONDS = (9.0, 2.1, 2.0, 2.02, 1.98, 2.0)


def log(folder: Path, seconds: Sequence[float] = SECONDS, more: str = "", **arguments: object) -> Path:
    """Write what Megatron's first and last rank print, each to a file of its own; return the folder."""
    table = "".join(
        f"  {name} {'.' * (48 - len(name))} {value}\n" for name, value in (ARGUMENTS | arguments).items() if value != ""
    )
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


def test_an_empty_value_of_another_argument_may_lose_its_blank(tmp_path: Path) -> None:
    folder = log(tmp_path, config_logger_dir=" ")
    text = (folder / "host0.txt").read_text()
    (folder / "host0.txt").write_text("\n".join(line.rstrip() for line in text.splitlines()))
    assert read_run(folder).seconds == 2.0


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


def test_a_compressed_runs_log_counts_by_the_dense_seconds_of_its_trial(tmp_path: Path) -> None:
    seconds = "optimus-cc: iterations 3 to 8: dense 1.2 s (1.1 to 1.34), balanced 0.9 s (0.8 to 1): balanced stays on"
    run = read_run(log(tmp_path, more=f"optimus-cc: tied embedding (int8) on megatron-core 0.19.2\n{seconds}"))
    assert run.seconds == 1.2 and run.spread == pytest.approx(0.1)
    assert run.job == read_run(log(tmp_path)).job
    (line, *_) = run.words(1.0, CLUSTERS["paper"])
    assert "1.200 s an iteration (dense iterations of its trial)" in line


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"world_size": ""}, "has no argument world_size: give a whole log"),
        ({"seconds": SECONDS[:3]}, "3 lines with 'elapsed time per iteration (ms)' after line 0, at least 4"),
        ({"more": "optimus-cc: pipeline forward (int8) on megatron-core 0.19.2"}, "the run is compressed"),
        ({"seconds": [1e-4] * 6}, "messages alone take"),
        ({"hidden_size": ""}, "has no argument hidden_size: give a whole log"),
        ({"hidden_size": "19\n"}, "19 hidden do not divide"),
        ({"data_parallel_size": 3}, "tensor x pipeline x context x data-parallel size is 24, and world_size 32"),
        ({"more": "setting number of microbatches to constant 9"}, "9 micro-batches are logged, 8 follow"),
        ({"more": " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 99"}, "99 parameters"),
        ({"more": "using world size: 64"}, "another run begins here without its table of arguments"),
        ({"encoder_seq_length": 512}, "seq_length is 1024, and encoder_seq_length 512"),
        ({"more_than_the_planner_reads": "\n  num_exper"}, "argument 'num_exper' has no value: the line is cut"),
        ({"swiglu": "Tru"}, "swiglu 'Tru' is neither True nor False"),
        ({"tensor_model_parallel_size": ""}, "has no argument tensor_model_parallel_size"),
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


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("name", ["all_reduce_perf", "alltoall_perf", "all_gather_perf"])
def test_nccl_tests_give_rate_and_latency_of_the_network(tmp_path: Path, name: str, old: bool) -> None:
    true, path = CLUSTERS["a100-100gbe"], tmp_path / "out.txt"
    path.write_text(nccl_tests(true, name, 16, 8, old=old))
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
    ("lost", "instead", "complaint"),
    [
        ("all_reduce_perf", "test", "neither the lines before nor the file's name say all_reduce_perf"),
        ("Rank ", "", "no line '#  Rank  0 .. on HOST' up to here"),
        ("     float", "# float", "no row of sizes follows"),
        ("node1", "node0", "two ranks have one host and one GPU"),
        ("Rank  1", "Rank  0", "another one has its number (nccl-tests built without MPI=1"),
        ("Rank 15", "Pid 15", "15 ranks are listed from here on, and a bus rate of"),
        ("maxBytes 8589934592", "maxBytes 17179869184", "the table ends at 8589934592 bytes, and -e says more"),
    ],
)
def test_another_output_is_refused_with_the_line(tmp_path: Path, lost: str, instead: str, complaint: str) -> None:
    path = tmp_path / "out.txt"
    said = nccl_tests(CLUSTERS["h100-ndr400"], "all_reduce_perf", 16, 8).replace(lost, instead)
    path.write_text("\n".join("#" + line if "# float" in line else line for line in said.splitlines()))
    with pytest.raises(PlanError, match=re.escape(complaint)):
        with_nccl_tests(CLUSTERS["paper"], path)


def test_two_collectives_in_one_file_are_refused_and_two_tests_of_one_give_the_last(tmp_path: Path) -> None:
    path, (slow, fast) = tmp_path / "out.txt", (CLUSTERS["10gbe"], CLUSTERS["a100-100gbe"])
    path.write_text(nccl_tests(slow, "all_reduce_perf", 16, 8) + nccl_tests(fast, "alltoall_perf", 16, 8))
    with pytest.raises(PlanError, match="all_reduce_perf and alltoall_perf are in one file"):
        with_nccl_tests(CLUSTERS["paper"], path)
    path.write_text(nccl_tests(slow, "all_reduce_perf", 16, 8) + nccl_tests(fast, "all_reduce_perf", 16, 8))
    assert with_nccl_tests(slow, path)[0].network.node_rate == pytest.approx(fast.network.node_rate, rel=0.02)


def test_a_table_of_large_sizes_gives_the_rate_and_leaves_the_latency(tmp_path: Path) -> None:
    true, path = CLUSTERS["a100-100gbe"], tmp_path / "out.txt"
    for sizes in ((1 << 34,), (1 << 28, 1 << 29, 1 << 30)):
        path.write_text(nccl_tests(true, "all_reduce_perf", 2, 1, sizes=sizes))
        found, _ = with_nccl_tests(CLUSTERS["10gbe"], path)
        assert found.network.node_rate == pytest.approx(true.network.node_rate, rel=0.02)
        assert found.network.hop == CLUSTERS["10gbe"].network.hop


def test_small_messages_give_no_rate(tmp_path: Path) -> None:
    """The form of NVIDIA/nccl-tests 314: one process, alltoall up to 4 MB, which latency limits."""
    path = tmp_path / "out.txt"
    path.write_text(nccl_tests(CLUSTERS["h100-ndr400"], "alltoall_perf", 8, 8, sizes=(1 << 20, 1 << 21, 1 << 22)))
    with pytest.raises(PlanError, match="the largest message has 4194304 bytes, which gives no rate"):
        with_nccl_tests(CLUSTERS["h100-ndr400"], path)


def test_forms_of_public_reports_give_the_same_rate(tmp_path: Path) -> None:
    """Forms: without '#', every GPU on bus 0x00 (NVIDIA/nccl 583); binaries named all_reduce_perf_mpi
    (nebius/soperator 428).
    """
    true, path = CLUSTERS["a100-100gbe"], tmp_path / "out.txt"
    said = nccl_tests(true, "all_reduce_perf", 16, 8, old=True)
    for form in (re.sub(r"\[0x\w+\]", "[0x00]", said.replace("#", "")), said.replace("_perf", "_perf_mpi")):
        path.write_text(form)
        found, _ = with_nccl_tests(CLUSTERS["10gbe"], path)
        assert found.network.node_rate == pytest.approx(true.network.node_rate, rel=0.02)


def logged(run: Path, count: int = 6, *, seconds: float = 2.0, batch: int = 64, first: int = 1) -> None:
    """Append iterations to what the last rank printed."""
    with (run / "host1.txt").open("a") as stream:
        for step in range(first, first + count):
            stream.write(f" iteration {step:>8}/     900 | elapsed time per iteration (ms): {1e3 * seconds:.1f} | "
                         f"global batch size: {batch:5d} | loss scale: 1.0 |\n")  # fmt: skip


def test_only_iterations_of_the_arguments_batch_count(tmp_path: Path) -> None:
    run = log(tmp_path, seconds=())
    logged(run, batch=16, seconds=0.5)
    with pytest.raises(PlanError, match=r"host1.txt, line 6: global_batch_size 16, and 64 in the arguments"):
        read_run(run)
    logged(run, first=7)
    assert (read_run(run).seconds, read_run(run).lines) == (2.0, 6)


def test_a_log_without_arguments_takes_them_from_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logged(tmp_path)
    words = ["plan", "--cluster", "a100-100gbe", "--from", str(tmp_path)]
    assert cli.main(words) == 2
    assert "no table 'arguments'" in capsys.readouterr().err
    assert cli.main([*words, "--nodes", "4", "--", *FLAGS]) == 0
    assert "vanilla: 2.000 s per iteration" in capsys.readouterr().out
    assert cli.main([*words, "--nodes", "4", "--", *FLAGS, "--global-batch-size", "128"]) == 2
    assert "line 6: global_batch_size 64, and 128 in the arguments" in capsys.readouterr().err


def test_one_number_of_seconds_calibrates(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--cluster", "a100-100gbe", "--nodes", "4", "--seconds", "2", "--", *FLAGS]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "calibrated on --seconds: 2.000 s an iteration (as given)" in said and "vanilla: 2.000 s" in said
    assert cli.main([*words[:6], "0", *words[7:]]) == 2
    assert "--seconds: 0 is not a positive number" in capsys.readouterr().err


def test_what_is_doubtful_about_a_log_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rising = [2.0 + 0.1 * step for step in range(20)]
    assert cli.main(["plan", "--cluster", "a100-100gbe", "--from", str(log(tmp_path, seconds=rising))]) == 0
    said = capsys.readouterr().out
    assert "doubtful: the iterations behind it are not steady, +16 % from their first to their second half" in said
    assert "times is outside of 0.6 to 1.7. The whole difference was put on computation: check --cluster" in said


def test_a_layout_that_ran_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = log(tmp_path, hidden_size=9600, micro_batch_size=4, seconds=[40.0] * 6)
    assert cli.main(["plan", "--cluster", "a100-hdr200", "--from", str(run)]) == 0
    capsys.readouterr()
    assert cli.main(["plan", "--cluster", "a100-hdr200", "--nodes", "4", "--", *read_run(run).flags]) == 2
    assert "it does not fit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("older", "flags"),
    [
        ({"tensor_model_parallel_size": "", "pipeline_model_parallel_size": "", "model_parallel_size": 4}, (4, 1)),
        ({"tensor_model_parallel_size": "", "intra_layer_model_parallel_size": 2}, (2, 2)),
        ({"checkpoint_activations": True}, (4, 2)),
    ],
)
def test_arguments_of_older_megatrons_are_mapped(
    tmp_path: Path, older: dict[str, object], flags: tuple[int, int]
) -> None:
    job = read_run(log(tmp_path, **older)).job  # type: ignore[arg-type]
    assert (job.tp, job.pp) == flags
    assert (job.recompute == "full") == ("checkpoint_activations" in older)
