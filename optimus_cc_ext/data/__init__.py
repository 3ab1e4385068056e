"""Text files -> a byte-level BPE tokenizer and Megatron's indexed dataset.

On the command line: `python -m optimus_cc_ext.data --input PATH`.
"""

from optimus_cc_ext.data.documents import DataError
from optimus_cc_ext.data.prepare import PreparedData, prepare

__all__ = ["DataError", "PreparedData", "prepare"]
