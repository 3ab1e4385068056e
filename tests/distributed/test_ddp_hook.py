"""Training under DistributedDataParallel on gloo ranks, with our communication hook and without it."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import optimus_cc_ext
from optimus_cc_ext import collectives
from tests.forked_ranks import run_ranks

RANKS = 4


class Model(nn.Sequential):
    """Two matrices whose lengths are no multiples of a block, and vectors."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(60, 250), nn.GELU(), nn.Linear(250, 61), nn.LayerNorm(61))


def trained(hook: tuple[Any, Any] | None, dtype: torch.dtype = torch.float32, step: int = 3) -> dict[str, Any]:
    """Train a model of several small buckets; return its last gradients, its weights and the lengths of buckets."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Model().to(dtype), bucket_cap_mb=0.02)
    seen: list[list[int]] = []
    if hook is not None:
        state, function = hook

        def noted(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            seen.append([each.numel() for each in bucket.parameters()])
            reduced: torch.futures.Future[torch.Tensor] = function(state, bucket)
            return reduced

        model.register_comm_hook(state, noted)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(step):
        generator = torch.Generator().manual_seed(100 * index + dist.get_rank())
        batch = torch.randn(8, 60, generator=generator).to(dtype)
        optimizer.zero_grad()
        with model.no_sync():
            model(batch).float().square().mean().backward()
        model(batch * 2).float().square().mean().backward()
        optimizer.step()
    found = [copy.deepcopy(each.grad) for each in model.parameters()]
    return {"grads": found, "weights": [each.detach().clone() for each in model.parameters()], "seen": seen}


def sparse(hook: tuple[Any, Any] | None) -> list[torch.Tensor]:
    """Return the gradients of an embedding, which are sparse, and of a matrix."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(50, 60, sparse=True), nn.Linear(60, 17, bias=False)))
    if hook is not None:
        model.register_comm_hook(*hook)
    model(torch.arange(20) + 5 * dist.get_rank()).square().mean().backward()
    return [each.grad.to_dense() for each in model.parameters() if each.grad is not None]


def _beside_ddp() -> dict[str, Any]:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {"alone": trained(None), "half alone": trained(None, torch.float16)}
    for name in ("fp32", "int8", "int4"):
        found[name] = trained(optimus_cc_ext.ddp_hook(name))
    found["half"] = trained(optimus_cc_ext.ddp_hook("int8"), torch.float16)
    found["sparse"] = [sparse(None), sparse(optimus_cc_ext.ddp_hook("int8"))]
    found["levels"] = trained(optimus_cc_ext.ddp_hook("fp32", collectives.levels()))
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(RANKS, _beside_ddp, env={"OPTIMUS_CC_NODE": "ranks:2"})


def errors(found: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
    pairs = zip(found, expected, strict=True)
    return [float((one.double() - two.double()).norm() / two.double().norm()) for one, two in pairs]


@pytest.mark.parametrize("how", ["fp32", "levels"])
def test_without_rounding_the_hook_gives_what_ddp_gives(ranks: list[dict[str, Any]], how: str) -> None:
    for rank in ranks:
        assert max(errors(rank[how]["grads"], rank["alone"]["grads"])) < 1e-4
        assert max(errors(rank[how]["weights"], rank["alone"]["weights"])) < 1e-6


@pytest.mark.parametrize(("format", "most"), [("int8", 0.02), ("int4", 0.2)])
def test_matrices_are_rounded_to_few_bits_and_vectors_are_not(ranks: Any, format: str, most: float) -> None:
    """Weights differ by steps before the last one, so the vectors' gradients do, a little."""
    for rank in ranks:
        assert all(
            torch.equal(*pair) for pair in zip(rank[format]["weights"], ranks[0][format]["weights"], strict=True)
        )
        off = errors(rank[format]["grads"], rank["alone"]["grads"])
        matrices = [off[0], off[2]]
        assert all(most / 20 < error < most for error in matrices)
        assert max(off[1], off[3], off[4], off[5]) < most / 50


def test_buckets_that_ddp_makes_anew_after_the_first_pass_are_read_anew(ranks: list[dict[str, Any]]) -> None:
    seen = ranks[0]["int8"]["seen"]
    assert len(seen) > 4 and seen[0] != seen[-1] and len({tuple(each) for each in seen}) > 2


def test_fp16_is_divided_before_it_is_added_up_as_ddp_does(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert max(errors(rank["half"]["grads"], rank["half alone"]["grads"])) < 0.03


def test_sparse_gradients_are_added_up_as_ddp_does(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        alone, ours = rank["sparse"]
        embedding, matrix = errors(ours, alone)
        assert embedding < 1e-6 and 1e-3 < matrix < 0.02


def _overflows() -> bool:
    dist.init_process_group("gloo")
    model = nn.Linear(64, 64, bias=False).half()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(*optimus_cc_ext.ddp_hook("int8"))
    (ddp(torch.ones(1, 64).half() * 30_000).float().sum()).backward()
    assert model.weight.grad is not None
    return bool(model.weight.grad.isfinite().all())


def test_the_sum_of_large_fp16_gradients_does_not_overflow() -> None:
    assert run_ranks(3, _overflows) == [True] * 3


def test_a_format_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'int7' is no block format: there are int8, int4"):
        optimus_cc_ext.ddp_hook("int7")
