"""`scripts/quickstart.sh`: one small GPT trained twice on real text, vanilla and compressed, side by side.

On the command line: `python -m optimus_cc_ext.quickstart [--input PATH] [--iterations N] [--output DIR]`.
"""

from optimus_cc_ext.quickstart.settings import QuickstartError, Settings

__all__ = ["QuickstartError", "Settings"]
