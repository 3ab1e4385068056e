"""The harness of forked ranks itself: results, failures, timeouts, and no process left behind."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.forked_ranks import run_ranks

pytestmark = pytest.mark.ci


def own_number(offset: int) -> tuple[int, str | None]:
    return int(os.environ["RANK"]) + offset, os.environ.get("OF_THIS_TEST")


def summed_over_ranks() -> tuple[float, torch.Tensor, int]:
    torch.distributed.init_process_group("gloo")
    value = torch.tensor([float(torch.distributed.get_rank())])
    torch.distributed.all_reduce(value)
    return value.item(), value, torch.get_num_threads()


def given_back(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensors


def failing_on_the_second() -> None:
    print("about to", "fail")
    if os.environ["RANK"] == "1":
        raise ValueError("the reason")
    time.sleep(600)


def dying_on_the_first() -> None:
    if os.environ["RANK"] == "0":
        os._exit(3)
    time.sleep(600)


def hanging_on_the_last(folder: str) -> None:
    if os.environ["RANK"] == "2":
        child = subprocess.Popen(["sleep", "600"])
        Path(folder, "pids").write_text(f"{os.getpid()} {child.pid}")
        a_function_that_hangs()


def a_function_that_hangs() -> None:
    time.sleep(600)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_results_come_in_rank_order_and_an_environment_is_passed_and_does_not_leak() -> None:
    assert run_ranks(3, own_number, 10, env={"OF_THIS_TEST": "1"}) == [(10, "1"), (11, "1"), (12, "1")]
    assert run_ranks(1, own_number, 0) == [(0, None)]
    assert "OF_THIS_TEST" not in os.environ


def test_ranks_meet_and_tensors_are_returned() -> None:
    for total, value, threads in run_ranks(3, summed_over_ranks):
        assert total == 3.0 and torch.equal(value, torch.tensor([3.0])) and threads == 1


def test_tensors_keep_dtype_shape_and_values_both_ways() -> None:
    sent = [torch.randn(3, 2).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool)]
    sent += [torch.tensor(1.5), torch.empty(0, 3), torch.randn(4, 3).t(), torch.nn.Parameter(torch.ones(2))]
    (received,) = run_ranks(1, given_back, *sent)
    for before, after in zip(sent, received, strict=True):
        assert before.dtype == after.dtype and torch.equal(before, after)


def test_ranks_start_without_importing_megatron_again() -> None:
    run_ranks(1, own_number, 0)  # starts the server, if no test has
    began = time.monotonic()
    run_ranks(2, own_number, 0)
    # A fork takes 0.05-0.3 s; importing Megatron in a rank 3 s and more.
    assert time.monotonic() - began < 2.5


def test_a_failing_rank_ends_all_with_its_traceback_and_output() -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError) as error:
        run_ranks(3, failing_on_the_second)
    assert time.monotonic() - began < 60
    message = str(error.value)
    assert "rank 1 failed" in message and "ValueError: the reason" in message and "about to fail" in message
    assert "rank 0 failed" not in message


def test_a_dead_rank_is_named_with_its_exit_code() -> None:
    with pytest.raises(AssertionError, match=r"rank 0 failed: it died without an answer \(exit code 3\)"):
        run_ranks(2, dying_on_the_first)


@pytest.mark.ci
def test_a_timeout_names_the_unfinished_ranks_and_shows_where_they_hang(tmp_path: Path) -> None:
    # The first call in a test session starts the fork server, which imports torch. This can take longer than 5 s.
    run_ranks(1, given_back)
    with pytest.raises(AssertionError) as error:
        run_ranks(3, hanging_on_the_last, str(tmp_path), timeout=5)
    message = str(error.value)
    assert "after 5 s these ranks of 3 had not finished: 2\n" in message
    assert "a_function_that_hangs" in message
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    deadline = time.monotonic() + 5
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, pids)), "a rank or what it started outlived the call"
