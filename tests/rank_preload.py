"""What the fork server imports once, for ranks to start with it at hand: the CPU runtime, then Megatron.

Imports, and what else every rank would do first; a server that has run parallel work (OpenMP) or opened a socket must
not be forked.
"""

import argparse
import contextlib
import functools
import gc
import importlib
import os
import warnings

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPTIMUS_CC_DEVICE"] = os.environ.get("OPTIMUS_CC_TEST_DEVICE", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"

from optimus_cc_ext.devices import cpu_runtime

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron says once per missing GPU library that it falls back
    if os.environ["OPTIMUS_CC_DEVICE"] == "cpu":  # a GPU is each rank's own to take: CUDA does not survive a fork
        cpu_runtime.activate()
    # What every training run imports, most of it late: in one rank after the other it would be most of their time.
    for module in (
        "megatron.training",
        "megatron.core.tokenizers.text.models",
        "optimus_cc_ext.hooks.installation",
        "torch._dynamo",
        "transformers.generation",
    ):
        importlib.import_module(module)
    # Some of it only some versions have: torch's own modules come and go.
    for module in (
        "torch._inductor.test_operators",
        "torch.profiler._cupti_monitor",
        "megatron.core.models.mimo.optimizer",
        "megatron.core.datasets.helpers",
        "optimus_cc_ext.pretrain_gpt",  # it needs 0.19; older versions are tested through an entry of the tests
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)

    # For its flags Megatron parses the source of its configurations, each time: half of what a rank does to start.
    with contextlib.suppress(ImportError, AttributeError):  # since 0.18
        from megatron.training import arguments
        from megatron.training.argument_utils import ArgumentGroupFactory as Factory

        docstrings = functools.cache(functools.partial(Factory._get_field_docstrings, object.__new__(Factory)))
        Factory._get_field_docstrings = lambda self, source: docstrings(source)
        arguments.add_megatron_arguments(argparse.ArgumentParser())

gc.collect()
gc.freeze()  # so that no rank's collector writes to the pages that all of them share
