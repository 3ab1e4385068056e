"""Logs of real runs, and tables of nccl-tests, in 500 mutations: the answer stays within 1 %, or the input is refused
with its line.

The logs are those of Megatron 0.19.2's own loop on two CPU ranks, without most lines that no reader looks for.
"""

import random
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median

import pytest

from optimus_cc_ext.tools.plan import PlanError
from optimus_cc_ext.tools.plan.hardware import CLUSTERS, network_of
from optimus_cc_ext.tools.plan.measured import read_run
from optimus_cc_ext.tools.plan.model import Job
from optimus_cc_ext.tools.plan.nccl_tests import with_nccl_tests
from tests.plan.nccl_output import nccl_tests

FOLDER = Path(__file__).parent / "logs"
LOGS = {name: (FOLDER / f"{name}.txt").read_text() for name in ("pipeline", "experts", "tensor")}
TABLES = {
    "2019": nccl_tests(CLUSTERS["a100-100gbe"], "all_reduce_perf", 16, 8, old=True),
    "today": nccl_tests(CLUSTERS["h100-ndr400"], "all_reduce_perf", 4, 2),
    "alltoall": nccl_tests(CLUSTERS["10gbe"], "alltoall_perf", 8, 4),
}
PREFIXES: tuple[Callable[[int], str], ...] = (
    lambda rank: f"{rank:3d}: ", lambda rank: f"{rank}: ", lambda rank: f"[default{rank}]:",
    lambda rank: f"[1,{rank}]<stdout>:", lambda rank: f"[{rank}] ", lambda rank: f"worker-{rank}: ",
    lambda rank: f"2026-01-20T08:33:{58 + rank % 2}.123456789Z ", lambda rank: f"trainer-{rank}  | ",
    lambda rank: f"(Worker pid={700 + rank}, ip=10.0.0.{rank}) ", lambda rank: f"[pod/train-{rank}/main] ",
)  # fmt: skip
NOISE = (
    "node1:4242:4250 [1] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [send] via NET/IB/0",
    "/usr/lib/python3/site-packages/torch/x.py:83: UserWarning: This is slow. (Triggered internally at x.cpp:1.)",
    "[rank1]:[W1127 13:00:00.1 ProcessGroupNCCL.cpp:4115] a hint that no one reads",
    "WARNING: one of 3 tokens", "", "INFO:root:iteration of the data loader begins",
    " > number of parameters on (tensor, pipeline) model parallel rank (0, 1): 77",
)  # fmt: skip

Answer = tuple[Job, float] | tuple[float, float, float]


def read_log(path: Path) -> Answer:
    """Return job and seconds."""
    run = read_run(path)
    return run.job, run.seconds


def read_table(path: Path) -> Answer:
    """Return the rate and the latency of the network, and the rate of NVLink."""
    found, _ = with_nccl_tests(replace(CLUSTERS["h100-ndr400"], network=network_of("10gbe")), path)
    return found.network.node_rate, found.network.hop, found.gpu.nvlink


def alike(one: Answer, other: Answer) -> bool:
    """Return True if numbers differ by 1 % at most, and jobs not at all."""
    return all(
        a == b if isinstance(a, Job) else a == pytest.approx(b, rel=0.01) for a, b in zip(one, other, strict=True)
    )


@cache
def true_answer(kind: str, text: str) -> Answer:
    """Return the answer on unchanged text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "unchanged.txt")
        path.write_text(text)
        return (read_log if kind == "log" else read_table)(path)


def answers(kind: str, text: str, part: str) -> list[Answer]:
    """Return the right answers on the first part of a text. In a log they come from the iterations that are whole,
    because nobody can know that more were there.
    """
    answer, found = true_answer(kind, text), re.findall(r"per iteration \(ms\): ([\d.]+) \|", part)
    if kind == "table":
        return [answer]
    seconds = [float(each) / 1e3 for each in found]
    return [(answer[0], median(seconds[:n][n // 2 :])) for n in (len(seconds), len(seconds) - 1) if n >= 4]  # type: ignore[list-item]


def mutated(rng: random.Random, kind: str, text: str, others: Sequence[str]) -> tuple[str, list[Answer]]:
    """Return another form of the text, and the answers that are right for it."""
    right, lines = answers(kind, text, text)[:1], text.splitlines()
    change = rng.choice(
        ("none", "before", "twice", "after", "tail", "line", "columns", "order", "noise", "mixed", "tee")
    )
    place = rng.randrange(len(lines))
    if change in ("before", "after"):  # another run, whole or ended early
        other = rng.choice(others)
        some = other.splitlines()[: rng.choice((None, rng.randrange(len(other.splitlines()))))]
        lines = [*some, *lines] if change == "before" else [*lines, *some]
        if change == "after":
            begun = any("arguments ---" in line or "Rank" in line for line in some)
            right = answers(kind, other, "\n".join(some)) if begun else right
    elif change == "twice":
        lines *= 2
    elif change == "tail":
        cut = text[: rng.randrange(len(text))]
        lines, right = cut.splitlines(), [*right, *answers(kind, text, cut)]
    elif change == "line":
        lines[place] = lines[place][: rng.randrange(1 + len(lines[place]))]
        # Nobody can know that the last iteration was there.
        whole = not any(re.search("iteration +\\d+/", line) for line in lines[place + 1 :])
        right += answers(kind, text, "\n".join(lines[:place])) if whole else []
    elif change == "columns":
        width = rng.randrange(40, 200)
        lines = [line[:width] for line in lines]
    elif change == "order":
        wanted = r"^\S*\s*\[?.{0,30}iteration +\d+/" if kind == "log" else r"\s*\d+ +\d+ +float"
        places = [number for number, line in enumerate(lines) if re.match(wanted, line)]
        for number, line in zip(places, rng.sample([lines[number] for number in places], len(places)), strict=True):
            lines[number] = line
    elif change == "noise":
        for _ in range(30):
            lines.insert(rng.randrange(len(lines)), rng.choice(NOISE))
    elif change == "mixed":  # two ranks write into one line
        column = rng.randrange(1 + len(lines[place]))
        ends = rng.choice(("", "\n"))
        lines[place] = lines[place][:column] + rng.choice(NOISE) + ends + lines[place][column:]
    elif change == "tee":
        lines = [each for line in lines for each in [line] * rng.choice((1, 2))]
    prefix = rng.choice((None, *PREFIXES))
    if prefix:
        lines = [prefix(rng.randrange(8)) + line for line in lines]
    if rng.random() < 0.3:
        lines = [f"\x1b[{rng.randrange(30, 38)}m{line}\x1b[0m" for line in lines]
    return rng.choice(("\n", "\r\n")).join(lines) + rng.choice(("", "\n")), right


def outcomes(tmp_path: Path, seeds: Sequence[int]) -> dict[str, int]:
    """Return how many mutations were answered, and how many were refused; fail at another answer."""
    counts = {"answered": 0, "refused": 0}
    for seed in seeds:
        rng = random.Random(seed)
        kind, texts = rng.choice((("log", LOGS), ("table", TABLES)))
        name = rng.choice(sorted(texts))
        text, right = mutated(rng, kind, texts[name], [each for each in texts.values() if each != texts[name]])
        path = tmp_path / f"{seed}.txt"
        path.write_text(text, newline="")
        try:
            answer = (read_log if kind == "log" else read_table)(path)
        except PlanError as error:
            assert re.search(r"line \d+|line, ", str(error)), (seed, str(error))
            counts["refused"] += 1
        else:
            assert any(alike(answer, each) for each in right), (seed, name, answer, right)
            counts["answered"] += 1
        path.unlink()
    print(f"{len(seeds)} mutations: {counts}")
    return counts


def test_a_sample_of_mutations_gives_the_same_answer_or_a_refusal_with_its_line(tmp_path: Path) -> None:
    assert outcomes(tmp_path, range(40))["answered"] >= 15


@pytest.mark.ci
def test_500_mutations_give_the_same_answer_or_a_refusal_with_its_line(tmp_path: Path) -> None:
    assert outcomes(tmp_path, range(500))["answered"] >= 200


@pytest.mark.parametrize(("first", "last"), [(a, b) for a in LOGS for b in LOGS if a != b])
def test_of_two_runs_in_one_log_the_last_one_is_read(first: str, last: str, tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(LOGS[first] + LOGS[last])
    assert read_log(path) == true_answer("log", LOGS[last])


ITERATION = r"(?m)^.*\biteration +{}/.*\n"
DAMAGE: dict[str, tuple[str, str, str]] = {
    "a number is cut": ("pipeline", r"(\biteration +9/.*\(ms\): \d\d).*", r"\1"),
    "a name is cut": ("experts", r"\bmoe_(ffn_hidden_size \.)", r"\1"),
    "an iteration is lost": ("pipeline", ITERATION.format(9), ""),
    "an iteration has two times": (
        "pipeline", ITERATION.format(9), r"\g<0>iteration 9/ 14 | elapsed time per iteration (ms): 77.0 |\n"
    ),
    "a row's time is cut": ("today", r"(?m)^( *8589934592 .*? -1 +\d+)\d(?=[. ])", r"\1"),
    "a rank is lost": ("today", r"(?m)^# +Rank +3 .*\n", ""),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_that_would_give_another_number_is_refused_with_its_line(damage: str, tmp_path: Path) -> None:
    name, pattern, instead = DAMAGE[damage]
    text = (LOGS | TABLES)[name]
    damaged = re.sub(pattern, instead, text, count=1)
    assert damaged != text
    path = tmp_path / "damaged.txt"
    path.write_text(damaged)
    with pytest.raises(PlanError, match=r"line \d+"):
        (read_log if name in LOGS else read_table)(path)
