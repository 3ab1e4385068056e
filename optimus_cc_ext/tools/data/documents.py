"""Source documents: finds the input files, reads them in a fixed order, cuts them into documents, and
checks the text.
"""

import bz2
import codecs
import fnmatch
import gzip
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from optimus_cc_ext.errors import OptimusError

# A single text file has no documents of its own, yet Megatron's --split cuts between documents only.
_CUT_BYTES = 16 * 1024

_COMPRESSED = re.compile(r"\.(gz|bz2|xz)$", re.IGNORECASE)
_JSON_LINES = re.compile(r"\.(jsonl|ndjson|json)$", re.IGNORECASE)
_OPENERS: dict[bytes, Callable[[Path], Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
# Files that hold no plain text, by a pattern of their names or of their first bytes: what they are, and the cure.
_NAMES = {
    r"\.(bin|idx)$": ("Megatron's own dataset, which is tokenized", "Give its path without the ending to --data-path"),
    r"\.[ct]sv$": ("a table", "Write the column of the text as a .jsonl"),
}
_STARTS = {
    rb"\x28\xb5\x2f\xfd": ("compressed with zstd", "Decompress it (zstd -d)"),
    rb"\x04\x22\x4d\x18": ("compressed with lz4", "Decompress it (lz4 -d)"),
    rb"PK\x03\x04": ("a zip archive", "Unpack it"),
    rb"PAR1": ("a Parquet file", "Write its column of the text as a .jsonl"),
    rb"\xff\xfe|\xfe\xff": ("text in UTF-16", "Convert it (iconv -f UTF-16 -t UTF-8)"),
    rb"%PDF-": ("a PDF", "Extract its text"),
    rb"version https://git-lfs": ("a pointer of Git LFS", "Fetch the file itself (git lfs pull)"),
}
_ARRAY = {rb"\s*\[": ("a JSON array, but each line must be an object", "Write one object in each line (jq -c '.[]')")}
_STRING = rb'"(?:\\.|[^"\\])*"\s*'
_RECORDS = {
    rb"\s*(\[\s*)?\{\s*" + _STRING + rb":|\s*\[\s*" + _STRING + rb"[],]": (
        "JSON, not plain text", "Name it .jsonl if each line is an object"
    )
}  # fmt: skip


class DataError(OptimusError, ValueError):
    """Input that cannot be used; the message names the file, the place in it and the cure."""


class Document(NamedTuple):
    """One document; `size` is its length in bytes of UTF-8."""

    text: str
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """The chosen files in order. Reading a corpus twice gives the same documents twice."""

    root: Path
    files: dict[str, tuple[int, int]]
    """Size in bytes and modification time in ns of each file, by its path below `root`; a single file by its name."""
    left_out: str
    """Words about the files of a directory that do not match the pattern; empty if there are none."""
    json_key: str
    max_bytes: int | None

    def documents(self, skip: Callable[[DataError], object] | None = None) -> Iterator[Document]:
        """Yield whole documents that hold more than white space, up to `max_bytes` of text.

        A record that cannot be used is given to `skip` and left out. Raises DataError for a file that cannot be used
        and, without `skip`, for a record: bad UTF-8, malformed JSON, or a missing key.
        """
        taken = 0
        for path in [self.root / name for name in self.files] if self.root.is_dir() else [self.root]:
            good, bad = False, None
            for line, offset, raw in self._read(path):
                try:
                    text = self._text(raw, path, line, offset)
                except DataError as error:
                    if skip is None:
                        raise
                    bad = bad or error
                    skip(error)
                    continue
                good = True
                size = len(text.encode())
                taken += size
                if self.max_bytes is not None and taken > self.max_bytes:
                    if taken > size:
                        return
                    raise DataError(
                        f"--max-mb: the first document alone has {taken / 1e6:g} MB, more than"
                        f" {self.max_bytes / 1e6:g}, and documents are never cut. Give a larger --max-mb"
                    )
                if text.strip():
                    yield Document(text, size)
            if bad and not good:  # the whole file is something else, such as records with another key
                raise bad

    def _read(self, path: Path) -> Iterator[tuple[int, int, bytes]]:
        """Yield (first line, byte offset, bytes): a whole file of a directory, lines of a .jsonl, pieces of a text
        file.
        """
        try:
            with _open(path) as stream:
                if self.root.is_dir() and not json_lines(path):
                    yield 1, 0, stream.read()
                else:
                    yield from _read_lines(stream, 1 if json_lines(path) else _CUT_BYTES)
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            reason = getattr(error, "strerror", None) or f"cut off or damaged: {error}"
            raise DataError(f"{path}: the file cannot be read ({reason}). Make it readable, or leave it out") from error

    def _text(self, raw: bytes, path: Path, line: int, offset: int) -> str:
        text = _decode(raw, path, line, offset)
        if offset == 0 or json_lines(path):  # files with a byte order mark may have been joined
            text = text.removeprefix("\ufeff")
        if not json_lines(path):
            return text
        return _extract_text(text, self.json_key, f"{path}: line {line}") if text.strip() else ""


def json_lines(path: Path) -> bool:
    """Return whether each line of a file is a document, by the file's suffix; else the file is text."""
    return _JSON_LINES.search(_COMPRESSED.sub("", path.name)) is not None


def _open(path: Path) -> IO[bytes]:
    """Open a file, decompressed if need be. Raises DataError, which says what the file is, if it holds no text."""
    stream: Any = path.open("rb")
    for magic, opener in _OPENERS.items():
        if stream.peek(8).startswith(magic):
            stream.close()
            stream = opener(path)
            break
    start = stream.peek(4096)
    kinds = [what for pattern, what in _NAMES.items() if re.search(pattern, path.name, re.IGNORECASE)]
    starts = _STARTS | (_ARRAY if json_lines(path) else _RECORDS)
    kinds += [what for pattern, what in starts.items() if re.match(pattern, start.removeprefix(codecs.BOM_UTF8))]
    for what, cure in kinds:
        stream.close()
        raise DataError(f"{path}: the file is {what}. {cure}, or leave the file out")
    return stream


def find_corpus(path: Path, *, pattern: str, json_key: str, max_bytes: int | None, exclude: Path) -> Corpus:
    """Find the files behind `path`, a directory or a file. Each line of a .jsonl, .ndjson or .json is a document; other
    files are text; both may be compressed (.gz, .bz2, .xz).

    A directory is searched recursively for file names that match `pattern`, in the order of their relative paths; names
    that start with a dot, and the directory `exclude`, are skipped. Each text file of a directory is one document. A
    single text file is cut into documents of about 16 KiB at line ends. `max_bytes` keeps a prefix. Raises DataError if
    there is nothing to read.
    """
    left_out = ""
    if path.is_dir():
        found, left_out = _scan(path, pattern, exclude)
    elif path.is_file():
        found = [path]
    else:
        reason = "neither a file nor a directory" if path.exists() else "no such file or directory"
        raise DataError(f"{path}: {reason}. Give --input an existing file or directory")
    root = path if path.is_dir() else path.parent
    names = sorted((file.relative_to(root).as_posix(), file.stat()) for file in found)
    files = {name: (status.st_size, status.st_mtime_ns) for name, status in names}
    return Corpus(root=path, files=files, left_out=left_out, json_key=json_key, max_bytes=max_bytes)


def _scan(root: Path, pattern: str, exclude: Path) -> tuple[list[Path], str]:
    def fail(error: OSError) -> NoReturn:
        raise DataError(
            f"{error.filename}: the directory cannot be listed ({error.strerror}). Make it readable, or move it away"
        ) from error

    found: list[Path] = []
    others: Counter[str] = Counter()
    for folder, folders, names in root.walk(on_error=fail):
        folders[:] = [name for name in folders if not name.startswith(".") and folder / name != exclude]
        for path in (folder / name for name in names if not name.startswith(".")):
            name = path.name.lower()
            if not any(fnmatch.fnmatchcase(each, pattern.lower()) for each in (name, _COMPRESSED.sub("", name))):
                others[path.suffix or path.name] += 1
            elif path.is_file():
                found.append(path)
            else:
                others["broken link"] += 1
    seen = ", ".join(f"{count} {suffix}" for suffix, count in others.most_common(3))
    if not found:
        proposed = next((suffix for suffix, _ in others.most_common() if suffix.startswith(".")), ".md")
        raise DataError(
            f"{root}: no file matches '{pattern}' (found: {seen or 'no files'}). Give --pattern, such as '*{proposed}'"
        )
    return found, f"{seen} (--pattern '{pattern}')" if others else ""


def _read_lines(stream: IO[bytes], at_least: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield runs of whole lines, each of the fewest lines that have `at_least` bytes; with 1, every line by itself."""
    line, offset, pending = 1, 0, b""
    for number, raw in enumerate(stream, start=1):
        pending += raw
        if len(pending) >= at_least:
            yield line, offset, pending
            line, offset, pending = number + 1, offset + len(pending), b""
    if pending:
        yield line, offset, pending


def _decode(raw: bytes, path: Path, line: int, offset: int) -> str:
    """Decode `raw`, which begins at line `line` and byte `offset` of the file `path`."""
    try:
        place, reason = raw.index(0), "a NUL byte, as in UTF-16 or in a binary file"
    except ValueError:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            place, reason = error.start, error.reason
    line += raw.count(b"\n", 0, place)
    raise DataError(
        f"{path}: line {line}, byte offset {offset + place}: the text is not UTF-8 ({reason})."
        " Convert the file to UTF-8, or leave it out"
    )


def _extract_text(line: str, key: str, where: str) -> str:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: malformed JSON ({error.msg}, column {error.colno}). Correct the line") from error
    except (ValueError, RecursionError) as error:
        # JSON that is valid but beyond Python's limits: numbers of thousands of digits, thousands of nested brackets.
        raise DataError(f"{where}: JSON that Python cannot read ({error}). Correct the line") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: a JSON {type(record).__name__}, not an object. Every line must be a JSON object")
    if key not in record:
        present = ", ".join(repr(name) for name in list(record)[:5]) or "none"
        raise DataError(f"{where}: no key '{key}' (keys: {present}). Give --json-key the key of the text")
    if not isinstance(text := record[key], str):
        raise DataError(
            f"{where}: the value of '{key}' is a {type(text).__name__}, not a string. Give --json-key the key of the "
            "text"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: the value of '{key}' has half of a surrogate pair at character {error.start},"
            " which UTF-8 cannot encode. Correct the line"
        ) from error
    return text
