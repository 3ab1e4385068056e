"""What a trained model is worth: a Megatron checkpoint -> Hugging Face's GPT-2, its perplexity, zero-shot tasks.

On the command line: `python -m optimus_cc_ext.evaluation convert|perplexity|tasks`.
"""

from optimus_cc_ext.evaluation.convert import Converted, convert
from optimus_cc_ext.evaluation.perplexity import Perplexity, perplexity

__all__ = ["Converted", "Perplexity", "convert", "perplexity"]
