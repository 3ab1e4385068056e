"""The smoke test of one version of megatron-core, or of torch.

`scripts/test.sh --megatron VERSION` and `--torch VERSION` run this file with that version; --full, with those in
requirements.lock.
"""

import os
from dataclasses import replace
from functools import partial

import pytest

from optimus_cc_ext.hooks.launching import all_seams
from optimus_cc_ext.hooks.parts import check_megatron
from optimus_cc_ext.hooks.registry import SUPPORTED_MEGATRON, UNSUPPORTED_MEGATRON_VARIABLE
from tests.forked_ranks import run_ranks
from tests.launches import launch
from tests.megatron import interventions, minimal_entry
from tests.megatron import runs as table
from tests.megatron.specs import RunSpec, uses
from tests.megatron.test_lossless_limits import assert_compressed_where_asked, assert_tied
from tests.megatron.test_messages import epilogue, links
from tests.megatron_runs import last_stage_losses, relative_gap

ASKED_FOR = os.environ.get("OPTIMUS_CC_TEST_MEGATRON")
VERSION = ASKED_FOR or SUPPORTED_MEGATRON[-1]
HAS_ENTRY = VERSION.startswith("0.19.")
ENTRY = None if HAS_ENTRY else minimal_entry.main  # None: optimus_cc_ext.tools.pretrain_gpt
TORCH = os.environ.get("OPTIMUS_CC_TEST_TORCH")
pytestmark = [] if ASKED_FOR or TORCH else [pytest.mark.full]

PLAIN = RunSpec(name="1F1B", entry=ENTRY)
LAYOUTS = [
    PLAIN,
    PLAIN.but("distributed optimizer, overlapped", flags=table.OVERLAPPED),
    PLAIN.but("distributed optimizer, overlapped, interleaved", flags=f"{table.OVERLAPPED} {table.INTERLEAVED}"),
]
IN_BF16 = PLAIN.but("bf16, overlapped", flags=f"--bf16 {table.OVERLAPPED}")
# After each 24 of the first 48 sequences the batch grows by 4, in pairs on 2 replicas: 2, 3, then 4 micro-batches.
GROWING = PLAIN.but(
    "growing batch", before=(partial(interventions.without, "--train-iters"),),
    flags="--rampup-batch-size 8 4 48 --train-samples 96 --lr-decay-samples 96",
)  # fmt: skip
MICRO_BATCHES = [2, 2, 2, 3, 3, 4, 4, 4]


@pytest.fixture(autouse=True)
def no_exception_for_unsupported_versions(monkeypatch):
    monkeypatch.delenv(UNSUPPORTED_MEGATRON_VARIABLE, raising=False)


def version_in_a_rank():
    """Return the versions of torch and Megatron that ranks import, which must be accepted, and Megatron's folder."""
    import megatron.core
    import megatron.training
    import torch

    assert check_megatron(all_seams()) is None
    return torch.__version__, megatron.core.__version__, megatron.core.__file__, megatron.training.__file__


def test_ranks_use_the_version_that_was_asked_for():
    [(torch, version, core, training)] = run_ranks(1, version_in_a_rank)
    assert version.split("+")[0] == VERSION, core
    assert TORCH is None or torch.split("+")[0] == TORCH
    assert os.path.dirname(os.path.dirname(core)) == os.path.dirname(os.path.dirname(training))


@uses((PLAIN, replace(PLAIN, name="off", ours=table.OFF)))
def test_off_is_bit_identical_to_vanilla(runs):
    vanilla, off = runs
    for mine, theirs in zip(off.ranks, vanilla.ranks, strict=True):
        # `==` compares floats by their bits: every loss, gradient norm and weight is the same.
        assert (mine.losses, mine.grad_norms, mine.weights) == (theirs.losses, theirs.grad_norms, theirs.weights)
        assert mine.random_states == theirs.random_states
        assert len(mine.losses) == 4 and mine.weights


@uses(*((layout, layout.but(f"{layout.name}, at full rank", ours=table.LOSSLESS)) for layout in LAYOUTS))
def test_full_rank_reproduces_vanilla_and_keeps_the_tied_embedding_tied(runs):
    vanilla, ours = runs
    assert relative_gap(last_stage_losses(ours.ranks), last_stage_losses(vanilla.ranks)) < table.TOLERANCE
    assert_compressed_where_asked(ours)
    assert_tied(ours)


@uses((IN_BF16, IN_BF16.but("gather in exact blocks", ours=f"{table.GATHER} --exact-blocks")))
def test_a_gather_that_leaves_nothing_out_reproduces_vanilla_and_replicas_stay_equal(runs):
    vanilla, ours = runs
    assert relative_gap(last_stage_losses(ours.ranks), last_stage_losses(vanilla.ranks)) < table.BF16_BUCKETS[0]
    assert_tied(ours)
    for first, second in (ours.ranks[:2], ours.ranks[2:]):
        assert first.weights == second.weights
        raw, sent = first.ours.traffic["parameter gather"]
        assert sent > raw, "4 bytes a value instead of 2, but for the first gather"


@pytest.mark.skipif(
    not VERSION.startswith("0.17."), reason=f"megatron-core {VERSION} parses --rampup-batch-size, and ignores it"
)
@uses((GROWING, GROWING.but("growing batch, at full rank", ours=f"{table.LOSSLESS_EPILOGUE} {table.LOSSLESS_SC}")))
def test_messages_follow_a_batch_size_that_ramps_up(runs):
    vanilla, ours = runs
    rule = [epilogue(2, micro_batches, 0) for micro_batches in MICRO_BATCHES]
    for _, receiver, sender in links(ours):
        assert receiver.messages["received"].history == sender.messages["sent"].history == rule
    assert relative_gap(last_stage_losses(ours.ranks), last_stage_losses(vanilla.ranks)) < table.TOLERANCE


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
