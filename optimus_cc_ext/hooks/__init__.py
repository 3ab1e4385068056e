"""The only folder that imports Megatron: one module per Megatron file that is wrapped, of the same name."""

from optimus_cc_ext.hooks.handle import Handle, compress
from optimus_cc_ext.hooks.installation import Installation

__all__ = ["Handle", "Installation", "compress"]
