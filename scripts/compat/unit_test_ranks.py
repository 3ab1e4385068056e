"""A rank of Megatron-LM's unit tests: pytest, with our settings around each test and, on a CPU, stand-ins for a GPU."""

import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import json
import os
import sys
import time
import types
from collections.abc import Mapping
from typing import Any, TextIO

import pytest
import torch
from _pytest.runner import runtestprotocol

from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.config.classes import CLASSES, TrafficClass, class_named
from optimus_cc_ext.config.presets import Layout
from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.hooks.attaching import attach
from optimus_cc_ext.patching import Patches

__all__ = ["MODES", "VANILLA", "go_on", "run", "stand_in_for_a_gpu"]

VANILLA = "vanilla"
MODES: Mapping[str, OptimusConfig | None] = {
    VANILLA: None,
    "off": OptimusConfig(),
    "lossless": OptimusConfig(dp_compression_format="int8", param_gather_format="int8", _exact_blocks=True),
}
"""Ways to run the tests; "lossless" runs the code of int8, with messages that carry values unchanged."""

_BETWEEN_STAGES = {
    "pipeline_forward_format": "int8", "compressed_backprop_format": "int8",
    "fused_embedding_sync": True, "fused_embedding_sync_format": "int8",
}  # fmt: skip
"""Settings that lossless has in addition where the tests are about pipeline stages."""

_SPEC = "get_gpt_layer_with_transformer_engine_"


class _Compressed(Patches):
    """Compression of every model that is wrapped in DistributedDataParallel, all in one handle; None: nothing."""

    def __init__(self, config: OptimusConfig | None) -> None:
        from megatron.core.distributed import DistributedDataParallel

        super().__init__()
        self._config, self._handle = config, None
        if config is not None:
            self.wrap(DistributedDataParallel, "__init__", self._built)
            self.callback(self._end)

    def _built(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        original(model, *args, **kwargs)
        if self._handle is None:
            self._handle = attach([model], self._choose, train_iters=100, on=self._config.any_technique)
            self._handle._session.follows_zeroing = True  # tests with one stage reduce gradients without a schedule
        else:
            self._handle._attach(model)

    def _choose(self, layout: Layout, _options: Any) -> tuple[OptimusConfig, Layout]:
        return self._config, layout

    @property
    def sent(self) -> int:
        """The bytes that were sent with a technique on."""
        on = self._handle is not None and self._config.any_technique
        return sum(sent for _, sent in self._handle._session.traffic.total().values()) if on else 0

    def _end(self) -> None:
        if self._handle is not None:
            self._handle._detach()  # a test may have destroyed the process groups


class _Around:
    """Plugin of pytest: skips finished tests, installs this package around each test, and writes down each outcome.

    A test whose layout leaves a class of traffic nothing to send, or does not support the class, is repeated without
    this class, as a preset would leave it out. The classes in `left_out`, by test, are off from the beginning.
    """

    def __init__(
        self, mode: str, todo: frozenset[str] | None, done: frozenset[str], left_out: Mapping[str, tuple[str, ...]],
        notes: TextIO,
    ) -> None:  # fmt: skip
        self._mode, self._todo, self._done, self._left_out, self._notes = mode, todo, done, left_out, notes
        self._refused: FlagError | None = None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [
            item
            for item in items
            if item.nodeid not in self._done and (self._todo is None or item.nodeid in self._todo)
        ]

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        self._note(start=item.nodeid)
        config, sent = MODES[self._mode], 0
        if config is not None and config.any_technique and "pipeline_parallel/" in item.nodeid:
            config = dataclasses.replace(config, **_BETWEEN_STAGES)
        left_out = list(self._left_out.get(item.nodeid, ()))
        for name in left_out:
            config = config and _without(config, class_named(name))
        while True:
            self._refused = None
            with _Compressed(config) as compressed:
                reports = runtestprotocol(item, nextitem=nextitem, log=False)
                sent = compressed.sent
            refused = _class_of(self._refused)
            if config is None or refused is None or not config.is_on(refused):
                break
            config = _without(config, refused)
            left_out.append(refused.name)
            self._note(again=item.nodeid, left_out=left_out)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        failed = [_last_words(report) for report in reports if report.failed]
        outcome = "failed" if failed else "skipped" if any(report.skipped for report in reports) else "passed"
        self._note(end=item.nodeid, outcome=outcome, reason=" | ".join(failed), sent=sent)
        while failed and not os.path.exists(go_on(self._notes.name, item.nodeid)):
            time.sleep(0.05)
        return True

    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> None:
        if call.excinfo is not None and isinstance(call.excinfo.value, FlagError):
            self._refused = call.excinfo.value

    def _note(self, **values: Any) -> None:
        self._notes.write(json.dumps(values) + "\n")
        self._notes.flush()


def go_on(notes: str, test: str) -> str:
    """Return the name of the file that lets a rank go on after it failed in a test."""
    return f"{notes}-{hashlib.sha256(test.encode()).hexdigest()}"


def _class_of(error: FlagError | None) -> TrafficClass | None:
    return next((each for each in CLASSES if error and error.flag in (each.flag, each.format_flag)), None)


def _without(config: OptimusConfig, traffic: TrafficClass) -> OptimusConfig:
    off = {traffic.format_field: "dense"} | ({traffic.name: False} if traffic.name in traffic.fields else {})
    return dataclasses.replace(config, **off)  # type: ignore[arg-type]


def _last_words(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    said = str(report.longrepr) if crash is None else crash.message
    return " ".join(said.split())[:300]


def run(
    file: str, mode: str, todo: frozenset[str] | None, done: frozenset[str], left_out: Mapping[str, tuple[str, ...]],
    notes: str,
) -> None:  # fmt: skip
    """Run the tests of `file` in this rank; write their outcomes to the file `notes`."""
    torch.set_num_threads(1)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    with open(notes, "w") as stream:
        words = [file, "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
        words += ["-p", "pytest_mock"] if importlib.util.find_spec("pytest_mock") else []
        status = pytest.main(words, plugins=[_Around(mode, todo, done, left_out, stream)])
        stream.write(json.dumps({"status": int(status)}) + "\n")


def stand_in_for_a_gpu() -> None:
    """Let tests that were written for GPUs run on a CPU, in every mode alike.

    gloo stands in for NCCL, Megatron's local layers for Transformer Engine's. Each layout destroys the groups of the
    one before, because gloo keeps threads for each, and seeds the random generators, which Transformer Engine's layers
    would not need.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    patches = Patches()  # the patches are never undone: this process and its forks only run these tests
    c10d = torch.distributed.distributed_c10d
    for name in ("init_process_group", "new_group"):
        for owner in (torch.distributed, c10d):
            patches.wrap(owner, name, _over_gloo)
    for kind in ("spec", "submodules"):
        if local := getattr(gpt_layer_specs, f"get_gpt_layer_local_{kind}", None):
            patches.replace(gpt_layer_specs, _SPEC + kind, functools.partial(_call_with_known, local))
    for name in ("get_gpt_decoder_block_spec", "get_gpt_mtp_block_spec"):
        patches.wrap(gpt_layer_specs, name, _of_local_layers)

    def seeded(original: Any, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        model_parallel_cuda_manual_seed(123, force_reset_rng=True)

    def thorough(original: Any) -> None:
        original()
        for group in [group for group in c10d._world.pg_map if group is not c10d._world.default_pg]:
            torch.distributed.destroy_process_group(group)

    patches.wrap(parallel_state, "initialize_model_parallel", seeded)
    patches.wrap(parallel_state, "destroy_model_parallel", thorough)
    # The fixtures would download data, which none of these tests reads.
    download = types.ModuleType("download_unit_tests_dataset")
    download.download_and_extract_asset = lambda **_: True  # type: ignore[attr-defined]
    sys.modules["tests.test_utils.python_scripts.download_unit_tests_dataset"] = download


def _over_gloo(original: Any, *args: Any, **kwargs: Any) -> Any:
    words = ["gloo" if isinstance(value, str) and "nccl" in value else value for value in args]
    if "nccl" in str(kwargs.get("backend")):
        kwargs["backend"] = "gloo"
    kwargs.pop("pg_options", None)  # NCCL's
    return original(*words, **kwargs)


def _call_with_known(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a maker of local layers with those arguments of Transformer Engine's maker that it knows."""
    names = list(inspect.signature(function).parameters)
    given = dict(zip(names, args, strict=False)) | kwargs
    return function(**{name: value for name, value in given.items() if name in names})


def _of_local_layers(original: Any, *args: Any, **kwargs: Any) -> Any:
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.arguments["use_transformer_engine"] = False
    return original(*bound.args, **bound.kwargs)
