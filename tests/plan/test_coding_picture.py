"""The picture of coding beside the wire shows the measured rows, and is what its command writes."""

from pathlib import Path

import pytest

from scripts.planned import coding

DRAWN = coding.ROWS.parent / "images" / "coding.svg"


def test_a_message_has_its_codes_and_a_scale_a_block_and_the_wire_takes_bits_over_the_rate() -> None:
    fp32, bf16, int8, int4 = coding.ways()
    assert fp32.nbytes == 1_020_000_000 == 2 * bf16.nbytes and fp32.coding == bf16.coding == 0
    values = fp32.nbytes / 4
    # A section begins at a multiple of 16 bytes.
    assert int8.nbytes == pytest.approx(values * (1 + 2 / 128), abs=300)
    assert int4.nbytes == pytest.approx(values * (1 / 2 + 2 / 128), abs=300)
    assert (int8.coding, int4.coding) == pytest.approx((0.52 + 0.45, 0.51 + 0.35))
    assert fp32.wire(100) == pytest.approx(81.6) and fp32.wire(400) == pytest.approx(20.4)


def test_the_picture_is_what_its_command_writes(tmp_path: Path) -> None:
    coding.main(tmp_path / DRAWN.name)
    assert (tmp_path / DRAWN.name).read_bytes() == DRAWN.read_bytes(), "python -m scripts.planned.coding draws it anew"
