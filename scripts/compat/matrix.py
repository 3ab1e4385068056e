"""Doctor's answers about the training lines of Megatron-LM's functional tests, as tables.

    scripts/compat_matrix.sh CHECKOUT [--target h100] [--json FILE] [-- FLAGS]

Every rank is a node of its own. FLAGS are ours, `--optimus-cc balanced` by default.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from scripts.compat.lines import Line, training_lines

ACCEPTED = "accepted"
LEFT_DENSE = "accepted, with classes left dense"
REFUSED = "refused"
BY_MEGATRON = "refused by Megatron itself"
NOTHING = "nothing to send"
OUTCOMES = (ACCEPTED, LEFT_DENSE, REFUSED, BY_MEGATRON, NOTHING)


@dataclass(frozen=True)
class Answer:
    """Answer of doctor's about one test case."""

    case: str
    outcome: str
    reasons: tuple[str, ...] = ()
    """Classes left dense with their reasons, or the reason of the refusal."""

    ranks: int = 0


def ask(target: str, ours: Sequence[str], line: Line) -> Answer:
    """Return doctor's answer about `line` with our flags; if that is refused, doctor also judges the line without
    them.
    """
    found = _diagnosis(target, [*line.words, *ours])
    if found["ok"]:
        left = tuple(
            finding["state"].partition(" leaves out ")[2]
            for finding in found["findings"]
            if finding["subject"] == "note" and " leaves out " in finding["state"]
        )
        conflicts = tuple(text for text in left if "(--" in text)
        compressed = {chosen for chosen in found["formats"].values()} - {"dense"}
        if not compressed:
            return Answer(line.case, NOTHING, left, line.ranks)
        return Answer(line.case, LEFT_DENSE if conflicts else ACCEPTED, conflicts, line.ranks)
    vanilla = _diagnosis(target, line.words)
    outcome = REFUSED if vanilla["ok"] else BY_MEGATRON
    return Answer(line.case, outcome, (found["verdict"].splitlines()[0],), line.ranks)


def _diagnosis(target: str, words: Sequence[str]) -> dict:  # type: ignore[type-arg]
    """Ask doctor in a fork of this process, which has imported Megatron and stays as it is."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        warnings.simplefilter("ignore")
        from optimus_cc_ext.tools.doctor import examine

        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            try:
                answer = examine(words, None, 1, target).as_json()
            except BaseException as error:
                answer = json.dumps({"ok": False, "verdict": f"doctor: {error!r}", "findings": []})
        writer.send_bytes(answer.encode())
        os._exit(0)
    writer.close()
    answer = json.loads(reader.recv_bytes())
    os.waitpid(pid, 0)
    return answer  # type: ignore[no-any-return]


def _import_megatron(checkout: str, target: str) -> None:
    sys.path.insert(0, checkout)
    from optimus_cc_ext.tools.doctor.target import HERE, emulate

    warnings.simplefilter("ignore")
    if target != HERE:
        emulate(target)
    import megatron.training.training  # noqa: F401


def table(lines: Sequence[Line], answers: Sequence[Answer]) -> Iterable[str]:
    """Yield the lines of the tables in Markdown."""
    distinct = {line.case: line.distinct for line in lines}
    yield "| | lines | distinct |"
    yield "|---|---:|---:|"
    for outcome in OUTCOMES:
        cases = [answer.case for answer in answers if answer.outcome == outcome]
        yield f"| {outcome} | {len(cases)} | {len({distinct[case] for case in cases})} |"
    yield f"| all | {len(lines)} | {len(set(distinct.values()))} |"
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for answer in answers:
        reasons[answer.outcome].update(answer.reasons)
    yield ""
    yield "| outcome | class left dense, or reason | lines |"
    yield "|---|---|---:|"
    for outcome in OUTCOMES[1:]:
        for reason, count in reasons[outcome].most_common():
            yield f"| {outcome} | {reason.replace('|', '/')} | {count} |"


def main() -> int:
    """Ask doctor about every line, and print the tables."""
    parser = argparse.ArgumentParser(prog="scripts/compat_matrix.sh", description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="a checkout of Megatron-LM")
    parser.add_argument("--target", default="h100", help="the machine that would train (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="ask only about cases whose name contains TEXT")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the answers, one JSON object a line")
    parser.add_argument("flags", nargs="*", metavar="FLAGS", help="our flags (default: --optimus-cc balanced)")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    lines = [line for line in training_lines(checkout) if options.only in line.case]
    ours = options.flags or ["--optimus-cc", "balanced"]
    with ProcessPoolExecutor(
        min(4, os.cpu_count() or 1), multiprocessing.get_context("spawn"), _import_megatron,
        (str(checkout), options.target),
    ) as pool:  # fmt: skip
        answers = list(pool.map(partial(ask, options.target, ours), lines))
    if options.json:
        options.json.write_text("".join(json.dumps(asdict(answer)) + "\n" for answer in answers))
    print("\n".join(table(lines, answers)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
