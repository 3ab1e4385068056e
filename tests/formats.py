"""Block formats over which tests run: all rows of the table, so that a row that lacks anything makes a test fail."""

import dataclasses
from collections.abc import Mapping

import pytest
import torch

from optimus_cc_ext.compressors import formats
from optimus_cc_ext.compressors.formats import BLOCK, FORMATS, Format, block_format
from optimus_cc_ext.config import OptimusConfig, literals_of
from tests.block_reference import ReferenceCodec

__all__ = [
    "ALL", "EVERY", "LOSSY", "SIGNS", "UNUSED", "every", "formats_of", "lossy",
    "near_limit", "reference_of", "with_unused_formats",
]  # fmt: skip

SIGNS = torch.randint(0, 2, (BLOCK,), generator=torch.Generator().manual_seed(5)).mul_(2).sub_(1).float()


def near_limit() -> torch.Tensor:
    """Return four blocks of values in fp16 that rounding or a rotation may lead beyond the limit: 65504."""
    random = torch.Generator().manual_seed(4)
    values = torch.rand(4, BLOCK, generator=random).mul_(-128).add_(65504)
    values[1:3] *= torch.randint(0, 2, (2, BLOCK), generator=random) * 2 - 1
    values[2:] = torch.where(torch.rand(2, BLOCK, generator=random) < 0.9, values[2:] / 300, values[2:])
    return values.half()


def every(rows: Mapping[str, Format]) -> list[tuple[str, bool]]:
    """Return format and rotated: each format without rotation, and rotated if the format can be."""
    return [(name, rotated) for name, row in rows.items() for rotated in ((False, True) if row.rotated else (False,))]


def lossy(rows: Mapping[str, Format]) -> dict[str, Format]:
    """Return the formats with rounding errors."""
    return {name: row for name, row in rows.items() if row.largest is not None}


def formats_of(field: str) -> list[str]:
    """Return the block formats that a field of the configuration accepts."""
    fields = {each.name: each for each in dataclasses.fields(OptimusConfig)}
    return [word for word in literals_of(fields[field].type) if block_format(word) is not None]


EVERY = every(FORMATS)


def _parametrised(cases: list[tuple[str, bool]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("format, rotated", cases, ids=lambda value: {True: "rotated", False: ""}.get(value))


ALL = _parametrised(EVERY)
LOSSY = _parametrised(every(lossy(FORMATS)))

UNUSED = {
    name: Format(name=name, packing="integers", bits=bits, largest=largest, rotated=True, gaussian_error=error)
    for name, bits, largest, error in (("int2", 2, 1.0, 0.8), ("int6", 6, 31.0, 0.027))
    if name not in FORMATS
}
"""Integer formats of widths that no row has. The packing accepts them, and so they are tested."""


def with_unused_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let codecs be made of the formats `UNUSED`, too."""
    monkeypatch.setattr(formats, "FORMATS", {**FORMATS, **UNUSED})


def reference_of(format: str, rotated: bool) -> ReferenceCodec:
    """Make the reference of a format, which is given only name, bits and largest code from the table."""
    row = formats.format_named(format)
    return ReferenceCodec(row.name, row.bits, row.largest, signs=SIGNS if rotated else None)
