"""Every system call of a save, as the last one before a SIGKILL and as one that fails: what was saved stays loadable.

A SIGKILL at a call leaves the folder as it is at that moment, so the folder is copied at each call of one run, instead
of a run for each kill; real kills show that this is the same. The bar is what Megatron alone does.
"""

from __future__ import annotations

import errno
import fnmatch
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from pathlib import Path

import pytest

from tests.megatron.save_faults import (
    FORMATS,
    OURS,
    Outcome,
    Recorded,
    Trainer,
    Tree,
    equal_rest,
    iteration_folder,
    outcome_of,
    record,
    save_again,
    shortened,
    up_to,
    without_ours,
)  # fmt: skip
from tests.system_calls import AVAILABLE, KILL, Call

pytestmark = [
    pytest.mark.skipif(not AVAILABLE, reason="needs x86-64 and a kernel that lets a held call go on (5.5)"),
    pytest.mark.timeout(3600),
]
Record = Callable[[str], Recorded]
ERRORS = (errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EACCES)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The uninterrupted run in each format."""
    return cache(lambda form: record(form, tmp_path_factory.mktemp(form)))


# -- killed -----------------------------------------------------------------------------------------------------------


def assert_nothing_is_lost(run: Recorded) -> Counter[str | None]:
    """Assert that at each call the iteration that the tracker names, and those before it, have their final contents;
    return the number of calls by iteration.
    """
    trackers: Counter[str | None] = Counter()
    for call, tree in run.calls:
        tracker = run.store.tracker(tree)
        trackers[tracker] += 1
        for iteration in range(2, int(tracker or 0) + 1, 2):
            kept = iteration_folder(run.end, iteration)
            assert any(OURS in path for path in kept)
            assert iteration_folder(tree, iteration) == kept, f"{call}: {iteration}, when the newest was {tracker}"
    assert {None, "2", "4"} <= trackers.keys()
    return trackers


def assert_each_resumes(run: Recorded, copies: list[tuple[str, Tree]], folder: Path) -> Counter[str]:
    """Assert that a run that resumes from a copy, among what was left there, trains as the uninterrupted run."""
    counts: Counter[str] = Counter()
    for number, (what, tree) in enumerate(copies):
        tracker = run.store.tracker(tree)
        outcome, ranks = run.resume(Trainer(run.form), tree, folder / str(number))
        if tracker == "":  # Megatron empties its tracker file before it writes to the file
            assert outcome.iteration is None, f"{what}: {outcome}"
            counts[f"refused by Megatron: {outcome.said}"] += 1
        else:
            assert outcome == Outcome(int(tracker or 0)), f"{what}: {outcome}"
            assert equal_rest(ranks, run.ranks, outcome.iteration or 0), what
            counts[f"from {outcome.iteration}"] += 1
    return counts


def calls_like(run: Recorded, *patterns: str) -> list[tuple[int, Call, Tree]]:
    """Return the first call of the save of 4 that is like each pattern, with its place among all calls.

    Asynchronous saves overlap, so that is the first of any save there; ours of all saves are equal.
    """
    save = [item for item in enumerate(run.calls) if run.form == "async" or run.store.tracker(item[1][1]) == "2"]
    found = (next(item for item in save if fnmatch.fnmatch(str(item[1][0]), pattern)) for pattern in patterns)
    return [(at, *item) for at, item in found]


def killed_at(run: Recorded, call: Call, folder: Path) -> Tree:
    """Resume at 2, and kill a rank at this call of the save of 4. Assert that 2 stays the newest, with all its files;
    return what is left.
    """
    run.store.put(up_to(run.store, run.end, 2), folder)
    seen: list[Call] = []
    kill = at_call(call, 0, KILL, seen)
    rehearsed = False

    def answer(other: Call) -> int | None:
        nonlocal rehearsed
        rehearsed = rehearsed or (other.name == "rmdir" and OURS in other.path)
        return kill(other) if rehearsed else None

    outcome, _ = outcome_of(lambda: Trainer(run.form)(folder, f"--load {folder}", answer=answer))
    assert seen and outcome.iteration is None, f"{call}: {outcome}"
    left = run.store.take(folder)
    assert run.store.tracker(left) == "2" and iteration_folder(left, 2) == iteration_folder(run.end, 2), call
    shutil.rmtree(folder)
    return left


def assert_as_copied(run: Recorded, at: int, left: Tree) -> None:
    """Assert that what is left of the calls that a killed rank had made is the same as in the copy at that call."""
    call, copied = run.calls[at]
    made = {other.path for other, _ in run.calls[:at] if other.rank == call.rank}
    both = [{shortened(path) for path in tree} & made for tree in (left, copied)]
    assert both[0] == both[1], call


def at_call(wanted: Call, nth: int, then: int, seen: list[Call]) -> Callable[[Call], int | None]:
    """Return an answer for the nth call, counted from 0, that equals `wanted`; `seen` is given that call."""
    equals: list[Call] = []

    def answer(call: Call) -> int | None:
        if call == wanted:
            equals.append(call)
            if len(equals) == nth + 1:
                seen.append(call)
                return then
        return None

    return answer


@pytest.mark.ci
def test_a_kill_at_any_call_of_a_save_loses_nothing(recorded: Record, tmp_path: Path) -> None:
    run = recorded("torch_dist")
    calls = assert_nothing_is_lost(run)
    ((_, call, copied),) = calls_like(run, "rank 0: rename .optimus_cc*")
    resumes = assert_each_resumes(run, [(f"killed at {call}", copied)], tmp_path)
    print(f"{len(run.calls)} calls, by tracker {dict(calls)}; resumed {dict(resumes)}")


KILLED_AT = (
    "rank 0: mkdir .optimus_cc*", "rank 0: write *rank_00000.pt", "rank 1: write *rank_00001.pt",
    "rank 0: write *topology.json", "rank 0*: write* iter_0000004/*", "rank 1*: write* iter_0000004/*",
    "rank 0: rename .optimus_cc*", "rank 0: fsync iter_0000004", "rank 0: openat latest*",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("form", FORMATS)
def test_a_run_that_is_killed_at_any_call_of_a_save_goes_on_as_if_never_killed(
    form: str, recorded: Record, tmp_path: Path
) -> None:
    run = recorded(form)
    calls = assert_nothing_is_lost(run)
    # The first save differs only in that there is nothing yet to lose.
    later = [(call, tree) for call, tree in run.first_by(run.store.names) if run.store.tracker(tree) is not None]
    first = next(item for item in run.calls if fnmatch.fnmatch(str(item[0]), "*: rename .optimus_cc*"))
    copies = [(f"killed at {call}", tree) for call, tree in (first, *later)]
    resumes = assert_each_resumes(run, copies, tmp_path)
    kills = calls_like(run, *KILLED_AT)
    killed = [(at, call, killed_at(run, call, tmp_path / "killed")) for at, call, _ in kills]
    if form != "async":  # else two saves can overlap, so that the calls of one rank come in another order
        for at, _, left in killed:
            assert_as_copied(run, at, left)
    resumes += assert_each_resumes(run, [(f"really killed at {call}", left) for _, call, left in killed], tmp_path)
    print(f"{form}: {len(run.calls)} calls, by tracker {dict(calls)}; {len(kills)} kills; resumed {dict(resumes)}")


@pytest.mark.full
@pytest.mark.parametrize("form", ["torch"])
def test_a_kill_while_an_iteration_is_saved_again_is_met_as_without_us(
    form: str, recorded: Record, tmp_path: Path
) -> None:
    run = recorded(form)
    again, before = save_again(run, tmp_path)

    def state(tree: Tree) -> frozenset[str]:
        """Return the names in a copy, and which files of iteration 4 are the old ones, and which the new."""
        same = {path: [digest == other.get(path) for other in (before, again.end)] for path, digest in tree.items()}
        return frozenset(shortened(path) + str(same[path] if path.startswith("iter_0000004") else "") for path in tree)

    ends: Counter[str] = Counter()
    copies = again.first_by(state)
    for number, (call, tree) in enumerate(copies):
        assert iteration_folder(tree, 2) == iteration_folder(before, 2), f"{call} lost 2"
        alone, _ = again.resume(Trainer(form, ours=False), without_ours(tree), tmp_path / f"alone-{number}")
        with_us, ranks = again.resume(Trainer(form), tree, tmp_path / f"with-us-{number}")
        print(f"  {call}: alone {alone}, with us {with_us}")
        if with_us.iteration is None:
            assert alone.iteration is None or re.match(r"error: .*: .*\. [A-Z]", with_us.said), f"{call}: {with_us}"
            ends["refused" if alone.iteration is None else "refused with a sentence"] += 1
        else:
            assert with_us.iteration == alone.iteration == 4, f"{call}: {with_us}; alone {alone}"
            resets = [line for line in ranks[0].said if " is reset " in line]
            assert resets or equal_rest(ranks, run.ranks, 4), call
            ends["reset, which is said" if resets else "equal"] += 1
    assert ends["equal"], "before the first change, both resume"
    print(f"{form}: {len(again.calls)} calls, {len(copies)} states, each resumed with us and without: {dict(ends)}")


# -- failing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A call that fails, its number among equal calls, and the error."""

    call: Call
    nth: int
    error: int

    def __str__(self) -> str:
        return f"{errno.errorcode[self.error]} at {self.call} ({self.nth + 1})"


def is_ours(call: Call) -> bool:
    return OURS in call.path or (call.name, call.path) == ("fsync", "iter_0000004")


def faults(calls: list[Call], errors: Iterator[int]) -> list[Fault]:
    """Return faults of a save that makes these calls: each change, the first and the last of equal ones, and the first
    of each kind of our reads.
    """
    first = next(at for at, call in enumerate(calls) if call.changes)
    chosen: dict[tuple[Call, int], None] = {}
    for at, call in enumerate(calls):
        nth, last = calls[:at].count(call), calls.count(call) - 1
        if at >= first and (nth in (0, last) if call.changes else nth == 0 and is_ours(call)):
            chosen[call, nth] = None
    return [Fault(call, nth, next(errors)) for call, nth in chosen]


def fail(
    run: Recorded, trainer: Trainer, fault: Fault | None, start: Tree, folder: Path
) -> tuple[Outcome, Tree, list[Call]]:
    """Resume at 2 and let one call of the save of 4 fail; return how the run ended, what it left, and its calls."""
    calls: list[Call] = []
    answer = at_call(fault.call, fault.nth, fault.error, []) if fault else lambda call: None

    def noting(call: Call) -> int | None:
        calls.append(call)
        return answer(call)

    run.store.put(start, folder)
    try:
        outcome, _ = outcome_of(lambda: trainer(folder, f"--load {folder} --exit-interval 4", answer=noting), last=4)
        return outcome, run.store.take(folder), calls
    finally:
        shutil.rmtree(folder)


def assert_said(fault: Fault, outcome: Outcome, folder: Path) -> None:
    """Assert that a run ended with a sentence: the rank, the file, the reason and a cure."""
    sentence = rf"error: rank {fault.call.rank}: .*{folder}\S*.*: .*\. [A-Z].*"
    assert re.fullmatch(sentence, outcome.said), f"{fault}: {outcome}"


@pytest.mark.full
@pytest.mark.parametrize("form", FORMATS)
def test_a_call_of_ours_that_fails_is_said_and_loses_nothing(form: str, recorded: Record, tmp_path: Path) -> None:
    run = recorded(form)
    start = up_to(run.store, run.end, 2)
    _, _, calls = fail(run, Trainer(form), None, start, tmp_path / "none")
    tried = [
        fault for fault in faults(calls, islice(cycle(ERRORS), [*FORMATS].index(form), None)) if is_ours(fault.call)
    ]
    ends: Counter[str] = Counter()
    left: dict[frozenset[str], tuple[str, Tree]] = {}
    for fault in tried:
        outcome, tree, _ = fail(run, Trainer(form), fault, start, tmp_path / "failed")
        if outcome.iteration is None:
            assert_said(fault, outcome, tmp_path / "failed")
        assert iteration_folder(tree, 2) == iteration_folder(start, 2), f"{fault} lost 2"
        assert run.store.tracker(tree) == ("2" if outcome.iteration is None else "4"), f"{fault}: {outcome}"
        left.setdefault(run.store.names(tree), (str(fault), tree))
        ends["a sentence" if outcome.iteration is None else "no matter"] += 1
    resumes = assert_each_resumes(run, [*left.values()], tmp_path)
    print(f"{form}: {len(tried)} faults of {len(calls)} calls: {dict(ends)}; resumed {dict(resumes)}")


@pytest.mark.full
@pytest.mark.parametrize("form", ["torch_dist"])
def test_a_call_of_megatrons_that_fails_ends_as_without_us(form: str, recorded: Record, tmp_path: Path) -> None:
    run = recorded(form)
    start = up_to(run.store, run.end, 2)
    _, _, calls = fail(run, Trainer(form), None, start, tmp_path / "none")
    tried = [fault for fault in faults(calls, cycle(ERRORS)) if not is_ours(fault.call)]
    ends: Counter[str] = Counter()
    left: dict[frozenset[str], tuple[str, Tree]] = {}
    for fault in tried:
        with_us, tree, _ = fail(run, Trainer(form), fault, start, tmp_path / "failed")
        alone, its, _ = fail(run, Trainer(form, ours=False), fault, without_ours(start), tmp_path / "alone")
        assert with_us.iteration == alone.iteration, f"{fault}: {with_us}; alone {alone}"
        assert run.store.tracker(tree) == run.store.tracker(its), f"{fault}: {with_us}; alone {alone}"
        assert iteration_folder(tree, 2) == iteration_folder(start, 2), f"{fault} lost 2"
        left.setdefault(run.store.names(tree), (str(fault), tree))
        ends["ended" if with_us.iteration is None else "no matter"] += 1
    resumes = assert_each_resumes(run, [*left.values()], tmp_path)
    print(f"{form}: {len(tried)} faults, each with us and without: {dict(ends)}; resumed {dict(resumes)}")
