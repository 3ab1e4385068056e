"""The repository's shell scripts, run as a person runs them, without the tests' own environment."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "SYSTEM_PATH", "Ended", "Launch", "run_script", "why_not_as_root"]

ROOT = Path(__file__).resolve().parent.parent
SYSTEM_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
_KEPT = ("HOME", "TMPDIR", "LANG", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Launch:
    """Printed command, split as a shell would split it."""

    torchrun: list[str]
    """Arguments of torchrun."""

    program: list[str]
    """`-m optimus_cc_ext`, and a script if there is one."""

    flags: list[str]

    def value(self, flag: str) -> str:
        """Return the value of `flag`, which is given once."""
        assert self.flags.count(flag) == 1, f"{flag} is given {self.flags.count(flag)} times"
        return self.flags[self.flags.index(flag) + 1]


@dataclass(frozen=True)
class Ended:
    """Result of a script."""

    code: int
    output: str
    errors: str

    @property
    def launch(self) -> Launch:
        """Return the command that --dry-run printed, which is one line."""
        assert self.code == 0, self.errors
        [line] = self.output.splitlines()
        words = shlex.split(line)
        start = words.index("torch.distributed.run") + 1
        module = words.index("-m", start)
        end = next(place for place in range(module, len(words)) if words[place].startswith("--"))
        return Launch(words[start:module], words[module:end], words[end:])


def why_not_as_root(*programs: str) -> str:
    """Return why these programs cannot be run as root here; empty if they can."""
    if os.geteuid() != 0:
        return f"{', '.join(programs)} need root"
    absent = [program for program in programs if shutil.which(program, path=SYSTEM_PATH) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


def run_script(
    script: str, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT, limit: float = 30.0
) -> Ended:
    """Run scripts/`script` on the CPU, with `env` and little else in its environment."""
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    environment |= {"PATH": path, "OPTIMUS_CC_DEVICE": "cpu", **(env or {})}
    command: Sequence[str] = (str(ROOT / "scripts" / script), *arguments)
    ended = subprocess.run(command, env=environment, cwd=cwd, text=True, capture_output=True, timeout=limit)
    return Ended(ended.returncode, ended.stdout, ended.stderr)
