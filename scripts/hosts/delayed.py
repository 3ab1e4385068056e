"""Network switch in user space that delays every frame: python -m scripts.hosts.delayed HOSTS

Linux delays packets with netem, which many kernels lack. This process makes one TAP device a host instead, named as the
bridge's ports are, and passes frames on. It reads lines from its standard input, `bits per second` and `seconds of
delay`, and ends with it. Each host shapes what it sends, as beside a bridge; what it receives is shaped here.
"""

import fcntl
import heapq
import itertools
import os
import select
import struct
import sys
import time
from contextlib import suppress

MTU = 9000
"""Bytes of a jumbo frame, which are few enough frames for this process, and small enough for a bucket of tc."""

_TUNSETIFF, _TAP_WITHOUT_HEADER = 0x400454CA, 0x0002 | 0x1000
_STDIN = 0
_DEEPEST = 0.5
"""Seconds of the rate that may wait for a receiver; further frames are dropped, as a switch does."""


def mac_address(host: int) -> str:
    """Return the hardware address of a host, from whose last byte the switch knows where a frame goes."""
    return f"02:00:00:00:00:{host + 1:02x}"


class Wires:
    """Frames on their way to the hosts, in the order in which they arrive.

    Args:
        hosts: number of hosts.
    """

    def __init__(self, hosts: int) -> None:
        self.bits, self.delay = float("inf"), 0.0
        self._free = [0.0] * hosts  # when the last bit that was sent to a host has arrived there
        self._frames: list[tuple[float, int, int, bytes]] = []
        self._order = itertools.count()

    def send(self, sender: int, frame: bytes, now: float) -> None:
        """Put a frame on the wire to its receiver, or to all other hosts."""
        everybody = frame[0] & 1
        for host in [*range(len(self._free))] if everybody else [frame[5] - 1]:
            waiting = self._free[host] - self.delay - now
            if host != sender and waiting < _DEEPEST:
                self._free[host] = now + max(waiting, 0) + 8 * len(frame) / self.bits + self.delay
                heapq.heappush(self._frames, (self._free[host], next(self._order), host, frame))

    def arrived(self, now: float) -> list[tuple[int, bytes]]:
        """Return the hosts and frames that have arrived."""
        found = []
        while self._frames and self._frames[0][0] <= now:
            _, _, host, frame = heapq.heappop(self._frames)
            found.append((host, frame))
        return found

    def seconds_to_next(self, now: float) -> float | None:
        """Return how long the next frame takes to arrive; None if none is under way."""
        return max(self._frames[0][0] - now, 0.0) if self._frames else None


def main(hosts: int) -> None:
    """Pass frames on until the standard input ends."""
    taps = [_tap(f"port{host}") for host in range(hosts)]
    print("ready", flush=True)
    wires = Wires(hosts)
    while True:
        ready, _, _ = select.select([_STDIN, *taps], [], [], wires.seconds_to_next(time.monotonic()))
        for tap in ready:
            if tap == _STDIN:
                if not (said := os.read(_STDIN, 4096).splitlines()):
                    return
                wires.bits, wires.delay = map(float, said[-1].split())
            else:
                wires.send(taps.index(tap), os.read(tap, MTU + 100), time.monotonic())
        for host, frame in wires.arrived(time.monotonic()):
            with suppress(OSError):  # a host that is not up yet takes none
                os.write(taps[host], frame)


def _tap(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADER))
    return device


if __name__ == "__main__":
    main(int(sys.argv[1]))
