"""Megatron's two orders of ranks in a real Slurm, two nodes of two ranks: the log's line, and ranks by node."""

from pathlib import Path

import pytest

from tests.shell_scripts import ROOT
from tests.slurm.real_slurm import ON_CPUS, Slurm, needs_slurm, slurm, wait_until

__all__ = ["slurm"]  # the fixture that the tests use
pytestmark = [pytest.mark.full, needs_slurm]

ORDERS = {
    "": "tp-cp-dp-pp, 2 ranks a node: data-parallel groups stay inside nodes, 1 of 1 pipeline hops cross nodes",
    "--use-tp-pp-dp-mapping": (
        "tp-cp-pp-dp, 2 ranks a node: data-parallel groups span nodes, 0 of 1 pipeline hops cross nodes"
    ),
}


def ranks_by_node(job: str) -> dict[str, set[str]]:
    """Read the ranks of a running job from its processes' environments, by the number of their node."""
    found: dict[str, set[str]] = {}
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            words = environment.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        variables = dict(word.split("=", 1) for word in words if "=" in word)
        if variables.get("SLURM_JOB_ID") == job and "LOCAL_RANK" in variables:
            found.setdefault(variables["SLURM_NODEID"], set()).add(variables["RANK"])
    return found


@pytest.mark.parametrize("mapping", ORDERS)
def test_the_log_says_which_groups_stay_inside_the_nodes_that_slurm_gave(
    mapping: str, slurm: Slurm, tmp_path: Path
) -> None:
    flags = [*ON_CPUS, "--optimus-cc", *mapping.split(), "--tokenizer-type", "NullTokenizer", "--vocab-size", "500"]
    words = ["pretrain", "MODEL=tiny", "PIPELINE_PARALLEL=2", "PROCESSES_PER_NODE=2", "DATA_PATH=mock", "TRAIN_ITERS=3"]
    options = ["--nodes=2", "--parsable", "--output=log", "--oversubscribe", "--mem=1G"]
    submit = str(ROOT / "scripts/slurm/submit.sh")
    number = slurm.run(submit, *words, *options, "--", *flags, cwd=tmp_path, OMP_NUM_THREADS="1")
    seen: dict[str, set[str]] = {}

    def over() -> bool:
        seen.update({node: seen.get(node, set()) | ranks for node, ranks in ranks_by_node(number).items()})
        return slurm.job(number)["JobState"] in ("COMPLETED", "FAILED")

    wait_until(over, "the end", 240)
    said = (tmp_path / "log").read_text()
    assert slurm.job(number)["JobState"] == "COMPLETED", said[-6000:]
    print(ORDERS[mapping], "ranks by node:", {node: sorted(ranks) for node, ranks in sorted(seen.items())}, sep="\n")
    lines = [line for line in said.splitlines() if f"placement {ORDERS[mapping]}" in line]
    # The launcher of each node prints the line before it starts ranks, and the extension once the groups exist.
    assert any("pretrain_gpt.sh: " in line for line in lines) and any("pretrain_gpt.sh: " not in line for line in lines)
    assert sorted(map(sorted, seen.values())) == [["0", "1"], ["2", "3"]]
