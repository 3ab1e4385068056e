"""Preparation of training data: text files become a byte-level BPE tokenizer and Megatron's indexed dataset.

Imports nothing of this package but `errors`; tokenizers and Megatron are imported when they are needed. Start reading
at `prepare.py`. The command line is `python -m optimus_cc_ext.tools.data --input PATH`.
"""

from optimus_cc_ext.tools.data.documents import DataError
from optimus_cc_ext.tools.data.prepare import PreparedData, prepare

__all__ = ["DataError", "PreparedData", "prepare"]
