"""The planner against published runs: held-out rows within their bounds, and which CSV is refused."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest

from optimus_cc_ext.tools.plan import PlanError
from optimus_cc_ext.tools.plan.hardware import GPUS
from optimus_cc_ext.tools.plan.memory import memory
from optimus_cc_ext.tools.plan.published import BAND, LAUNCHES, SHIPPED, Row, nearest, read_rows, shipped
from scripts.planned.validate import Campaign, campaigns, main, regrets

pytestmark = pytest.mark.ci

ROWS = shipped()


@pytest.fixture(scope="module")
def found() -> dict[str, Campaign]:
    return {campaign.name: campaign for campaign in campaigns(ROWS)}


@pytest.mark.parametrize(
    "name", [pytest.param("Nar-T1", marks=pytest.mark.full), "Nar-T2", "Kor-T5", "vTrain", "BLOOM", "MT-NLG"]
)
def test_held_out_runs_are_predicted_and_deepspeeds_forks_once_few_rows_give_their_scale(
    found: dict[str, Campaign], name: str
) -> None:
    scaled = name in ("BLOOM", "MT-NLG")
    assert bool(found[name].scale) == scaled and found[name].good
    assert found[name].median <= (0.10 if scaled else 0.08) and found[name].ninetieth <= 0.20


def test_every_h100_run_of_4096_gpus_and_more_is_within_a_tenth(found: dict[str, Campaign]) -> None:
    errors = [e for c in found.values() for row, e in c.errors if row.job.gpus >= 4096]
    assert len(errors) == 7 and max(map(abs, errors)) <= 0.10


def test_large_runs_of_an_mlperf_round_are_scaled_alike_with_and_without_its_small_ones_beside_them(
    found: dict[str, Campaign],
) -> None:
    (alone,) = campaigns([row for row in ROWS if row.campaign == "MLPerf-v3.1" and row.job.gpus >= 4096])
    assert alone.errors == found["MLPerf-v3.1"].errors


def test_no_row_that_constants_were_fitted_on_counts_as_held_out(found: dict[str, Campaign]) -> None:
    # A scaled campaign is judged on the rows that each draw leaves.
    held_out = {row.line for c in found.values() if not c.scale for row, _ in c.errors}
    assert not held_out & {row.line for row in ROWS if row.fitted and not row.campaign.startswith("MLPerf")}
    assert [row.model for row in ROWS if row.fitted and row.cluster.gpu.name == "A100"] == [
        "1.7B", "7.5B", "39B", "145B", "530B", "22B-full", "175B-full", "530B-full", "1T-full",
    ]  # fmt: skip


def test_the_layout_that_is_chosen_for_a_model_costs_at_most_a_twentieth_more_than_the_best() -> None:
    found = {name: (regret, mean) for name, _, regret, _, _, mean in regrets(ROWS)}
    assert len(found) == 8 and max(regret for regret, _ in found.values()) <= 0.05
    # For one BLOOM model the planner expects less than 3 % between micro-batches of 2 and 4, and 10 % was measured.
    assert [name for name, (_, mean) in found.items() if mean > 0.05] == ["BLOOM, BLOOM182"]
    assert max(mean for _, mean in found.values()) <= 0.055


def test_only_blooms_runs_launch_kernels_one_by_one_and_only_rows_in_bf16_cast_gradients(tmp_path: Path) -> None:
    overheads = {row.campaign: row.cluster.gpu.layer_overhead for row in ROWS if row.cluster.gpu.name == "A100"}
    assert overheads.pop("BLOOM") == LAUNCHES and set(overheads.values()) == {0.0}
    assert {(row.job.precision, row.job.accumulation) for row in ROWS if row.campaign == "BLOOM"} == {("fp16", "added")}
    rows, _ = read_rows(changed(tmp_path / "rows.csv", campaign="BLOOM, later", precision="bf16"))
    assert (rows[1].job.gradient_bytes, rows[1].job.accumulation) == (4, "cast")


def test_the_band_of_a_plan_holds_nine_of_ten_held_out_rows(found: dict[str, Campaign]) -> None:
    for gpu, band in BAND.items():
        errors = [
            abs(error) for c in found.values() for row, error in c.errors
            if row.cluster.gpu.name == gpu and not c.name.startswith(("BLOOM", "MT-NLG"))
        ]  # fmt: skip
        inside = sum(error <= band for error in errors) / len(errors)
        assert inside >= 0.88, gpu  # 0.88 allows for the H100, where 8 of 9 rows are within the band


@pytest.mark.parametrize(("gpu", "name"), [("A100", "gemm_efficiency"), ("A100", "memory_efficiency"),
                                           ("H100", "gemm_efficiency"), ("H100", "layer_overhead")])  # fmt: skip
def test_the_shipped_constants_are_what_the_fitted_rows_give(gpu: str, name: str) -> None:
    mine = [row for row in ROWS if row.fitted and row.cluster.gpu.name == gpu]

    def loss(factor: float) -> float:
        changed = replace(GPUS[gpu], **{name: getattr(GPUS[gpu], name) * factor})
        return sum(math.log(row.ratio(changed)) ** 2 for row in mine)

    assert loss(1.0) <= min(loss(0.93), loss(1.07))


def test_a_published_run_is_its_own_nearest() -> None:
    row = next(row for row in ROWS if row.model == "530B@1120")
    assert nearest(ROWS, row.cluster, row.job) is row


def test_published_runs_fit_into_memory() -> None:
    # BLOOM's optimizer was sharded (ZeRO-1), which the columns do not say.
    rows = [row for row in ROWS if row.campaign != "BLOOM"]
    assert [row.model for row in rows if sum(memory(row.job).values()) > row.cluster.gpu.memory] == []


def changed(path: Path, **values: str) -> Path:
    """Write the first two rows of the A100s, the second one with other values."""
    with SHIPPED[0].open(newline="") as stream:
        rows = list(csv.DictReader(stream))[:2]
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, [*rows[0], *(name for name in values if name not in rows[0])])
        writer.writeheader()
        writer.writerows([rows[0], rows[1] | values])
    return path


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"seconds": "-3.5"}, r"line 3, column seconds: '-3.5' is not a positive number"),
        ({"gpus": "0"}, r"line 3, column gpus: '0' is not a positive number"),
        ({"batch": "many"}, r"line 3, column batch: 'many' is not a positive number"),
        ({"layers": "2.5"}, r"line 3, column layers: '?2.5'? is not a whole number"),
        ({"recompute": "some"}, r"line 3, column recompute: 'some' is not one of none, sel, full"),
        ({"precision": "int8"}, r"line 3, column precision: 'int8' is not one of fp16, bf16, fp8"),
        ({"gpu": "A10"}, r"line 3: unknown GPU 'A10': did you mean A100"),
        ({"network": "hdr"}, r"line 3: unknown network 'hdr': did you mean hdr8, hdr4"),
    ],
)
def test_a_bad_value_is_refused_with_line_and_column(tmp_path: Path, values: dict[str, str], complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        read_rows(changed(tmp_path / "rows.csv", **values))


def test_a_missing_column_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(SHIPPED[0].read_text().replace("micro_batch", "microbatch", 1))
    assert main([str(path)]) == 2
    assert "line 1: no column micro_batch" in capsys.readouterr().err
    assert main([str(tmp_path / "none.csv")]) == 2
    path.write_text(SHIPPED[0].read_text().splitlines()[0] + "\n")
    assert main([str(path)]) == 2
    assert "no rows" in capsys.readouterr().err


def test_a_row_that_is_no_layout_is_named_and_the_rest_is_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(changed(tmp_path / "rows.csv", pp="7"))]) == 1
    assert "line 3: 64 GPUs do not divide among 14 tensor x pipeline ranks" in capsys.readouterr().err


def test_rows_that_are_missed_fail_the_validation(tmp_path: Path) -> None:
    good, bad = changed(tmp_path / "good.csv", campaign="X"), tmp_path / "bad.csv"
    assert main([str(good)]) == 0
    changed(bad, campaign="X", seconds="9")
    assert main([str(bad)]) == 1


def test_a_campaign_is_good_within_8_and_20_percent_or_where_it_is_scaled() -> None:
    def campaign(scale: str, *errors: float) -> Campaign:
        row: Row = ROWS[0]
        return Campaign("X", scale, tuple((row, error) for error in errors))

    assert campaign("", *[0.07] * 9, 0.9).good
    assert not campaign("", *[0.07] * 8, 0.21, 0.21).good
    assert not campaign("", *[0.09] * 10).good
    assert campaign("from 3 rows", 0.5).good
