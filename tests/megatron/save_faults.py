"""Runs that save under a `Watch`, copies of their folder at each call, and what becomes of a run that resumes."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from optimus_cc_ext.hooks import start
from tests.megatron.runs import CB4
from tests.megatron.specs import without_trial
from tests.megatron_runs import MegatronRun, run_megatron
from tests.system_calls import Call, Watch, watched_by

Tree = Mapping[str, str | None]
"""Contents of a folder: the digest of each file by its path, None for a folder."""

TRACKER = "latest_checkpointed_iteration.txt"
OURS = "optimus_cc"
ITERATIONS = 6
"""Iterations of the uninterrupted run, which saves after every second one."""

NO_HANG_SECONDS = {"torch": 90, "torch_dist": 90, "async": 240}
"""With --async-save each rank starts a process that imports Megatron."""
OUR_FLAGS = without_trial(f"{CB4} --compressed-backprop-messages all")
FORMATS = {
    "torch": "--ckpt-format torch",
    "torch_dist": "--ckpt-format torch_dist",
    "async": "--ckpt-format torch_dist --async-save --use-persistent-ckpt-worker --async-strategy mcore",
}


def shortened(path: str) -> str:
    """Return a path with * for the random word in the name of a folder of ours."""
    return re.sub(r"(?<=incomplete_)[^/]+", "*", path)


class Store:
    """Contents of copied folders; copies share what they have in common."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[tuple[str, int, int, int], str] = {}
        folder.mkdir()

    def take(self, folder: Path) -> Tree:
        """Copy a folder as it is now. A file that is moved or removed meanwhile is left out."""
        tree: dict[str, str | None] = {}
        for path, folders, files in os.walk(folder):
            here = os.path.relpath(path, folder)
            tree |= {os.path.normpath(os.path.join(here, name)): None for name in folders}
            for name in files:
                try:
                    tree[os.path.normpath(os.path.join(here, name))] = self._digest(Path(path, name))
                except FileNotFoundError:
                    continue
        return tree

    def _digest(self, file: Path) -> str:
        status = file.stat()
        key = str(file), status.st_ino, status.st_size, status.st_mtime_ns
        if key not in self._known:
            content = file.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            if not (kept := self._folder / digest).exists():
                kept.write_bytes(content)
            self._known[key] = digest
        return self._known[key]

    def put(self, tree: Tree, folder: Path) -> Path:
        """Make a new folder with these contents."""
        folder.mkdir()
        for path, digest in sorted(tree.items()):
            (folder / path if digest is None else (folder / path).parent).mkdir(parents=True, exist_ok=True)
            if digest is not None:
                shutil.copyfile(self._folder / digest, folder / path)
        return folder

    def tracker(self, tree: Tree) -> str | None:
        """Return the text of Megatron's tracker file: the iteration from which Megatron resumes."""
        digest = tree.get(TRACKER)
        return None if digest is None else (self._folder / digest).read_text()

    def names(self, tree: Tree) -> frozenset[str]:
        """Return the names in a copy, and the iteration that its tracker names."""
        return frozenset({shortened(path) for path in tree} | {f"tracker: {self.tracker(tree)}"})


def iteration_folder(tree: Tree, iteration: int) -> Tree:
    return {path: digest for path, digest in tree.items() if path.startswith(f"iter_{iteration:07d}")}


def up_to(store: Store, tree: Tree, iteration: int) -> Tree:
    """Return a copy without later iterations, whose tracker names this one."""
    kept = {path: digest for path, digest in tree.items() if path.startswith("iter_") and int(path[5:12]) <= iteration}
    file = store._folder / f"tracker {iteration}"
    file.write_text(str(iteration))
    return kept | {TRACKER: file.name}


def without_ours(tree: Tree) -> Tree:
    return {path: digest for path, digest in tree.items() if OURS not in path}


@dataclass(frozen=True)
class Trainer:
    """Starts runs of two stages that save after every second iteration, in one format."""

    form: str
    ours: bool = True

    @property
    def reads(self) -> bool:
        """Return True if calls that only read are watched, which takes too long where each rank starts a writer."""
        return self.form != "async"

    def __call__(
        self, folder: Path, flags: str = "", answer: Callable[[Call], int | None] | None = None
    ) -> list[MegatronRun]:
        argv = shlex.split(
            "--pipeline-model-parallel-size 2 --global-batch-size 4 --lr-decay-iters 6 "
            f"--train-iters {ITERATIONS} --save {folder} --save-interval 2 {FORMATS[self.form]} {flags} "
            f"{OUR_FLAGS if self.ours else ''}"
        )
        start = partial(run_megatron, 2, argv, entry=_train, timeout=NO_HANG_SECONDS[self.form])
        if answer is None:
            return start(before=partial(_prepare, self, None))
        with Watch(folder, answer, shortened) as watch:
            return start(before=partial(_prepare, self, watch.address))


def _prepare(trainer: Trainer, address: str | None) -> None:
    if trainer.ours:
        start()
    if address is not None:
        watched_by(address, reads=trainer.reads)


def _train() -> None:
    """Train; an early end is an error, after which the other ranks are ended, as torchrun ends them."""
    from optimus_cc_ext.tools import pretrain_gpt

    try:
        pretrain_gpt.main()
    except SystemExit as ended:
        if ended.code != 0:
            raise RuntimeError(f"the rank ended with status {ended.code}") from ended
        raise


@dataclass(frozen=True)
class Outcome:
    """How a run ended that resumed."""

    iteration: int | None
    """Iteration from which it went on to the end; None: it ended early."""

    said: str = ""
    """The sentence, or the last line of the traceback, with which it ended early."""


def outcome_of(start: Callable[[], list[MegatronRun]], last: int = ITERATIONS) -> tuple[Outcome, list[MegatronRun]]:
    """Return how a run ended whose last iteration is to be `last`, and its ranks' records."""
    try:
        ranks = start()
    except AssertionError as failed:  # a rank ended early, died or hung
        lines = [line.strip() for line in str(failed).splitlines()]
        sentences = [line.removeprefix("optimus-cc: ") for line in lines if line.startswith("optimus-cc: error: ")]
        reasons = [
            line for line in lines if re.match(r"\S*(Error|Exception)\b|rank \d failed: it died|after \d+ s", line)
        ]
        return Outcome(None, (sentences + reasons + lines)[0]), []
    if any(rank.ended for rank in ranks):
        return Outcome(None, f"ended with {[rank.ended for rank in ranks]}"), ranks
    return Outcome(last - len(ranks[0].losses)), ranks


def equal_rest(ranks: list[MegatronRun], whole: list[MegatronRun], iteration: int) -> bool:
    """Return True if a run that went on from this iteration equals the rest of the whole run, to the bit."""
    return all(
        mine.weights == its.weights
        and all(
            getattr(mine, part) == getattr(its, part)[iteration:]
            for part in ("losses", "grad_norms", "random_states", "steps")
        )
        for mine, its in zip(ranks, whole, strict=True)
    )


@dataclass
class Recorded:
    """A run in one format, with a copy of its folder before each call that changes the folder."""

    form: str
    store: Store
    folder: Path
    ranks: list[MegatronRun] = field(default_factory=list)
    calls: list[tuple[Call, Tree]] = field(default_factory=list)
    end: Tree = field(default_factory=dict)

    def note(self, call: Call) -> None:
        """Copy the folder before a call, until the last save begins and the one before it is in place: an asynchronous
        save may end after the next one began.
        """
        before = self.store.tracker(self.calls[-1][1]) if self.calls else None
        last = (self.folder / f"iter_{ITERATIONS:07d}").exists() and before == str(ITERATIONS - 2)
        if call.changes and not last:
            self.calls.append((call, self.store.take(self.folder)))

    def first_by(self, key: Callable[[Tree], frozenset[str]]) -> list[tuple[Call, Tree]]:
        """Return the first copy for each value of `key`."""
        first: dict[frozenset[str], tuple[Call, Tree]] = {}
        for call, tree in self.calls:
            first.setdefault(key(tree), (call, tree))
        return list(first.values())

    def resume(self, trainer: Trainer, tree: Tree, folder: Path) -> tuple[Outcome, list[MegatronRun]]:
        """Resume from a copy, which is removed afterwards."""
        self.store.put(tree, folder)
        try:
            return outcome_of(lambda: trainer(folder, f"--load {folder}"))
        finally:
            shutil.rmtree(folder)


def record(form: str, folder: Path) -> Recorded:
    """Make the uninterrupted run, with copies of its folder."""
    run = Recorded(form, Store(folder / f"store of {form}"), folder / form)
    run.ranks = Trainer(form)(run.folder, answer=run.note)
    run.end = run.store.take(run.folder)
    return run


def save_again(run: Recorded, folder: Path) -> tuple[Recorded, Tree]:
    """Resume at 2 where 4 exists and is the newest, and save 4 once more; return the copies, and the folder before."""
    again = Recorded(run.form, run.store, folder / "again")
    before = up_to(run.store, run.end, 4)
    run.store.put(before, again.folder)
    again.ranks = Trainer(run.form)(
        again.folder, f"--load {again.folder} --ckpt-step 2 --exit-interval 4", answer=again.note
    )
    again.end = run.store.take(again.folder)
    return again, before
