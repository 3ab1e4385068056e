"""Real text for trainings, prepared once for each vocabulary. A text is one record of `TEXTS`."""

import hashlib
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from optimus_cc_ext.data import PreparedData, prepare


@dataclass(frozen=True)
class Text:
    """Source of real text."""

    source: Path
    """Directory, .jsonl file, or text file."""

    pattern: str
    """Pattern of the names of the files to read in a directory."""

    name: str
    """Description of the text for people."""

    def prepared(self, folder: Path, vocabulary: int, max_mb: float, *, progress: bool = False) -> PreparedData:
        """Return the tokenized text in `folder`, prepared again if the folder is of other files or settings.

        Raises:
            DataError: there is no such text, or not enough of it.
        """
        folder.parent.mkdir(parents=True, exist_ok=True)
        return prepare(
            self.source, folder.absolute(), vocab_size=vocabulary, pattern=self.pattern, max_mb=max_mb,
            progress=progress,
        )  # fmt: skip


TEXTS: Mapping[str, Text] = {
    "python": Text(
        Path(sysconfig.get_path("purelib")), "*.py", "the Python sources of this environment's packages"
    ),
}  # fmt: skip


def text_of(given: Path | None, pattern: str | None = None) -> Text:
    """Return the text of --input, or the Python sources if --input was not given."""
    if given is None:
        known = TEXTS["python"]
        return Text(known.source, pattern or known.pattern, known.name)
    return Text(given, pattern or "*.txt", str(given))


def hash_of(data: PreparedData) -> str:
    """Return the SHA-256 of the tokens, which shows whether two runs were trained on the same text."""
    with data.data_prefix.with_suffix(".bin").open("rb") as tokens:
        return hashlib.file_digest(tokens, "sha256").hexdigest()
