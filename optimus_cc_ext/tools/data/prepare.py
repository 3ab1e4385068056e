"""The whole way from text to a folder that Megatron trains on, which appears complete or not at all.

OUTPUT/corpus.bin, corpus.idx   Megatron's indexed dataset, one sequence per document
OUTPUT/tokenizer/               for --tokenizer-type HuggingFaceTokenizer --tokenizer-model
OUTPUT/skipped.txt              records that --skip-bad left out, each with its reason, if there were any
OUTPUT/manifest.json            the inputs and settings; the same ones again are not processed twice
"""

import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from optimus_cc_ext.errors import require_extra
from optimus_cc_ext.tools.data.documents import Corpus, DataError, Document, find_corpus
from optimus_cc_ext.tools.data.output import check_replaceable, locked, replace

_MANIFEST, SKIPPED = "manifest.json", "skipped.txt"
_DATASET_FILES = ("corpus.bin", "corpus.idx", "tokenizer/tokenizer.json")
# By default Megatron writes its index beside the dataset, into a folder of the dataset's name.
_REPLACEABLE = {"corpus.bin", "corpus.idx", "tokenizer", _MANIFEST, SKIPPED, "corpus", "cache"}
# Longest run of letters, digits, other signs or white space that is one word for the tokenizer, whose time is quadratic
# in the length of a word. Chinese, DNA and base64 have no white space.
_LONGEST_RUN = 1000
# Learning takes 5 s for each MB in which no word comes twice, so the tokenizer learns from a quarter of such a text.
_UNBROKEN, _LEARNED_SHARE = re.compile(rf"(?<!\S)\S{{{_LONGEST_RUN},}}"), 4
# Bytes of text that are tokenized at once: enough to keep all threads busy, little enough for the progress bar to move.
_BATCH_BYTES = 4 * 1024 * 1024

_END_OF_DOCUMENT = "<|endoftext|>"
# One token for each byte, so that any text can be represented, and one for the end of a document.
_MIN_VOCAB_SIZE = 256 + 1


@dataclass(frozen=True, slots=True)
class PreparedData:
    """The prepared data as Megatron's flags need it: `data_prefix` for --data-path, `tokenizer_dir` for
    --tokenizer-model.

    `documents` and `tokens` count the contents of the dataset, end-of-document tokens included; `text_bytes` is the
    length of the text in UTF-8; `skipped` counts the bad records that were left out, and `left_out` names the files;
    `up_to_date` is True if nothing had to be made.
    """

    data_prefix: Path
    tokenizer_dir: Path
    vocab_size: int
    documents: int
    tokens: int
    text_bytes: int
    up_to_date: bool
    skipped: int = 0
    left_out: str = ""


def prepare(
    input: str | Path,
    output: str | Path,
    *,
    vocab_size: int = 8192,
    workers: int | None = None,
    pattern: str = "*.txt",
    max_mb: float | None = None,
    json_key: str = "text",
    skip_bad: bool = False,
    progress: bool = True,
) -> PreparedData:
    """Train a tokenizer on `input` and write `input` as Megatron's indexed dataset into the folder `output`.

    `input` is a directory (files that match `pattern`, recursively), a `.jsonl` file (the text under `json_key`) or a
    text file; documents.find_corpus defines order and cuts. `max_mb` (10**6 bytes) keeps a prefix of whole documents.
    `skip_bad` leaves out records that cannot be used, such as a line that is cut or has no text.
    `workers` is the number of tokenizing threads, which a process starts once; the bytes written do not depend on it.
    `output` appears when it is complete; a second call with the same settings and unchanged files returns at once.
    `progress` draws bars on a terminal.

    Raises DataError if the input or an argument is wrong, OSError if `output` cannot be written.
    """
    if vocab_size < _MIN_VOCAB_SIZE:
        raise DataError(
            f"--vocab-size {vocab_size}: too small, a byte-level vocabulary has at least {_MIN_VOCAB_SIZE}"
            " tokens (256 bytes and the end of a document). Give a larger number"
        )
    if workers is not None and workers < 1:
        raise DataError(f"--workers {workers}: at least one thread is needed. Give 1 or more")
    # `not >=` also refuses NaN.
    if max_mb is not None and not 0 < max_mb < float("inf"):
        raise DataError(f"--max-mb {max_mb:g}: not a positive size. Give a positive number, or leave the flag out")
    require_extra("data", "tokenizers", "tqdm")
    if workers is not None:
        os.environ["RAYON_NUM_THREADS"] = str(workers)
    source, target = Path(input).resolve(), Path(output).absolute()
    check_replaceable(target, source, _REPLACEABLE)
    max_bytes = None if max_mb is None else int(max_mb * 1e6)
    corpus = find_corpus(source, pattern=pattern, json_key=json_key, max_bytes=max_bytes, exclude=target)
    made_from = {
        "format": 3,
        "input": str(source),
        "json_key": json_key,
        "max_bytes": max_bytes,
        "skip_bad": skip_bad,
        "requested_vocab_size": vocab_size,
        "tokenizers": version("tokenizers"),
        "files": len(corpus.files),
        "files_fingerprint": hashlib.sha256(ascii(corpus.files).encode()).hexdigest(),
    }
    with locked(target) as partial:
        counts = _read_up_to_date(target, made_from)
        up_to_date = counts is not None
        if counts is None:
            partial.mkdir()
            counts = _build(corpus, partial, vocab_size, skip_bad, progress)
            sizes = {name: (partial / name).stat().st_size for name in _DATASET_FILES}
            manifest = {"made_from": made_from, "counts": counts, "sizes": sizes}
            (partial / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
            replace(partial, target)
    return PreparedData(
        target / "corpus", target / "tokenizer", left_out=corpus.left_out, up_to_date=up_to_date, **counts
    )


def _read_up_to_date(target: Path, made_from: dict[str, Any]) -> dict[str, int] | None:
    """Return the counts of the dataset in `target` if it was made from the same inputs and is complete; else None."""
    try:
        manifest = json.loads((target / _MANIFEST).read_text(encoding="utf-8"))
        whole = all((target / name).stat().st_size == manifest["sizes"][name] for name in _DATASET_FILES)
        return manifest["counts"] if whole and manifest["made_from"] == made_from else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a folder that is absent or damaged is made again


def _build(corpus: Corpus, folder: Path, vocab_size: int, skip_bad: bool, progress: bool) -> dict[str, int]:
    from tqdm import tqdm

    def bar(label: str, total: int) -> Any:
        # With disable=None, tqdm draws the bar on a terminal only.
        return tqdm(desc=label, total=total, unit="B", unit_scale=True, disable=None if progress else True)

    text_bytes = 0
    skipped: list[str] = []
    with bar("training the tokenizer", sum(size for size, _ in corpus.files.values())) as training:

        def texts() -> Iterator[str]:
            nonlocal text_bytes
            for text, size in corpus.documents((lambda error: skipped.append(f"{error}\n")) if skip_bad else None):
                text_bytes += size
                training.update(size)
                yield text

        # This first reading also finds every error in the text.
        tokenizer = _train_tokenizer(texts(), vocab_size, folder / "tokenizer")
    if text_bytes == 0:
        raise DataError(f"{corpus.root}: the input contains only white space. Give --input a file with text")
    if skipped:
        (folder / SKIPPED).write_text("".join(skipped), encoding="utf-8")
    with bar("tokenizing", text_bytes) as tokenizing:
        counts = _write_indexed(corpus.documents(lambda _: None), tokenizer, folder / "corpus", tokenizing.update)
    return {"vocab_size": tokenizer.get_vocab_size(), "text_bytes": text_bytes, "skipped": len(skipped), **counts}


def _train_tokenizer(texts: Iterator[str], vocab_size: int, folder: Path) -> Any:
    """Train a byte-level BPE (GPT-2's word boundaries) on `texts`; the same texts give the same tokenizer.

    Makes `folder` with tokenizer.json and tokenizer_config.json, which Megatron's HuggingFaceTokenizer reads without a
    network, and returns the tokenizers.Tokenizer. A short text may give fewer tokens than `vocab_size`;
    get_vocab_size() returns their number. _END_OF_DOCUMENT is token 0, the config's eos.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    runs = "|".join(f"{kind}{{{_LONGEST_RUN}}}" for kind in (r"\p{L}", r"\p{N}", r"\s", r"[^\s\p{L}\p{N}]"))
    cut = pre_tokenizers.Split(Regex(runs), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[_END_OF_DOCUMENT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((_UNBROKEN.sub(_part_to_learn, text) for text in texts), trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _END_OF_DOCUMENT,
        # With the tokenizer's clean-up of spaces, decoding could join "a ," into "a,".
        "clean_up_tokenization_spaces": False,
        # The tokenizer sets no limit, because Megatron cuts documents into sequences. Larger numbers lose digits in
        # JSON.
        "model_max_length": 2**53,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return tokenizer


def _part_to_learn(run: re.Match[str]) -> str:
    starts = range(0, len(run[0]), _LONGEST_RUN * _LEARNED_SHARE)
    return "".join(run[0][start : start + _LONGEST_RUN] for start in starts)


def _write_indexed(
    documents: Iterator[Document], tokenizer: Any, prefix: Path, advance: Callable[[int], Any]
) -> dict[str, int]:
    """Write one sequence per document, ended by _END_OF_DOCUMENT, as uint16 if the vocabulary fits, else as int32."""
    # Megatron is imported here, which takes seconds that neither bad input nor finished data should wait for.
    with warnings.catch_warnings():
        # Megatron warns about kernels that are not installed; writing files does not use them.
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder, get_bin_path, get_idx_path

    # A special token that is spelled out in the text is text, not the end of a document.
    tokenizer.encode_special_tokens = True
    end = tokenizer.token_to_id(_END_OF_DOCUMENT)
    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), DType.optimal_dtype(tokenizer.get_vocab_size()))
    for batch in _batches(documents):
        for encoding in tokenizer.encode_batch_fast([text for text, _ in batch], add_special_tokens=False):
            ids = [*encoding.ids, end]
            builder.add_document(ids, [len(ids)])
        advance(sum(size for _, size in batch))
    builder.finalize(get_idx_path(str(prefix)))
    return {"documents": len(builder.sequence_lengths), "tokens": sum(builder.sequence_lengths)}


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    room = _BATCH_BYTES
    for document in documents:
        batch.append(document)
        room -= document.size
        if room <= 0:
            yield batch
            batch, room = [], _BATCH_BYTES
    if batch:
        yield batch
