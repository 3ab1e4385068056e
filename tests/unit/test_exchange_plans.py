"""Plans of exchanges: their layouts compared with a literal reference, and the number of steps that making them
takes.
"""

import sys
import time
import tracemalloc
from itertools import accumulate
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optimus_cc_ext.collectives.exchange import ExchangePlan
from optimus_cc_ext.collectives.legs import sent
from optimus_cc_ext.collectives.messages import Formats
from optimus_cc_ext.collectives.ranges import Range
from optimus_cc_ext.compressors.blocks import BlockLayout
from optimus_cc_ext.compressors.formats import BLOCK

# -- layouts against a literal reference ------------------------------------------------------------------------------


def plan_of(numel: int, coded: list[Range], dense: list[Range], ranks: int, sharded: bool) -> ExchangePlan:
    return ExchangePlan(
        numel=numel, coded=coded, dense=dense, dtype=torch.float32, ranks=ranks, sharded=sharded,
        formats=Formats("int4", "int8"),
    )  # fmt: skip


def cut_literally(ranges: list[Range], ranks: int, sharded: bool, numel: int, unit: int) -> list[list[list[int]]]:
    """Return each replica's runs of elements, element by element; none crosses the end of a range or of a shard."""
    if sharded:
        size = numel // ranks
        shards = [range(d * size, (d + 1) * size) for d in range(ranks)]
        runs = [[[e for e in range(at, at + n) if e in shard] for at, n in sorted(ranges)] for shard in shards]
        return [[run for run in of_shard if run] for of_shard in runs]
    # Replicas get whole units, counted from the beginning of each range: equally many each, but for the last ones.
    units = [list(range(at, at + n))[first : first + unit] for at, n in sorted(ranges) for first in range(0, n, unit)]
    share = -(-len(units) // ranks) if units else 1
    return [units[d * share : (d + 1) * share] for d in range(ranks)]


def blocks_of(runs: list[list[int]]) -> list[list[int]]:
    return [run[first : first + BLOCK] for run in runs for first in range(0, len(run), BLOCK)]


def blocks_in(layout: BlockLayout, message: int) -> list[list[int]]:
    """Return the blocks of a message in the layout, after checking that they are numbered one after the other."""
    found = []
    for piece in layout.pieces[message]:
        assert piece.block == len(found)
        elements = list(range(piece.start, piece.start + piece.numel))
        found += blocks_of([elements])
    return found


@st.composite
def buckets(draw: st.DrawFn) -> tuple[int, list[Range], list[Range], int]:
    """Draw the length of a bucket, its encoded and its other parameters in any order, and the number of replicas."""
    lengths = draw(st.lists(st.integers(1, 3 * BLOCK), min_size=1, max_size=8))
    gaps = [draw(st.sampled_from((0, 0, 1, 64))) for _ in lengths]
    ends = list(accumulate(gap + length for gap, length in zip(gaps, lengths, strict=True)))
    ranges = [(end - length, length) for end, length in zip(ends, lengths, strict=True)]
    encoded = [draw(st.booleans()) for _ in lengths]
    ranks = draw(st.integers(1, 9))
    numel = -(-ends[-1] // ranks) * ranks
    coded, dense = (
        [r for r, is_coded in zip(ranges, encoded, strict=True) if is_coded is kind] for kind in (True, False)
    )
    return numel, draw(st.permutations(coded)), draw(st.permutations(dense)), ranks


@given(buckets(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_layouts_are_those_of_a_literal_walk_over_every_element(bucket, sharded):
    numel, coded, dense, ranks = bucket
    plan = plan_of(numel, coded, dense, ranks, sharded)
    of_codes = [blocks_of(runs) for runs in cut_literally(coded, ranks, sharded, numel, BLOCK)]
    of_values = [[e for run in runs for e in run] for runs in cut_literally(dense, ranks, sharded, numel, 1)]
    layout = plan.layouts[0]
    assert layout.messages == ranks
    assert layout.blocks == max(map(len, of_codes)) and layout.dense_numel == max(map(len, of_values))
    for shard in range(ranks):
        assert blocks_in(layout, shard) == of_codes[shard]
        assert [e for at, n in layout.dense[shard] for e in range(at, at + n)] == of_values[shard]
        start = shard * (numel // ranks)
        own = plan.own_layouts(shard, (start,))[0]
        assert [[e + start for e in block] for block in blocks_in(own, 0)] == of_codes[shard]
        assert [e + start for at, n in own.dense[0] for e in range(at, at + n)] == of_values[shard]
        assert own.messages == 1 and own.sections(64, 4) == layout.sections(64, 4)


# -- start-up at many replicas ----------------------------------------------------------------------------------------


def bucket_of(parameters: int, ranks: int) -> tuple[int, list[Range], list[Range]]:
    """Make a bucket like those of the 8.3B model (Megatron makes them larger with more replicas): matrices and
    vectors.
    """
    lengths = [[3072 * 1024, 3072][index % 2] for index in range(parameters)]
    ends = list(accumulate(lengths))
    ranges = [(end - length, length) for end, length in zip(ends, lengths, strict=True)]
    padding = ranks * 128
    return -(-ends[-1] // padding) * padding, ranges[::2], ranges[1::2]


def make_layouts(parameters: int, ranks: int) -> list[BlockLayout]:
    """Make all layouts that a reducer and a gather of one bucket take from their plans."""
    numel, coded, dense = bucket_of(parameters, ranks)
    made = []
    for sharded in (True, False):
        plan = plan_of(numel, coded, dense, ranks, sharded)
        made += [plan.layouts[0], plan.own_layouts(ranks - 1)[0]]
        assert sent(plan.legs()) > 0 and plan.slice_bytes[0] > 0
    gather = plan_of(numel, coded, dense, ranks, sharded=True)  # this plan is the one for the gather of parameters
    return [*made, gather.layouts[0], gather.own_layouts(ranks - 1, (numel - numel // ranks,))[0]]


def lines_run(parameters: int, ranks: int) -> int:
    """Count the lines of our modules that making all layouts of a bucket executes, each pass of a one-line loop
    included.
    """
    count = 0

    def noting(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if "optimus_cc_ext" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return noting

    before = sys.gettrace()
    sys.settrace(noting)
    try:
        make_layouts(parameters, ranks)
    finally:
        sys.settrace(before)
    return count


def test_layouts_take_as_many_steps_as_there_are_replicas_and_parameters_together():
    # The plans of a bucket execute 112 lines for each replica and 46 for each parameter.
    counts = {(p, d): lines_run(p, d) for p in (100, 800) for d in (64, 512)}
    assert all(count < 150 * (parameters + ranks) for (parameters, ranks), count in counts.items())
    # 700 more parameters cost as many lines at 512 replicas as at 64, so no step is repeated for each pair of the two.
    assert counts[800, 512] - counts[100, 512] < 1.2 * (counts[800, 64] - counts[100, 64])


@pytest.mark.parametrize("ranks", [64, 512, 1024])
def test_start_up_at_many_replicas_takes_seconds_on_plans_that_allocate_no_tensors(ranks, record_property):
    buckets, parameters = 16, 600
    started = time.process_time()
    for _ in range(buckets):
        make_layouts(-(-parameters // buckets), ranks)
    seconds = time.process_time() - started
    tracemalloc.start()
    kept = make_layouts(-(-parameters // buckets), ranks)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    record_property("cpu_seconds", seconds)
    record_property("mb", buckets * held / 1e6)
    print(f"D = {ranks}: {seconds:.2f} CPU-seconds, {buckets * held / 1e6:.1f} MB in {len(kept)} layouts a bucket")
    assert seconds < 2
