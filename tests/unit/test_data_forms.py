"""Text in every form in which people keep it: each document survives with its text, or the file is refused by name."""

import bz2
import gzip
import json
import lzma
import random
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from optimus_cc_ext.tools.data import DataError, prepare
from optimus_cc_ext.tools.data.__main__ import main
from tests.prepared_data import read_back, write_jsonl

OTHER_FILES = {
    "a.jsonl.zst": (b"\x28\xb5\x2f\xfd" + bytes(range(256)), "compressed with zstd. Decompress it (zstd -d)"),
    "a.txt": (b"\x04\x22\x4d\x18" + bytes(range(256)), "compressed with lz4"),
    "b.txt": (b"PK\x03\x04" + bytes(range(256)), "a zip archive. Unpack it"),
    "a.parquet": (b"PAR1" + bytes(range(256)), "a Parquet file. Write its column of the text as a .jsonl"),
    "a.pdf": (b"%PDF-1.7\n", "a PDF. Extract its text"),
    "x_text_document.bin": (b"ab" * 100, "Megatron's own dataset"),
    "x_text_document.idx": (b"MMIDIDX\0\0", "Megatron's own dataset"),
    "a.csv": (b"id,text\n1,words\n", "a table. Write the column of the text as a .jsonl"),
    "u16.jsonl": ('{"text": "words"}\n'.encode("utf-16"), "text in UTF-16. Convert it (iconv -f UTF-16"),
    "u16le.txt": ("words\n".encode("utf-16-le") * 9, "byte offset 1: the text is not UTF-8 (a NUL byte, as in UTF-16"),
    "tail.jsonl": (b'{"text": "words"}\n' + bytes(40), "line 2, byte offset 18: the text is not UTF-8 (a NUL byte"),
    "array.json": (b'[{"text": "words"},\n{"text": "words"}]', "a JSON array, but each line must be an object"),
    "array.jsonl.gz": (gzip.compress(b'[\n{"text": "words"}\n]'), "a JSON array, but each line must be an object"),
    "indented.json": (b'{\n "text": "words"\n}', "line 1: malformed JSON"),
    "part-00000": (b'{"text": "words"}\n' * 9, "JSON, not plain text. Name it .jsonl if each line is an object"),
    "rows.dat": (b'["22", "7", "English", ["I am."]]\n' * 9, "JSON, not plain text"),
    "all.txt": (b'[\n  {"text": "words"}\n]', "JSON, not plain text"),
    "lines.txt": (b'\xef\xbb\xbf{"id": 1, "text": "words"}\n', "JSON, not plain text"),
    "c.jsonl": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\n", "a pointer of Git LFS"),
    "cut.jsonl.gz": (gzip.compress(b'{"text": "words"}\n' * 999)[:-20], "cut off or damaged"),
    "cut.txt.xz": (lzma.compress(b"words\n" * 999)[:-20], "cut off or damaged"),
}


@pytest.mark.parametrize("folder", [False, True], ids=["alone", "in a folder"])
@pytest.mark.parametrize("name", OTHER_FILES)
def test_a_file_that_is_no_text_is_refused_by_what_it_is(name: str, folder: bool, tmp_path: Path) -> None:
    content, expected = OTHER_FILES[name]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(content)
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "words"}\n')
    source = tmp_path / "in" if folder else tmp_path / "in" / name
    with pytest.raises(DataError, match=re.escape(expected)) as refused:
        prepare(source, tmp_path / "out", vocab_size=300, pattern="*", progress=False)
    assert name in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


# -- the number of documents and their text survive -----------------------------------------------------------------

ANY = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
HARD = [
    "<|endoftext|>",
    "\ufeff",
    "\u2028",
    "\r\n",
    "\x85",
    "東" * 1001,
    "A" * 2500,
    " " * 1200 + "x",
    "=" * 1000,
    "\n{",
]
TEXTS = st.lists(
    st.lists(st.one_of(ANY, st.sampled_from([*HARD, "\0"])), max_size=3).map("".join), min_size=1, max_size=8
)
PACKERS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".GZ": gzip.compress}
BAD_RECORDS = [
    '{"text": null}',
    '{"body": "x"}',
    '{"text": "cut of',
    '{"text": [1, 2]}',
    "[]",
    '{"text": "\\udc00"}',
    "\0\0",
]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    texts=TEXTS, ending=st.sampled_from([".jsonl", ".ndjson", ".json", ".JSONL", ".NdJson"]),
    packer=st.sampled_from([*PACKERS]), start=st.sampled_from([b"", b"\xef\xbb\xbf"]), ascii=st.booleans(),
    newline=st.sampled_from(["\n", "\r\n", "\n\n", "\n \n"]), last=st.booleans(), shards=st.integers(0, 3),
    bad=st.lists(st.tuples(st.integers(0, 8), st.sampled_from(BAD_RECORDS)), max_size=3),
)  # fmt: skip
def test_every_record_of_json_lines_in_any_form_is_one_document_with_its_text(
    texts: list[str], ending: str, packer: str, start: bytes, ascii: bool, newline: str, last: bool, shards: int,
    bad: list[tuple[int, str]],
) -> None:  # fmt: skip
    assume(any(text.strip() for text in texts))
    bad = bad if shards == 0 else []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "in")
        source.mkdir()
        size = -(-len(texts) // max(1, shards))
        for place in range(0, len(texts), size):
            records = [json.dumps({"id": 7, "text": text}, ensure_ascii=ascii) for text in texts[place : place + size]]
            for where, record in bad:
                records.insert(where, record)
            data = start + (newline.join(records) + newline * last).encode()
            (source / f"{place}{ending}{packer}").write_bytes(PACKERS[packer](data))
        (source / "read.me").write_text("not text")
        given = source if shards else source / f"0{ending}{packer}"
        prepared = prepare(
            given, Path(folder, "out"), vocab_size=300, pattern=f"*{ending}", skip_bad=bool(bad), progress=False
        )
        assert read_back(prepared) == [text for text in texts if text.strip()]
        assert prepared.skipped == len(bad)
        assert prepared.left_out == ("1 .me (--pattern '*" + ending + "')" if shards else "")
        assert (prepared.tokenizer_dir.parent / "skipped.txt").exists() == bool(bad)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    texts=TEXTS, ending=st.sampled_from([".txt", ".TXT", "", ".md"]), packer=st.sampled_from([*PACKERS]),
    start=st.sampled_from([b"", b"\xef\xbb\xbf"]), alone=st.booleans(),
)  # fmt: skip
def test_every_text_file_of_a_folder_is_one_document_and_a_single_one_loses_nothing(
    texts: list[str], ending: str, packer: str, start: bytes, alone: bool
) -> None:
    texts = [text.replace("\0", "").lstrip("\ufeff") for text in texts]
    assume(any(text.strip() for text in texts))
    assume(not any(re.match(r'\s*\{\s*"', text) for text in texts))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "in")
        source.mkdir()
        texts = ["".join(texts)] if alone else texts
        for place, text in enumerate(texts):
            (source / f"{place}{ending}{packer}").write_bytes(PACKERS[packer](start + text.encode()))
        given = source / f"0{ending}{packer}" if alone else source
        prepared = prepare(given, Path(folder, "out"), vocab_size=300, pattern=f"*{ending}", progress=False)
        found = read_back(prepared)
        assert ["".join(found)] == texts if alone else found == [text for text in texts if text.strip()]


def test_bad_records_are_skipped_on_request_counted_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n{"text": null}\n{"text": "b"}\n{"body": "c"}\n{"text": "c')
    words = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out"), "--skip-bad"]
    for _ in range(2):  # the second time nothing is made, and the same is said
        assert main(words) == 0
        said = capsys.readouterr()
        assert "2 documents" in said.out and "warning: 3 bad records skipped" in said.err and "line 2: the" in said.err
    named = (tmp_path / "out" / "skipped.txt").read_text().splitlines()
    assert [line.split(": ")[1] for line in named] == ["line 2", "line 4", "line 5"]


@pytest.mark.timeout(120)
def test_a_text_without_word_breaks_takes_time_that_is_linear_in_its_length(tmp_path: Path) -> None:
    characters = {
        "東京都大阪府": "letters",
        "ACGT": "letters",
        "0123": "digits",
        " ": "space",
        "\n": "lines",
        "=-": "signs",
    }
    texts = [(each * 100_000)[:100_000] + "." for each in characters]
    prepared = prepare(write_jsonl(tmp_path / "in.jsonl", texts), tmp_path / "out", vocab_size=400, progress=False)
    assert read_back(prepared) == texts
    words = "It isn't 3,000 words:\t" * 50
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer_dir / "tokenizer.json"))
    pieces = [place for text in texts for _, place in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert max(end - start for start, end in pieces) == 1000
    usual = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(words)
    assert tokenizer.pre_tokenizer.pre_tokenize_str(words) == usual, "words of usual length stay as they were"


def test_of_a_text_without_word_breaks_a_quarter_is_learned_from_and_of_other_texts_all(tmp_path: Path) -> None:
    run = "".join(random.Random(0).choices("abcdefgh", k=9500))
    broken = [run[start : start + 999] for start in range(0, len(run), 999)]

    def vocabulary(texts: list[str]) -> str:
        prepared = prepare(write_jsonl(tmp_path / "in.jsonl", texts), tmp_path / "out", vocab_size=400, progress=False)
        assert read_back(prepared) == texts
        return (prepared.tokenizer_dir / "tokenizer.json").read_text()

    assert vocabulary([run]) == vocabulary([run[:1000], run[4000:5000], run[8000:9000]])
    assert vocabulary([" ".join(broken)]) == vocabulary([broken[0], *(f" {word}" for word in broken[1:])])
