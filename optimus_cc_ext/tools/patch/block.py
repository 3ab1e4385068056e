"""The block that loads Optimus-CC in an entry script: found by its marker lines, put in and taken out as bytes."""

import difflib
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from optimus_cc_ext.errors import OptimusError

_BEGIN, _END = "# >>> optimus-cc", "# <<< optimus-cc"
_VERSION = 1

_BODY = """\
# Optimus-CC prepares this process before anything of Megatron is imported. Taken out by: optimus-cc patch FILE --undo
if __name__ == "__main__":
    try:
        from optimus_cc_ext import startup as optimus_cc_startup
    except ModuleNotFoundError as error:
        if error.name != "optimus_cc_ext":
            raise
        raise ImportError(
            "this script is patched to load optimus_cc_ext, which is not installed. Install it with `pip install "
            "--no-deps PATH/TO/ITS/REPOSITORY`, or delete the lines from `# >>> optimus-cc` to `# <<< optimus-cc`"
        ) from None
    optimus_cc_startup.prepare_script()
""".splitlines()

_WITHOUT_MARKERS = """\
# Optimus-CC (optimus_cc_ext), before anything of Megatron is imported. Its patches/apply.sh --undo takes this out.
if __name__ == "__main__":
    try:
        from optimus_cc_ext import startup as optimus_cc_startup
    except ModuleNotFoundError as error:
        if error.name != "optimus_cc_ext":
            raise
        raise ImportError(
            "this pretrain_gpt.py is patched to load optimus_cc_ext, which is not installed. Install it with "
            "`pip install --no-deps PATH/TO/ITS/REPOSITORY`, or take the patch out with its patches/apply.sh --undo"
        ) from None
    optimus_cc_startup.prepare()

""".splitlines()
"""Lines that patches/apply.sh of commit 8b301ab inserted, without markers."""


def _sha256(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode("latin-1")).hexdigest()


BLOCK = "\n".join([f"{_BEGIN} block {_VERSION}, sha256 {_sha256(_BODY)}", *_BODY, _END, ""])
"""Text of the block. It is ASCII, so that it has the same bytes in every encoding that Python's sources may have."""


@dataclass(frozen=True)
class Block:
    """Block of ours in a file.

    Attributes:
        first: number of its first line, from 1.
        last: number of its last line.
        edited: the difference to our text, if its lines are no longer those that its marker was written for.
        newer: True if a later release than this one inserted it.
    """

    first: int
    last: int
    edited: str = ""
    newer: bool = False


def find(source: bytes) -> Block | None:
    """Return the block of ours in a file, recognised by its markers alone, or by the exact text of commit 8b301ab.

    Raises:
        OptimusError: there are several blocks, or a marker is missing; the message names the lines.
    """
    lines = [line.decode("latin-1").rstrip("\r\n") for line in _lines(source)[1]]
    begins = [number for number, line in enumerate(lines, 1) if line.lstrip().startswith(_BEGIN)]
    ends = [number for number, line in enumerate(lines, 1) if line.lstrip().startswith(_END)]
    size = len(_WITHOUT_MARKERS)
    old = [number + 1 for number in range(len(lines)) if lines[number : number + size] == _WITHOUT_MARKERS]
    if not begins and not ends and len(old) <= 1:
        return Block(old[0], old[0] + size - 1) if old else None
    if len(begins) != 1 or len(ends) != 1 or old or begins > ends:
        raise OptimusError(
            f"lines {', '.join(map(str, sorted(begins + ends + old)))} are marker lines or blocks of Optimus-CC, but "
            "not those of one whole block. Delete what is left of them by hand"
        )
    [first], [last] = begins, ends
    body = lines[first : last - 1]
    if _sha256(body) in lines[first - 1]:
        version = re.search(r"block (\d+)", lines[first - 1])
        return Block(first, last, newer=version is not None and int(version[1]) > _VERSION)
    difference = difflib.unified_diff(_BODY, body, "as inserted", "as found", lineterm="", n=1)
    return Block(first, last, "\n".join(difference) or "(only the marker line differs)")


def insert(source: bytes, line: int) -> bytes:
    """Insert the block above line number `line` (the first is 1), with that line's line ending; return the source."""
    bom, lines = _lines(source)
    endings = re.findall(rb"\r\n|\n|\r", b"".join(lines[line - 1 :] + lines)) or [b"\n"]
    return b"".join([bom, *lines[: line - 1], BLOCK.encode().replace(b"\n", endings[0]), *lines[line - 1 :]])


def remove(source: bytes, block: Block) -> bytes:
    """Return the source without the block."""
    bom, lines = _lines(source)
    return b"".join([bom, *lines[: block.first - 1], *lines[block.last :]])


def _lines(source: bytes) -> tuple[bytes, list[bytes]]:
    """Return the byte order mark of a source, or nothing, and its lines with their endings, as Python counts them."""
    bom = b"\xef\xbb\xbf" if source.startswith(b"\xef\xbb\xbf") else b""
    return bom, source.removeprefix(bom).splitlines(keepends=True)
