"""Launcher: `torchrun ... -m optimus_cc_ext [pretrain_gpt.py] <Megatron's flags> <ours>` changes no file of
Megatron's.
"""

import sys

from optimus_cc_ext.startup import launch

if __name__ == "__main__":
    launch(sys.argv[1:])
