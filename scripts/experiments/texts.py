"""Real text for trainings, prepared once for each vocabulary. A text is one record of `TEXTS`."""

import gzip
import hashlib
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from optimus_cc_ext.tools.data import DataError, PreparedData, prepare


@dataclass(frozen=True)
class Text:
    """Source of real text."""

    source: Path
    """Directory, .jsonl file, or text file; also compressed by gzip (.gz, or .dz as Debian's dictionaries)."""

    pattern: str
    """Pattern of the names of the files to read in a directory."""

    name: str
    """Description of the text for people."""

    package: str = ""
    """Debian package that contains the text, if this environment lacks it."""

    def prepared(self, folder: Path, vocabulary: int, max_mb: float, *, progress: bool = False) -> PreparedData:
        """Return the tokenized text in `folder`, prepared again if the folder is of other files or settings.

        Raises:
            DataError: there is no such text, or not enough of it.
        """
        folder.parent.mkdir(parents=True, exist_ok=True)
        if self.package and not self.source.exists():
            raise DataError(
                f"{self.source}: no such file, it is part of Debian's package {self.package}. Run apt-get install"
                f" {self.package}, or give the text with --input"
            )
        source = self.source
        if source.suffix == ".dz":
            source = folder.with_name(f"{folder.name}.txt")
            if not source.exists():
                # A few bytes of old packages are not UTF-8.
                with gzip.open(self.source, "rt", encoding="utf-8", errors="ignore") as packed:
                    source.write_text(packed.read(), encoding="utf-8")
        return prepare(
            source, folder.absolute(), vocab_size=vocabulary, pattern=self.pattern, max_mb=max_mb, progress=progress
        )


TEXTS: Mapping[str, Text] = {
    # Names that begin with _ are left out: setuptools makes a file of such a name, which holds the path of this
    # checkout.
    "python": Text(
        Path(sysconfig.get_path("purelib")), "[!_]*.py", "the Python sources of this environment's packages"
    ),
    "prose": Text(
        Path("/usr/share/dictd/gcide.dict.dz"), "*.txt", "an English dictionary with definitions and quotations",
        package="dict-gcide",
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
