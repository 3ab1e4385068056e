"""The emulated cluster's network: rates that hold, counters that count, and nothing that is left behind.

The training runs take most of a minute, so they come with --full only.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from scripts.hosts.network import Network, NetworkError, network, why_not
from tests.shaped_links import needs_namespaces
from tests.shell_scripts import ROOT

pytestmark = pytest.mark.ci

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
_EXCHANGE = """
import sys, time, torch, torch.distributed as dist
rank, address = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"tcp://{address}:5001", rank=rank, world_size=2)
sent, received = torch.ones(32768), torch.empty(32768)
there, back = dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)
for operations in ([there if rank == 0 else back], [there, back]) * 3:
    dist.barrier()
    started = time.monotonic()
    for _ in range(6):
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    dist.barrier()
    if rank == 0:
        print(time.monotonic() - started, flush=True)
"""
_OWNER = """
import signal, time
from scripts.hosts.network import network
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
with network(2) as hosts:
    hosts.popen(1, ["setsid", "sleep", "60"])
    time.sleep(1)
    print("ready", flush=True)
    time.sleep(60)
"""


@needs_namespaces
def test_hosts_can_be_had_where_a_users_path_leads_to_no_tools_of_root(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [folder for folder in os.environ["PATH"].split(":") if not folder.rstrip("/").endswith("sbin")]
    monkeypatch.setenv("PATH", ":".join(folders))
    assert why_not() is None


@needs_namespaces
@pytest.mark.parametrize("senders", [[1], [1, 2]], ids=["the sender's link is full", "the receiver's link is full"])
def test_the_rate_holds_and_the_counters_say_what_was_sent(senders: list[int]) -> None:
    with network(3) as hosts:
        hosts.set_rate("40mbit")
        nbytes = (4 << 20) // len(senders)
        before = hosts.counters()
        bits = 8 * (4 << 20) / _transfer(hosts, senders, 0, nbytes)
        # Framing takes 4 to 5 %, and the burst that the bucket lets through gives 0.5 % back; a busy machine is slower.
        assert 0.5 < bits / 40e6 < 1.0
        sent = [after.since(b) for after, b in zip(hosts.counters(), before, strict=True)]
        for sender in senders:
            # Packets that the receiver's full link drops are counted, and sent again.
            assert 0.99 < sent[sender].payload / nbytes < (1.01 if len(senders) == 1 else 1.2)
        assert abs(sent[0].payload) < 0.01 * nbytes and sent[0].sent_packets > 100
        hosts.set_rate("none")
        assert 8 * (4 << 20) / _transfer(hosts, [1], 0, 4 << 20) > 100e6


@needs_namespaces
def test_a_delayed_packet_takes_as_long_as_its_rate_says_and_a_long_message_keeps_the_rate() -> None:
    with network(3, delays=True) as hosts:
        hosts.set_rate("40mbit+20ms")
        before = hosts.counters()
        short, long = (_transfer(hosts, [1], 0, nbytes) for nbytes in (1, 4 << 20))
        # The receiver says that it is there, and the byte comes back: two ways.
        assert 0.04 <= short < 0.5
        assert 0.4 < 8 * (4 << 20) / long / 40e6 < 1.0
        sent = [after.since(b) for after, b in zip(hosts.counters(), before, strict=True)]
        assert 0.99 < sent[1].payload / (4 << 20) < 1.01 and sent[1].retransmitted == 0
        assert sent[2].sent_bytes < 2_000, "the third host has nothing to say"
        hosts.set_rate("40mbit")
        assert 0.5 < 8 * (4 << 20) / _transfer(hosts, [1, 2], 0, 2 << 20) / 40e6 < 1.0


@needs_namespaces
def test_hosts_without_delays_refuse_a_rate_with_one() -> None:
    with network(1) as hosts, pytest.raises(NetworkError, match="no delay"):
        hosts.set_rate("40mbit+20ms")


@needs_namespaces
def test_a_full_link_goes_on_when_its_rate_is_lowered() -> None:
    with network(2) as hosts, ThreadPoolExecutor() as threads:
        hosts.set_rate("400mbit")
        transfer = threads.submit(_transfer, hosts, [1], 0, 60 << 20)
        # Packets of up to 64 kB wait in the link's queue, more than the smaller bucket of a lower rate holds.
        for rate in (300, 240, 200, 160, 130, 100):
            time.sleep(0.2)
            hosts.set_rate(f"{rate}mbit")
        assert transfer.result(timeout=20) > 60 * 8 / 400


@needs_namespaces
@pytest.mark.skipif(os.geteuid() != 0, reason="takes root, who can become somebody else")
def test_a_user_without_root_has_such_hosts_where_users_may_make_namespaces() -> None:
    script = "from scripts.hosts.network import network\nwith network(1) as hosts: print(hosts.counters())"
    somebody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--ambient-caps=+dac_read_search"]
    capable = ["--inh-caps=-all,+dac_read_search"]
    may = subprocess.run([*somebody, *capable, "unshare", "-Urnm", "true"], capture_output=True, text=True, timeout=10)
    if may.returncode != 0:
        pytest.skip(f"users may not: {may.stderr.strip()}")
    # The capability only allows the user to read the interpreter in root's home, and nothing else.
    command = [*somebody, *capable, sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("[Counters(sent_bytes=0"), done.stderr


@needs_namespaces
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_the_hosts_and_what_runs_there_end_with_their_owner_however_it_ends(how: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", _OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None and owner.stdout.readline()
        below = psutil.Process(owner.pid).children(recursive=True)
        assert sum(process.name() == "sleep" for process in below) == 1 and len(below) >= 2 * 3
        owner.send_signal(how)
        assert not psutil.wait_procs(below, timeout=10)[1]
        owner.kill()


@needs_namespaces
@pytest.mark.full
def test_messages_both_ways_take_as_long_as_one_after_the_other_with_gloo() -> None:
    """This is the planner's `_EXCHANGE`, in scripts/bench/cluster/predicted.py."""
    with network(2) as hosts:
        hosts.set_rate("25mbit")
        command = ["env", "GLOO_SOCKET_IFNAME=eth0", sys.executable, "-c", _EXCHANGE]
        one, other = (
            hosts.popen(rank, [*command, str(rank), hosts.address(0)], stdout=subprocess.PIPE) for rank in (0, 1)
        )
        said, _ = one.communicate(timeout=60)
        assert other.communicate(timeout=20) and one.returncode == other.returncode == 0
    seconds = [float(line) for line in said.split()]
    assert 1.6 < statistics.median(seconds[1::2]) / statistics.median(seconds[::2]) < 2.4


def _transfer(hosts: Network, senders: list[int], receiver: int, nbytes: int) -> float:
    """Return the seconds until the receiver has `nbytes` of each sender; the senders begin together."""
    address = hosts.address(receiver)
    command = [sys.executable, "-I", "-S", "-c", _RECEIVE, address, str(len(senders))]
    with hosts.popen(receiver, command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None and server.stdout.readline()
        send = [sys.executable, "-I", "-S", "-c", _SEND, address, str(nbytes)]
        clients = [hosts.popen(sender, send) for sender in senders]
        seconds = float(server.communicate(timeout=30)[0])
        assert [client.wait(10) for client in clients] == [0] * len(senders)
    return seconds


# Training


def _command(output: Path, *arguments: str) -> list[str]:
    tiny = ["--layouts", "pp2dp1", "--models", "tiny", "--max-mb", "0.5", "--blocks", "1", "--output", str(output)]
    return [sys.executable, "-m", "scripts.bench.cluster", *tiny, "--rates", "20mbit,none", *arguments]


@needs_namespaces
@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_smallest_cluster_counts_the_bytes_that_the_metrics_count(tmp_path: Path) -> None:
    command = _command(tmp_path / "out", "--variants", "vanilla,cb", "--iterations", "2", "--bound")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "out/cluster.json").read_text())
    rows = {(row["variant"], row["rate"]): row for row in content["times"]}
    assert [(*key, row["measured"]) for key, row in rows.items()] == [
        ("vanilla", "none", 4), ("cb", "none", 4), ("vanilla", "20mbit", 4), ("cb", "20mbit", 4),
    ]  # fmt: skip
    before, ours = content["traffic"]
    for row in (before, ours):
        assert row["kernel over metrics"] == pytest.approx(1, abs=0.05)
    # A tiny iteration sends half a megabyte, which takes 0.1 s at this rate; without links the whole iteration takes
    # half of that.
    assert rows["vanilla", "20mbit"]["seconds"] > 1.3 * rows["vanilla", "none"]["seconds"]
    sent = "pipeline backward, MB"
    assert ours[sent] < 0.8 * before[sent], "a quarter of the messages is of the epilogue"
    # A quarter of the messages of one direction is a sixteenth of all bytes, and its gain is less than the noise here.
    assert rows["cb", "20mbit"]["bound"] is not None
    assert (tmp_path / "out/cluster.md").read_text().count("| 20mbit |") == 2


@needs_namespaces
@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["SIGINT to the script", "SIGKILL to the script", "SIGKILL to a rank"])
def test_an_interrupted_cluster_leaves_nothing_behind(tmp_path: Path, how: str) -> None:
    command = _command(tmp_path / "out", "--variants", "vanilla", "--iterations", "1000")
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=ROOT, text=True, **piped) as script:
        try:
            assert script.stdout is not None
            for line in script.stdout:
                if "20mbit" in line and line.split()[0].isdecimal():  # this line reports an iteration on shaped links
                    break
            below = psutil.Process(script.pid).children(recursive=True)
            ranks = [each for each in below if "optimus_cc_ext" in each.cmdline()[:4]]
            assert len(ranks) == 2
            if how.endswith("rank"):
                ranks[0].kill()
            else:
                script.send_signal(signal.Signals[how.split()[0]])
            output = script.communicate(timeout=60)[0]
        finally:
            script.kill()
    assert script.returncode == {"SIGINT to the script": 130, "SIGKILL to the script": -9}.get(how, 1), output
    assert not psutil.wait_procs(below, timeout=10)[1]
    if how.endswith("rank"):
        assert "Signal 9 (SIGKILL)" in output, "the cause, not that the others lost their connection"
