"""Loader of the questions beside the task files, or of a text of the user's, for the harness, which passes on
--metadata.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets

HERE = Path(__file__).resolve().parent


def questions(
    file: str, text_file: str | None = None, json_key: str = "text", **_metadata: Any
) -> dict[str, datasets.Dataset]:
    """Return the lines of the .jsonl `file` of this folder as the split `test`, or those of `text_file`.

    A `text_file` that is no .jsonl is one document.
    """
    path = HERE / file if text_file is None else Path(text_file)
    text = path.read_bytes().decode("utf-8-sig")
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in text.split("\n") if line.strip()]
        rows = rows if text_file is None else [{"text": row[json_key]} for row in rows]
    else:
        rows = [{"text": text}]
    # Dataset.from_list makes a data set that cannot be hashed with some versions of pyarrow.
    return {"test": datasets.Dataset.from_generator(_rows, gen_kwargs={"rows": rows})}


def _rows(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield from rows
