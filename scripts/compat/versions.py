"""Which seams hold in which version of Megatron, as a table.

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
from pathlib import Path

_PROBE = """
import json, warnings
warnings.simplefilter("ignore")
from optimus_cc_ext.devices import cpu_runtime
cpu_runtime.activate()
from optimus_cc_ext.errors import UnsupportedMegatron
from optimus_cc_ext.hooks.installation import all_seams
from optimus_cc_ext.hooks.registry import SUPPORTED_MEGATRON, megatron_version
seams, broken = all_seams(), []
for seam in seams:
    try:
        seam.resolve()
    except UnsupportedMegatron as error:
        broken.append(str(error).partition(": ")[2].partition(". ")[0])
version = megatron_version()
print("@" + json.dumps([version, version in SUPPORTED_MEGATRON, len(seams), broken]))
"""


def probe(folder: Path) -> tuple[str, bool, int, list[str]]:
    """Return (version, supported, number of seams, seams that do not hold) of the Megatron in `folder`."""
    env = {**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}", "OPTIMUS_CC_DEVICE": "cpu"}
    done = subprocess.run([sys.executable, "-P", "-c", _PROBE], env=env, capture_output=True, text=True, check=False)
    found = [line[1:] for line in done.stdout.splitlines() if line.startswith("@")]
    if not found:
        said = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return folder.name, False, 0, [f"cannot be imported here: {said}"]
    version, supported, seams, broken = json.loads(found[0])
    return version, supported, seams, broken


def main() -> int:
    """Probe every version that is named, and print the table."""
    parser = argparse.ArgumentParser(prog="scripts/compat_versions.sh", description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="CHECKOUT", help="folder that holds megatron/")
    parser.add_argument("--index", nargs="+", default=[], metavar="VERSION", help="releases of megatron-core")
    options = parser.parse_args()
    print("| Megatron | calls itself | supported | seams that hold | others |\n|---|---|---|---:|---|")
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
            version, supported, seams, broken = probe(folder)
            holding = f"{seams - len(broken)} of {seams}" if seams else "-"
            cells = name, version, "yes" if supported else "no", holding, "; ".join(broken)
            print(f"| {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
