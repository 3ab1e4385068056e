"""Sums, gathers and exchanges in few bits over torch.distributed.

This room knows tensors and process groups; it knows no configuration, no session and no Megatron. Any training loop can
call the functions below (docs/collectives.md); `exchange.py` has the steps of a sum.
"""

from optimus_cc_ext.collectives.functions import (
    Work,
    all_gather_into_tensor,
    all_reduce,
    levels,
    reduce_scatter_tensor,
)

__all__ = ["Work", "all_gather_into_tensor", "all_reduce", "levels", "reduce_scatter_tensor"]
