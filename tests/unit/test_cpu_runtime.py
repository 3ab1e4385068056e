"""The CPU runtime's promises about torch itself; each test runs in a fork of a process where it is active."""

from __future__ import annotations

import argparse
import functools
import importlib
import logging
import os
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from optimus_cc_ext.tools.cpu import cpu_runtime, driver
from tests.forked_ranks import run_ranks

pytestmark = pytest.mark.ci

DTYPES = {f"{name}Tensor": getattr(torch, name.lower()) for name in ("Float", "Double", "Half", "BFloat16", "Long")}
DTYPES |= {"IntTensor": torch.int32, "ByteTensor": torch.uint8, "BoolTensor": torch.bool}


def in_a_rank(test: Callable[..., None]) -> Callable[..., None]:
    """Run the test in one forked rank, so that its replacements in torch end with the rank."""

    @functools.wraps(test)
    def forked(**parameters: Any) -> None:
        run_ranks(1, call_wrapped, test.__module__, test.__name__, parameters, timeout=60)

    return forked


def call_wrapped(module: str, name: str, parameters: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**parameters)


@in_a_rank
def test_cuda_tensor_types_are_types_of_cpu_tensors() -> None:
    for name, dtype in DTYPES.items():
        cuda_type = getattr(torch.cuda, name)
        tensor = torch.zeros(2, 3, dtype=dtype, device="cuda")
        assert isinstance(cuda_type, type)
        assert cuda_type.dtype == dtype
        assert tensor.type() == f"torch.cuda.{name}"
        assert isinstance(tensor, cuda_type) and isinstance(tensor, (torch.cuda.CharTensor, cuda_type))
        assert isinstance(torch.nn.Parameter(tensor, requires_grad=False), cuda_type)
        others = [getattr(torch.cuda, other) for other in DTYPES if other != name]
        assert not isinstance(tensor, tuple(others))
    assert not isinstance("text", torch.cuda.FloatTensor)


@in_a_rank
def test_cuda_tensor_types_construct_and_convert() -> None:
    assert torch.cuda.FloatTensor([1, 2]).tolist() == [1.0, 2.0]
    assert torch.cuda.LongTensor(2, 3).shape == (2, 3)
    tensor = torch.ones(2)
    for half in (torch.cuda.BFloat16Tensor, "torch.cuda.BFloat16Tensor", torch.bfloat16):
        assert tensor.type(half).dtype == torch.bfloat16
    assert "cuda" not in torch.empty(2, device="meta").type()


@in_a_rank
def test_cuda_in_any_spelling_is_the_cpu() -> None:
    devices = ("cuda", "cuda:1", torch.device("cuda"), torch.device("cuda", 0), torch.cuda.current_device())
    layer = torch.nn.Linear(2, 2)
    for device in devices:
        made = [
            torch.empty(2, device=device),
            torch.tensor([1.0], device=device),
            torch.arange(3, device=device),
            torch.randn(2, device=device),
            torch.zeros_like(torch.ones(2), device=device),
            torch.full((2,), 1.0, device=device),
            torch.fft.fftfreq(4, device=device),
            torch.ones(2).new_zeros(3, device=device),
            *(torch.ones(2).to(device), torch.ones(2).to(device, torch.float64)),
            torch.ones(2).to(device=device, non_blocking=True),
            torch.ones(2).cuda(device),
            layer.to(device).weight,
            layer.cuda(device if not isinstance(device, str) else None).weight,
            torch.nn.Linear(2, 2, device=device).weight,
        ]
        assert all(tensor.device.type == "cpu" for tensor in made)
    with torch.device("cuda"):
        assert torch.zeros(2).device.type == "cpu"


@in_a_rank
def test_other_devices_stay_what_they_are() -> None:
    assert torch.empty(2, device="meta").device.type == "meta"
    assert torch.ones(2).to("meta").device.type == "meta"
    assert torch.ones(2).to(torch.float16).dtype == torch.float16
    assert torch.ones(2).to(torch.ones(1, dtype=torch.int32)).dtype == torch.int32
    with torch.device("meta"):  # the context manager recognises factories by identity, so it must know the originals
        assert torch.zeros(2).device.type == "meta"


@in_a_rank
def test_cudas_random_state_and_seed_are_those_that_the_model_draws_from() -> None:
    def draw() -> list[float]:
        return torch.nn.functional.dropout(torch.ones(64, device="cuda"), 0.5).tolist()

    torch.cuda.manual_seed(1)
    first, second = draw(), draw()
    torch.cuda.manual_seed_all(1)
    assert draw() == first != second
    torch.cuda.manual_seed(2)
    assert draw() != first
    assert torch.cuda.initial_seed() == 2 == torch.initial_seed()

    state = torch.cuda.get_rng_state("cuda:0")
    assert torch.equal(torch.cuda.get_rng_state(), torch.get_rng_state())
    drawn = torch.rand(8)
    assert not torch.equal(torch.get_rng_state(), state)
    torch.cuda.random.set_rng_state(state)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(torch.rand(8), drawn)
    torch.cuda.set_rng_state_all(torch.cuda.get_rng_state_all())
    assert torch.cuda.default_generators[torch.cuda.current_device()] is torch.default_generator


@in_a_rank
def test_megatrons_rng_tracker_forks_and_restores() -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    torch.cuda.manual_seed(7)
    tracker.add("a", 11)
    tracker.add("b", 12)
    outside = torch.get_rng_state()
    draws = {}
    for name in ("a", "b", "a"):
        with tracker.fork(name):
            draws.setdefault(name, []).append(torch.rand(8).tolist())
        assert torch.equal(torch.get_rng_state(), outside)
    assert draws["a"][0] != draws["b"][0], "two streams with different seeds drew the same"
    assert draws["a"][0] != draws["a"][1], "a stream started over instead of going on"
    assert torch.manual_seed(11) and torch.rand(8).tolist() == draws["a"][0]


@in_a_rank
def test_events_measure_milliseconds_and_streams_nest() -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stream = torch.cuda.Stream(device=torch.cuda.current_device())
    with stream, torch.cuda.stream(stream), torch.cuda.stream(None):
        start.record()
        time.sleep(0.05)
        end.record(stream)
    stream.wait_event(end)
    stream.wait_stream(torch.cuda.current_stream())
    end.synchronize()
    assert 50 <= start.elapsed_time(end) < 5000  # a sleep may be longer than asked for, never shorter
    assert end.query() and stream.query()
    assert stream == torch.cuda.default_stream() and len({stream, torch.cuda.current_stream()}) == 1
    with pytest.raises(ValueError, match="enable_timing"):
        torch.cuda.Event().elapsed_time(end)
    with pytest.raises(ValueError, match="recorded"):
        torch.cuda.Event(enable_timing=True).elapsed_time(end)


@in_a_rank
def test_queries_answer_truthfully() -> None:
    assert torch.cuda.is_available() and torch.cuda.device_count() == int(os.environ["LOCAL_WORLD_SIZE"])
    properties = torch.cuda.get_device_properties(0)
    assert properties.total_memory > 0 and properties.multi_processor_count >= 1
    assert torch.cuda.get_device_capability() == (properties.major, properties.minor) == (0, 0)
    assert torch.cuda.memory_allocated() == torch.cuda.memory.max_memory_reserved() == 0
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total == properties.total_memory
    torch.cuda.set_device("cuda:3")
    assert torch.cuda.current_device() == 3
    assert not torch.accelerator.is_available() and torch.accelerator.current_accelerator() is None


@in_a_rank
def test_compile_leaves_functions_as_they_are() -> None:
    assert torch.compile(len) is len
    assert torch.compile(dynamic=True)(len) is len


@in_a_rank
def test_what_has_no_meaning_on_a_cpu_raises_an_error_that_names_it() -> None:
    calls: dict[str, Callable[[], Any]] = {
        "torch.cuda.CUDAGraph": torch.cuda.CUDAGraph,
        "torch.cuda.graph": lambda: torch.cuda.graph(None),
        "torch.cuda.ipc_collect": torch.cuda.ipc_collect,
        "torch.cuda.memory_snapshot": torch.cuda.memory_snapshot,
        "torch.cuda.memory._record_memory_history": torch.cuda.memory._record_memory_history,
        "torch.cuda.MemPool": torch.cuda.MemPool,
        "torch.cuda.ExternalStream": lambda: torch.cuda.ExternalStream(0),
        "torch.cuda.FloatStorage": lambda: torch.cuda.FloatStorage(2),
        "torch.cuda.utilization": torch.cuda.utilization,
        "torch.cuda.cudart": torch.cuda.cudart,
        "torch.cuda.profiler.start": torch.cuda.profiler.start,
        "torch.cuda.Event(interprocess=True)": lambda: torch.cuda.Event(interprocess=True),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError) as error:
            call()
        assert str(error.value).startswith(f"{name} has no meaning on a CPU")
    # torch._dynamo reads this attribute when it is imported, from torch 2.15 on.
    assert callable(torch.cuda.use_mem_pool.__wrapped__)


@in_a_rank
def test_every_public_cuda_function_is_answered_or_refused() -> None:
    from optimus_cc_ext.tools.cpu import torch_cuda

    kept = {"has_half", "has_magma"} | torch_cuda.KEPT  # facts about the build, and exceptions
    public = {name: getattr(torch.cuda, name) for name in set(torch.cuda.__all__) - kept}
    now = {name: value for name, value in public.items() if not isinstance(value, types.ModuleType)}
    cpu_runtime.deactivate()
    untouched = [name for name, value in now.items() if value is getattr(torch.cuda, name)]
    assert untouched == []


@in_a_rank
def test_nccl_is_refused_with_the_flag_to_use() -> None:
    for call in (torch.distributed.init_process_group, torch.distributed.distributed_c10d.init_process_group):
        with pytest.raises(RuntimeError, match=r"nccl backend needs GPUs.*--distributed-backend gloo"):
            call(backend="nccl")
    with pytest.raises(RuntimeError, match="nccl backend needs GPUs"):
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl")


@in_a_rank
def test_autocast_for_cuda_acts_on_the_cpu() -> None:
    ones = torch.ones(2, 2)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert (ones @ ones).dtype == torch.bfloat16
    with torch.autocast("cuda", enabled=False):
        assert (ones @ ones).dtype == torch.float32


def owners() -> list[Any]:
    from megatron.core.datasets import utils
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from torch.utils._device import DeviceContext

    return [
        *(torch, torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams, torch.cuda.graphs),
        *(torch.cuda.nvtx, torch.Tensor, torch.accelerator, torch.fft, torch.nested, torch.distributed),
        *(torch.distributed.distributed_c10d, torch.amp.autocast_mode.autocast, DeviceContext),
        *(utils, ModelParallelConfig, WrappedTorchNorm),
    ]


@in_a_rank
def test_deactivate_restores_everything_and_activate_works_again() -> None:
    def state() -> dict[tuple[str, str], Any]:
        return {(str(owner), name): value for owner in owners() for name, value in vars(owner).items()}

    active = state()
    cpu_runtime.deactivate()
    assert not cpu_runtime.is_active()
    pristine = state()
    environment = dict(os.environ)
    assert type(torch.cuda.FloatTensor).__name__ == "tensortype"
    assert torch.ones(1).type() == "torch.FloatTensor"
    runtime_modules = [key for key, value in pristine.items() if "cpu_runtime" in str(getattr(value, "__module__", ""))]
    assert runtime_modules == []
    assert "TORCHDYNAMO_DISABLE" not in os.environ

    line = cpu_runtime.activate()
    assert line == cpu_runtime.activate() == "optimus-cc: running on CPU over gloo (OPTIMUS_CC_DEVICE=cpu)"
    assert torch.zeros(1, device="cuda").type() == "torch.cuda.FloatTensor"
    assert state().keys() == active.keys()
    cpu_runtime.deactivate()
    cpu_runtime.deactivate()
    after = state()
    assert after.keys() == pristine.keys()
    assert [key for key in after if after[key] is not pristine[key]] == []
    assert dict(os.environ) == environment


@in_a_rank
def test_device_choice_follows_the_variable_then_the_machine() -> None:
    cpu_runtime.deactivate()
    patch = pytest.MonkeyPatch()
    for available in (True, False):
        patch.setattr(torch.cuda, "is_available", lambda available=available: available)
        for wanted, expected in (("cpu", "cpu"), ("", "cuda" if available else "cpu"), ("cuda", "cuda")):
            patch.setenv("OPTIMUS_CC_DEVICE", wanted)
            if available or wanted != "cuda":
                assert cpu_runtime.device_choice() == expected
    with pytest.raises(RuntimeError, match=r"OPTIMUS_CC_DEVICE=cuda, but PyTorch .* sees no CUDA device"):
        cpu_runtime.device_choice()
    with pytest.raises(ValueError, match=r"OPTIMUS_CC_DEVICE='tpu'.*cpu, cuda or shared-gpu"):
        patch.setenv("OPTIMUS_CC_DEVICE", "tpu")
        cpu_runtime.activate()
    patch.delenv("OPTIMUS_CC_DEVICE")
    assert cpu_runtime.activate() == "optimus-cc: running on CPU over gloo (no CUDA device found)"


@in_a_rank
def test_a_gpu_that_torch_cannot_use_is_refused_unless_the_cpu_is_asked_for(tmp_path: Path) -> None:
    cpu_runtime.deactivate()
    patch = pytest.MonkeyPatch()
    patch.delenv("OPTIMUS_CC_DEVICE")
    patch.setattr(cpu_runtime, "GPU_FILES", f"{tmp_path}/nvidia[0-9]*")
    for name, refused in (("nvidiactl", False), ("nvidia0", True)):
        (tmp_path / name).touch()
        if not refused:
            assert cpu_runtime.device_choice() == "cpu"
    with pytest.raises(RuntimeError, match=r"nvidia0\), but PyTorch .* check nvidia-smi .*OPTIMUS_CC_DEVICE=cpu"):
        cpu_runtime.activate()
    patch.setattr(torch.version, "cuda", "13.0")
    patch.setattr(driver, "newest_cuda", lambda: 12040)
    with pytest.raises(RuntimeError, match=r"CUDA up to 12\.4, .* built for 13\.0: update .*OPTIMUS_CC_DEVICE=cpu"):
        cpu_runtime.activate()
    patch.setenv("OPTIMUS_CC_DEVICE", "cpu")
    assert cpu_runtime.device_choice() == "cpu"


@in_a_rank
def test_tensors_are_on_the_current_gpu_whatever_the_backend_is_unless_the_cpu_runtime_is_active() -> None:
    from optimus_cc_ext.hooks.training import training_device

    torch.distributed.init_process_group("gloo")
    assert training_device() == torch.device("cpu")
    cpu_runtime.deactivate()
    on_gpu = torch.cuda.is_available()
    assert training_device() == (torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"))


@in_a_rank
def test_activating_after_megatron_is_refused_and_leaves_torch_alone() -> None:
    from megatron.core.tensor_parallel import random

    cpu_runtime.deactivate()
    random._lazy_init = torch.cuda._lazy_init  # as if Megatron had been imported now
    with pytest.raises(RuntimeError, match=r"after Megatron had been imported.*before the first import"):
        cpu_runtime.activate()
    assert not cpu_runtime.is_active()
    assert torch.ones(1).type() == "torch.FloatTensor"


@in_a_rank
def test_defaults_for_a_cpu_are_set_in_megatrons_parser_and_can_be_overridden() -> None:
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args([])
    assert (args.distributed_backend, args.transformer_impl) == ("gloo", "local")
    assert not (args.gradient_accumulation_fusion or args.masked_softmax_fusion)
    assert args.no_persist_layer_norm
    assert not (args.bias_gelu_fusion or args.bias_dropout_fusion or args.apply_rope_fusion)
    args = parser.parse_args(["--transformer-impl", "transformer_engine"])
    assert args.transformer_impl == "transformer_engine"


@in_a_rank
def test_the_checkpoint_writer_works_on_copies_in_a_process_of_its_own() -> None:
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    from optimus_cc_ext.tools.cpu.megatron_on_cpu import checkpoint_writer

    cpu_runtime.deactivate()  # the writer's process starts without the runtime
    kept = []

    def megatrons_loop(weight: torch.Tensor) -> None:
        assert torch.cuda.device_count() == 1
        buckets = FileSystemWriterAsync.preload_tensors([("file", "key", ([], [("item", weight)]))])
        kept.append(buckets[0][2][1][0][1])

    PersistentAsyncCaller.async_loop = staticmethod(megatrons_loop)
    weight = torch.ones(3)
    checkpoint_writer(weight)
    weight.zero_()
    assert kept[0].tolist() == [1.0, 1.0, 1.0]


@in_a_rank
def test_megatrons_wheel_which_has_no_makefile_is_not_asked_to_run_make_on_a_gpu_either() -> None:
    from optimus_cc_ext.tools.cpu.megatron_on_cpu import use_compiled_helpers

    cpu_runtime.deactivate()
    datasets = importlib.import_module("megatron.core.datasets.utils")
    with pytest.raises(SystemExit):
        datasets.compile_helpers()
    for _ in range(2):
        use_compiled_helpers()
        datasets.compile_helpers()
    assert not hasattr(datasets.compile_helpers.__wrapped__, "__wrapped__")


@in_a_rank
def test_megatron_warns_once_of_draws_from_the_one_generator_of_a_cpu() -> None:
    from megatron.core.tensor_parallel import random

    said = []
    logger = logging.getLogger(random.__name__)
    logger.addHandler(handler := logging.Handler())
    handler.emit = said.append
    for _ in range(3):
        logger.warning("CPU RNG state changed within GPU RNG context")
    assert len(said) == 1
