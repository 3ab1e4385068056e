"""Megatron-LM's own unit tests beside this package: vanilla, off, and with lossless messages.

    scripts/compat_tests.sh CHECKOUT [--only TEXT] [--ranks 2 4 8] [--limit SECONDS] [--results FOLDER]

Ranks are forks of this process, which has imported Megatron. The ranks of a file run its tests in order. If only some
ranks fail in a test, or it makes no progress for --limit seconds, ranks are started anew with the next test. Off and
lossless run the tests that passed in vanilla.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from scripts.compat.forks import Forks
from scripts.compat.unit_test_ranks import MODES, VANILLA, go_on, run, stand_in_for_a_gpu

FILES = (
    "pipeline_parallel/test_schedules.py",
    "pipeline_parallel/test_pipeline_layout.py",
    "pipeline_parallel/test_multimodule_schedules.py",
    "distributed/test_distributed_data_parallel.py",
    "distributed/test_param_and_grad_buffer.py",
    "distributed/test_grad_sync_with_expert_parallel.py",
    "distributed/test_finalize_model_grads.py",
    "distributed/test_grad_reduce_for_replicated_embedder.py",
    "distributed/test_reduce_scatter_with_fp32_accumulation.py",
    "test_optimizer.py",
    "dist_checkpointing/test_optimizer.py",
    "transformer/moe/test_token_dispatcher.py",
    "transformer/moe/test_a2a_token_dispatcher.py",
)
GRACE = 8.0
"""Seconds that the other ranks have to end a test that has failed on one rank."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of one test at one number of ranks in one mode."""

    mode: str
    ranks: int
    file: str
    test: str
    outcome: str
    reason: str = ""
    sent: int = 0
    """Bytes that this package counted on all ranks: messages of its own, and Megatron's collectives that it saw."""

    left_out: tuple[str, ...] = ()
    """Classes of traffic that the test refused before it was repeated without them."""

    @property
    def pair(self) -> tuple[str, int]:
        """The test and its number of ranks."""
        return self.test, self.ranks


class _Attempt:
    """Ranks that run the tests of a file, as the starting process sees them."""

    def __init__(self, ranks: int, folder: Path, run: Callable[[str], None]) -> None:
        self._notes = [folder / f"notes-{rank}" for rank in range(ranks)]
        self._forks = Forks(ranks, folder, lambda rank: run(str(self._notes[rank])))

    def follow(self, limit: float) -> Iterator[tuple[str, str, str, int, tuple[str, ...]]]:
        """Yield (test, outcome, reason, bytes, classes left out) as tests end, and end the ranks.

        Ranks that have all failed in a test go on to the next. If only some
        ranks fail, or a test makes no progress for `limit` seconds, all are ended.
        """
        told, size, since = 0, -1, time.monotonic()
        while True:
            alive, before = self._forks.alive, size
            ended, started, left_out = self._read()
            for test in started[told:]:
                answers = [rank[test] for rank in ended if test in rank]
                if len(answers) < len(ended):
                    break
                failed = [
                    f"rank {at}: {each['reason']}" for at, each in enumerate(answers) if each["outcome"] == "failed"
                ]
                outcome = "failed" if failed else min(each["outcome"] for each in answers)
                told += 1
                reason, sent = failed[0] if failed else "", sum(each["sent"] for each in answers)
                yield test, outcome, reason, sent, left_out.get(test, ())
                if len(failed) == len(answers):
                    for notes in self._notes:
                        Path(go_on(str(notes), test)).touch()
                elif failed:
                    return
            if not alive:
                break
            now = time.monotonic()
            size = sum(notes.stat().st_size for notes in self._notes if notes.exists())
            since = now if size != before else since
            failing = any(rank.get(test, {}).get("outcome") == "failed" for test in started[told:] for rank in ended)
            if now - since > (GRACE if failing else limit):
                self.end()
            time.sleep(0.1)
        if told < len(started):
            said = [rank[started[told]]["reason"] for rank in ended if started[told] in rank]
            reason = next(filter(None, said), "no answer, or a rank died")
            yield started[told], "failed", reason, 0, left_out.get(started[told], ())

    def end(self) -> None:
        """End the ranks that are left."""
        self._forks.end()

    def _read(self) -> tuple[list[dict[str, dict[str, Any]]], list[str], dict[str, tuple[str, ...]]]:
        """Return the tests that each rank has ended, all that were started, in their order, and the classes that
        tests refused.
        """
        notes = [_records(path) for path in self._notes]
        ended = [{note["end"]: note for note in rank if "end" in note} for rank in notes]
        started = max(([note["start"] for note in rank if "start" in note] for rank in notes), key=len)
        refused = {note["again"]: tuple(note["left_out"]) for rank in notes for note in rank if "again" in note}
        return ended, started, refused


def _records(path: Path) -> list[dict[str, Any]]:
    """Read the whole lines of a file of JSON lines."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def _run_file(
    file: str, ranks: int, mode: str, limit: float, todo: frozenset[str] | None, done: set[str]
) -> Iterator[Outcome]:
    """Run the tests of a file that are not in `done`, and that are in `todo` if it is given.

    A test that fails after it was repeated without a refused class runs again in new ranks, without the class from the
    beginning, because the refusal can leave process groups half made.
    """
    left_out: dict[str, tuple[str, ...]] = {}
    while todo is None or todo - done:
        last = None
        with tempfile.TemporaryDirectory(prefix="compat-tests-") as folder:
            attempt = _Attempt(
                ranks, Path(folder), partial(run, f"tests/unit_tests/{file}", mode, todo, frozenset(done), left_out)
            )
            try:
                for outcome in attempt.follow(limit):
                    last = Outcome(mode, ranks, file, *outcome)
                    if last.outcome == "failed" and last.left_out and last.test not in left_out:
                        left_out[last.test] = last.left_out
                        break
                    done.add(last.test)
                    yield replace(last, left_out=last.left_out or left_out.get(last.test, ()))
            finally:
                attempt.end()
            log = (Path(folder) / "rank-0.log").read_text(errors="replace").strip().splitlines()
        if last is None and not done:
            print(f"{file} on {ranks} ranks, {mode}: nothing ran; {log[-1] if log else ''}", file=sys.stderr)
        if last is None or last.outcome != "failed":
            return


def _prepare(checkout: Path) -> int:
    """Import Megatron from the checkout; return the largest number of ranks."""
    sys.path.insert(0, str(checkout))
    os.chdir(checkout)
    from optimus_cc_ext.tools.cpu import cpu_runtime

    warnings.simplefilter("ignore")  # Megatron warns once for each missing GPU library
    on_gpus = cpu_runtime.device_choice() == "cuda"
    if not on_gpus:
        cpu_runtime.activate()
    import megatron.training  # noqa: F401

    if on_gpus:
        import torch

        return torch.cuda.device_count()
    stand_in_for_a_gpu()
    return 8


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield the lines of the tables in Markdown: pairs by file and mode, then each difference to vanilla."""
    passed = {
        mode: {one.pair: one for one in outcomes if one.mode == mode and one.outcome == "passed"} for mode in MODES
    }
    pairs = passed[VANILLA]
    yield "| file | vanilla | off | lossless | of these with bytes through this package |"
    yield "|---|---:|---:|---:|---:|"
    for file in (*FILES, ""):
        here = {pair for pair, one in pairs.items() if file in ("", one.file)}
        ours = [one for pair, one in passed["lossless"].items() if pair in here]
        counts = len(here), len(here & passed["off"].keys()), len(ours), sum(one.sent > 0 for one in ours)
        yield f"| {f'`{file}`' if file else 'all'} | {' | '.join(map(str, counts))} |"
    yield ""
    yield "| mode | reason | tests | pairs |"
    yield "|---|---|---|---:|"
    differences = [one for one in outcomes if one.pair in pairs and one.outcome != "passed"]
    reasons = Counter((one.mode, one.reason.partition(": ")[2] or one.reason or one.outcome) for one in differences)
    for (mode, reason), count in reasons.most_common():
        names = {one.test.rpartition("::")[2].partition("[")[0] for one in differences if reason in one.reason}
        yield f"| {mode} | {reason.replace('|', '/')} | {', '.join(sorted(names))} | {count} |"


def main() -> int:
    """Run what is not in the results yet, and print the tables."""
    parser = argparse.ArgumentParser(prog="scripts/compat_tests.sh", description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="a checkout of Megatron-LM")
    parser.add_argument("--only", default="", metavar="TEXT", help="run only the files whose name contains TEXT")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="numbers of ranks (default: 2 4 8)")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds without progress (default: %(default)g)")
    parser.add_argument(
        "--results", type=Path, default=Path("results/compat_tests"), metavar="FOLDER",
        help="folder of outcomes.jsonl, which a second start continues (default: %(default)s)",
    )  # fmt: skip
    options = parser.parse_args()
    for package in ("pytest_mock", "einops"):
        if importlib.util.find_spec(package) is None:
            print(f"{package} is not installed: tests that import it will not run", file=sys.stderr)
    results = options.results.resolve() / "outcomes.jsonl"
    results.parent.mkdir(parents=True, exist_ok=True)
    outcomes = [Outcome(**record) for record in _records(results)]
    most = _prepare(options.checkout.resolve())
    with results.open("a") as stream:
        for ranks in (ranks for ranks in options.ranks if ranks <= most):
            for file in (file for file in FILES if options.only in file):
                here = [one for one in outcomes if (one.file, one.ranks) == (file, ranks)]
                for mode in MODES:
                    todo = frozenset(one.test for one in here if (one.mode, one.outcome) == (VANILLA, "passed"))
                    done = {one.test for one in here if one.mode == mode}
                    for one in _run_file(file, ranks, mode, options.limit, None if mode == VANILLA else todo, done):
                        here.append(one)
                        stream.write(json.dumps(asdict(one)) + "\n")
                        stream.flush()
                outcomes += [one for one in here if one not in outcomes]
    print("\n".join(table(outcomes)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
