"""Fixtures that make the runs of the table, each once in a session, and name the tests that a failed run takes down."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from optimus_cc_ext.hooks import start
from tests.megatron import identity
from tests.megatron.specs import Run, RunSpec
from tests.megatron_runs import run_megatron


class Runs:
    """Every run that was requested, and every failure."""

    def __init__(self, session: pytest.Session, folder: Path) -> None:
        self._session, self._folder = session, folder
        self._made: dict[RunSpec, Run | BaseException] = {}

    def __call__(self, spec: RunSpec) -> Run:
        if spec not in self._made:
            try:
                self._made[spec] = self._make(spec)
            except Exception as error:
                self._made[spec] = error
                pytest.fail(f"the run '{spec.name}' takes down {self._users(spec)}\n\n{error}", pytrace=False)
        made = self._made[spec]
        if isinstance(made, BaseException):
            pytest.fail(f"the run '{spec.name}' failed: see the first test that asked for it", pytrace=False)
        return made

    def _make(self, spec: RunSpec) -> Run:
        for needed in filter(None, (spec.loaded, spec.other, spec.copies)):
            self(needed)  # needed runs are made first, because folders are numbered in the order in which runs are made
        here = self._folder / str(len(self._made))
        folders = {"here": here}
        for role in ("loaded", "other"):
            if (needed := getattr(spec, role)) is not None:
                folders[role] = self(needed).folder
        if spec.copies is not None:
            shutil.copytree(self(spec.copies).folder, here)
        if spec.spoil is not None:
            spec.spoil(here)
        argv = [part.format(**folders) for part in shlex.split(spec.argv)]
        before = functools.partial(_prepare, spec.before, spec.ours is not None)
        ranks = run_megatron(
            spec.layout[0], argv, before=before, probe=spec.probe, entry=spec.entry, watched=spec.watched
        )
        if not spec.ends:
            assert [rank.ended for rank in ranks] == [None] * len(ranks), _last_lines(ranks)
        made = Run(spec, ranks, here)
        if identity.switched_on():
            identity.record(made, Path(os.environ[identity.VARIABLE]))
        return made

    def _users(self, spec: RunSpec) -> str:
        """Return the tests of this session that use the run, or a run that resumes from it."""
        tests = [
            item.name
            for item in self._session.items
            if hasattr(item, "callspec") and any(_needs(one, spec) for one in item.callspec.params.get("runs", ()))
        ]
        return f"{len(tests)} tests:\n  " + "\n  ".join(tests)


def _needs(one: RunSpec, other: RunSpec) -> bool:
    return one == other or any(_needs(n, other) for n in (one.loaded, one.other, one.copies) if n is not None)


def _prepare(interventions: Any, install: bool) -> None:
    for intervention in interventions:
        intervention()
    if install:
        start()


def _last_lines(ranks: Any) -> str:
    return "\n".join(f"rank {number} ended: {rank.ended}: {rank.printed[-8:]}" for number, rank in enumerate(ranks))


@pytest.fixture(scope="session")
def _runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(request.session, tmp_path_factory.mktemp("runs"))


@pytest.fixture
def runs(request: pytest.FixtureRequest, _runs: Runs) -> Any:
    """Return the runs that the test's `uses` names: one run by itself, several as a list."""
    made = [_runs(spec) for spec in request.param]
    return made[0] if len(made) == 1 else made
