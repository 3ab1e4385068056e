"""Reports: reads a run's event files or log, and writes tables, pictures and a page (`pip install
'optimus_cc_ext[report]'`).

Imports the table of classes from `config`, and nothing that needs torch or Megatron. Start reading at `comparison.py`,
which compares one or two runs; `record.py` and `log_lines.py` read, `table.py`, `pictures.py` and `document.py` write.
"""

from optimus_cc_ext.errors import OptimusError, require_extra

__all__ = ["ReportError", "require"]


class ReportError(OptimusError):
    """Missing or unusable input of a report; the message names the file and the cure."""


class NoRows(ReportError):
    """A run that has logged nothing."""


def require() -> None:
    """Raise MissingExtra unless the extra `report` is installed."""
    require_extra("report", "matplotlib", "rich", "tensorboard")
