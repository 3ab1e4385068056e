"""The whole way from text to a folder that Megatron trains on, made at once or not at all.

OUTPUT/corpus.bin, corpus.idx   Megatron's indexed dataset, one sequence per document
OUTPUT/tokenizer/               for --tokenizer-type HuggingFaceTokenizer --tokenizer-model
OUTPUT/manifest.json            what it was made from; the same again is not made twice
"""

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from optimus_cc_ext.data.documents import Corpus, DataError, find_corpus
from optimus_cc_ext.data.encode import EncodedBatch, encode_documents
from optimus_cc_ext.data.output import check_replaceable, locked, replace
from optimus_cc_ext.data.tokenizer import (
    END_OF_DOCUMENT,
    TOKENIZER_FILE,
    check_vocab_size,
    save_tokenizer,
    train_tokenizer,
)

__all__ = ["PreparedData", "default_workers", "prepare"]

_FORMAT = 1
_MANIFEST = "manifest.json"
_PREFIX = "corpus"
_TOKENIZER = "tokenizer"


@dataclass(frozen=True, slots=True)
class PreparedData:
    """What Megatron's flags need: `data_prefix` for --data-path, `tokenizer_dir` for --tokenizer-model.

    `documents` and `tokens` count what is in the dataset, end-of-document tokens included; `text_bytes` is
    UTF-8; `up_to_date` says that nothing had to be made.
    """

    data_prefix: Path
    tokenizer_dir: Path
    vocab_size: int
    documents: int
    tokens: int
    text_bytes: int
    up_to_date: bool


def default_workers() -> int:
    """As many as there are cores for this process, at most 8: reading and writing are one process's work."""
    return min(8, len(os.sched_getaffinity(0)))


def prepare(
    input: str | Path,
    output: str | Path,
    *,
    vocab_size: int = 8192,
    workers: int | None = None,
    pattern: str = "*.txt",
    max_mb: float | None = None,
    json_key: str = "text",
    progress: bool = True,
) -> PreparedData:
    """Train a tokenizer on `input` and write it as Megatron's indexed dataset into the folder `output`.

    `input` is a directory (files matching `pattern`, recursively), a `.jsonl` file (the text under
    `json_key`) or a text file; see documents.find_corpus for order and cuts. `max_mb` (10**6 bytes) keeps a
    prefix of whole documents. The bytes written do not depend on `workers`. `output` appears when it is
    complete; a second call with the same settings and unchanged files returns at once. `progress` draws bars
    on stderr.
    Raises DataError for what is wrong with the input or the arguments, OSError if `output` cannot be written.
    """
    _check_arguments(vocab_size, workers, max_mb)
    source, target = Path(input).resolve(), Path(output).absolute()
    # Megatron keeps its index of a data set beside it, by default in a folder of the data's own name.
    caches = {_PREFIX, "cache"}
    check_replaceable(target, source, {f"{_PREFIX}.bin", f"{_PREFIX}.idx", _TOKENIZER, _MANIFEST} | caches)
    max_bytes = None if max_mb is None else int(max_mb * 1e6)
    corpus = find_corpus(source, pattern=pattern, json_key=json_key, max_bytes=max_bytes, exclude=target)
    made_from = {
        "format": _FORMAT,
        "input": str(source),
        "kind": corpus.kind,
        "pattern": pattern if corpus.kind == "directory" else None,
        "json_key": json_key if corpus.kind == "jsonl" else None,
        "max_bytes": max_bytes,
        "requested_vocab_size": vocab_size,
        "end_of_document": END_OF_DOCUMENT,
        "tokenizers": version("tokenizers"),
        "files": len(corpus.files),
        "files_fingerprint": corpus.fingerprint(),
    }
    with locked(target) as partial:
        if (existing := _read_up_to_date(target, made_from)) is not None:
            return existing
        partial.mkdir()
        counts = _build(corpus, partial, vocab_size, workers or default_workers(), progress)
        sizes = {name: (partial / name).stat().st_size for name in _dataset_files()}
        manifest = {"made_from": made_from, "counts": counts, "sizes": sizes, "tokenizer": _TOKENIZER}
        (partial / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        replace(partial, target)
    return _describe(target, counts, up_to_date=False)


def _check_arguments(vocab_size: int, workers: int | None, max_mb: float | None) -> None:
    check_vocab_size(vocab_size)
    if workers is not None and workers < 1:
        raise DataError(f"--workers {workers}: there must be at least one. Give 1 or more")
    # The negation also catches NaN.
    if max_mb is not None and not 0 < max_mb < float("inf"):
        raise DataError(f"--max-mb {max_mb:g}: must be more than 0. Give a positive number, or leave the flag out")


def _dataset_files() -> list[str]:
    return [f"{_PREFIX}.bin", f"{_PREFIX}.idx", f"{_TOKENIZER}/{TOKENIZER_FILE}"]


def _read_up_to_date(target: Path, made_from: dict[str, Any]) -> PreparedData | None:
    """Return what is in `target` if it was made from the same and is still whole."""
    try:
        manifest = json.loads((target / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["made_from"] != made_from:
            return None
        if any((target / name).stat().st_size != manifest["sizes"][name] for name in _dataset_files()):
            return None
        return _describe(target, manifest["counts"], up_to_date=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent, or damaged: made again


def _describe(target: Path, counts: dict[str, int], *, up_to_date: bool) -> PreparedData:
    return PreparedData(target / _PREFIX, target / _TOKENIZER, up_to_date=up_to_date, **counts)


def _build(corpus: Corpus, folder: Path, vocab_size: int, workers: int, progress: bool) -> dict[str, int]:
    columns = (TextColumn("{task.description:<22}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not progress) as bars:
        training = bars.add_task("training the tokenizer", total=corpus.size)
        tokenizing = bars.add_task("tokenizing", total=corpus.size)

        # This first reading also finds everything that is wrong with the text.
        text_bytes = 0

        def texts() -> Iterator[str]:
            nonlocal text_bytes
            for document in corpus.documents():
                text_bytes += document.size
                bars.advance(training, document.size)
                yield document.text

        tokenizer = train_tokenizer(texts(), vocab_size)
        if text_bytes == 0:
            raise DataError(f"{corpus.root}: no text in it, nothing but white space. Give --input something with text")
        bars.update(training, total=text_bytes, completed=text_bytes)
        bars.update(tokenizing, total=text_bytes)
        save_tokenizer(tokenizer, folder / _TOKENIZER)

        # Here, not above: importing Megatron takes seconds; bad input and finished data need not wait for it.
        with warnings.catch_warnings():
            # About kernels that are not installed, which writing files has no use for.
            warnings.simplefilter("ignore")
            from optimus_cc_ext.data.indexed import write_indexed

        size = tokenizer.get_vocab_size()
        tokenizer_file = folder / _TOKENIZER / TOKENIZER_FILE
        # closing: the processes end with this block, whatever ends it.
        with closing(encode_documents(corpus.documents(), tokenizer_file, workers)) as encoded:
            written = write_indexed(folder / _PREFIX, _advancing(encoded, bars, tokenizing), size)
    return {
        "vocab_size": size,
        "documents": written.documents,
        "tokens": written.tokens,
        "text_bytes": text_bytes,
    }


def _advancing(batches: Iterator[EncodedBatch], bars: Progress, task: TaskID) -> Iterator[EncodedBatch]:
    for batch in batches:
        yield batch
        bars.advance(task, batch.size)
