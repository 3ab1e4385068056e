"""Hosts on one switch, made of Linux namespaces, with links whose rate can be changed at any time.

A host is a network namespace and a process namespace, held by a process that reads a pipe. When its owner closes the
pipe, or ends in whatever way, the holding process ends, and the kernel removes the host, its links and all processes on
it.

Root is not needed where users may make namespaces of their own: all hosts then lie in one user namespace, inside of
which the owner is root, and outside of which the owner has no more rights than before. `why_not` tries whether that
works.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from optimus_cc_ext.errors import OptimusError
from scripts.hosts.delayed import MTU, mac_address

INTERFACE = "eth0"
UNSHAPED = "none"
"""Rate of a link without a queueing discipline: as fast as the machine copies."""

FRAMING_BYTES = 66
"""Bytes of headers per packet: Ethernet 14, IPv4 20, TCP 32 with timestamps. The counters of a veth device count them
once per packet that it was given, even if that packet has up to 64 KiB, which a real network would have cut into
frames.
"""

_RATE = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[kmg])bit(?:\+(?P<delay>\d+(?:\.\d+)?)ms)?")
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}
_SLOWEST = 1e6
_COMMAND_SECONDS = 20.0
_MOST_HOSTS = 250
_QUEUE_BYTES = 16_000_000


class NetworkError(OptimusError):
    """Error of a network that cannot be made or changed. The message says what failed."""


@dataclass(frozen=True)
class Counters:
    """Kernel's counters of one host's interface since it was made."""

    sent_bytes: int
    sent_packets: int
    retransmitted: int
    """TCP segments that this host sent again; their bytes are in `sent_bytes`."""

    @property
    def payload(self) -> int:
        """Bytes without Ethernet, IP and TCP headers; an acknowledgement has none."""
        return self.sent_bytes - FRAMING_BYTES * self.sent_packets

    def since(self, before: "Counters") -> "Counters":
        """Return the traffic between two readings."""
        return Counters(*(new - old for new, old in zip(astuple(self), astuple(before), strict=True)))


def why_not() -> str | None:
    """Return in a sentence why this machine cannot make hosts with shaped links; None if it can. Trying it takes
    0.3 s.
    """
    try:
        with network(2) as hosts:
            hosts.set_rate("10mbit")
    except NetworkError as error:
        return str(error)
    return None


def bits_per_second(rate: str) -> float:
    """Read a rate such as 50mbit, or 50mbit+20ms with a delay; infinity for `UNSHAPED`.

    Raises:
        ValueError: the text is not a rate, or the rate is below 1 Mbit/s, where a training iteration would take an
            hour.
    """
    if rate == UNSHAPED:
        return float("inf")
    match = _RATE.fullmatch(rate)
    if match is None:
        raise ValueError(
            f"{rate!r} is not a rate. Give a number with kbit, mbit or gbit, such as 50mbit or 50mbit+20ms, or none"
        )
    bits = float(match["number"]) * _UNITS[match["unit"]]
    if bits < _SLOWEST:
        raise ValueError(f"{rate!r}: rates below 1mbit are not supported")
    return bits


def seconds_of_delay(rate: str) -> float:
    """Return the seconds that a packet takes from one host to another at `rate`, which `bits_per_second` accepts."""
    match = _RATE.fullmatch(rate)
    return float(match["delay"] or 0) / 1e3 if match else 0.0


def tbf_options(rate: str) -> str:
    """Return the options of tc's token bucket for `rate`. The burst is small, so that short messages wait, too."""
    bits = bits_per_second(rate)
    # The bucket holds 2 ms of the rate, because the timers of a busy machine are late by a fraction of that; and a
    # packet of a delayed network, which is not cut.
    burst = max(int(bits / 8 * 2e-3), MTU + 14)
    # Nothing is dropped: TCP bounds what one connection puts into its own host's queue, and a switch's buffers hold as
    # much. A shorter queue would send a part of every long message again.
    return f"rate {bits:.0f}bit burst {burst} limit {_QUEUE_BYTES}"


class Network:
    """Running hosts. `network` makes and removes them."""

    def __init__(
        self, switch: "_Holder", hosts: "Sequence[_Holder]", delayed: "subprocess.Popen[bytes] | None"
    ) -> None:
        self._switch, self._hosts, self._delayed = switch, hosts, delayed
        self.rate = UNSHAPED
        if delayed is None:
            self._bridge()
        else:
            moves = [f"link set port{host} netns {holder.pid} name {INTERFACE}" for host, holder in enumerate(hosts)]
            _batch(switch, "ip", moves)
        for host, holder in enumerate(hosts):
            own = f"address {mac_address(host)} mtu {MTU}" if delayed else ""
            address = f"address add {self.address(host)}/24 dev {INTERFACE}"
            _batch(holder, "ip", [address, f"link set {INTERFACE} {own} addrgenmode none up", "link set lo up"])

    def _bridge(self) -> None:
        lines = ["link add name switch type bridge", "link set switch addrgenmode none up"]
        for host, holder in enumerate(self._hosts):
            lines.append(f"link add port{host} type veth peer name {INTERFACE} netns {holder.pid}")
            # IPv6 is off: its own messages would be counted, and its header is longer than FRAMING_BYTES says.
            lines.append(f"link set port{host} addrgenmode none master switch up")
        _batch(self._switch, "ip", lines)

    def __len__(self) -> int:
        return len(self._hosts)

    def address(self, host: int) -> str:
        """Return the IPv4 address of a host, which only the hosts of this network can reach."""
        return f"10.77.0.{host + 1}"

    def set_rate(self, rate: str) -> None:
        """Give every link this rate, in both directions; open connections stay open.

        Raises:
            ValueError: the text is not a rate.
            NetworkError: tc refused the rate, or this network cannot delay packets.
        """
        if rate == self.rate:
            return
        bits, delay = bits_per_second(rate), seconds_of_delay(rate)
        # A bucket that is made smaller never sends a waiting packet that is larger than it: the link stops. A new
        # bucket drops what waits, and TCP sends it again.
        changes = ["qdisc del dev {} root"] if self.rate != UNSHAPED else []
        changes += [f"qdisc add dev {{}} root tbf {tbf_options(rate)}"] if rate != UNSHAPED else []
        if self._delayed is not None:
            assert self._delayed.stdin is not None
            self._delayed.stdin.write(f"{bits} {delay}\n".encode())
            self._delayed.stdin.flush()
        elif delay:
            raise NetworkError(f"{rate}: these hosts' links have no delay. Make them with one")
        else:
            ports = [f"port{host}" for host in range(len(self._hosts))]
            _batch(self._switch, "tc", [change.format(port) for port in ports for change in changes])
        for holder in self._hosts:
            _batch(holder, "tc", [change.format(INTERFACE) for change in changes])
        self.rate = rate

    def counters(self) -> list[Counters]:
        """Read every host's counters, without starting a process."""
        return [_counters(Path(f"/proc/{holder.pid}/net")) for holder in self._hosts]

    def popen(self, host: int, command: Sequence[str], **kwargs: Any) -> subprocess.Popen[bytes]:
        """Start a process on a host, in a session of its own, so that Ctrl-C reaches only the owner, who ends the
        process.
        """
        holder = self._hosts[host]
        processes = f"--pid=/proc/{holder.pid}/ns/pid_for_children"
        enter = [*holder.enter, "--net", "--mount", processes, f"--wd={Path.cwd()}"]
        return subprocess.Popen([*enter, *command], start_new_session=True, **kwargs)


@contextmanager
def network(hosts: int, *, delays: bool = False) -> Iterator[Network]:
    """Make `hosts` hosts, which exist as long as the block and this process. With `delays` a rate may have a delay;
    then a process of ours passes the packets on, up to some 100 Mbit/s on two cores.

    Raises:
        NetworkError: a command is missing or failed, for example because this user may not make namespaces.
    """
    if missing := [command for command in ("ip", "tc", "unshare", "nsenter") if _found(command) is None]:
        raise NetworkError(
            f"iproute2 and util-linux are needed: there is no `{'` and no `'.join(missing)}` on PATH or in /usr/sbin"
        )
    if not 1 <= hosts <= _MOST_HOSTS:
        raise NetworkError(f"{hosts} hosts: between 1 and {_MOST_HOSTS} are possible")
    with ExitStack() as stack:
        try:
            switch = stack.enter_context(_holder())
        except NetworkError:
            switch = stack.enter_context(_holder(new_user=True))
        holders = [stack.enter_context(_holder(switch)) for _ in range(hosts)]
        yield Network(switch, holders, stack.enter_context(_switch(switch, hosts)) if delays else None)


@dataclass(frozen=True)
class _Holder:
    """Holder of a network namespace and a process namespace: a process; the namespaces are gone when it ends."""

    pid: int
    as_user: bool
    """True if the namespaces belong to a user namespace, which has to be entered with them."""

    @property
    def enter(self) -> list[str]:
        """Beginning of a command line that enters namespaces of the holder; the options of the namespaces follow it."""
        return ["nsenter", f"--target={self.pid}", *(["--user", "--preserve-credentials"] if self.as_user else [])]


@contextmanager
def _holder(beside: _Holder | None = None, *, new_user: bool = False) -> Iterator[_Holder]:
    """Make namespaces: of this process's user, of a `new_user`, or of the user of the namespaces `beside`."""
    # When the first process of a process namespace ends, the kernel ends all others in it. `cat` ends with this
    # process, which alone has the pipe's other end.
    unshare = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "sh", "-c", "echo ready; exec cat"]
    unshare[1:1] = ["--user", "--map-root-user"] if new_user else []
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    as_user = new_user or (beside is not None and beside.as_user)
    inside = beside.enter if beside is not None else []
    with subprocess.Popen([*inside, *unshare], start_new_session=True, **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        if not process.stdout.readline():
            reason = process.stderr.read().decode(errors="replace").strip()
            raise NetworkError(f"this user cannot make namespaces: {reason}")
        yield _Holder(process.pid, as_user)


@contextmanager
def _switch(inside: _Holder, hosts: int) -> "Iterator[subprocess.Popen[bytes]]":
    """Start the switch in user space in the namespaces of `inside`. It ends with the pipe, or with them."""
    command = [*inside.enter, "--net", f"--wd={Path.cwd()}", sys.executable, "-m", "scripts.hosts.delayed", str(hosts)]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        if not process.stdout.readline():
            reason = process.stderr.read().decode(errors="replace").strip().splitlines()
            raise NetworkError(f"the links cannot be given a delay: {reason[-1] if reason else 'no reason given'}")
        yield process


def _counters(net: Path) -> Counters:
    (line,) = [line for line in (net / "dev").read_text().splitlines() if f"{INTERFACE}:" in line]
    values = line.split(":")[1].split()
    names, numbers = [line.split() for line in (net / "snmp").read_text().splitlines() if line.startswith("Tcp:")]
    return Counters(int(values[8]), int(values[9]), int(numbers[names.index("RetransSegs")]))


def _found(command: str) -> str | None:
    """Return the path of a command. Debian has tc where only root's PATH looks."""
    return shutil.which(command) or shutil.which(command, path="/usr/sbin:/sbin")


def _batch(holder: _Holder, tool: str, lines: Sequence[str]) -> None:
    """Run `ip` or `tc` on all lines, in one process, in the network namespace of `holder`."""
    command = [*holder.enter, "--net", _found(tool) or tool, "-batch", "-"]
    try:
        done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        raise NetworkError(f"{tool}: no answer within {_COMMAND_SECONDS:.0f} s") from None
    if done.returncode != 0:
        raise NetworkError(f"{tool} {'; '.join(lines)}: {done.stderr.strip() or f'status {done.returncode}'}")
