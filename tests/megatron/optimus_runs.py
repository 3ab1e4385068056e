"""Optimus-CC installed in the ranks of a tiny Megatron run, and what tests read out of its session."""

from collections.abc import Sequence
from typing import Any

import torch

import optimus_cc_ext
from tests.megatron_runs import MegatronRun, hash_of, run_megatron

__all__ = [
    "LOSSY",
    "PP2_DP2",
    "TP2_PP2_DP2",
    "install",
    "relative_gap",
    "remembered",
    "run_optimus",
    "session_facts",
    "without_forecast",
]

PP2_DP2 = (4, ("--pipeline-model-parallel-size", "2"))
LOSSY = (
    "--optimus-cc",
    "--compressed-backprop-rank",
    "4",
    "--dp-compression-rank",
    "4",
    "--dp-compression-stages",
    "all",
    "--residual-across-iterations",
    "carry",
)
"""Everything on, at a rank at which all of it leaves something out."""
TP2_PP2_DP2 = (8, ("--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "2"))


def install() -> None:
    """What the launcher does before Megatron parses its command line."""
    optimus_cc_ext.install()


def remembered(session: Any) -> list[torch.Tensor]:
    """Residual and warm start of every state on this rank, of pipeline links first; not copies."""
    states = [state for technique in session.techniques for state in technique.states]
    return [tensor for state in states for tensor in (state.residual.value, state.warm_start.value)]


def session_facts(model: list[torch.nn.Module], optimizer: Any) -> dict[str, Any]:
    """Where this rank stands, what it compressed, and the hashes of parameters that must be replicas."""
    session = optimus_cc_ext.current_session()
    assert session is not None and session.grid is not None
    from megatron.core import parallel_state

    parameters = {f"{index}.{name}": p for index, chunk in enumerate(model) for name, p in chunk.named_parameters()}
    return {
        "stage": session.grid.place.stage,
        "tensor_rank": session.grid.place.tensor_rank,
        "data_rank": parallel_state.get_data_parallel_rank(),
        "sent": session.backprop.sending.compressed if session.backprop.sending else None,
        "received": session.backprop.receiving.compressed if session.backprop.receiving else None,
        "buckets": sum(len(group.buckets) for chunk in model for group in chunk.bucket_groups),
        "compressed_matrices": sum(reducer.matrices for reducer in session.gradients.reducers),
        "tied": [hash_of(p) for p in parameters.values() if getattr(p, "shared_embedding", False)],
        "split_over_tensor_ranks": {
            name: bool(getattr(p, "tensor_model_parallel", False)) for name, p in parameters.items()
        },
        "traffic": {c.value: counts for c, counts in session.traffic.total().items()},
    }


def run_optimus(
    layout: tuple[int, Sequence[str]],
    flags: Sequence[str] = (),
    *,
    ours_are_known: bool = True,
    timeout: float = 180.0,
    **kwargs: Any,
) -> list[MegatronRun]:
    """Train the tiny GPT on `layout` with Optimus-CC installed and these flags.

    Without `ours_are_known`, where `before` installs by a configuration, no flag of ours is on the command line.
    """
    world_size, layout_flags = layout
    if ours_are_known:
        flags = without_forecast(flags)
    kwargs.setdefault("before", install)
    kwargs.setdefault("probe", session_facts)
    return run_megatron(world_size, [*layout_flags, *flags], timeout=timeout, **kwargs)


def without_forecast(flags: Sequence[str]) -> list[str]:
    """These flags, and no measuring before the third iteration, unless they say something about it.

    It would take as long as the rest of a short run; `test_auto_stages` and the launched runs have it.
    """
    asked_for = any(flag.endswith("compression-forecast") or flag == "auto" for flag in flags)
    return [*flags] if asked_for else [*flags, "--no-compression-forecast"]


def relative_gap(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference between two loss curves of equal length."""
    assert len(losses) == len(expected) > 0
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
