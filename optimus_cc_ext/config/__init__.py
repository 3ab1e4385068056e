"""Configuration: the options of each class of traffic, their command-line flags, presets, and refusals.

Uses only the standard library, `compressors/formats.py` and `errors.py`, so that a command line can be checked without
torch or Megatron. Start reading at `classes.py`, the table of the classes of traffic; `presets.py` turns a parsed
command line into an `OptimusConfig`.
"""

from optimus_cc_ext.config.classes import (
    CompressedBackpropConfig,
    DataParallelCompressionConfig,
    FusedEmbeddingSyncConfig,
    ParamGatherConfig,
    PipelineForwardConfig,
)
from optimus_cc_ext.config.optimus_config import OptimusConfig
from optimus_cc_ext.config.options import default_of, flag_of, literals_of, option, type_of, values_of

__all__ = [
    "CompressedBackpropConfig", "DataParallelCompressionConfig", "FusedEmbeddingSyncConfig", "OptimusConfig",
    "ParamGatherConfig", "PipelineForwardConfig", "default_of", "flag_of", "literals_of", "option",
    "type_of", "values_of",
]  # fmt: skip
