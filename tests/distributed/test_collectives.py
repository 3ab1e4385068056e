"""Functions of `optimus_cc_ext.collectives` over real gloo ranks, compared with a literal reference: sums of decoded
values, in the order of the ranks.
"""

import gc
import weakref
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from optimus_cc_ext import collectives
from optimus_cc_ext.collectives import functions
from optimus_cc_ext.compressors.blocks import BlockLayout
from optimus_cc_ext.compressors.fast import fast_codec
from optimus_cc_ext.compressors.formats import BLOCK
from tests.forked_ranks import run_ranks

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Case = dict[str, Any]


def cases(seed: int, ranks: int, number: int) -> list[Case]:
    """Draw cases: shapes whose values divide among the ranks, dtypes, formats, and both operations."""
    random = Random(seed)
    return [
        {
            "seed": random.randrange(1 << 20), "dtype": random.choice(DTYPES),
            "shape": (ranks, random.choice([1, 5, 127, 128, 700]), random.randint(1, 4)),
            "format": random.choice(["int8", "int4"]), "mean": random.random() < 0.5, "later": random.random() < 0.5,
        }
        for _ in range(number)
    ]  # fmt: skip


def values(case: Case, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(case["seed"] + rank)
    return torch.randn(case["shape"], generator=generator).to(case["dtype"])


def _all_three(drawn: list[Case]) -> list[list[torch.Tensor]]:
    """Return the results of the three functions on this rank, by case."""
    dist.init_process_group("gloo")
    rank, group, found = dist.get_rank(), collectives.levels(), []
    for case in drawn:
        how = {"group": group, "async_op": case["later"], "format": case["format"]}
        op, mine = AVG if case["mean"] else SUM, values(case, rank)
        reduced, part, whole = mine.clone(), torch.empty_like(mine[0]), torch.empty_like(mine)
        whole[rank].copy_(mine[0])
        works = [
            collectives.all_reduce(reduced, op, **how),
            collectives.reduce_scatter_tensor(part, mine, op, **how),
            collectives.all_gather_into_tensor(whole, whole[rank], **how),
        ]
        assert [work is not None for work in works] == [case["later"]] * 3
        assert all(work.wait() and work.wait() for work in works if work is not None)
        assert torch.equal(mine, values(case, rank)), "the input of a reduce-scatter is not changed"
        found.append([reduced, part, whole])
    return found


def messages_of(flat: torch.Tensor, format: str) -> tuple[torch.Tensor, BlockLayout]:
    layout, codec = BlockLayout.of_one(flat.numel()), fast_codec(format, seed=functions.SEED, rotated=True)
    message = torch.zeros(1, codec.message_bytes(layout, flat.dtype), dtype=torch.uint8)
    codec.encode(flat, layout, message)
    return message, layout


def decoded(parts: list[torch.Tensor], format: str) -> torch.Tensor:
    """Decode the tensors as their receiver does, and add them up in fp32 in their order; round the sum once."""
    coded = [messages_of(part, format) for part in parts]
    out = torch.zeros_like(parts[0])
    codec = fast_codec(format, seed=functions.SEED, rotated=True)
    codec.decode_add(torch.cat([message for message, _ in coded]), coded[0][1], 0, out)
    return out


def summed(own: int, parts: list[torch.Tensor], format: str) -> torch.Tensor:
    """Return the sum of a part at the rank that owns it: its own values, which are exact, and what arrives of others.

    The others' messages are added up in the order of the ranks; an empty one stands for the owner.
    """
    message, layout = messages_of(torch.zeros_like(parts[0]), format)
    coded = [message if rank == own else messages_of(part, format)[0] for rank, part in enumerate(parts)]
    out, codec = parts[own].clone(), fast_codec(format, seed=functions.SEED, rotated=True)
    codec.decode_add(torch.cat(coded), layout, 0, out, onto=True)
    return out


def mean(total: torch.Tensor, case: Case, ranks: int) -> torch.Tensor:
    return total / ranks if case["mean"] else total


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.full), 3])
def test_sums_and_gathers_are_the_decoded_values_in_order_and_alike_on_all_ranks(ranks: int) -> None:
    drawn = cases(ranks, ranks, 20)
    for case, found in zip(drawn, zip(*run_ranks(ranks, _all_three, drawn), strict=True), strict=True):
        flats = [values(case, rank).flatten() for rank in range(ranks)]
        size, format = flats[0].numel() // ranks, case["format"]
        blocks = -(-flats[0].numel() // BLOCK)
        share = -(-blocks // ranks) * BLOCK
        sums = [summed(d, [flat[d * share : (d + 1) * share] for flat in flats], format) for d in range(ranks)]
        expected = torch.cat([decoded([part], "int8") if part.numel() else part for part in sums])
        for rank, (reduced, part, whole) in enumerate(found):
            assert torch.equal(reduced.flatten(), mean(expected, case, ranks)), case
            pieces = [flat[rank * size : (rank + 1) * size] for flat in flats]
            assert torch.equal(part.flatten(), mean(summed(rank, pieces, format), case, ranks)), case
            gathered = [decoded([values(case, other)[0].flatten()], format) for other in range(ranks)]
            assert torch.equal(whole.flatten(), torch.cat(gathered)), case


def test_in_two_levels_a_node_adds_up_exactly_and_its_sums_are_sent() -> None:
    drawn = [case | {"dtype": torch.float32} for case in cases(4, 4, 12)]
    results = run_ranks(4, _all_three, drawn, env={"OPTIMUS_CC_NODE": "ranks:2"})
    for case, found in zip(drawn, zip(*results, strict=True), strict=True):
        flats = [values(case, rank).flatten() for rank in range(4)]
        nodes, size, format = [flats[0] + flats[1], flats[2] + flats[3]], flats[0].numel() // 4, case["format"]
        for rank, (reduced, part, _) in enumerate(found):
            pieces = [node[rank * size : (rank + 1) * size] for node in nodes]
            assert torch.equal(part.flatten(), mean(summed(rank // 2, pieces, format), case, 4)), case
            assert torch.equal(reduced, found[0][0]), "all ranks have the same bits"
        length = flats[0].numel() // (2 * BLOCK) * BLOCK
        for place in range(2):  # each place of a node sums a half of the whole blocks, as two ranks do by themselves
            halves = [node[place * length : (place + 1) * length] for node in nodes]
            share = -(-length // BLOCK // 2) * BLOCK
            sums = [summed(d, [half[d * share : (d + 1) * share] for half in halves], format) for d in range(2)]
            expected = torch.cat([decoded([part], "int8") if part.numel() else part for part in sums])
            got = found[0][0].flatten()[place * length : (place + 1) * length]
            assert torch.equal(got, mean(expected, case, 4)), case
        rest = mean(sum(flat[2 * length :].double() for flat in flats), case, 4)
        assert torch.allclose(found[0][0].flatten()[2 * length :].double(), rest, atol=1e-5)


LOOP = (Path(__file__).parents[2] / "docs" / "collectives.md").read_text().split("```python\n")[1].split("```")[0]


@pytest.fixture(scope="module")
def pair() -> list[dict[str, Any]]:
    """Return the findings of two ranks, made one after the other in one pair of processes."""
    return run_ranks(2, _on_a_pair, LOOP)


def _on_a_pair(loop: str) -> dict[str, Any]:
    # The page's loop makes the process group.
    return {"loss": _page(loop), "edges": _edges(), "refused": _refused(), "made again": _made_again(), "kept": _kept()}


def _page(loop: str) -> float:
    names: dict[str, Any] = {}
    exec(compile(loop, "docs/collectives.md", "exec"), names)
    weights = torch.cat([parameter.detach().flatten() for parameter in names["model"].parameters()])
    others = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(others, weights)
    assert all(torch.equal(other, weights) for other in others), "replicas"
    return float(names["loss"])


def test_the_pages_loop_has_20_lines_trains_and_keeps_replicas_equal(pair) -> None:
    assert len([line for line in LOOP.splitlines() if line]) <= 20
    assert max(rank["loss"] for rank in pair) < 0.5


def _edges() -> list[Any]:
    """Return what reaches this rank of values that are not finite, and what else is at an edge."""
    rank, found = dist.get_rank(), []
    for poison in (torch.nan, torch.inf):
        flat, whole = torch.ones(600), torch.empty(600 * 2)
        flat[300] = poison if rank else 1.0
        collectives.all_gather_into_tensor(whole, flat, format="int4")
        collectives.all_reduce(flat, format="int8")
        found += [not bool(flat[300].isfinite()), not bool(whole[900].isfinite()), bool(flat[:128].isfinite().all())]
    number, none, random = torch.tensor(2.5), torch.empty(0, 3), torch.get_rng_state()
    collectives.all_reduce(number, AVG, format="fp32")
    collectives.all_reduce(none, format="int8")
    collectives.all_gather_into_tensor(torch.empty(0), torch.empty(0), format="int8")
    found += [float(number) == 2.5, torch.equal(torch.get_rng_state(), random)]
    alone = dist.new_group([0])
    only = torch.ones(3)
    assert collectives.all_reduce(only, group=alone, async_op=True, format="int8") is None or rank == 0
    return [*found, bool((only == 1).all())]


def test_what_is_not_finite_reaches_every_rank_and_empty_tensors_and_other_groups_are_left_alone(pair) -> None:
    assert [rank["edges"] for rank in pair] == [[True] * 9] * 2


def _refused() -> list[str]:
    flat, found = torch.ones(6), []
    for name, arguments, how in (
        ("all_reduce", (flat, dist.ReduceOp.MAX), {"format": "int8"}),
        ("all_reduce", (flat.long(),), {"format": "int8"}),
        ("all_reduce", (flat.view(2, 3).t(),), {"format": "int8"}),
        ("all_reduce", (flat,), {"format": "int7"}),
        ("reduce_scatter_tensor", (torch.ones(4), flat), {"format": "int8"}),
        ("reduce_scatter_tensor", (torch.ones(3).half(), flat), {"format": "int8"}),
        ("all_gather_into_tensor", (flat, torch.ones(2)), {"format": "int8"}),
        ("levels", (None, dist.group.WORLD), {}),
        ("levels", (None, dist.group.WORLD, dist.group.WORLD), {}),
    ):
        with pytest.raises(ValueError) as error:
            getattr(collectives, name)(*arguments, **how)
        found.append(str(error.value))
    return found


def test_other_operations_dtypes_formats_and_lengths_are_refused_by_name(pair) -> None:
    found = pair[0]["refused"]
    assert [text.split(". ")[0] for text in found[:3]] == [
        "all_reduce: RedOpType.MAX is not possible in few bits", "all_reduce: torch.int64 is not possible in few bits",
        "all_reduce: tensors must be contiguous",
    ]  # fmt: skip
    for text, part in zip(found[3:], ("int7", "6 values, not 4 times 2", "float32 and torch.float16",
                                      "6 values, not 2 times 2", "belong together", "not a row and a column"),
                          strict=True):  # fmt: skip
        assert part in text


def _made_again() -> int:
    """Return the number of layouts, with tables of kernels, that a second call makes."""
    flat, whole, made = torch.ones(6, 700), torch.ones(2, 6, 700), 0
    init = BlockLayout.__init__

    def counted(self: BlockLayout, *args: Any) -> None:
        nonlocal made
        made += 1
        init(self, *args)

    for again in (False, True):
        BlockLayout.__init__ = counted if again else init  # type: ignore[method-assign]
        collectives.all_reduce(flat, format="int8")
        collectives.reduce_scatter_tensor(flat[:3], flat, format="int4")
        collectives.all_gather_into_tensor(whole, flat, format="int4")
    BlockLayout.__init__ = init  # type: ignore[method-assign]
    return made


def test_a_second_call_makes_no_layout_for_whose_tables_a_gpu_would_wait(pair) -> None:
    assert [rank["made again"] for rank in pair] == [0, 0]


def _kept() -> tuple[int, int, bool]:
    """Return how many plans are kept after many shapes, of how many at most, and whether a destroyed group is gone."""
    pair = dist.new_group([0, 1])
    for numel in range(2, 300, 2):
        collectives.all_reduce(torch.ones(numel), group=pair, format="int8")
    gone = weakref.ref(pair)
    dist.destroy_process_group(pair)
    del pair
    gc.collect()
    kept = functions._plan.cache_info()
    return kept.currsize, kept.maxsize or 0, gone() is None


def test_what_is_kept_is_bounded_and_holds_no_destroyed_group(pair) -> None:
    for kept, most, gone in (rank["kept"] for rank in pair):
        assert kept <= most == 128 and gone


def _from_a_mesh() -> list[torch.Tensor]:
    """Sum in the levels of a mesh, and in those that are found; return both."""
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
    found = []
    for group in (
        collectives.levels(None, mesh.get_group("inside"), mesh.get_group("between")), collectives.levels()
    ):  # fmt: skip
        flat = torch.randn(1000, generator=torch.Generator().manual_seed(dist.get_rank()))
        collectives.all_reduce(flat, group=group, format="int4")
        found.append(flat)
    return found


@pytest.mark.full
def test_the_groups_of_a_mesh_give_the_levels_that_hosts_would() -> None:
    for given, seen in run_ranks(4, _from_a_mesh, env={"OPTIMUS_CC_NODE": "ranks:2"}):
        assert torch.equal(given, seen)
