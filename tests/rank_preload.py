"""Modules that the fork server imports once, so that ranks start with them: the CPU runtime, then Megatron.

It may contain only imports and work that every rank would do first: a server that has run parallel work (OpenMP) or
opened a socket must not be forked.
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

from optimus_cc_ext.tools.cpu import cpu_runtime

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron warns once for each missing GPU library
    # On a GPU each rank takes its device itself: CUDA does not survive a fork.
    if os.environ["OPTIMUS_CC_DEVICE"] == "cpu":
        cpu_runtime.activate()
    # Every training run imports these modules, most of them late: importing them in each rank would take most of its
    # time.
    for module in (
        "megatron.training",
        "megatron.core.tokenizers.text.models",
        "optimus_cc_ext.hooks.launching",
        "torch._dynamo",
        "transformers.generation",
    ):
        importlib.import_module(module)
    # Modules that only some versions have, because torch's own modules come and go.
    for module in (
        "torch._inductor.test_operators",
        "torch.profiler._cupti_monitor",
        "megatron.core.models.mimo.optimizer",
        "megatron.core.datasets.helpers",
        "optimus_cc_ext.tools.pretrain_gpt",  # this entry needs Megatron 0.19; older versions run an entry of the tests
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)

    # Megatron derives flags from its configurations by parsing their source each time, which takes half of a rank's
    # start.
    with contextlib.suppress(ImportError, AttributeError):  # Megatron has these names since 0.18
        from megatron.training import arguments
        from megatron.training.argument_utils import ArgumentGroupFactory as Factory

        docstrings = functools.cache(functools.partial(Factory._get_field_docstrings, object.__new__(Factory)))
        Factory._get_field_docstrings = lambda self, source: docstrings(source)
        arguments.add_megatron_arguments(argparse.ArgumentParser())

gc.collect()
gc.freeze()  # no rank's garbage collector may write to pages that all ranks share
