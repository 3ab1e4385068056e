"""The emulated cluster's network: rates that hold, counters that count, and nothing that is left behind.

Network namespaces take root, and the training runs take most of a minute, so they come with --full only.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.shell_scripts import ROOT

BENCH = ROOT / "scripts/bench"
sys.path.insert(0, str(BENCH))  # its modules import each other by name, as a script's do

import cluster_network  # noqa: E402
from cluster_network import living_owners, network  # noqa: E402

needs_namespaces = pytest.mark.skipif(cluster_network.why_not() is not None, reason=str(cluster_network.why_not()))

_RECEIVE = """
import selectors, socket, sys, time
server = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
connections = [server.accept()[0] for _ in range(int(sys.argv[2]))]
started = time.monotonic()
with selectors.DefaultSelector() as selector:
    for connection in connections:
        selector.register(connection, selectors.EVENT_READ)
        connection.send(b"!")
    while selector.get_map():
        for key, _ in selector.select():
            if not key.fileobj.recv(1 << 16):
                selector.unregister(key.fileobj)
print(time.monotonic() - started)
"""
_SEND = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 5000))
connection.recv(1)  # all are there
connection.sendall(bytes(int(sys.argv[2])))
"""
_OWNER = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
sys.path.insert(0, sys.argv[1])
from cluster_network import living_owners, network  # noqa: E402
with network(2) as hosts:
    print(hosts.popen(1, ["sleep", "60"]).pid, *hosts.hosts, hosts.switch, flush=True)
    time.sleep(60)
"""


@needs_namespaces
@pytest.mark.parametrize("senders", [[1], [1, 2]], ids=["the sender's link is full", "the receiver's link is full"])
def test_the_rate_holds_and_the_counters_say_what_was_sent(senders: list[int]) -> None:
    with network(3) as hosts:
        hosts.set_rate("40mbit")
        nbytes = (4 << 20) // len(senders)
        before = hosts.counters()
        bits = 8 * (4 << 20) / _transfer(hosts, senders, 0, nbytes)
        # Framing takes 4 to 5 %, what the buckets let through at once gives 0.5 % back; a busy machine is late.
        assert 0.5 < bits / 40e6 < 1.0
        sent = [after.since(b) for after, b in zip(hosts.counters(), before, strict=True)]
        for sender in senders:
            # What is lost at the receiver's full link was sent, and is sent again.
            assert 0.99 < sent[sender].payload / nbytes < (1.01 if len(senders) == 1 else 1.2)
        assert abs(sent[0].payload) < 0.01 * nbytes and sent[0].sent_packets > 100
        hosts.set_rate("none")
        assert 8 * (4 << 20) / _transfer(hosts, [1], 0, 4 << 20) > 100e6
        names = [hosts.switch, *hosts.hosts]
    assert not _namespaces() & set(names)


@needs_namespaces
def test_what_a_killed_owner_leaves_the_next_start_removes_and_what_lives_it_leaves_alone() -> None:
    with network(2) as ours, _owner() as killed, _owner() as living:
        killed.owner.kill()
        killed.owner.wait(10)
        assert set(killed.names) <= _namespaces(), "SIGKILL leaves no time to clean up"
        assert _runs(killed.process)
        assert living.owner.pid in living_owners() and killed.owner.pid not in living_owners()
        cluster_network.clean()
        assert not _namespaces() & set(killed.names) and not _runs(killed.process)
        assert set(living.names) | set(ours.hosts) <= _namespaces()
        living.owner.send_signal(signal.SIGINT)
        living.owner.wait(10)
        assert not _namespaces() & set(living.names)


@dataclass(frozen=True)
class _Owner:
    owner: subprocess.Popen[str]
    process: int
    """On its second host."""

    names: list[str]
    """Of its namespaces."""


@contextmanager
def _owner() -> Iterator[_Owner]:
    """A process that has a network with two hosts, and a process on the second."""
    with subprocess.Popen([sys.executable, "-c", _OWNER, str(BENCH)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            pid, *names = process.stdout.readline().split()
            yield _Owner(process, int(pid), names)
        finally:
            process.kill()


def _transfer(hosts: cluster_network.Network, senders: list[int], receiver: int, nbytes: int) -> float:
    """Seconds until the receiver has `nbytes` of each sender; they begin together."""
    address = hosts.address(receiver)
    command = [sys.executable, "-I", "-S", "-c", _RECEIVE, address, str(len(senders))]
    with hosts.popen(receiver, command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None and server.stdout.readline()
        send = [sys.executable, "-I", "-S", "-c", _SEND, address, str(nbytes)]
        clients = [hosts.popen(sender, send) for sender in senders]
        seconds = float(server.communicate(timeout=60)[0])
        assert [client.wait(10) for client in clients] == [0] * len(senders)
    return seconds


def _runs(pid: int) -> bool:
    """A process that has ended, and that its new parent has not yet asked for, does not run."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _namespaces() -> set[str]:
    return {path.name for path in Path("/run/netns").glob("optimus-cc-cluster-*")}


# Training


def _script(output: Path, *arguments: str) -> list[str]:
    tiny = ["--layouts", "pp2dp1", "--models", "tiny", "--max-mb", "0.5", "--output", str(output)]
    return [sys.executable, str(BENCH / "cluster.py"), *tiny, *arguments]


def _processes_of_a_training(script: subprocess.Popen[str]) -> list[psutil.Process]:
    """All below the script, as soon as it has told an iteration on shaped links."""
    assert script.stdout is not None
    for line in script.stdout:
        if "20mbit" in line and line.split()[0].isdecimal():
            break
    return psutil.Process(script.pid).children(recursive=True)


@needs_namespaces
@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_smallest_cluster_counts_the_bytes_that_the_metrics_count(tmp_path: Path) -> None:
    arguments = ["--rates", "20mbit,none", "--variants", "vanilla,cb", "--blocks", "1", "--iterations", "2"]
    done = subprocess.run(_script(tmp_path / "out", *arguments), capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out/cluster.json").read_text())["rows"]
    assert [(row["variant"], row["rate"], row["seconds"]["count"]) for row in found] == [
        ("vanilla", "none", 4), ("cb", "none", 4), ("vanilla", "20mbit", 4), ("cb", "20mbit", 4),
    ]  # fmt: skip
    for row in found:
        assert row["kernel_to_metrics"] == pytest.approx(1, abs=0.05)
    vanilla, ours = found[2:]
    # A tiny iteration sends half a megabyte: 0.1 s at this rate, where it takes half of that without links.
    assert vanilla["seconds"]["median"] > 1.3 * found[0]["seconds"]["median"]
    sent, before = (row["traffic"]["pipeline backward"][0] for row in (ours, vanilla))
    assert sent < 0.8 * before, "a quarter of the messages is of the epilogue"
    assert (tmp_path / "out/cluster.md").read_text().count("| 20mbit |") == 2


@needs_namespaces
@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["SIGINT to the script", "SIGKILL to a rank"])
def test_an_interrupted_cluster_leaves_nothing_behind(tmp_path: Path, how: str) -> None:
    arguments = ["--rates", "20mbit,none", "--variants", "vanilla", "--blocks", "1", "--iterations", "1000"]
    command = _script(tmp_path / "out", *arguments)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as script:
        try:
            below = _processes_of_a_training(script)
            assert len(below) >= 4, "two torchruns, a rank each"
            if how.startswith("SIGKILL"):
                [rank, *_] = [each for each in below if "torch.distributed.run" not in each.cmdline()]
                rank.kill()
            else:
                script.send_signal(signal.Signals[how.split()[0]])
            output = script.communicate(timeout=60)[0]
        finally:
            script.kill()
    expected = {"SIGINT": 130, "SIGKILL": 1}[how.split()[0]]
    assert script.returncode == expected, output
    assert not psutil.wait_procs(below, timeout=5)[1]
    assert not [name for name in _namespaces() if f"-{script.pid}-" in name]
    if expected == 1:
        assert "Signal 9 (SIGKILL)" in output, "the cause, not that the others lost their connection"


@needs_namespaces
@pytest.mark.full
@pytest.mark.timeout(600)
def test_processes_end_with_a_script_that_is_killed(tmp_path: Path) -> None:
    arguments = ["--rates", "20mbit,none", "--variants", "vanilla", "--blocks", "1", "--iterations", "1000"]
    with subprocess.Popen(_script(tmp_path / "out", *arguments), stdout=subprocess.PIPE, text=True) as script:
        try:
            below = _processes_of_a_training(script)
        finally:
            script.kill()
    assert len(below) >= 4 and not psutil.wait_procs(below, timeout=10)[1]
    cleaned = subprocess.run([*_script(tmp_path / "out"), "--clean"], capture_output=True, text=True, timeout=60)
    assert cleaned.returncode == 0 and f"-cluster-{script.pid}-" in cleaned.stdout
    assert not [name for name in _namespaces() if f"-{script.pid}-" in name]
