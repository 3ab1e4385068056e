"""Planner: predicts the seconds per iteration on a cluster that need not exist, for `optimus-cc plan`; no torch is
imported.

Imports `config`, `report` and the torch-free parts of `techniques`. Start reading at `iteration.py`: it
puts a job (`model.py`) on a cluster (`hardware.py`), with costs from `seconds.py` and `traffic.py`, through the
`timeline.py`. `variants.py` compares ways to compress, `grid.py` plans many points for one page,
`validate.py` compares predictions with published runs, and `measured.py` reads the user's own.
"""

from optimus_cc_ext.errors import OptimusError

__all__ = ["PlanError"]


class PlanError(OptimusError, ValueError):
    """A plan that cannot be made; the message gives the reason and the cure."""
