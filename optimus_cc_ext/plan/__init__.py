"""What an iteration will take on a cluster that need not exist: `optimus-cc plan`. Standard library only, no torch.

`model` and `hardware` describe, `seconds` and `traffic` cost; `iteration` puts that through the forecast's timeline,
`variants` compares ways to compress, and `validate` holds all of it against published runs.
"""

from optimus_cc_ext.errors import OptimusError

__all__ = ["PlanError"]


class PlanError(OptimusError, ValueError):
    """A plan that cannot be made. The message says why, and what to do."""
