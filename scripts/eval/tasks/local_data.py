"""The questions that lie beside the task files; lm-evaluation-harness takes paths from the working folder."""

from pathlib import Path
from typing import Any

import datasets

HERE = Path(__file__).resolve().parent


def questions(file: str, **_metadata: Any) -> dict[str, datasets.Dataset]:
    """The lines of a .jsonl file of this folder, as the split `test`."""
    return {"test": datasets.Dataset.from_json(str(HERE / file))}
