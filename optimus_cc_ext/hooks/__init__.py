"""Hooks around Megatron: one module per wrapped Megatron file, of the same name. No other folder imports Megatron for
them.

Imports all folders of the extension. Start reading at `launching.py` (Megatron's own training loop) or `attaching.py`
(a loop of one's own), then at the module that is named like the Megatron file you know; `registry.py` checks what is
wrapped.
"""

from optimus_cc_ext.hooks.attaching import compress
from optimus_cc_ext.hooks.handle import Handle
from optimus_cc_ext.hooks.launching import Launch, launched, start

__all__ = ["Handle", "Launch", "compress", "launched", "start"]
