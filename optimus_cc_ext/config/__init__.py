"""The configuration: what can be asked for, how a command line asks for it, and what is done on a layout."""

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
    "ParamGatherConfig", "PipelineForwardConfig", "default_of", "flag_of", "literals_of", "option", "type_of",
    "values_of",
]  # fmt: skip
