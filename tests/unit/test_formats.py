"""The table of formats, and checks that every row has all that a format needs."""

import dataclasses
import subprocess
import sys
from functools import partial

import pytest
import torch

from optimus_cc_ext.compressors import formats, packing
from optimus_cc_ext.compressors.blocks import BlockLayout, Codec
from optimus_cc_ext.compressors.fast import fast_codec
from optimus_cc_ext.compressors.formats import BLOCK, FORMATS, SUM_FORMAT, block_format, format_named
from optimus_cc_ext.compressors.scratch import Scratch
from optimus_cc_ext.config.classes import CLASSES
from tests.block_reference import ReferenceCodec
from tests.formats import SIGNS, UNUSED, every, reference_of, with_unused_formats

WIDTHS = [*every({name: row for name, row in FORMATS.items() if row.packing == "integers"}), *every(UNUSED)]
"""Integer formats, with widths that no row of the table has."""


def values() -> torch.Tensor:
    """Make fp32 values: a block of the even numbers from -128 to 126, the third 1.5 larger, two dense values."""
    ramp = torch.arange(BLOCK + 2, dtype=torch.float32).sub_(64).mul_(2)
    ramp[2] += 1.5
    return ramp


MESSAGES = {
    "int8": """
        0000004300000243 0000000000000000 813f 0000000000000000000000000000
        81838687898b8d8f91939597999b9d9fa1a3a5a7a9abadafb1b3b5b7b9bbbdbfc0c2c4c6c8caccced0d2d4d6d8dadcde
        e0e2e4e6e8eaeceef0f2f4f6f8fafcfe00020406080a0c0e10121416181a1c1e20222426282a2c2e30323436383a3c3e
        4041434547494b4d4f51535557595b5d5f61636567696b6d6f71737577797b7d
    """,
    "int4": """
        0000004300000243 0000000000000000 9241 0000000000000000000000000000
        8181818181929292929292929292a3a3a3a3a3a3a3a3a3b4b4b4b4b4b4b4b4b4c4c5c5c5c5c5c5c5c5c5d6d6d6d6d6d6
        d6d6d6e7e7e7e7e7e7e7e7e7f8f8f8f8
    """,
    "fp32": """
        0000004300000243 0000000000000000 803f 0000000000000000000000000000
        000000c30000fcc20000f5c20000f4c20000f0c20000ecc20000e8c20000e4c20000e0c20000dcc20000d8c20000d4c2
        0000d0c20000ccc20000c8c20000c4c20000c0c20000bcc20000b8c20000b4c20000b0c20000acc20000a8c20000a4c2
        0000a0c200009cc2000098c2000094c2000090c200008cc2000088c2000084c2000080c2000078c2000070c2000068c2
        000060c2000058c2000050c2000048c2000040c2000038c2000030c2000028c2000020c2000018c2000010c2000008c2
        000000c20000f0c10000e0c10000d0c10000c0c10000b0c10000a0c1000090c1000080c1000060c1000040c1000020c1
        000000c10000c0c0000080c0000000c00000000000000040000080400000c04000000041000020410000404100006041
        00008041000090410000a0410000b0410000c0410000d0410000e0410000f04100000042000008420000104200001842
        000020420000284200003042000038420000404200004842000050420000584200006042000068420000704200007842
        00008042000084420000884200008c4200009042000094420000984200009c420000a0420000a4420000a8420000ac42
        0000b0420000b4420000b8420000bc420000c0420000c4420000c8420000cc420000d0420000d4420000d8420000dc42
        0000e0420000e4420000e8420000ec420000f0420000f4420000f8420000fc42
    """,
}
"""Message of each format in hexadecimal digits: two dense values in fp32, padded to 16 bytes; the block's scale in
bf16, padded; its codes.
"""


def test_one_message_of_each_format_is_the_one_that_is_written_here() -> None:
    layout = BlockLayout([[(0, BLOCK)]], [[(BLOCK, 2)]])
    for name in FORMATS:
        codec = Codec(name)
        message = torch.zeros(1, codec.message_bytes(layout, torch.float32), dtype=torch.uint8)
        codec.encode(values(), layout, message)
        assert bytes(message[0].tolist()) == bytes.fromhex(MESSAGES[name]), name


def test_the_table_needs_no_torch() -> None:
    told = "import optimus_cc_ext.compressors.formats, sys; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


def test_rows_agree_with_themselves() -> None:
    for name, row in FORMATS.items():
        assert row.name == name and row.block == BLOCK
        assert row.code_bytes * 8 == BLOCK * row.bits and row.bits_per_value == row.bits + 1 / 8
        if row.packing == "integers":
            assert row.largest == 2 ** (row.bits - 1) - 1, f"{name}: codes on both sides of 0, as many on each"
        with pytest.raises(dataclasses.FrozenInstanceError):
            row.bits = 3  # type: ignore[misc]
    assert SUM_FORMAT in FORMATS


@pytest.mark.parametrize("ask", [format_named, block_format, Codec, partial(fast_codec, seed=1, rotated=True)])
def test_an_unknown_format_is_refused_with_the_known_names(ask) -> None:
    with pytest.raises(ValueError, match=f"'int5' is no block format: there are {', '.join(FORMATS)}"):
        ask("int5")


def test_classes_of_traffic_accept_only_formats_of_the_table_and_never_the_tests_own() -> None:
    for traffic in CLASSES:
        known = {name for name, row in FORMATS.items() if row.largest is not None} | {"dense", "low-rank", "exact"}
        assert set(traffic.formats) <= known, f"{traffic.name} accepts formats that are in no row"


def test_a_choice_without_blocks_has_no_format() -> None:
    assert block_format("dense") is block_format("low-rank") is block_format("exact") is None
    assert [block_format(name) for name in FORMATS] == list(FORMATS)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"bits": 3}, "int4: integers have 2, 4, 6 or 8 bits, not 3"),
        ({"packing": "e5m2"}, "int4: codecs know blocks of 128 and the packings integers, fp32, not .*e5m2"),
        ({"block": 32}, "int4: codecs know blocks of 128 .* not blocks of 32"),
    ],
)
def test_a_row_that_no_codec_can_write_is_refused(monkeypatch, changes, message) -> None:
    monkeypatch.setattr(formats, "FORMATS", {"int4": dataclasses.replace(FORMATS["int4"], **changes)})
    with pytest.raises(ValueError, match=message):
        Codec("int4")


def test_the_reference_defines_no_format_of_another_name() -> None:
    with pytest.raises(ValueError, match="no definition of int5 with 8 bits"):
        ReferenceCodec("int5", 8, 15.0)


@pytest.mark.parametrize("name", sorted({name for name, _ in WIDTHS}))
def test_integers_of_every_width_are_packed_as_the_reference_packs_them(monkeypatch, name) -> None:
    with_unused_formats(monkeypatch)
    row, reference = format_named(name), reference_of(name, rotated=False)
    largest = int(row.largest)
    numbers = torch.randint(-largest, largest + 1, (20, BLOCK), generator=torch.Generator().manual_seed(3)).float()
    numbers[0], numbers[1] = largest, -largest
    codes, found = torch.zeros(20, row.code_bytes, dtype=torch.uint8), torch.empty(20, BLOCK)
    pack = packing.PACKINGS[row.packing](row, Scratch())
    pack.write(numbers.clone(), codes)
    assert codes.tolist() == [reference._pack(list(map(int, block))) for block in numbers.tolist()]
    pack.read(codes, found)
    assert torch.equal(found, numbers)
    assert torch.equal(torch.stack([reference.numbers(block) for block in codes]).float(), numbers)


@pytest.mark.parametrize("name, rotated", every(UNUSED))
def test_formats_of_widths_that_are_not_used_yet_work_end_to_end(monkeypatch, name, rotated) -> None:
    with_unused_formats(monkeypatch)
    codec = Codec(name, signs=SIGNS if rotated else None)
    sent = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    layout, found = BlockLayout.of_one(sent.numel()), torch.empty_like(sent)
    message = torch.zeros(1, codec.message_bytes(layout, sent.dtype), dtype=torch.uint8)
    codec.encode(sent, layout, message)
    codec.decode(message, layout, found)
    error = float((found - sent).norm() / sent.norm())
    assert error == pytest.approx(format_named(name).gaussian_error, rel=0.1)
