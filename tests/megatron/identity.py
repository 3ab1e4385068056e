"""Comparison of two records of every Megatron run of a test session: did a change keep all bits?

    python -m pytest tests/megatron --record before.jsonl      # at one commit
    python -m pytest tests/megatron --record after.jsonl       # at another one, on the same machine
    python -m tests.megatron.identity before.jsonl after.jsonl

A record holds, for each rank of each run, its losses, gradient norms, hashes of weights, of gradients and of compressor
state after each step, bytes by class of traffic, a hash of all messages that the rank sent, and how many functions of
the package and torch operators its third iteration called.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.megatron.recording import hash_of

if TYPE_CHECKING:
    from tests.megatron.specs import Run

__all__ = ["VARIABLE", "counting_calls", "hash_messages", "record", "switched_on"]

VARIABLE = "OPTIMUS_CC_TEST_RECORD"
"""Environment variable that holds the file of records, for ranks and workers to see."""

_SENT = {"isend": 0, "all_to_all_single": 1, "all_gather_into_tensor": 1, "reduce_scatter_tensor": 1, "all_reduce": 0}
"""Functions of torch.distributed by which training sends tensors, and the place of that tensor in their arguments."""

_NAMES = {"isend": "tensor", "all_reduce": "tensor", "all_gather_into_tensor": "input_tensor"}


def switched_on() -> bool:
    """Return whether this test session records its runs; ranks inherit the answer."""
    return VARIABLE in os.environ


def hash_messages() -> dict[str, str]:
    """Hash every tensor that this rank sends from now on; the result, by function, is complete at the end of the run.

    Hashes of one function are added up, so that the order in which streams and requests end does not count. A
    single value is left out (Megatron's flags and norms), and so is fp64 (our log's table, which holds times).
    """
    import torch.distributed as dist

    totals: dict[str, str] = {}

    def hashing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = args[_SENT[name]] if len(args) > _SENT[name] else kwargs.get(_NAMES.get(name, "input"))
            if isinstance(tensor, torch.Tensor) and tensor.numel() > 1 and tensor.dtype != torch.float64:
                total = int(totals.get(name, "0"), 16) + int(hash_of(tensor), 16)
                totals[name] = f"{total % 2**256:064x}"
            return original(*args, **kwargs)

        return call

    for name in _SENT:
        wrapped = hashing(name, getattr(dist, name))
        setattr(dist, name, wrapped)
        # torch checks that a point-to-point operation is the very function of its module.
        setattr(dist.distributed_c10d, name, wrapped)
    return totals


class _Operators(TorchDispatchMode):
    """Dispatch mode that counts torch's operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


@contextmanager
def counting_calls(counts: dict[str, int]) -> Iterator[None]:
    """Count calls of the package's Python functions, and all torch operators, inside the context."""
    package, functions = f"{os.sep}optimus_cc_ext{os.sep}", 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal functions
        functions += event == "call" and package in frame.f_code.co_filename

    with _Operators() as operators:
        sys.setprofile(profile)
        try:
            yield
        finally:
            sys.setprofile(None)
    counts |= {"functions": functions, "operators": operators.count}


def record(run: Run, file: Path) -> None:
    """Append the record of all ranks of `run` to `file`, as a line of JSON."""
    ranks = []
    for rank in run.ranks:
        ours = None if rank.ours is None else asdict(rank.ours)
        ranks.append(
            {
                "losses": rank.losses, "evaluation losses": rank.evaluation_losses, "norms": rank.grad_norms,
                "weights": rank.weights, "gradients": rank.gradients, "random states": rank.random_states,
                "steps": [asdict(step) for step in rank.steps], "messages": rank.wire, "ours": ours,
                "calls": rank.calls,
            }
        )  # fmt: skip
    with file.open("a") as out:
        out.write(json.dumps({"name": run.spec.name, "ranks": ranks}, default=str) + "\n")


def differences(before: Path, after: Path) -> list[str]:
    """List the differences between two files of records: run, rank and key of each differing value."""
    first, second = (_by_name(file) for file in (before, after))
    found = [f"{name}: only in {before}" for name in first.keys() - second.keys()]
    found += [f"{name}: only in {after}" for name in second.keys() - first.keys()]
    for name in sorted(first.keys() & second.keys()):
        for number, (one, other) in enumerate(zip(first[name], second[name], strict=True)):
            keys = [key for key in one if key != "calls"]
            found += [f"{name}, rank {number}: {key}" for key in keys if _plain(one[key]) != _plain(other.get(key))]
    return found


def more_calls(before: Path, after: Path) -> list[str]:
    """List the runs whose third iteration calls more functions of the package, or more operators, than before."""
    first, second = (_by_name(file) for file in (before, after))
    return [
        f"{name}, rank {number}: {kind} {one['calls'][kind]} -> {other['calls'][kind]}"
        for name in sorted(first.keys() & second.keys())
        for number, (one, other) in enumerate(zip(first[name], second[name], strict=True))
        for kind in one["calls"].keys() & other["calls"].keys()
        # Requests that are polled make the number of functions vary by 4 % between two runs of one commit.
        if other["calls"][kind] > one["calls"][kind] * (1.05 if kind == "functions" else 1)
    ]


def _by_name(file: Path) -> dict[str, list[dict[str, Any]]]:
    return {run["name"]: run["ranks"] for run in map(json.loads, file.read_text().splitlines())}


def _plain(value: Any) -> str:
    """Return a value as text, in which NaN equals itself."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def main() -> int:
    """Print the differences between the two files on the command line; exit 1 if there is one."""
    before, after = map(Path, sys.argv[1:3])
    found = differences(before, after)
    print("\n".join(found) or f"{len(_by_name(before))} runs: losses, weights, messages and bytes are equal")
    more = more_calls(before, after)
    print("\n".join(more) or "no run calls more functions of the package or more torch operators")
    return bool(found or more)


if __name__ == "__main__":
    sys.exit(main())
