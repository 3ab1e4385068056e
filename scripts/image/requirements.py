"""Choice of the versions that an image gets; it runs on the base image's pip and nothing else.

requirements.py wanted             requirements of pyproject.toml, with those of the extras in EXTRAS
requirements.py missing            locked versions of packages that the base image neither has nor constrains
requirements.py replaced REPORT    locked versions of packages that pip's report would replace; an error for all
                                   others
"""

import importlib.metadata
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

EXTRAS = os.environ.get("EXTRAS", "").split(",")
# The two locks differ in a few packages, so the second one holds only if its extra is asked for.
LOCKS = ("requirements.lock", *(["requirements-eval.lock"] if "eval" in EXTRAS else []))


def canonical(requirement: str) -> str:
    """Return the normalised name of the package that a requirement begins with."""
    return re.sub(r"[-_.]+", "-", re.split(r"[=<>!~ @\[;]", requirement, maxsplit=1)[0]).lower()


def lines(file: str) -> list[str]:
    """Return the requirements in a file of pip's; none if there is no such file."""
    path = Path(file)
    text = path.read_text() if file and path.is_file() else ""
    return [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith(("#", "-"))]


def locked() -> dict[str, str]:
    """Return the locked requirement of each package, by its normalised name."""
    return {canonical(line): line for file in LOCKS for line in lines(file)}


def wanted() -> Iterator[str]:
    """Yield the requirements of pyproject.toml without megatron-core, which is installed by itself; torch is the base
    image's.
    """
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    names = [name for name in EXTRAS if name]
    for name in names:
        if name not in project["optional-dependencies"]:
            known = ", ".join(project["optional-dependencies"])
            raise SystemExit(f"requirements.py: error: EXTRAS: {name!r} is not an extra. Give some of {known}.")
    asked = [*project["dependencies"], *(line for name in names for line in project["optional-dependencies"][name])]
    yield from (line for line in asked if canonical(line) != "megatron-core")


def missing() -> Iterator[str]:
    """Yield the locked versions of packages that the base image neither has nor constrains."""
    there = {canonical(found.name) for found in importlib.metadata.distributions()}
    there |= {canonical(line) for line in lines(os.environ.get("PIP_CONSTRAINT", ""))}
    yield from (line for name, line in locked().items() if name not in there)


def replaced(report: str) -> Iterator[str]:
    """Yield the locked versions of packages that are too old in the base image."""
    there = {canonical(found.name): found.version for found in importlib.metadata.distributions()}
    constrained = {canonical(line): line for line in lines(os.environ.get("PIP_CONSTRAINT", ""))}
    for item in json.loads(Path(report).read_text())["install"]:
        name = canonical(item["metadata"]["name"])
        if name not in there or name in constrained:
            continue
        if name not in locked():
            raise SystemExit(
                f"requirements.py: error: {name}: the base image has {there[name]}, which is too old, and no "
                "version of it is locked. Give another BASE_IMAGE."
            )
        print(f"{name}: {there[name]} of the base image is too old; the locked version replaces it", file=sys.stderr)
        yield locked()[name]


if __name__ == "__main__":
    steps = {"wanted": wanted, "missing": missing, "replaced": replaced}
    print("\n".join(steps[sys.argv[1]](*sys.argv[2:])))
