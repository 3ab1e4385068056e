"""Which functions of Megatron that we wrap, and which attributes that we read, hold in which version, as a table.

    scripts/compat_versions.sh [--index VERSION ...] [CHECKOUT ...]

Each version is imported by a process of its own, on this machine's CPU. Nothing is installed: wheels of the index are
unpacked into a temporary folder.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

_PROBE = """
import json, warnings
warnings.simplefilter("ignore")
from optimus_cc_ext.tools.cpu import cpu_runtime
cpu_runtime.activate()
import megatron.core, megatron.training
from optimus_cc_ext.errors import UnsupportedMegatron
from optimus_cc_ext.hooks.launching import all_seams, parts_of_megatron
from optimus_cc_ext.hooks.parts import check_megatron
from optimus_cc_ext.hooks.registry import megatron_version
try:
    trains = "yes" if check_megatron(all_seams()) is None else "untested"
except UnsupportedMegatron:
    trains = "no"
print("@" + json.dumps([megatron_version(), trains, parts_of_megatron()]))
"""


def probe(folder: Path) -> tuple[str, str, Mapping[str, str | None]]:
    """Return (version, whether it trains, the parts that we need with the reason why one does not hold) of the Megatron
    in `folder`.
    """
    env = {**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}", "OPTIMUS_CC_DEVICE": "cpu"}
    done = subprocess.run([sys.executable, "-P", "-c", _PROBE], env=env, capture_output=True, text=True, check=False)
    found = [line[1:] for line in done.stdout.splitlines() if line.startswith("@")]
    if not found:
        said = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return folder.name, "no", {"": f": cannot be imported here: {said}"}
    version, trains, parts = json.loads(found[0])
    return version, trains, parts


def row(name: str, version: str, trains: str, parts: Mapping[str, str | None]) -> str:
    """Return the row of a version in Markdown."""
    counts = []
    for kind in ("seam", "attribute"):
        reasons = [reason for part, reason in parts.items() if part.startswith(f"{kind} ")]
        counts.append(f"{reasons.count(None)} of {len(reasons)}" if reasons else "-")
    broken = [reason.partition(": ")[2].partition(". ")[0] for reason in parts.values() if reason is not None]
    return f"| {' | '.join((name, version, trains, *counts, '; '.join(broken)))} |"


def main() -> int:
    """Probe every version that is named, and print the table."""
    parser = argparse.ArgumentParser(prog="scripts/compat_versions.sh", description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="CHECKOUT", help="folder that holds megatron/")
    parser.add_argument("--index", nargs="+", default=[], metavar="VERSION", help="releases of megatron-core")
    options = parser.parse_args()
    print(
        "| Megatron | calls itself | trains | functions that hold | attributes | others |\n|---|---|---|---:|---:|---|"
    )
    with tempfile.TemporaryDirectory() as scratch:
        folders = {f"checkout {path.name}": path.resolve() for path in options.checkouts}
        for release in options.index:
            target = Path(scratch) / release
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(target)]
            subprocess.run([*pip, f"megatron-core=={release}"], check=True)
            [wheel] = target.glob("*.whl")
            zipfile.ZipFile(wheel).extractall(target)
            folders[f"megatron-core {release}"] = target
        for name, folder in folders.items():
            print(row(name, *probe(folder)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
