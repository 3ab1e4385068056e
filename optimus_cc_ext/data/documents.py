"""Where the text comes from: which files, in which order, cut into which documents, and what is wrong."""

import fnmatch
import hashlib
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from optimus_cc_ext.errors import OptimusError

__all__ = ["Corpus", "DataError", "Document", "SourceFile", "find_corpus"]

# A single text file has no documents of its own, yet Megatron's --split cuts between documents only.
_CUT_BYTES = 16 * 1024


class DataError(OptimusError, ValueError):
    """Input that cannot be used. The message names the file, the place in it and the cure."""


@dataclass(frozen=True, slots=True)
class Document:
    """One document. `size` is in bytes of UTF-8."""

    text: str
    size: int


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file as it was when it was found; `relative` has forward slashes, `size` is in bytes."""

    relative: str
    size: int
    mtime_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """The chosen files, in order. Reading them twice gives the same documents twice."""

    root: Path
    kind: Literal["directory", "text", "jsonl"]
    files: tuple[SourceFile, ...]
    json_key: str
    max_bytes: int | None

    @property
    def size(self) -> int:
        """Bytes to read at most; what documents() yields may be less."""
        total = sum(file.size for file in self.files)
        return total if self.max_bytes is None else min(total, self.max_bytes)

    def fingerprint(self) -> str:
        """A hash of every file's name, size and modification time: equal means nothing has changed."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(os.fsencode(f"{file.relative}\0{file.size}\0{file.mtime_ns}\n"))
        return digest.hexdigest()

    def documents(self) -> Iterator[Document]:
        """Yield the documents that hold more than white space, whole ones only, up to `max_bytes` of them.

        Raises DataError: a file that cannot be read, bad UTF-8, malformed JSON, a missing key.
        """
        taken = 0
        for document in self._all_documents():
            if self.max_bytes is not None and taken + document.size > self.max_bytes:
                if taken == 0:
                    raise _first_is_larger(document.size, self.max_bytes)
                return
            taken += document.size
            if document.text.strip():
                yield document

    def _all_documents(self) -> Iterator[Document]:
        if self.kind == "directory":
            for file in self.files:
                path = self.root / file.relative
                yield _decode(_read_bytes(path), path)
        elif self.kind == "text":
            yield from _cut_text_file(self.root)
        else:
            yield from _read_jsonl(self.root, self.json_key)


def find_corpus(path: Path, *, pattern: str, json_key: str, max_bytes: int | None, exclude: Path) -> Corpus:
    """Find the files behind `path`: a directory, a `.jsonl` file, or any other file as text.

    A directory is searched recursively for file names that match `pattern`, in the order of their relative
    paths; what starts with a dot, and the directory `exclude`, are left out. One file is one document.
    A single text file is cut into documents of about 16 KiB at line ends. `max_bytes` keeps a prefix.
    Raises DataError if there is nothing to read.
    """
    if path.is_dir():
        files = _take_prefix(_scan(path, pattern, exclude), max_bytes)
        return Corpus(root=path, kind="directory", files=files, json_key=json_key, max_bytes=max_bytes)
    if not path.exists():
        raise DataError(f"{path}: no such file or directory. Give --input an existing one")
    if not path.is_file():
        raise DataError(f"{path}: neither a file nor a directory. Give --input one of these")
    status = path.stat()
    return Corpus(
        root=path,
        kind="jsonl" if path.suffix == ".jsonl" else "text",
        files=(SourceFile(path.name, status.st_size, status.st_mtime_ns),),
        json_key=json_key,
        max_bytes=max_bytes,
    )


def _scan(root: Path, pattern: str, exclude: Path) -> list[SourceFile]:
    def fail(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be listed ({error.strerror})") from error

    files: list[SourceFile] = []
    other_suffixes: Counter[str] = Counter()
    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".") and Path(folder, name) != exclude]
        for name in names:
            if name.startswith("."):
                continue
            if not fnmatch.fnmatchcase(name, pattern):
                other_suffixes[Path(name).suffix or name] += 1
                continue
            path = Path(folder, name)
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # a dangling link has no text
            if stat.S_ISREG(status.st_mode):
                relative = path.relative_to(root).as_posix()
                files.append(SourceFile(relative, status.st_size, status.st_mtime_ns))
    if not files:
        seen = ", ".join(f"{count} {suffix}" for suffix, count in other_suffixes.most_common(3)) or "no files"
        raise DataError(f"{root}: no file matches '{pattern}' (there: {seen}). Give --pattern, such as '*.md'")
    return sorted(files, key=lambda file: file.relative)


def _take_prefix(files: list[SourceFile], max_bytes: int | None) -> tuple[SourceFile, ...]:
    # documents() would stop at the same place; stopping here keeps later files out of the fingerprint.
    if max_bytes is None:
        return tuple(files)
    taken = 0
    for index, file in enumerate(files):
        taken += file.size
        if taken > max_bytes:
            if taken == file.size:
                raise _first_is_larger(file.size, max_bytes)
            return tuple(files[:index])
    return tuple(files)


def _first_is_larger(size: int, max_bytes: int) -> DataError:
    return DataError(
        f"--max-mb: the first document alone has {size / 1e6:g} MB, more than {max_bytes / 1e6:g},"
        " and only whole documents are taken. Give a larger --max-mb"
    )


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path}: cannot be read ({error.strerror}). Correct that, or leave the file out")


def _decode(raw: bytes, path: Path, line: int = 1, offset: int = 0) -> Document:
    """Decode the bytes that stand at line `line` and byte `offset` of the file."""
    try:
        return Document(raw.decode("utf-8"), len(raw))
    except UnicodeDecodeError as error:
        line += raw.count(b"\n", 0, error.start)
        raise DataError(
            f"{path}: line {line}, byte offset {offset + error.start}: not UTF-8 ({error.reason})."
            " Convert the file to UTF-8, or leave it out"
        ) from error


def _read_lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as stream:
            yield from stream
    except OSError as error:
        raise _unreadable(path, error) from error


def _cut_text_file(path: Path) -> Iterator[Document]:
    pending: list[bytes] = []
    size = offset = 0
    line = 1
    for raw in _read_lines(path):
        pending.append(raw)
        size += len(raw)
        if size >= _CUT_BYTES:
            yield _decode(b"".join(pending), path, line, offset)
            line += len(pending)
            offset += size
            pending, size = [], 0
    if pending:
        yield _decode(b"".join(pending), path, line, offset)


def _read_jsonl(path: Path, key: str) -> Iterator[Document]:
    offset = 0
    for line, raw in enumerate(_read_lines(path), start=1):
        decoded = _decode(raw, path, line, offset).text
        offset += len(raw)
        if decoded.strip():
            yield _extract_text(decoded, key, f"{path}: line {line}")


def _extract_text(line: str, key: str, where: str) -> Document:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: malformed JSON ({error.msg}, column {error.colno}). Correct the line") from error
    except (ValueError, RecursionError) as error:
        # Valid JSON beyond what Python reads: numbers of thousands of digits, thousands of nested brackets.
        raise DataError(f"{where}: JSON that cannot be read ({error}). Correct the line") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: a JSON {type(record).__name__}, not an object. Every line must be an object")
    if key not in record:
        present = ", ".join(repr(name) for name in list(record)[:5]) or "none"
        raise DataError(f"{where}: no key '{key}' (keys: {present}). Give --json-key")
    text = record[key]
    if not isinstance(text, str):
        raise DataError(f"{where}: the value of '{key}' is a {type(text).__name__}, not a string")
    try:
        return Document(text, len(text.encode("utf-8")))
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: '{key}' has half of a surrogate pair at character {error.start},"
            " which UTF-8 cannot hold. Correct the line"
        ) from error
