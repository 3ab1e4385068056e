"""The table of errors in one level and in two is made by real ranks, and has the errors that the formats leave."""

import pytest

from scripts.study.levels import SHARES, VARIANTS, main, measure


@pytest.mark.full
def test_errors_in_levels_are_those_of_the_formats(capsys: pytest.CaptureFixture[str]) -> None:
    errors = measure(2, 2, 1 << 15)
    assert set(errors) == {(share, *variant) for share in SHARES for variant in VARIANTS}
    # A rank adds its own part without rounding it, so three of four replicas are rounded, and one of two nodes.
    assert errors[0.0, 1, "int4"] == pytest.approx(0.117 * (3 / 4) ** 0.5, rel=0.05)
    assert errors[0.0, 2, "int4"] == pytest.approx(0.117 * (1 / 2) ** 0.5, rel=0.05)
    assert errors[0.0, 2, "int8"] == pytest.approx(0.0065 * (1 / 2) ** 0.5, rel=0.05)
    # int8 in two levels loses less than int4 in one, whatever share of their gradients replicas have in common.
    assert all(errors[share, 2, "int8"] < errors[share, 1, "int4"] / 4 for share in SHARES)


@pytest.mark.full
def test_the_command_prints_a_row_for_each_share(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--nodes", "2", "--members", "2", "--numel", "16384"]) == 0
    printed = capsys.readouterr().out
    assert "int4, two levels" in printed and all(f"{share:.0%}" in printed for share in SHARES)
