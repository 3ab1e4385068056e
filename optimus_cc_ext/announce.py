"""Log lines: by `logging`, and on standard output where a launcher or `install` runs the training; and the names of
kinds of memory, by which log, doctor and documentation call each of them.
"""

import logging

from optimus_cc_ext.errors import named_fields

COMPRESSION_STATE = "compression state"
"""Name of the memory for residuals and warm starts, which outlive a step."""

MESSAGE_BUFFERS = "message buffers"
"""Name of the memory that holds messages of gradients and parameters, and the old values of a slice with which the
gather computes what a step has changed.
"""

COMMUNICATORS = "more NCCL communicators"
"""Name of the memory that NCCL takes for process groups of this package."""

_LOGGER = logging.getLogger("optimus_cc_ext")


def say(line: str, level: int = logging.INFO) -> None:
    """Log a line. A Python program gets the names of fields in place of flags, and sees warnings unless it logs
    otherwise.
    """
    _LOGGER.log(level, line if _prints() else named_fields(line))


class _StandardOutput(logging.Handler):
    """Log handler that prints each line as it is, to the current `sys.stdout`."""

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), flush=True)


def on_standard_output() -> None:
    """Print every line from now on, whatever the level of other loggers is."""
    if not _prints():
        _LOGGER.addHandler(_StandardOutput())
    _LOGGER.setLevel(logging.INFO)
    _LOGGER.propagate = False


def _prints() -> bool:
    return any(isinstance(handler, _StandardOutput) for handler in _LOGGER.handlers)
