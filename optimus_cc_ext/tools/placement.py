"""Placement of ranks on nodes, printed for a layout on the command line.

python -m optimus_cc_ext.tools.placement --tensor 2 --pipeline 4 --world-size 32 --ranks-per-node 8
"""

import argparse
import sys

from optimus_cc_ext.placement import Placement, placement_line


def main() -> int:
    """Print the placement of the layout on the command line; the launcher calls this."""
    parser = argparse.ArgumentParser(
        prog="python -m optimus_cc_ext.tools.placement",
        description="Print which process groups stay inside nodes, and how many pipeline hops cross nodes.",
    )
    for name in ("tensor", "context", "pipeline", "world-size", "ranks-per-node"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--use-tp-pp-dp-mapping", action="store_true")
    asked = parser.parse_args()
    placement = Placement(
        tensor=asked.tensor, context=asked.context, pipeline=asked.pipeline,
        data=max(1, asked.world_size // (asked.tensor * asked.context * asked.pipeline)),
        ranks_per_node=asked.ranks_per_node, pipeline_before_data=asked.use_tp_pp_dp_mapping,
    )  # fmt: skip
    print(placement_line(placement))
    return 0


if __name__ == "__main__":
    sys.exit(main())
