"""Text -> tokenizer -> indexed dataset: the written data are the whole text, or nothing is written."""

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optimus_cc_ext.tools.data import DataError, prepare
from optimus_cc_ext.tools.data.__main__ import main
from optimus_cc_ext.tools.data.documents import find_corpus
from tests.prepared_data import load_documents, write_jsonl

WORDS = ["quick", "brown", "", "two\tcolumns\r\n", "naïve", "café", "—", "東京", "🙂", "a", "lazy", "dog"]


def make_text(index: int) -> str:
    """Make some hundred bytes with the usual reasons of wrong decoding: white space, accents, emoji."""
    words = [WORDS[(index * 7 + step * step) % len(WORDS)] for step in range(40 + index % 17)]
    return f"  # document {index}\n" + " ".join(words) + " , .\n\n"


@pytest.fixture
def texts() -> list[str]:
    return [make_text(index) for index in range(60)]


@pytest.fixture
def folder(tmp_path: Path, texts: list[str]) -> Path:
    """Make a directory in which file i holds texts[i], with files that must be left out."""
    root = tmp_path / "input"
    for index, text in enumerate(texts):
        path = root / f"part{index // 10}" / f"file{index:03}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    (root / ".hidden").mkdir()
    (root / ".hidden" / "secret.txt").write_text("hidden")
    (root / "image.png").write_bytes(b"\x89PNG\xff\xfe")
    (root / "blank.txt").write_text(" \n")
    return root


def read(source: Path, max_bytes: int | None = None) -> list[str]:
    """Return the documents of a corpus before they are tokenized."""
    corpus = find_corpus(source, pattern="*.txt", json_key="text", max_bytes=max_bytes, exclude=source.parent / "out")
    return [document.text for document in corpus.documents()]


def build_megatron_tokenizer(folder: Path) -> Any:
    """Make the tokenizer as Megatron's training loop does from its flags."""
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    flags = SimpleNamespace(
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model=str(folder),
        metadata_path=None,
        chat_template=None,
        vocab_file=None,
        merge_file=None,
        special_tokens=None,
        tokenizer_hf_no_use_fast=False,
        trust_remote_code=False,
        tokenizer_hf_no_include_special_tokens=False,
        pad_vocab_size=False,
    )
    return build_tokenizer(flags)


def read_tree(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_the_dataset_is_the_text_and_megatron_reads_both_without_a_network(
    tmp_path: Path, folder: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> None:
        raise AssertionError("the network was asked")

    prepared = prepare(folder, tmp_path / "out", vocab_size=300, workers=2, progress=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("socket.socket.connect", refuse)
    tokenizer = build_megatron_tokenizer(prepared.tokenizer_dir)
    assert tokenizer.vocab_size == prepared.vocab_size == 300
    assert tokenizer.detokenize([tokenizer.eod], skip_special_tokens=False) == "<|endoftext|>"
    documents = load_documents(prepared.data_prefix)
    assert [document[-1] for document in documents] == [tokenizer.eod] * len(texts)
    assert [document[:-1] for document in documents] == [tokenizer.tokenize(text) for text in texts]
    assert [tokenizer.detokenize(document[:-1]) for document in documents] == texts
    assert prepared.documents == len(texts)
    assert prepared.tokens == sum(len(document) for document in documents)
    assert prepared.text_bytes == sum(len(text.encode()) for text in texts)


def test_spelled_out_special_token_is_text_not_an_end(tmp_path: Path) -> None:
    text = "before <|endoftext|> after " * 30
    source = write_jsonl(tmp_path / "in.jsonl", [text])
    prepared = prepare(source, tmp_path / "out", vocab_size=300, workers=1, progress=False)
    (document,) = load_documents(prepared.data_prefix)
    eod = build_megatron_tokenizer(prepared.tokenizer_dir).eod
    assert document.index(eod) == len(document) - 1


@pytest.mark.full
def test_workers_batches_and_the_kind_of_input_do_not_change_a_byte(
    tmp_path: Path, folder: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(write_jsonl(tmp_path / "in.jsonl", texts), tmp_path / "jsonl", vocab_size=400, workers=1, progress=False)
    monkeypatch.setattr(sys.modules["optimus_cc_ext.tools.data.prepare"], "_BATCH_BYTES", 1000)
    prepare(folder, tmp_path / "batches", vocab_size=400, progress=False)
    for workers in ("1", "3"):  # The tokenizer starts its threads once per process.
        command = [sys.executable, "-m", "optimus_cc_ext.tools.data", "--input", str(folder), "--workers", workers]
        command += ["--output", str(tmp_path / workers), "--vocab-size", "400"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    jsonl, *trees = (read_tree(tmp_path / name) for name in ("jsonl", "batches", "1", "3"))
    assert trees[0].keys() >= {"corpus.bin", "corpus.idx", "manifest.json", "tokenizer/tokenizer.json"}
    assert trees[0] == trees[1] == trees[2]
    for name in ("corpus.bin", "corpus.idx", "tokenizer/tokenizer.json"):
        assert jsonl[name] == trees[0][name]


def test_single_text_file_is_cut_at_line_ends_and_nothing_is_lost(tmp_path: Path, texts: list[str]) -> None:
    path = tmp_path / "book.txt"
    content = "".join(texts) * 10
    path.write_bytes(content.encode())
    documents = read(path)
    assert "".join(documents) == content
    assert len(documents) > 5
    assert all(document.endswith("\n") for document in documents)


def test_a_directory_whose_name_ends_like_a_file_is_a_directory(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.mkdir()
    (source / "a.txt").write_text("text, not JSON")
    assert read(source) == ["text, not JSON"]


def test_max_mb_takes_the_first_whole_documents(tmp_path: Path, folder: Path, texts: list[str]) -> None:
    limit = sum(len(text.encode()) for text in texts[:20])
    blank = len((folder / "blank.txt").read_bytes())  # blank.txt sorts first, counts towards the limit, and is left out
    for source, whole in ((folder, limit + blank), (write_jsonl(tmp_path / "in.jsonl", texts), limit)):
        assert read(source, whole) == texts[:20]
        assert read(source, whole - 1) == texts[:19]


def test_second_run_is_skipped_until_something_changes(tmp_path: Path, folder: Path) -> None:
    def run(**settings: object) -> bool:
        return prepare(folder, tmp_path / "out", workers=1, progress=False, **settings).up_to_date

    assert not run(vocab_size=400)
    before = read_tree(tmp_path / "out")
    assert run(vocab_size=400)
    assert read_tree(tmp_path / "out") == before
    (tmp_path / "out/corpus/cache").mkdir(parents=True)  # Megatron puts its index here without --data-cache-path
    assert not run(vocab_size=300)
    assert not (tmp_path / "out/corpus").exists(), "an index of other tokens must not survive them"
    (folder / "part0" / "file000.txt").write_text("another text")
    assert not run(vocab_size=300)
    assert run(vocab_size=300)
    with (tmp_path / "out" / "corpus.bin").open("r+b") as stream:
        stream.truncate(10)
    assert not run(vocab_size=300)
    (tmp_path / "out" / "manifest.json").write_text("{")
    assert not run(vocab_size=300)


BAD_INPUTS = {
    "missing input": (None, [], ["no such file"]),
    "directory without a match": ({"a.md": b"text"}, [], ["no file matches '*.txt'", "1 .md", "--pattern"]),
    "directory with blank files only": ({"a.txt": b"", "b.txt": b" \n"}, [], ["only white space"]),
    "bad UTF-8 in a directory": (
        {"a.txt": b"fine", "b.txt": b"one\ntwo\xff"},
        [],
        ["b.txt: line 2, byte offset 7: the text is not UTF-8"],
    ),
    "bad UTF-8 far in a text file": (
        b"0123456789abcde\n" * 3000 + b"abc\xc3(",
        [],
        ["line 3001, byte offset 48003: the text is not UTF-8"],
    ),
    "bad UTF-8 in jsonl": (b'{"text": "a"}\n{"text": "\xff"}\n', [], ["line 2, byte offset 24: the text is not UTF-8"]),
    "malformed JSON": (b'{"text": "a"}\n\n{"text": \n', [], ["line 3: malformed JSON", "column"]),
    "deeply nested JSON": (b'{"text":' + b"[" * 200_000 + b"\n", [], ["line 1: JSON that Python cannot read"]),
    "JSON that is no object": (b'{"text": "a"}\n[1]\n', [], ["line 2: a JSON list, not an object"]),
    "missing key": (b'{"text": "a"}\n{"body": "b"}\n', [], ["line 2: no key 'text'", "'body'", "--json-key"]),
    "key of another type": (b'{"text": 3}\n', [], ["line 1", "a int, not a string"]),
    "no good record": (b'{"text": null}\n' * 3, ["--skip-bad"], ["line 1", "a NoneType, not a string"]),
    "half a surrogate pair": (b'{"text": "a\\ud800"}\n', [], ["line 1", "surrogate", "character 1"]),
    "empty jsonl": (b"\n", [], ["only white space"]),
    "vocabulary too small": (b'{"text": "a"}\n', ["--vocab-size", "256"], ["--vocab-size 256", "257"]),
    "no workers": (b'{"text": "a"}\n', ["--workers", "0"], ["--workers 0"]),
    "negative limit": (b'{"text": "a"}\n', ["--max-mb", "-1"], ["--max-mb -1"]),
    "limit that is no number": (b'{"text": "a"}\n', ["--max-mb", "nan"], ["--max-mb nan"]),
    "limit below the first document": (b'{"text": "abc"}\n', ["--max-mb", "0.000001"], ["first document"]),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input_gets_a_reason_and_leaves_nothing(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, flags, expected = BAD_INPUTS[case]
    source = tmp_path / ("in.txt" if case.endswith("text file") else "in.jsonl")
    if isinstance(content, dict):
        source.mkdir()
        for name, data in content.items():
            (source / name).write_bytes(data)
    elif content is not None:
        source.write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    assert main(["--input", str(source), "--output", str(tmp_path / "out"), *flags]) == 2
    message = capsys.readouterr().err
    assert all(part in message for part in expected), message
    assert "Traceback" not in message
    assert sorted(tmp_path.rglob("*")) == before


def test_output_that_holds_other_files_is_refused(tmp_path: Path, folder: Path) -> None:
    kept = tmp_path / "out" / "thesis.tex"
    kept.parent.mkdir()
    kept.write_text("years of work")
    with pytest.raises(DataError, match=r"thesis\.tex"):
        prepare(folder, tmp_path / "out", progress=False)
    with pytest.raises(DataError, match="the folder contains the input"):
        prepare(folder, tmp_path, progress=False)
    assert kept.read_text() == "years of work"


def test_output_inside_the_input_is_not_read_again(tmp_path: Path, folder: Path) -> None:
    for _ in range(2):
        prepared = prepare(folder, folder / "out", vocab_size=300, workers=1, pattern="*[!g]", progress=False)
    assert prepared.up_to_date


def test_failure_keeps_the_earlier_result(tmp_path: Path, folder: Path) -> None:
    prepare(folder, tmp_path / "out", vocab_size=300, workers=1, progress=False)
    before = read_tree(tmp_path / "out")
    (folder / "part3" / "file030.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="the text is not UTF-8"):
        prepare(folder, tmp_path / "out", vocab_size=300, workers=1, progress=False)
    assert read_tree(tmp_path / "out") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["input", "out"]


@pytest.mark.parametrize(
    "stop",
    [pytest.param(each, marks=pytest.mark.full) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)],
)
def test_interrupted_run_leaves_nothing_and_the_next_one_succeeds(
    tmp_path: Path, texts: list[str], stop: signal.Signals
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", texts * 2000)
    command = [sys.executable, "-m", "optimus_cc_ext.tools.data", "--input", str(source), "--workers", "2"]
    command += ["--output", str(tmp_path / "out"), "--vocab-size", "300"]
    # A shell starts background processes with SIGINT ignored, and this test may run in one.
    listening = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=listening)
    try:
        # The .bin file appears when Megatron is imported and the tokenizing is about to start.
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".out.partial/corpus.bin")):
            assert time.monotonic() < deadline, "timed out"
            time.sleep(0.02)
        process.send_signal(stop)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[stop]
    assert b"Traceback" not in errors
    assert not (tmp_path / "out").exists()
    if stop != signal.SIGKILL:  # SIGKILL allows no cleaning up; the next run cleans up
        assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    write_jsonl(source, texts)
    prepare(source, tmp_path / "out", vocab_size=300, workers=1, progress=False)
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out"]
