"""The studies of exact gathers: unequal runs are found, codings have the bits that are said, and a step is measured."""

from pathlib import Path

import pytest
import torch

from optimus_cc_ext.compressors import exact
from scripts.study.codings import bits, huffman
from scripts.study.exact import COLUMNS, differing, main
from tests.unit.test_exact_codec import trained

ROW = dict.fromkeys(COLUMNS, "") | {"losses": "a", "weights": "b"}


def test_a_run_with_other_losses_or_weights_than_vanilla_in_its_cell_is_found() -> None:
    vanilla = ROW | {"variant": "vanilla"}
    others = [ROW | {"variant": "gather"} | change for change in ({}, {"losses": "x"}, {"weights": "y"})]
    elsewhere = ROW | {"variant": "gather", "model": "llama", "losses": "x"}  # without a run of vanilla
    assert differing([vanilla, *others, elsewhere]) == others[1:]


def test_rice_takes_the_bits_of_the_product_and_entropy_is_below_all_others() -> None:
    old, new = trained(1 << 19, 1e-4, torch.bfloat16)
    found = bits(old, new)
    message = torch.zeros(1 << 20, dtype=torch.uint8)
    assert found["rice"] == pytest.approx(
        8 * int(exact.encode(old, new, message)), rel=0.05
    )  # the table is in the message
    assert found["entropy"] <= found["huffman"] <= found["rice"] < found["widths"]
    assert found["unchanged"] == (old == new).sum()
    assert bits(old, old)["entropy"] == 0 and bits(old, old)["huffman"] == len(old)


def test_huffmans_code_is_that_of_a_textbook() -> None:
    assert huffman([45, 13, 12, 16, 9, 5]) == 224 and huffman([7]) == 7


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["--variants", "magic"], "'magic' is none of"), (["--cells", "gpt:pp2dp2"], "is no cell. Give model:layout")],
)
def test_bad_input_ends_with_the_reason(
    arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main([*arguments, "--output", f"{tmp_path}/out"])
    except SystemExit as ended:
        status = int(str(ended.code))
    assert status == 2 and reason in capsys.readouterr().err
