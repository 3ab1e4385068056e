"""System calls by which processes touch the files of a folder: told one by one, before the kernel makes them.

    with Watch(folder, answer) as watch:        # `answer(call)`: None lets the call happen, an errno fails it
        ...                                     # processes that called watched_by(watch.address) are held at each call

The kernel holds a thread at a watched call and asks (seccomp's user notification), so calls from Python, from C++ and
from child processes are seen alike. Not seen: writes through mapped memory, io_uring, and what a page cache would lose
in a power failure.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import re
import select
import signal
import socket
import struct
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["AVAILABLE", "KILL", "Call", "Watch", "watched_by"]

AVAILABLE = platform.machine() == "x86_64" and tuple(map(int, platform.release().split(".")[:2])) >= (5, 5)
"""True where the numbers below are the kernel's, and a held call can be let through."""

KILL = -1
"""Answer that sends SIGKILL to the rank that makes the call, before it is made."""

# Number, and arguments that hold the file: "3" is a descriptor in argument 3, "0:1" a descriptor and a path below it,
# ":1" a path. The first file named is the one that changes.
_CHANGES: dict[str, tuple[int, str]] = {
    "write": (1, "0"), "pwrite64": (18, "0"), "writev": (20, "0"), "pwritev": (296, "0"), "sendfile": (40, "0"),
    "copy_file_range": (326, "2"), "fsync": (74, "0"), "fdatasync": (75, "0"), "truncate": (76, ":0"),
    "ftruncate": (77, "0"), "fallocate": (285, "0"), "rename": (82, ":0"), "renameat": (264, "0:1"),
    "renameat2": (316, "0:1"), "mkdir": (83, ":0"), "mkdirat": (258, "0:1"), "rmdir": (84, ":0"), "unlink": (87, ":0"),
    "unlinkat": (263, "0:1"), "link": (86, ":1"), "linkat": (265, "2:3"), "symlink": (88, ":1"),
    "symlinkat": (266, "1:2"), "creat": (85, ":0"), "open": (2, ":0"), "openat": (257, "0:1"),
    "chmod": (90, ":0"), "fchmod": (91, "0"),
}  # fmt: skip
_READS: dict[str, tuple[int, str]] = {
    "stat": (4, ":0"), "lstat": (6, ":0"), "newfstatat": (262, "0:1"), "statx": (332, "0:1"), "access": (21, ":0"),
    "getdents64": (217, "0"), "readlink": (89, ":0"), "close": (3, "0"),
}  # fmt: skip
_CALLS = {number: (name, files) for name, (number, files) in (_CHANGES | _READS).items()}
_FLAGS_OF_OPEN = {"open": 1, "openat": 2}
_CALLS_BY_NAME = {name: number for number, (name, _) in _CALLS.items()}
_TO_CHANGE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

# Of the kernel's headers linux/prctl.h, linux/seccomp.h and linux/bpf_common.h.
_NO_NEW_PRIVILEGES, _SECCOMP, _SET_FILTER, _NEW_LISTENER = 38, 317, 1, 8
_ALLOW, _ASK = 0x7FFF0000, 0x7FC00000
_RECEIVE, _SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1
_LOAD, _EQUAL, _ANY_BIT, _RESULT = 0x20, 0x15, 0x45, 0x06


@dataclass(frozen=True)
class Call:
    """A call that a thread is about to make."""

    rank: int
    process: int
    """Process of the rank: 0 is the rank itself, others are processes that it started."""

    name: str
    path: str
    """Path within the watched folder."""

    changes: bool
    """False if the call only reads."""

    def __str__(self) -> str:
        return f"rank {self.rank}{', child' * self.process}: {self.name} {self.path}"


class Watch:
    """Watches a folder, which need not exist yet; calls `answer` in a thread, for one call at a time.

    Args:
        named: replaces what differs between runs in a path.
    """

    def __init__(self, folder: Path, answer: Callable[[Call], int | None], named: Callable[[str], str] = str) -> None:
        self._folder, self._answer, self._named = os.path.realpath(folder), answer, named
        self._short = tempfile.TemporaryDirectory(prefix="watch-")
        self.address = os.path.join(self._short.name, "socket")
        self.killed: list[Call] = []
        self.failure: BaseException | None = None
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self.address)
        self._server.listen()
        self._stop, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *unused: Any) -> None:
        os.close(self._wake)
        self._thread.join()
        os.close(self._stop)
        self._server.close()
        self._short.cleanup()
        if self.failure is not None:
            raise self.failure

    def _serve(self) -> None:
        ranks: dict[int, tuple[int, int]] = {}
        poll = select.poll()
        poll.register(self._server, select.POLLIN)
        poll.register(self._stop, select.POLLHUP)
        while True:
            for descriptor, event in poll.poll():
                if descriptor == self._stop:
                    for listener in ranks:
                        os.close(listener)
                    return
                if descriptor == self._server.fileno():
                    connection, _ = self._server.accept()
                    with connection:
                        said, (listener, *_), _, _ = socket.recv_fds(connection, 64, 1)
                    ranks[listener] = struct.unpack("ii", said)  # type: ignore[assignment]
                    poll.register(listener, select.POLLIN)
                elif event & select.POLLIN:
                    with contextlib.suppress(OSError):  # the thread has died meanwhile
                        self._reply(descriptor, *ranks[descriptor])
                else:
                    poll.unregister(descriptor)  # all of the rank's processes are gone
                    os.close(descriptor)
                    del ranks[descriptor]

    def _reply(self, listener: int, rank: int, pid: int) -> None:
        asked = bytearray(80)
        fcntl.ioctl(listener, _RECEIVE, asked)
        number, thread, _, call, _, _, *values = struct.unpack("=QIIiIQ6Q", asked)
        error = 0
        try:
            if (seen := self._see(rank, pid, thread, call, values)) is not None:
                error = self._answer(seen) or 0
                if error == KILL:
                    self.killed.append(seen)
                    os.kill(pid, signal.SIGKILL)
                    if seen.process == 0:
                        return
                    error = 0
        except OSError:
            raise
        except BaseException as failure:
            self.failure = self.failure or failure
        reply = struct.pack("=QqiI", number, 0, -error, 0 if error else _CONTINUE)
        fcntl.ioctl(listener, _SEND, bytearray(reply))

    def _see(self, rank: int, pid: int, thread: int, number: int, values: list[int]) -> Call | None:
        name, place = _CALLS[number]
        at, _, path = place.partition(":")
        found = "" if at == "" else _descriptor(thread, values[int(at)])
        if path:
            found = os.path.join(found or os.readlink(f"/proc/{thread}/cwd"), _text(thread, values[int(path)]))
        found = os.path.normpath(found)
        if found != self._folder and not found.startswith(f"{self._folder}/"):
            return None
        changes = name in _CHANGES
        if name == "close":
            changes = _opened_to_write(thread, values[0])
        if name in _FLAGS_OF_OPEN:
            changes = bool(values[_FLAGS_OF_OPEN[name]] & _TO_CHANGE)
        return Call(
            rank, int(_process_of(thread) != pid), name, self._named(os.path.relpath(found, self._folder)), changes
        )


def _process_of(thread: int) -> int:
    status = Path(f"/proc/{thread}/status").read_text()
    return int(re.search(r"^Tgid:\s*(\d+)", status, re.MULTILINE)[1])  # type: ignore[index]


def _descriptor(thread: int, value: int) -> str:
    number = ctypes.c_int(value & 0xFFFFFFFF).value
    try:
        return os.readlink(f"/proc/{thread}/cwd" if number == -100 else f"/proc/{thread}/fd/{number}")
    except FileNotFoundError:
        return "/"


def _opened_to_write(thread: int, descriptor: int) -> bool:
    lines = Path(f"/proc/{thread}/fdinfo/{descriptor}").read_text()
    return bool(int(re.search(r"^flags:\s*(\d+)", lines, re.MULTILINE)[1], 8) & os.O_ACCMODE)  # type: ignore[index]


def _text(thread: int, address: int) -> str:
    with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return os.fsdecode(memory.read(4096).partition(b"\0")[0])


def watched_by(address: str, *, reads: bool = False) -> None:
    """Let the `Watch` at this address hold this thread, its later threads and its later children.

    Args:
        reads: hold closes and calls that only read, too; then the imports of a child take long.
    """
    program = _program(reads=reads)
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    described = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        assert libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
        listener = libc.syscall(_SECCOMP, _SET_FILTER, _NEW_LISTENER, described)
        assert listener >= 0, os.strerror(ctypes.get_errno())
        # The descriptor stays open here, too: closing it is one of the calls that are held.
        socket.send_fds(connection, [struct.pack("ii", int(os.environ["RANK"]), os.getpid())], [listener])


def _program(*, reads: bool) -> list[tuple[int, int, int, int]]:
    """Return the kernel's filter: ask about the calls of the table, and about an open if it may change a file."""
    asked = [number for number, (name, _) in _CALLS.items() if reads or name not in {**_READS, **_FLAGS_OF_OPEN}]
    conditional = [] if reads else [(_CALLS_BY_NAME[name], argument) for name, argument in _FLAGS_OF_OPEN.items()]
    size = 1 + len(asked) + 3 * len(conditional)  # two results follow
    program = [(_LOAD, 0, 0, 0)]
    program += [(_EQUAL, size - place, 0, number) for place, number in enumerate(asked, start=1)]
    for number, argument in conditional:
        place = len(program)
        program += [(_EQUAL, 0, 2, number), (_LOAD, 0, 0, 16 + 8 * argument)]
        program += [(_ANY_BIT, size - place - 2, size - place - 3, _TO_CHANGE)]
    return [*program, (_RESULT, 0, 0, _ALLOW), (_RESULT, 0, 0, _ASK)]
