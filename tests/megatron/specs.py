"""Specification of a Megatron run, its results, and the mark with which a test asks for it.

@uses((VANILLA, OFF)) def test_installed_and_off_is_bit_identical_to_vanilla(runs): vanilla, off = runs
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.megatron_runs import MegatronRun

__all__ = ["Layout", "Run", "RunSpec", "full", "in_ci", "uses"]

Layout = tuple[int, str]


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Specification of a run. In flags, {here} is its own folder, {loaded} and {other} are those of other runs."""

    name: str = field(compare=False)
    layout: Layout = (4, "--pipeline-model-parallel-size 2")
    """Number of ranks, and flags of the layout. With the default flags there are two stages and two replicas."""

    flags: str = ""
    """Flags of Megatron."""

    ours: str | None = None
    """Flags of Optimus-CC; None: the run does not install Optimus-CC."""

    before: tuple[Callable[[], Any], ...] = ()
    """Interventions before Optimus-CC is installed."""

    probe: Callable[..., Any] | None = None
    entry: Callable[[], Any] | None = None
    loaded: RunSpec | None = None
    other: RunSpec | None = None
    copies: RunSpec | None = None
    """Run whose folder is copied to make this one's."""

    spoil: Callable[[Path], None] | None = None
    """Function that changes the folder that was copied from another run."""

    ends: bool = False
    """True if the run ends early, and a test asks why."""

    watched: bool = False
    """True if the hot path is watched."""

    @property
    def argv(self) -> str:
        """Command line, with placeholders for folders."""
        return f"{self.layout[1]} {self.flags} {without_trial(self.ours or '')}"

    def but(self, name: str, **changes: Any) -> RunSpec:
        """Return a copy with changes; `flags` and `ours` are appended to the present ones."""
        for kind in ("flags", "ours"):
            if kind in changes:
                changes[kind] = f"{getattr(self, kind) or ''} {changes[kind]}"
        return replace(self, name=name, **changes)


@dataclass(frozen=True)
class Run:
    """Finished run: its specification and the records of its ranks."""

    spec: RunSpec
    ranks: list[MegatronRun]
    folder: Path
    """Folder that {here} stands for in the run's flags."""

    def by_place(self) -> dict[tuple[int, int, int], MegatronRun]:
        """Return the ranks' records by stage, tensor-parallel rank and data-parallel rank."""
        return {(rank.stage, rank.tensor_rank, rank.data_rank): rank for rank in self.ranks}

    @property
    def said(self) -> list[str]:
        """Lines that Optimus-CC printed on the first rank, which prints for all ranks."""
        return self.ranks[0].said


def uses(*cases: RunSpec | tuple[RunSpec, ...] | Any) -> pytest.MarkDecorator:
    """Give these runs to a test as `runs`, once for each case."""
    params = [case if hasattr(case, "marks") else _case(case) for case in cases]
    return pytest.mark.parametrize("runs", params, indirect=True)


def full(*case: RunSpec) -> Any:
    """Return a case that runs only with --full."""
    return _case(case, marks=pytest.mark.full)


def in_ci(*case: RunSpec) -> Any:
    """Return a case that runs only in CI and with --full."""
    return _case(case, marks=pytest.mark.ci)


def _case(case: RunSpec | tuple[RunSpec, ...], marks: Any = ()) -> Any:
    case = case if isinstance(case, tuple) else (case,)
    return pytest.param(case, id=" & ".join(spec.name for spec in case), marks=marks)


def without_trial(ours: str) -> str:
    """Add a flag that switches the trial of a preset off, unless the flags say something about it.

    A trial leaves the ways to the links of the moment, and is longer than a short run.
    """
    asked_for = "--optimus-cc" not in ours or "compression-trial" in ours
    return ours if asked_for else f"{ours} --no-compression-trial"
