"""A job whose user has another torch in ~/.local and a compiler that is not there trains in an image all the same."""

import sys
from pathlib import Path

import pytest

from tests.shell_scripts import ROOT, run_script
from tests.slurm.real_slurm import ON_CPUS

# Apptainer mounts the home folder and keeps the environment. This stand-in does the same, with the machine as its
# image.
APPTAINER = f"""#!/bin/sh
while case "$1" in *.sif) false ;; esac; do shift; done
shift
for word; do shift; set -- "$@" "$(echo "$word" | sed 's#^/opt/optimus-cc#{ROOT}#')"; done
exec "$@"
"""
SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
SLURM_NNODES=1 SLURM_NODEID=0 exec "$@"
"""


@pytest.mark.full
def test_a_poisoned_home_and_a_compiler_that_is_not_there_do_not_reach_into_an_image(tmp_path: Path) -> None:
    programs, home, work = tmp_path / "bin", tmp_path / "home", tmp_path / "work"
    site = home / f".local/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages/torch"
    for folder in (programs, work, site):
        folder.mkdir(parents=True)
    (site / "__init__.py").write_text("raise ImportError('the torch of ~/.local')")
    for name, text in (("apptainer", APPTAINER), ("srun", SRUN), ("scontrol", "#!/bin/sh\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (work / "optimus-cc.sif").touch()
    settings = {
        "PATH": f"{programs}:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin", "HOME": str(home),
        "CC": "/nowhere", "PYTHONPATH": str(site.parent), "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_CPUS_PER_NODE": "2", "PROCESSES_PER_NODE": "2", "PIPELINE_PARALLEL": "2", "MODEL": "tiny",
        "TRAIN_ITERS": "2", "CHECKPOINT_DIR": "none", "OPTIMUS_CC_ROOT": str(ROOT), "OPTIMUS_CC_DEVICE": "cpu",
        "IMAGE": "optimus-cc.sif", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    ended = run_script("slurm/pretrain.sbatch", *ON_CPUS, "--optimus-cc", env=settings, cwd=work, limit=200)
    said = ended.output + ended.errors
    assert ended.code == 0 and "iteration        2/       2" in ended.output, said[-3000:]
    # Without the image's protection the job fails, which shows that the test can fail.
    poisoned = run_script(
        "slurm/pretrain.sbatch", *ON_CPUS, env=settings | {"IMAGE_ENV": "PYTHONPATH"}, cwd=work, limit=200
    )
    assert poisoned.code != 0 and "the torch of ~/.local" in poisoned.output + poisoned.errors
