"""From a run's event files or log to tables, pictures and a page: `pip install 'optimus_cc_ext[report]'`.

`record` reads, with `log_lines`; `table`, `pictures` and `page` write; `comparison` is all of it for two runs.
"""

from optimus_cc_ext.errors import OptimusError, require_extra

__all__ = ["ReportError"]

require_extra("report", "matplotlib", "rich", "tensorboard")


class ReportError(OptimusError):
    """What was to be reported on is not there. The message names the file and what to do."""
