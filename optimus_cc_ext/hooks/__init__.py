"""Hooks around Megatron: one module per wrapped Megatron file, of the same name. No other folder imports Megatron for
them.

Imports all folders of the extension. Start reading at `installation.py` (all models of a process) or `handle.py` (one
model), then at the module that is named like the Megatron file you know; `registry.py` checks what is wrapped.
"""

from optimus_cc_ext.hooks.attaching import compress
from optimus_cc_ext.hooks.handle import Handle
from optimus_cc_ext.hooks.installation import Installation

__all__ = ["Handle", "Installation", "compress"]
