"""What a run is made of, what it left, and how a test asks for it.

@uses((VANILLA, OFF))
def test_installed_and_off_is_bit_identical_to_vanilla(runs): vanilla, off = runs
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.megatron_runs import MegatronRun

__all__ = ["Layout", "Run", "RunSpec", "full", "uses"]

Layout = tuple[int, str]


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What a run is made of. In flags, {here} is its own folder, {loaded} and {other} those of other runs."""

    name: str = field(compare=False)
    layout: Layout = (4, "--pipeline-model-parallel-size 2")
    """Ranks, and flags. With two replicas unless said."""

    flags: str = ""
    """Megatron's."""

    ours: str | None = None
    """None: Optimus-CC is not installed."""

    before: tuple[Callable[[], Any], ...] = ()
    """Interventions, before Optimus-CC is installed."""

    probe: Callable[..., Any] | None = None
    entry: Callable[[], Any] | None = None
    loaded: RunSpec | None = None
    other: RunSpec | None = None
    copies: RunSpec | None = None
    """The run whose folder this one's begins as a copy of."""

    spoil: Callable[[Path], None] | None = None
    """What happens to this copy."""

    ends: bool = False
    """It does not come to its end, and a test asks why."""

    watched: bool = False
    """The hot path is watched."""

    @property
    def argv(self) -> str:
        """The command line, with placeholders for folders."""
        return f"{self.layout[1]} {self.flags} {without_forecast(self.ours or '')}"

    def but(self, name: str, **changes: Any) -> RunSpec:
        """The same with changes; `flags` and `ours` are added to what there is."""
        for kind in ("flags", "ours"):
            if kind in changes:
                changes[kind] = f"{getattr(self, kind) or ''} {changes[kind]}"
        return replace(self, name=name, **changes)


@dataclass(frozen=True)
class Run:
    """A run that was made."""

    spec: RunSpec
    ranks: list[MegatronRun]
    folder: Path
    """{here} of its flags."""

    def by_place(self) -> dict[tuple[int, int, int], MegatronRun]:
        """By stage, tensor-parallel rank and data-parallel rank."""
        return {(rank.stage, rank.tensor_rank, rank.data_rank): rank for rank in self.ranks}

    @property
    def said(self) -> list[str]:
        """Our lines on the first rank, which speaks for all."""
        return self.ranks[0].said


def uses(*cases: RunSpec | tuple[RunSpec, ...] | Any) -> pytest.MarkDecorator:
    """A test is given these runs as `runs`, once for each case."""
    params = [case if hasattr(case, "marks") else _case(case) for case in cases]
    return pytest.mark.parametrize("runs", params, indirect=True)


def full(*case: RunSpec) -> Any:
    """A case that runs with --full only."""
    return _case(case, marks=pytest.mark.full)


def _case(case: RunSpec | tuple[RunSpec, ...], marks: Any = ()) -> Any:
    case = case if isinstance(case, tuple) else (case,)
    return pytest.param(case, id=" & ".join(spec.name for spec in case), marks=marks)


def without_forecast(ours: str) -> str:
    """These flags, and no measuring before the third iteration, unless they say something about it.

    It would take as long as the rest of a short run.
    """
    asked_for = not ours or "compression-forecast" in ours or "--dp-compression-stages auto" in ours
    return ours if asked_for else f"{ours} --no-compression-forecast"
