"""The machine for which doctor judges a launch line: this one, or a GPU that this machine may not have."""

import importlib.metadata
import os
import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from optimus_cc_ext.errors import UnknownName

HERE = "here"
_CAPABILITIES = {"a100": (8, 0), "h100": (9, 0), "b200": (10, 0)}
_MEMORY = {"a100": 80e9, "h100": 80e9, "b200": 180e9}
TARGETS = (HERE, *_CAPABILITIES)
"""The values of `--target`: this machine, with or without a GPU, or a kind of GPU."""

KNOWN_VARIABLES = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NVTE_CPU_OFFLOAD_V1": "1",
    "CUDA_GRAPHS_USE_NODE_PRIORITY": "1",
    "NCCL_GRAPH_REGISTER": "0",
}
"""Environment variables that Megatron's validation reads, each with the value that it asks for."""

NEWEST = {
    "transformer-engine": "2.20.2",
    "emerging-optimizers": "0.3.0",
    "mamba-ssm": "2.3.2",
    "causal-conv1d": "1.7.0",
    "einops": "0.8.2",
    "nvidia-resiliency-ext": "0.4.1",
    "multi-storage-client": "",
    "deep-ep": "",
    "pybind11": "",
}
"""Packages that Megatron needs for some options, with the newest release on the index on 2026-11-25 if Megatron asks
for its version.
"""


def check_target(name: str) -> None:
    """Raise UnknownName, with the known targets, if there is no target of this name."""
    if name not in TARGETS:
        raise UnknownName("target", name, TARGETS)


def default_target() -> str:
    """Return `here` if PyTorch can use a CUDA device that training would use, and otherwise h100."""
    import torch

    from optimus_cc_ext.tools.cpu import cpu_runtime

    on_cpu = cpu_runtime.is_active() or os.environ.get(cpu_runtime.DEVICE_VARIABLE) == "cpu"
    return HERE if not on_cpu and torch.cuda.is_available() else "h100"


def emulate(target: str) -> None:
    """Let `torch.cuda` and Megatron's version checks answer as on the target; this process cannot train afterwards.

    Environment variables that Megatron's validation reads are unknown until the launch line gives them.
    """
    import torch

    from optimus_cc_ext.patching import Patches
    from optimus_cc_ext.tools.cpu import cpu_runtime, torch_cuda

    cpu_runtime.deactivate()
    patches = Patches()  # these patches stay: this process answers for one target only
    if not torch.cuda.is_available():
        torch_cuda.install(patches)
    capability = _CAPABILITIES[target]
    properties = torch.cuda.get_device_properties(0)
    answers = {name: getattr(properties, name) for name in ("name", "multi_processor_count")}
    answers["total_memory"] = _MEMORY[target]
    of_target = type("_Properties", (), answers | dict(zip(("major", "minor"), capability, strict=True)))()
    patches.replace(torch.cuda, "get_device_capability", lambda device=None: capability)
    patches.replace(torch.cuda, "get_device_properties", lambda device=None: of_target)
    for name in (*KNOWN_VARIABLES, "PYTORCH_CUDA_ALLOC_CONF", "NCCL_PROTO"):
        os.environ.pop(name, None)
    if not _installed("transformer-engine"):
        from megatron.core import utils
        from megatron.core.extensions import transformer_engine as extensions
        from megatron.core.models.common.embeddings import rope_utils
        from megatron.core.transformer.moe import moe_utils
        from packaging.version import Version

        patches.replace(utils, "_te_version", Version(NEWEST["transformer-engine"]))
        for module in (extensions, moe_utils, rope_utils):
            for name in [name for name, value in vars(module).items() if name.startswith("fused_") and value is None]:
                patches.replace(module, name, _never_called)
        # Megatron is imported already, and has noted that Transformer Engine is missing. The stand-ins reach only the
        # checks that Megatron makes later.
        names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers")
        stand_ins = [ModuleType(name) for name in names]
        stand_ins[-1].FusedAdam = _FusedAdam  # type: ignore[attr-defined]
        sys.modules.update(zip(names, stand_ins, strict=True))


class _FusedAdam:
    """A stand-in for Transformer Engine's optimizer, of which Megatron's validation reads the parameters."""

    def __init__(
        self, master_weight_dtype: Any, exp_avg_dtype: Any, exp_avg_sq_dtype: Any, use_decoupled_grad: bool,
        store_param_remainders: bool,
    ) -> None: ...  # fmt: skip


def _never_called(*args: Any, **kwargs: Any) -> None:
    """Stand in for a kernel of Transformer Engine: Megatron's validation asks only whether the kernel exists."""


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def missing(args: Any) -> list[str]:
    """Return the packages that a run with Megatron's validated arguments needs and that this machine lacks."""
    pattern = getattr(args, "hybrid_layer_pattern", None) or getattr(args, "hybrid_override_pattern", None) or ""
    local = getattr(args, "non_persistent_ckpt_type", None) == "local"
    needed: Mapping[str, Any] = {
        "transformer-engine": args.transformer_impl == "transformer_engine"
        or getattr(args, "use_precision_aware_optimizer", False),
        "emerging-optimizers": getattr(args, "optimizer", "adam") not in ("adam", "sgd"),
        "mamba-ssm": "M" in pattern,
        "causal-conv1d": "M" in pattern,
        "einops": (getattr(args, "num_distributed_optimizer_instances", None) or 1) > 1,
        "nvidia-resiliency-ext": getattr(args, "inprocess_restart", False) or local,
        # Megatron 0.17 has --enable-msc on by default, and needs the package for such paths only.
        "multi-storage-client": getattr(args, "enable_msc", False) and any(map(_is_remote, vars(args).values())),
        # A checkout compiles its dataset helper when training begins; wheels bring it compiled.
        "pybind11": find_spec("megatron.core.datasets.helpers_cpp") is None,
        "deep-ep": getattr(args, "moe_token_dispatcher_type", "") == "flex",
    }
    return [name for name, asked in needed.items() if asked and not _installed(name)]


def _is_remote(value: Any) -> bool:
    return any(str(each).startswith("msc://") for each in (value if isinstance(value, list) else [value]))


def listed(packages: Iterable[str]) -> str:
    """Return the packages as words, with the versions that Megatron's checks were answered for."""
    return ", ".join(f"{name} ({NEWEST[name]} assumed)" if NEWEST[name] else name for name in packages)
