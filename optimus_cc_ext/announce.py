"""Log lines: by `logging`, and on standard output where a launcher or `install` runs the training."""

import logging

__all__ = ["on_standard_output", "say"]

_LOGGER = logging.getLogger("optimus_cc_ext")


def say(line: str) -> None:
    """Log a line of level INFO."""
    _LOGGER.info(line)


class _StandardOutput(logging.Handler):
    """Prints each line as it is, to what `sys.stdout` is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), flush=True)


def on_standard_output() -> None:
    """Print every line from now on, whatever the level of other loggers is."""
    if not any(isinstance(handler, _StandardOutput) for handler in _LOGGER.handlers):
        _LOGGER.addHandler(_StandardOutput())
    _LOGGER.setLevel(logging.INFO)
    _LOGGER.propagate = False
