"""Source documents: finds the input files, reads them in a fixed order, cuts them into documents, and
checks the text.
"""

import fnmatch
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from optimus_cc_ext.errors import OptimusError

__all__ = ["Corpus", "DataError", "Document", "find_corpus"]

# A single text file has no documents of its own, yet Megatron's --split cuts between documents only.
_CUT_BYTES = 16 * 1024


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
    json_key: str
    max_bytes: int | None

    def documents(self) -> Iterator[Document]:
        """Yield whole documents that hold more than white space, up to `max_bytes` of text.

        Raises DataError for a file that cannot be read, bad UTF-8, malformed JSON, or a missing key.
        """
        taken, jsonl = 0, self._is_jsonl()
        for path, line, offset, raw in self._read():
            if jsonl:
                text = _decode(raw, path, line, offset)
                raw = _extract_text(text, self.json_key, f"{path}: line {line}") if text.strip() else b""
            taken += len(raw)
            if self.max_bytes is not None and taken > self.max_bytes:
                if taken > len(raw):
                    return
                raise DataError(
                    f"--max-mb: the first document alone has {taken / 1e6:g} MB, more than"
                    f" {self.max_bytes / 1e6:g}, and documents are never cut. Give a larger --max-mb"
                )
            if (text := _decode(raw, path, line, offset)).strip():
                yield Document(text, len(raw))

    def _is_jsonl(self) -> bool:
        return self.root.suffix == ".jsonl" and not self.root.is_dir()

    def _read(self) -> Iterator[tuple[Path, int, int, bytes]]:
        """Yield (file, first line, byte offset, bytes): files of a directory, lines of a .jsonl, pieces of
        a text file.
        """
        path = self.root
        try:
            if not path.is_dir():
                yield from _read_lines(path, 1 if self._is_jsonl() else _CUT_BYTES)
                return
            for name in self.files:
                path = self.root / name
                yield path, 1, 0, path.read_bytes()
        except OSError as error:
            raise DataError(
                f"{path}: the file cannot be read ({error.strerror}). Make it readable, or leave it out"
            ) from error


def find_corpus(path: Path, *, pattern: str, json_key: str, max_bytes: int | None, exclude: Path) -> Corpus:
    """Find the files behind `path`: a directory, a `.jsonl` file, or any other file as text.

    A directory is searched recursively for file names that match `pattern`, in the order of their relative paths; names
    that start with a dot, and the directory `exclude`, are skipped. Each file of a directory is one document. A single
    text file is cut into documents of about 16 KiB at line ends. `max_bytes` keeps a prefix. Raises DataError if there
    is nothing to read.
    """
    if path.is_dir():
        found = _scan(path, pattern, exclude)
    elif path.is_file():
        found = [path]
    else:
        reason = "neither a file nor a directory" if path.exists() else "no such file or directory"
        raise DataError(f"{path}: {reason}. Give --input an existing file or directory")
    root = path if path.is_dir() else path.parent
    names = sorted((file.relative_to(root).as_posix(), file.stat()) for file in found)
    files = {name: (status.st_size, status.st_mtime_ns) for name, status in names}
    return Corpus(root=path, files=files, json_key=json_key, max_bytes=max_bytes)


def _scan(root: Path, pattern: str, exclude: Path) -> list[Path]:
    def fail(error: OSError) -> NoReturn:
        raise DataError(
            f"{error.filename}: the directory cannot be listed ({error.strerror}). Make it readable, or move it away"
        ) from error

    found: list[Path] = []
    others: Counter[str] = Counter()
    for folder, folders, names in root.walk(on_error=fail):
        folders[:] = [name for name in folders if not name.startswith(".") and folder / name != exclude]
        for path in (folder / name for name in names if not name.startswith(".")):
            if not fnmatch.fnmatchcase(path.name, pattern):
                others[path.suffix or path.name] += 1
            elif path.is_file():  # a dangling symbolic link has no text
                found.append(path)
    if not found:
        seen = ", ".join(f"{count} {suffix}" for suffix, count in others.most_common(3)) or "no files"
        raise DataError(f"{root}: no file matches '{pattern}' (found: {seen}). Give --pattern, such as '*.md'")
    return found


def _read_lines(path: Path, at_least: int) -> Iterator[tuple[Path, int, int, bytes]]:
    """Yield runs of whole lines, each of the fewest lines that have `at_least` bytes; with 1, every line by itself."""
    line, offset, pending = 1, 0, b""
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            pending += raw
            if len(pending) >= at_least:
                yield path, line, offset, pending
                line, offset, pending = number + 1, offset + len(pending), b""
    if pending:
        yield path, line, offset, pending


def _decode(raw: bytes, path: Path, line: int, offset: int) -> str:
    """Decode `raw`, which begins at line `line` and byte `offset` of the file `path`."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line += raw.count(b"\n", 0, error.start)
        raise DataError(
            f"{path}: line {line}, byte offset {offset + error.start}: the text is not UTF-8 ({error.reason})."
            " Convert the file to UTF-8, or leave it out"
        ) from error


def _extract_text(line: str, key: str, where: str) -> bytes:
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
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: the value of '{key}' has half of a surrogate pair at character {error.start},"
            " which UTF-8 cannot encode. Correct the line"
        ) from error
