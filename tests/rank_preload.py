"""What the fork server imports once, for ranks to start with it at hand: the CPU runtime, then Megatron.

Imports only: a server that has run parallel work (OpenMP) or opened a socket must not be forked.
"""

import contextlib
import importlib
import os
import warnings

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPTIMUS_CC_DEVICE"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"

from optimus_cc_ext import cpu_runtime

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron says once per missing GPU library that it falls back
    cpu_runtime.activate()
    # What every training run imports, most of it late: in one rank after the other it would be most of their time.
    for module in (
        "megatron.training",
        "megatron.core.tokenizers.text",
        "optimus_cc_ext.hooks.installation",
        "torch._dynamo",
        "torch._inductor.test_operators",
        "transformers.generation",
    ):
        importlib.import_module(module)
    with contextlib.suppress(ImportError):  # it needs 0.19; older versions are tested through an entry of the tests
        import optimus_cc_ext.pretrain_gpt  # noqa: F401
