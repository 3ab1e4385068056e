"""Hosts on one switch, made of network namespaces: links with a rate that can be changed at any time.

Each host has one interface, `eth0`; the switch is a bridge in a namespace of its own, so that nothing appears in the
machine's own namespace and several clusters can exist side by side with the same addresses. Names carry the owner's
process id and start time: what a killed owner has left can be told from what a living one uses.
"""

import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "FRAMING_BYTES", "INTERFACE", "UNSHAPED", "Counters", "Network", "NetworkError", "bits_per_second", "clean",
    "left_behind", "living_owners", "network", "tbf_options", "why_not",
]  # fmt: skip

INTERFACE = "eth0"
UNSHAPED = "none"
"""The rate of a link without a queueing discipline: as fast as the machine copies."""

FRAMING_BYTES = 66
"""Ethernet 14, IPv4 20, TCP 32 with timestamps. The counters of a veth device hold them once per packet that it took
over, also where that packet is one of up to 64 KiB which a real network would have cut into frames."""

_NAMESPACES = Path("/run/netns")
_PREFIX = "optimus-cc-cluster"
_NAME = re.compile(rf"{_PREFIX}-(?P<pid>\d+)-(?P<start>\d+)-(?:switch|host\d+)")
_RATE = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>kbit|mbit|gbit)")
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SLOWEST = 1e6
_COMMAND_SECONDS = 20.0
_KILL_SECONDS = 15.0
_MOST_HOSTS = 250


class NetworkError(RuntimeError):
    """The network cannot be made or changed. The message says what failed."""


@dataclass(frozen=True)
class Counters:
    """What one host's interface has sent since it was made, by the kernel."""

    sent_bytes: int
    sent_packets: int
    retransmitted: int
    """TCP segments of this host that were sent again; their bytes are in `sent_bytes`."""

    @property
    def payload(self) -> int:
        """Bytes without Ethernet, IP and TCP headers; an acknowledgement has none."""
        return self.sent_bytes - FRAMING_BYTES * self.sent_packets

    def since(self, before: "Counters") -> "Counters":
        """What was sent between two readings."""
        return Counters(
            self.sent_bytes - before.sent_bytes,
            self.sent_packets - before.sent_packets,
            self.retransmitted - before.retransmitted,
        )


def why_not() -> str | None:
    """Why no such network can be made on this machine; None if it can be tried."""
    if not hasattr(os, "setns"):
        return "network namespaces are Linux's, and take Python 3.12"
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    if missing:
        return f"network namespaces with shaped links take iproute2: no `{'`, no `'.join(missing)}` on PATH"
    if os.geteuid() != 0:
        return "network namespaces take root"
    return None


def bits_per_second(rate: str) -> float:
    """Read a rate such as 50mbit; infinity for `UNSHAPED`.

    Raises:
        ValueError: not a rate, or one below 1 Mbit/s, where a training iteration would take an hour.
    """
    if rate == UNSHAPED:
        return float("inf")
    match = _RATE.fullmatch(rate)
    if match is None:
        raise ValueError(f"{rate!r} is not a rate. Give a number with kbit, mbit or gbit, such as 50mbit, or none")
    bits = float(match["number"]) * _UNITS[match["unit"]]
    if bits < _SLOWEST:
        raise ValueError(f"{rate!r}: rates below 1mbit are not supported")
    return bits


def tbf_options(rate: str) -> list[str]:
    """Options of tc's token bucket for `rate`: what may leave at once is little, so that short messages wait, too."""
    bits = bits_per_second(rate)
    # 2 ms of the rate: the timers of a busy machine are late by a fraction of that.
    burst = max(int(bits / 8 * 2e-3), 6_000)
    return ["rate", f"{bits:.0f}bit", "burst", str(burst), "latency", "50ms"]


class Network:
    """Running hosts. Made by `network`, which also takes them away."""

    def __init__(self, hosts: int) -> None:
        owner = f"{_PREFIX}-{os.getpid()}-{_start_time(os.getpid())}"
        self.switch = f"{owner}-switch"
        self.hosts = [f"{owner}-host{host}" for host in range(hosts)]
        self.rate = UNSHAPED

    def address(self, host: int) -> str:
        """IPv4 address of a host, which only the hosts of this network can reach."""
        return f"10.77.0.{host + 1}"

    def build(self) -> None:
        """Make the namespaces, the switch and the links, unshaped.

        Raises:
            NetworkError: a command failed.
        """
        _run(f"ip netns add {self.switch}")
        _run(f"ip -n {self.switch} link add switch type bridge")
        _run(f"ip -n {self.switch} link set switch addrgenmode none up")
        for host, name in enumerate(self.hosts):
            _run(f"ip netns add {name}")
            _run(f"ip -n {self.switch} link add port{host} type veth peer name {INTERFACE} netns {name}")
            # No IPv6: its chatter would be counted, and its header is longer than FRAMING_BYTES says.
            _run(f"ip -n {self.switch} link set port{host} addrgenmode none master switch up")
            _run(f"ip -n {name} address add {self.address(host)}/24 dev {INTERFACE}")
            _run(f"ip -n {name} link set {INTERFACE} addrgenmode none up")
            _run(f"ip -n {name} link set lo up")

    def set_rate(self, rate: str) -> None:
        """Give every link this rate, in both directions; connections live on.

        Raises:
            ValueError: not a rate.
            NetworkError: tc refused.
        """
        ends = [(self.switch, f"port{host}") for host in range(len(self.hosts))]
        ends += [(name, INTERFACE) for name in self.hosts]
        if rate == UNSHAPED:
            shaped = self.rate != UNSHAPED
            commands = [f"tc -n {name} qdisc del dev {device} root" for name, device in ends] if shaped else []
        else:
            options = " ".join(tbf_options(rate))
            commands = [f"tc -n {name} qdisc replace dev {device} root tbf {options}" for name, device in ends]
        for command in commands:
            _run(command)
        self.rate = rate

    def counters(self) -> list[Counters]:
        """Read every host's counters now, in a few hundred microseconds: no process is started."""
        read: list[Counters | OSError] = []

        def visit() -> None:
            try:
                for name in self.hosts:
                    with (_NAMESPACES / name).open() as namespace:
                        os.setns(namespace.fileno(), os.CLONE_NEWNET)
                    read.append(_own_counters())
            except OSError as error:
                read.append(error)

        # In a thread that ends there: a thread's namespace is its own, and this one's does not change.
        thread = threading.Thread(target=visit, name="counters")
        thread.start()
        thread.join()
        for each in read:
            if isinstance(each, OSError):
                raise NetworkError(f"the counters cannot be read: {each}") from each
        return [each for each in read if isinstance(each, Counters)]

    def popen(self, host: int, command: Sequence[str], **kwargs: Any) -> subprocess.Popen[bytes]:
        """Start a process on a host, in a session of its own: Ctrl-C is for the owner, who ends it in good order."""
        entered = ["ip", "netns", "exec", self.hosts[host], *command]
        return subprocess.Popen(entered, start_new_session=True, **kwargs)

    def kill(self) -> None:
        """End every process on the hosts at once.

        Raises:
            NetworkError: one would not end.
        """
        _kill_in([self.switch, *self.hosts])

    def remove(self) -> None:
        """End what runs on the hosts and take them away, with all that hangs on them."""
        _remove([self.switch, *self.hosts])


@contextmanager
def network(hosts: int) -> Iterator[Network]:
    """`hosts` hosts for as long as the block lasts; first, what a killed owner has left is cleared away.

    Raises:
        NetworkError: no root, no ip or tc, or a command failed.
    """
    if (reason := why_not()) is not None:
        raise NetworkError(reason)
    if not 1 <= hosts <= _MOST_HOSTS:
        raise NetworkError(f"{hosts} hosts: between 1 and {_MOST_HOSTS} are possible")
    clean()
    made = Network(hosts)
    try:
        made.build()
        yield made
    finally:
        with _undisturbed():
            made.remove()


def left_behind() -> list[str]:
    """Names of the namespaces whose owner is gone."""
    return [name for name, pid in _all_names() if pid is None]


def living_owners() -> list[int]:
    """Process ids of those who have a network now, this one left out."""
    return sorted({pid for _, pid in _all_names() if pid is not None and pid != os.getpid()})


def clean() -> list[str]:
    """End and remove what owners that are gone have left; return the names of the namespaces."""
    names = left_behind()
    _remove(names)
    return names


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals wait: a second Ctrl-C, or one at the very end, must not end the cleaning up. It has its own limits."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _all_names() -> list[tuple[str, int | None]]:
    """Our namespaces, and the owner of each where it lives. A process id alone can have been given away again."""
    found: list[tuple[str, int | None]] = []
    for path in sorted(_NAMESPACES.glob(f"{_PREFIX}-*")):
        if match := _NAME.fullmatch(path.name):
            pid = int(match["pid"])
            found.append((path.name, pid if _start_time(pid) == match["start"] else None))
    return found


def _start_time(pid: int) -> str | None:
    """When the process started, in clock ticks since boot: field 22, the 20th behind the name in brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _own_counters() -> Counters:
    """Of the namespace in which this thread is. /proc/net would be the main thread's."""
    here = Path("/proc/thread-self/net")
    (line,) = [line for line in (here / "dev").read_text().splitlines() if f"{INTERFACE}:" in line]
    values = line.split(":")[1].split()
    names, numbers = [line.split() for line in (here / "snmp").read_text().splitlines() if line.startswith("Tcp:")]
    return Counters(int(values[8]), int(values[9]), int(numbers[names.index("RetransSegs")]))


def _kill_in(names: Sequence[str]) -> None:
    deadline = time.monotonic() + _KILL_SECONDS
    while pids := _processes_in(names):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise NetworkError(f"processes {pids} do not end")
        time.sleep(0.02)


def _processes_in(names: Sequence[str]) -> list[int]:
    wanted = set()
    for name in names:
        with suppress(OSError):
            wanted.add(_identity(_NAMESPACES / name))
    # An interrupted `ip netns add` leaves an empty file, or the caller's own namespace for a moment.
    wanted.discard(_identity(Path("/proc/self/ns/net")))
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if _identity(path / "ns/net") in wanted:
                found.append(int(path.name))
    return found


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _remove(names: Sequence[str]) -> None:
    names = [name for name in names if (_NAMESPACES / name).exists()]
    try:
        _kill_in(names)
    finally:
        for name in names:
            # Another owner's start may be clearing away the same.
            with suppress(NetworkError):
                _run(f"ip netns del {name}")
    if still := [name for name in names if (_NAMESPACES / name).exists()]:
        raise NetworkError(f"namespaces {', '.join(still)} cannot be removed")


def _run(command: str) -> None:
    try:
        done = subprocess.run(command.split(), capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise NetworkError(f"{command}: no answer within {_COMMAND_SECONDS:.0f} s") from None
    if done.returncode != 0:
        raise NetworkError(f"{command}: {done.stderr.strip() or f'status {done.returncode}'}")
