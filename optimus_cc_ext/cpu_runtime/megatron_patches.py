"""The few places of Megatron that assume a GPU in a way that torch.cuda's replacement does not cover.

Each wraps one attribute of Megatron; nothing is copied from it.
"""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from typing import Any

import torch

from optimus_cc_ext.cpu_runtime import adam, devices
from optimus_cc_ext.cpu_runtime.patching import Patches

__all__ = ["check_not_too_late", "install"]

RNG_MODULE = "megatron.core.tensor_parallel.random"
ASYNC_MODULE = "megatron.core.dist_checkpointing.strategies.async_utils"
DISPATCHER_MODULE = "megatron.core.transformer.moe.token_dispatcher"


def check_not_too_late() -> None:
    """Raise RuntimeError if Megatron was imported before torch.cuda was replaced: it keeps torch's originals.

    To be called once torch.cuda is replaced.
    """
    module = sys.modules.get(RNG_MODULE)
    if module is not None and module._lazy_init is not torch.cuda._lazy_init:
        raise RuntimeError(
            "the CPU runtime was activated after Megatron was imported, which keeps CUDA's functions; call "
            "optimus_cc_ext.cpu_runtime.activate() before the first import of megatron, or start the "
            "program with `python -m optimus_cc_ext`"
        )


def _skip_compilation_if_compiled(patches: Patches) -> None:
    # The wheel brings the dataset helper compiled and no Makefile; Megatron runs make all the same.
    datasets = importlib.import_module("megatron.core.datasets.utils")
    compile_helpers = datasets.compile_helpers

    @functools.wraps(compile_helpers)
    def compile_unless_importable() -> None:
        try:
            importlib.import_module("megatron.core.datasets.helpers_cpp")
        except ImportError:
            compile_helpers()

    patches.replace(datasets, "compile_helpers", compile_unless_importable)


def _keep_pipeline_outputs(patches: Patches) -> None:
    # With interleaving and overlapped sends, Megatron frees an output once its send is *ordered* on a stream;
    # gloo reads the buffer later: NaN. Releases that wait for the send instead (0.19) lose the overlap. So
    # outputs stay.
    config_class = importlib.import_module("megatron.core.model_parallel_config").ModelParallelConfig
    post_init = config_class.__post_init__

    @functools.wraps(post_init)
    def post_init_keeping_outputs(self: Any) -> None:
        post_init(self)
        self.deallocate_pipeline_outputs = False

    patches.replace(config_class, "__post_init__", post_init_keeping_outputs)


def _allow_sequence_parallel_norm(patches: Patches) -> None:
    # Torch's norms are right under sequence parallelism once their parameters say so: Megatron then sums the
    # gradients over the tensor-parallel ranks (core/distributed/finalize_model_grads.py). Its wrapper refuses
    # only because it does not mark them.
    norm_class = importlib.import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    build = norm_class.__new__

    @functools.wraps(build)
    def build_marked(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if not config.sequence_parallel:
            return build(cls, config, *args, **kwargs)
        unmarked = copy.copy(config)
        unmarked.sequence_parallel = False
        norm = build(cls, unmarked, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    patches.replace(norm_class, "__new__", staticmethod(build_marked))


def _give_numbers_to_the_dispatcher(patches: Patches) -> None:
    # Expert parallelism's all-to-all wants its split sizes as numbers. Megatron makes them numbers where it moves them
    # off the GPU, and lets tensors that are on the host already pass as they are.
    module = importlib.import_module(DISPATCHER_MODULE)
    move = module.maybe_move_tensor_to_cpu

    @functools.wraps(move)
    def move_or_convert(tensor: Any, as_numpy: bool = False, *args: Any, **kwargs: Any) -> Any:
        moved = move(tensor, as_numpy, *args, **kwargs)
        return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved

    patches.replace(module, "maybe_move_tensor_to_cpu", move_or_convert)


def _serve_checkpoint_writer(patches: Patches) -> None:
    # --async-save writes from a second process, which starts without the runtime.
    module = importlib.import_module(ASYNC_MODULE)
    patches.replace(module.PersistentAsyncCaller, "async_loop", staticmethod(checkpoint_writer))


def checkpoint_writer(*args: Any, **kwargs: Any) -> None:
    """Megatron's asynchronous checkpoint writer (PersistentAsyncCaller.async_loop), as the main function of a process
    in which nothing is replaced yet."""
    patches = Patches()
    devices.install(patches)
    writer = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    preload = writer.FileSystemWriterAsync.preload_tensors

    @functools.wraps(preload)
    def preload_copies(*args: Any, **kwargs: Any) -> Any:
        # On a GPU this is the copy to the host after which training may go on. A CPU tensor comes through
        # shared memory, and Megatron's `.to("cpu")` would leave the writer reading what training overwrites.
        return [
            (file, key, (data, [(item, tensor.clone()) for item, tensor in tensors]))
            for file, key, (data, tensors) in preload(*args, **kwargs)
        ]

    patches.replace(writer.FileSystemWriterAsync, "preload_tensors", staticmethod(preload_copies))
    importlib.import_module(ASYNC_MODULE).PersistentAsyncCaller.async_loop(*args, **kwargs)


def _refuse_nccl(patches: Patches) -> None:
    def gloo_only(function: Any) -> Any:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            backends = [value for value in (*args, kwargs.get("backend")) if isinstance(value, str)]
            if any("nccl" in backend.lower() for backend in backends):
                raise RuntimeError(
                    f"torch.distributed.{function.__name__}: the nccl backend needs GPUs, and this run is "
                    "on a CPU; use --distributed-backend gloo (the default on a CPU)"
                )
            return function(*args, **kwargs)

        return checked

    for name in ("init_process_group", "new_group"):
        checked = gloo_only(getattr(torch.distributed, name))
        patches.replace(torch.distributed, name, checked)
        patches.replace(torch.distributed.distributed_c10d, name, checked)


def install(patches: Patches) -> None:
    """Wrap Megatron's seams; imports Megatron's core."""
    _refuse_nccl(patches)
    _skip_compilation_if_compiled(patches)
    _keep_pipeline_outputs(patches)
    _allow_sequence_parallel_norm(patches)
    _give_numbers_to_the_dispatcher(patches)
    _serve_checkpoint_writer(patches)
    adam.install(patches)
