"""Child processes of a killed process end with it, however they were started, unless they asked to live on."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from optimus_cc_ext.devices import parent_death

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")

PARENT = """
import multiprocessing as mp, os, subprocess, sys, threading, time

if __name__ == "__mp_main__":  # as torch does, and before multiprocessing gets to what it does after a fork
    subprocess.run(["true"])

def say(pid):  # in one write: with PYTHONUNBUFFERED, print makes two, and another process's may come between
    os.write(1, f"{pid}\\n".encode())

def sleep():
    say(os.getpid())
    time.sleep(100)

def pass_on(method):
    mp.get_context(method).Process(target=sleep).start()
    sleep()

def command(**options):
    subprocess.Popen(["sh", "-c", "echo $$; exec sleep 100"], **options)

def in_a_thread(start):
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()

STARTS = {
    "fork": lambda: mp.get_context("fork").Process(target=sleep).start(),
    "manager": lambda: say((kept := mp.get_context("spawn").Manager())._process.pid) or kept,
    "fork in a spawned one": lambda: mp.get_context("spawn").Process(target=pass_on, args=("fork",)).start(),
    "fork server": lambda: mp.get_context("forkserver").Process(target=pass_on, args=("spawn",)).start(),
    "command": command,
    "command with a preexec_fn": lambda: command(preexec_fn=lambda: say("theirs")),
    "new session": lambda: command(start_new_session=True),
    "thread, fork": lambda: in_a_thread(STARTS["fork"]),
    "thread, spawn": lambda: in_a_thread(lambda: mp.get_context("spawn").Process(target=sleep).start()),
    "thread, command": lambda: in_a_thread(command),
}

if __name__ == "__main__":
    if sys.argv[2] == "install":
        from optimus_cc_ext.devices import parent_death
        parent_death.install()
    kept = STARTS[sys.argv[1]]()
    time.sleep(100)
"""


@contextlib.contextmanager
def started(folder: Path, way: str, children: int = 1, install: str = "install") -> Iterator[list[psutil.Process]]:
    """Start a parent, which leads a group of its own, and its children; yield the running processes."""
    script = folder / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": str(Path(parent_death.__file__).parents[2])}
    parent = subprocess.Popen(
        [sys.executable, str(script), way, install],
        env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert parent.stdout is not None
    found = [psutil.Process(parent.pid)]
    try:
        while len(found) <= children:
            line = parent.stdout.readline()
            assert line, "the parent ended"
            found += [psutil.Process(int(line))] if line.strip().isdigit() else []
        yield found
    finally:
        for process in [*found[1:], parent]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        parent.communicate(timeout=10)


def left_after_kill(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Kill the first process; return the others that are alive `seconds` later."""
    processes[0].kill()
    processes[0].wait()
    _, alive = psutil.wait_procs(processes[1:], timeout=seconds)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


WAYS = {
    "fork": 1, "manager": 1, "fork in a spawned one": 2, "fork server": 2, "command": 1, "command with a preexec_fn": 1
}  # fmt: skip


@pytest.mark.parametrize(("way", "children"), WAYS.items(), ids=list(WAYS))
def test_what_a_killed_process_started_ends_with_it(way: str, children: int, tmp_path: Path) -> None:
    with started(tmp_path, way, children) as processes:
        assert left_after_kill(processes, 20) == []


@pytest.mark.parametrize("way", ["new session", "thread, fork", "thread, spawn", "thread, command"])
def test_what_asked_for_a_new_session_or_came_from_another_thread_lives_on(way: str, tmp_path: Path) -> None:
    """The kernel would end the child of a thread with that thread; each of these threads has ended."""
    with started(tmp_path, way) as processes:
        assert left_after_kill(processes, 0.3) == processes[1:]


WAITS = """
import os, subprocess
from optimus_cc_ext.devices import parent_death
parent_death.install()
forks = []
os.register_at_fork(before=lambda: forks.append(1))
for start in (subprocess.run, subprocess.call, subprocess.check_call, subprocess.check_output):
    start(["true"])
print(len(forks))
subprocess.Popen(["true"]).wait()
print(len(forks))
"""


def test_a_command_that_is_waited_for_is_started_without_a_copy_of_the_process() -> None:
    """Python calls the functions of `register_at_fork` where it forks, and not where it uses vfork."""
    environment = {**os.environ, "PYTHONPATH": str(Path(parent_death.__file__).parents[2])}
    found = subprocess.run([sys.executable, "-c", WAITS], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["0", "1"]


def test_without_it_a_server_of_multiprocessing_outlives_its_owner(tmp_path: Path) -> None:
    with started(tmp_path, "manager", install="do not") as processes:
        assert left_after_kill(processes, 0.3) == processes[1:]


def test_a_child_whose_parent_died_before_it_could_say_so_ends_at_once() -> None:
    said = "from optimus_cc_ext.devices.parent_death import end_with; end_with({}); print('alive')"
    for parent, code in ((os.getpid(), 0), (os.getppid(), -signal.SIGKILL)):
        done = subprocess.run([sys.executable, "-c", said.format(parent)], capture_output=True, timeout=30)
        assert done.returncode == code and (done.stdout == b"alive\n") == (code == 0), done.stderr


def test_a_command_that_cannot_be_started_is_an_error_as_ever_and_the_tracker_is_left_alone(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys\n"
        "from optimus_cc_ext.devices import parent_death as ours; ours.install(); ours.install()\n"
        "try: subprocess.run(['no-such-command'])\n"
        "except FileNotFoundError as error: print(error.filename)\n"
        "print(subprocess.run(['echo', 'ran'], -1, None, None, subprocess.PIPE, text=True).stdout.strip())\n"
        "ours._spawn(lambda path, args, fds: print(args), sys.executable, ['-c', 'resource_tracker'], [])\n"
        "ours._spawn(lambda path, args, fds: print(args), '/a/wrapper', ['-c', 'spawn'], [])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    expected = "no-such-command\nran\n['-c', 'resource_tracker']\n['-c', 'spawn']\n"
    assert done.stdout == expected, done.stderr


FAILS = """
import signal, sys
from torch.utils.data import DataLoader
from optimus_cc_ext.devices import parent_death
if sys.argv[1] == "install":
    parent_death.install()
# As Megatron's, with --exit-signal-handler.
handles = lambda _: signal.signal(signal.SIGTERM, lambda *_: None)
loading = iter(DataLoader(range(100), num_workers=1, worker_init_fn=handles))
next(loading)
raise RuntimeError("a lost connection")
"""


@pytest.mark.full
def test_a_process_that_fails_ends_although_its_data_loader_handles_sigterm(tmp_path: Path) -> None:
    def failing(install: str, seconds: float) -> int | None:
        with (tmp_path / "said").open("w") as said:
            process = subprocess.Popen([sys.executable, "-c", FAILS, install], stderr=said, start_new_session=True)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    assert failing("do not", 10) is None
    assert failing("install", 30) == 1
    assert (tmp_path / "said").read_text().rstrip().endswith("RuntimeError: a lost connection")
