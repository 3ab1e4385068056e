"""What an iteration will take on a cluster that need not exist: `optimus-cc plan`. Standard library only, no torch.

`model` and `hardware` describe, `compute` and `links` give seconds, `variants` bytes of compressed traffic; `iteration`
puts them through the forecast's timeline; `validate` holds all of it against published runs.
"""

from optimus_cc_ext.errors import OptimusError

__all__ = ["PlanError"]


class PlanError(OptimusError, ValueError):
    """A plan that cannot be made. The message says why, and what to do."""
