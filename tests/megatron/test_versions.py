"""The smoke test of one version of megatron-core.

`scripts/test.sh --megatron VERSION` runs this file with that version; a whole run, with the one in requirements.lock.
"""

import os
import sys

import pytest

from optimus_cc_ext.hooks.registry import SUPPORTED_MEGATRON, UNSUPPORTED_MEGATRON_VARIABLE, check_version
from tests.forked_ranks import run_ranks
from tests.launches import launch
from tests.megatron import minimal_entry
from tests.megatron.optimus_runs import PP2_DP2, relative_gap, run_optimus
from tests.megatron.test_compressed_messages import _ends, _expected, _install_recording
from tests.megatron.test_distributed_optimizer import INTERLEAVED, OVERLAPPED
from tests.megatron.test_lossless_limits import FE, LOSSLESS_CB, LOSSLESS_SC, TOLERANCE
from tests.megatron_runs import last_stage_losses, run_megatron

VERSION = os.environ.get("OPTIMUS_CC_TEST_MEGATRON", SUPPORTED_MEGATRON[-1])
HAS_ENTRY = VERSION.startswith("0.19.")
ENTRY = None if HAS_ENTRY else minimal_entry.main  # None: optimus_cc_ext.pretrain_gpt

LAYOUTS = {
    "1F1B": (),
    "distributed optimizer, overlapped": OVERLAPPED,
    "distributed optimizer, overlapped, interleaved": (*OVERLAPPED, *INTERLEAVED),
}


@pytest.fixture(autouse=True)
def no_exception_for_unsupported_versions(monkeypatch):
    monkeypatch.delenv(UNSUPPORTED_MEGATRON_VARIABLE, raising=False)


@pytest.fixture(scope="module")
def vanilla():
    """Vanilla runs by layout, each run once."""
    known = {}

    def run(name):
        if name not in known:
            known[name] = run_megatron(PP2_DP2[0], [*PP2_DP2[1], *LAYOUTS[name]], entry=ENTRY)
        return known[name]

    return run


def version_in_a_rank():
    """The version that ranks import, which must not be refused, and where it lies."""
    import megatron.core
    import megatron.training

    check_version()
    return megatron.core.__version__, megatron.core.__file__, megatron.training.__file__


def test_ranks_use_the_version_that_was_asked_for():
    [(version, core, training)] = run_ranks(1, version_in_a_rank)
    assert version.split("+")[0] == VERSION, core
    assert os.path.dirname(os.path.dirname(core)) == os.path.dirname(os.path.dirname(training))


def test_off_is_bit_identical_to_vanilla(vanilla):
    off = run_optimus(PP2_DP2, entry=ENTRY)
    for mine, theirs in zip(off, vanilla("1F1B"), strict=True):
        # Floats compared with ==: every loss, gradient norm and weight has the same bits.
        assert (mine.losses, mine.grad_norms, mine.weights) == (theirs.losses, theirs.grad_norms, theirs.weights)
        assert mine.random_states == theirs.random_states
        assert len(mine.losses) == 4 and mine.weights


@pytest.mark.parametrize("layout", LAYOUTS)
def test_full_rank_reproduces_vanilla_and_keeps_the_tied_embedding_tied(layout, vanilla):
    runs = run_optimus(PP2_DP2, [*LAYOUTS[layout], *LOSSLESS_CB, *LOSSLESS_SC, *FE], entry=ENTRY)
    assert relative_gap(last_stage_losses(runs), last_stage_losses(vanilla(layout))) < TOLERANCE
    for run in runs:
        facts = run.probed
        assert all((facts["sent"] or []) + (facts["received"] or [])), "every message must have been compressed"
        # 4 matrices in each of a stage's 2 layers; the first stage has the position embedding as well.
        assert facts["compressed_matrices"] == (9 if facts["stage"] == 0 else 8)
        embedding_raw, embedding_sent = facts["traffic"]["embedding"]
        assert 0 < embedding_sent < embedding_raw, "the tied embedding must have been reduced our way"
    assert len({copy for run in runs for copy in run.probed["tied"]}) == 1


# 4 sequences more after each 24 of the first 48, in pairs on 2 replicas: M = 2, then 3, then 4.
GROWING = ("--rampup-batch-size", "8", "4", "48", "--train-samples", "96", "--lr-decay-samples", "96")
MICRO_BATCHES = [2, 2, 2, 3, 3, 4, 4, 4]


def _in_samples() -> None:
    at = sys.argv.index("--train-iters")
    del sys.argv[at : at + 2]


def _in_samples_and_recording() -> None:
    _in_samples()
    _install_recording()


@pytest.mark.skipif(
    not VERSION.startswith("0.17."), reason=f"megatron-core {VERSION} parses --rampup-batch-size, and ignores it"
)
def test_messages_follow_a_batch_size_that_ramps_up():
    flags = [*PP2_DP2[1], *GROWING]
    vanilla = last_stage_losses(run_megatron(PP2_DP2[0], flags, before=_in_samples, entry=ENTRY))
    epilogue = [flag.replace("all", "epilogue") for flag in LOSSLESS_CB]
    layout = (PP2_DP2[0], flags)
    runs = run_optimus(
        layout, [*epilogue, *LOSSLESS_SC, *FE], before=_in_samples_and_recording, probe=_ends, entry=ENTRY
    )
    rule = [_expected(2, micro_batches, 0) for micro_batches in MICRO_BATCHES]
    ends = [end for run in runs for end in (run.probed["sent"], run.probed["received"]) if end]
    assert len(ends) == 4
    assert [history for history, _ in ends] == [rule] * 4
    assert relative_gap(last_stage_losses(runs), vanilla) < TOLERANCE


def test_without_a_script_it_trains_or_says_which_script_to_give():
    ended = launch(["--pipeline-model-parallel-size", "2", "--optimus-cc"])
    if HAS_ENTRY:
        assert ended.accepted, ended.output
    else:
        assert ended.code == 2
        assert ended.ours[-1].startswith(
            f"optimus-cc: error: the built-in pretrain_gpt cannot run on megatron-core {VERSION}"
        )
        assert "Give the script of a Megatron-LM checkout" in ended.ours[-1]
