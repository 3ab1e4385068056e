"""With the distributed optimizer, overlapped reductions and gathers, and interleaving: the same laws."""

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron.optimus_runs import PP2_DP2, TP2_PP2_DP2, relative_gap, run_optimus, session_facts
from tests.megatron.test_lossless_limits import FE, LOSSLESS_CB, LOSSLESS_SC, TOLERANCE, TWENTY
from tests.megatron_runs import MegatronRun, hash_of, last_stage_losses, run_megatron

SHARDED = ("--use-distributed-optimizer",)
OVERLAPPED = (*SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")
INTERLEAVED = ("--num-layers-per-virtual-pipeline-stage", "1")
# Small enough that the first stage, which Megatron splits into buckets, gets several of them.
SMALL_BUCKETS = ("--ddp-bucket-size", "60000")


def _facts_and_gradients(model: list[torch.nn.Module], optimizer: Any) -> dict[str, Any]:
    """`session_facts`, and what the buckets hold for every compressed matrix after the last iteration."""
    gradients = {
        f"{index}.{name}": hash_of(parameter.main_grad)
        for index, chunk in enumerate(model)
        for name, parameter in chunk.named_parameters()
        if name.endswith("weight") and "linear" in name
    }
    return {**session_facts(model, optimizer), "gradients": gradients}


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        (PP2_DP2, SHARDED),
        (PP2_DP2, ("--overlap-grad-reduce", *SMALL_BUCKETS)),
        (PP2_DP2, (*OVERLAPPED, *SMALL_BUCKETS)),
        (PP2_DP2, (*OVERLAPPED, *INTERLEAVED)),
        (TP2_PP2_DP2, SHARDED),
    ],
    ids=["sharded", "overlapped", "sharded and overlapped", "sharded, overlapped, interleaved", "sharded, TP2"],
)
def test_full_rank_reproduces_vanilla_and_keeps_the_tied_embedding_tied(layout, flags):
    world_size, layout_flags = layout
    vanilla = last_stage_losses(run_megatron(world_size, [*layout_flags, *flags, *TWENTY]))
    runs = run_optimus(layout, [*flags, *TWENTY, *LOSSLESS_CB, *LOSSLESS_SC, *FE], probe=_facts_and_gradients)
    assert relative_gap(last_stage_losses(runs), vanilla) < TOLERANCE
    _assert_rebuilt_where_it_is_read(runs, sharded="--use-distributed-optimizer" in flags)
    assert all(run.probed["compressed_matrices"] >= 8 for run in runs)
    for tensor_rank in {run.probed["tensor_rank"] for run in runs}:
        copies = [run.probed["tied"] for run in runs if run.probed["tensor_rank"] == tensor_rank]
        assert len({copy for (copy,) in copies}) == 1, "first and last stage, all replicas: one embedding"


def _assert_rebuilt_where_it_is_read(runs: list[MegatronRun], *, sharded: bool) -> None:
    places = itertools.groupby(sorted(runs, key=_place), _place)
    for _, (one, other) in places:
        equal = [one.probed["gradients"][name] == other.probed["gradients"][name] for name in one.probed["gradients"]]
        assert len(equal) >= 8
        # Whatever a replica does not read, it leaves as its own gradient: so no matrix is alike on both.
        assert not any(equal) if sharded else all(equal)


def _place(run: MegatronRun) -> tuple[int, int]:
    return run.probed["stage"], run.probed["tensor_rank"]


@pytest.mark.parametrize("flags", [SHARDED, OVERLAPPED], ids=["sharded", "sharded and overlapped"])
def test_fused_embedding_sync_is_bit_identical_to_vanilla(flags):
    # Reduce-scatter over the replicas, then a sum of two: the same additions as Megatron's, on fewer values.
    vanilla = run_megatron(4, [*PP2_DP2[1], *flags, *TWENTY])
    runs = run_optimus(PP2_DP2, [*flags, *TWENTY, *FE])
    assert last_stage_losses(runs) == last_stage_losses(vanilla)


def _saved_gradients(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(folder.glob("wgrads/iter_0000002/*.pth")):
        for chunk, gradients in torch.load(file, weights_only=True).items():
            found |= {f"{file.stem}.{chunk}.{name}": gradient for name, gradient in gradients.items()}
    return found


def test_asked_for_whole_gradients_it_gives_them_and_not_its_shard(tmp_path):
    # Megatron writes what replica 0 holds, and all-reduces in that iteration where else it reduce-scatters. With
    # --overlap-grad-reduce its own files differ from those of a run without, so that is left out.
    flags = [*SHARDED, "--train-iters", "2", "--save-wgrads-interval", "2", "--save-interval", "100"]
    run_megatron(4, [*PP2_DP2[1], *flags, "--save", str(tmp_path / "vanilla")])
    run_optimus(PP2_DP2, [*flags, *LOSSLESS_SC, *FE, "--save", str(tmp_path / "ours")])
    vanilla, ours = (_saved_gradients(tmp_path / name) for name in ("vanilla", "ours"))
    assert vanilla.keys() == ours.keys() and len(vanilla) > 8
    for name, expected in vanilla.items():
        # One update of the weights lies behind them: Adam makes more of the lossless limit's rounding (1e-5 here).
        assert float((ours[name] - expected).norm()) < 1e-4 * float(expected.norm()), name


def test_traffic_of_fe_follows_the_arithmetic():
    for flags, raw_share, sent_share in (((), 2.0, 1.5), (SHARDED, 1.5, 1.0)):
        # D=2, in units of the embedding's bytes: V(3D-2)/D -> V(2D-1)/D, and V(D-1)/D + V -> V(D-1)/D + V/D.
        runs = run_optimus(PP2_DP2, [*flags, *FE, "--train-iters", "2"])
        for run in runs:
            raw, sent = run.probed["traffic"]["embedding"]
            embedding_bytes = 512 * 64 * 4  # 500 words, padded by Megatron to a multiple of 128
            assert (raw, sent) == (2 * raw_share * embedding_bytes, 2 * sent_share * embedding_bytes)


def _start_one_ulp_away() -> None:
    """Move every bf16 weight to its upper or lower neighbour, the same way on all replicas."""
    from megatron.core.distributed import DistributedDataParallel

    wrap, chunks = DistributedDataParallel.__init__, itertools.count()

    # Here, because the optimizer, which copies the weights, is built next.
    @functools.wraps(wrap)
    def wrap_neighbour(self: Any, *args: Any, **kwargs: Any) -> None:
        wrap(self, *args, **kwargs)
        chunk = next(chunks)
        for number, parameter in enumerate(self.module.parameters()):
            assert parameter.dtype == torch.bfloat16
            tied = getattr(parameter, "shared_embedding", False)
            generator = torch.Generator().manual_seed(0 if tied else 1 + 1000 * chunk + number)
            steps = 2 * torch.randint(2, parameter.shape, generator=generator, dtype=torch.int16) - 1
            # One more or less in its bits is the next number away from zero, or towards it; zero stays.
            parameter.data.view(torch.int16).add_(steps * (parameter.data != 0))

    DistributedDataParallel.__init__ = wrap_neighbour


def test_in_bf16_full_rank_stays_within_twice_what_one_ulp_of_the_weights_does():
    layout_flags = [*PP2_DP2[1], "--bf16", *OVERLAPPED, *INTERLEAVED, *TWENTY]
    vanilla = last_stage_losses(run_megatron(4, layout_flags))
    neighbour = last_stage_losses(run_megatron(4, layout_flags, before=_start_one_ulp_away))
    runs = run_optimus((4, layout_flags), [*LOSSLESS_CB, *LOSSLESS_SC, *FE])
    gap, spread = relative_gap(last_stage_losses(runs), vanilla), relative_gap(neighbour, vanilla)
    print(f"relative gap {gap:.1e}, spread of vanilla one bf16 ulp away {spread:.1e}")
    assert 0 < gap < 2 * spread
    assert spread < 1e-2, "one ulp away is not another training"
