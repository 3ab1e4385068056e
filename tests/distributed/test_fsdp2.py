"""FSDP2 in few bits on four gloo ranks, two nodes of two, beside FSDP2 without it."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from optimus_cc_ext import fsdp2
from optimus_cc_ext.errors import OptimusError
from tests.forked_ranks import run_ranks

RANKS = 4

pytestmark = pytest.mark.ci


class Model(nn.Module):
    """Matrices whose rows do not divide among the ranks, vectors, and two modules that are sharded together."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(60, 250), nn.Linear(250, 60)
        self.norm, self.out = nn.LayerNorm(60), nn.Linear(60, 17)
        self.scale = nn.Parameter(torch.ones(17))

    def forward(self, batch: torch.Tensor, norm: bool = True) -> torch.Tensor:
        inside = self.second(nn.functional.gelu(self.first(batch)))
        out: torch.Tensor = self.out(self.norm(inside) if norm else inside) * self.scale
        return out


def sharded(mesh: DeviceMesh | None = None, **how: Any) -> Any:
    model: Any = Model()
    for each in (model.first, model.second, [model.out, model.norm]):  # not in the order of the model
        fully_shard(each, mesh=mesh, **how)
    return fully_shard(model, mesh=mesh, **how)


def batch_of(step: int) -> torch.Tensor:
    return torch.randn(8, 60, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def trained(model: Any, steps: int = 2) -> dict[str, list[torch.Tensor]]:
    """Train, with accumulation over two batches and clipping; return the last gradients and the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        for index in (0, 1):
            model.set_requires_gradient_sync(index == 1)
            model.set_is_last_backward(index == 1)
            model(batch_of(2 * step + index)).float().square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return {
        "grads": [each.grad.full_tensor() for each in model.parameters()],
        "weights": [each.detach().full_tensor() for each in model.parameters()],
        "norm": [norm.full_tensor() if hasattr(norm, "full_tensor") else norm],
    }


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises((OptimusError, ValueError)) as error:
        call()
    return str(error.value)


def _see_no_gpu() -> None:
    """Let torch see that it has no GPU: the CPU runtime pretends one, and meshes of torch 2.9 would then take NCCL."""
    torch.cuda.is_available = lambda: False


def _beside_fsdp2() -> dict[str, Any]:
    _see_no_gpu()
    dist.init_process_group("gloo")
    whole, bf16 = init_device_mesh("cpu", (4,)), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found: dict[str, Any] = {"alone": trained(sharded(whole)), "bf16 alone": trained(sharded(whole, mp_policy=bf16))}
    for format in ("fp32", "int8", "int4"):
        model = sharded(whole)
        fsdp2.compress(model, format)
        found[format] = trained(model)
    model = sharded(whole, mp_policy=bf16)
    fsdp2.compress(model)
    found["bf16"] = trained(model)
    # FSDP2 alone cannot do this on gloo: the factor becomes an operation of NCCL. With 2 instead of 4 gradients double.
    model = sharded(whole)
    fsdp2.compress(model, "fp32")
    for each in (model, model.first, model.second, model.norm):
        each.set_gradient_divide_factor(2.0)
    model(batch_of(0)).square().mean().backward()
    found["factor"] = [each.grad.full_tensor() for each in model.parameters()]
    model = sharded(whole)
    model(batch_of(0)).square().mean().backward()
    found["without factor"] = [each.grad.full_tensor() for each in model.parameters()]
    found["grid alone"] = trained(sharded(grid))
    for format in ("fp32", "int8"):
        model = sharded(grid["shard"])
        fsdp2.compress(model, format, replicas=grid["replicate"])
        found[f"grid {format}"] = trained(model)
    found |= _others(whole, grid)
    return found


def _others(whole: DeviceMesh, grid: DeviceMesh) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = sharded(whole)
    handle = fsdp2.compress(model)
    twice = refusal(lambda: fsdp2.compress(model))
    handle.remove()
    found["removed"] = trained(model)
    found["unused"] = []
    for compressed in (False, True):
        model = sharded(whole)
        if compressed:
            fsdp2.compress(model, "int4")
        model.first.weight.requires_grad_(False)
        model(batch_of(0), norm=False).square().mean().backward()
        named = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        found["unused"].append({name: each.full_tensor() for name, each in named.items()})
    found["resumed"], found["later"] = _resumed(whole), _later(whole)
    transposed = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))
    double = sharded(whole).double()
    fsdp2.compress(double)
    found["refused"] = [
        twice,
        refusal(lambda: fsdp2.compress(Model())),
        refusal(lambda: fsdp2.compress(sharded(grid))),
        refusal(lambda: fsdp2.compress(sharded(grid["shard"]), replicas=grid["shard"])),
        refusal(lambda: fsdp2.compress(sharded(transposed["shard"]), replicas=transposed["replicate"])),
        refusal(lambda: fsdp2.compress(sharded(whole), "int7")),
        refusal(lambda: double(batch_of(0).double()).square().mean().backward()),
    ]
    return found


def _later(mesh: DeviceMesh) -> list[dict[str, torch.Tensor]]:
    """Return gradients by name: FSDP2's alone, those in int4 if the model has evaluated before, and those in int4 if
    its parameters are exchanged afterwards, and some of the new ones are frozen.
    """
    found = []
    for way in ("alone", "evaluated", "exchanged"):
        model: Any = Model()
        fully_shard(model.first, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if way == "evaluated":
            with torch.no_grad():
                model(batch_of(0))
        if way != "alone":
            fsdp2.compress(model, "int4")
        if way == "exchanged":
            model.load_state_dict({name: each.clone() for name, each in model.state_dict().items()}, assign=True)
            model.norm.bias.requires_grad_(False)
        model(batch_of(0)).square().mean().backward()
        found.append({name: each.grad.full_tensor() for name, each in model.named_parameters() if each.requires_grad})
    return found


def _resumed(mesh: DeviceMesh) -> bool:
    """Return whether a run that is saved and loaded by torch's distributed checkpoint goes on to the bit."""
    one = sharded(mesh)
    fsdp2.compress(one)
    trained(one)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save(one.state_dict(), checkpoint_id=folder[0])
    two = sharded(mesh)
    fsdp2.compress(two)
    state = two.state_dict()
    dcp.load(state, checkpoint_id=folder[0])
    two.load_state_dict(state)
    pairs = zip(trained(one)["weights"], trained(two)["weights"], strict=True)
    equal = all(torch.equal(*pair) for pair in pairs)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(str(folder[0]))
    return equal


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(RANKS, _beside_fsdp2, env={"OPTIMUS_CC_NODE": "ranks:2"}, timeout=300)


def errors(found: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
    pairs = zip(found, expected, strict=True)
    return [float((one.double() - two.double()).norm() / two.double().norm()) for one, two in pairs]


@pytest.mark.parametrize(
    ("how", "beside", "most"),
    [
        ("fp32", "alone", 1e-5),
        ("removed", "alone", 1e-6),
        ("grid fp32", "grid alone", 1e-5),
        ("bf16", "bf16 alone", 0.05),
    ],
)
def test_it_gives_what_fsdp2_gives_alone(ranks: Any, how: str, beside: str, most: float) -> None:
    for rank in ranks:
        for what in ("grads", "weights", "norm"):
            assert max(errors(rank[how][what], rank[beside][what])) < most, what


def test_a_factor_of_the_users_own_divides_the_sum(ranks: Any) -> None:
    for rank in ranks:
        assert max(errors(rank["factor"], [2 * each for each in rank["without factor"]])) < 1e-5


@pytest.mark.parametrize(("how", "beside", "most"), [
    ("int8", "alone", 0.03), ("int4", "alone", 0.3), ("grid int8", "grid alone", 0.03)
])  # fmt: skip
def test_matrices_are_rounded_to_few_bits_and_vectors_are_not(ranks: Any, how: str, beside: str, most: float) -> None:
    names = [name for name, _ in Model().named_parameters()]
    vectors = [name for name, each in Model().named_parameters() if each.ndim == 1]
    for rank in ranks:
        off = dict(zip(names, errors(rank[how]["grads"], rank[beside]["grads"]), strict=True))
        assert all(most / 20 < off[name] < most for name in names if name not in vectors), off
        assert all(off[name] < most / 8 for name in vectors), off


def test_a_run_goes_on_from_torchs_checkpoint_to_the_bit(ranks: Any) -> None:
    assert all(rank["resumed"] for rank in ranks)


def test_what_is_reduced_with_a_parameter_without_gradient_is_dense_and_a_frozen_one_is_not_in_the_way(
    ranks: Any,
) -> None:
    for rank in ranks:
        alone, compressed = rank["unused"]
        assert alone.keys() == compressed.keys() and "first.weight" not in alone and "norm.weight" not in alone
        off = {name: errors([compressed[name]], [alone[name]])[0] for name in alone}
        assert off["out.weight"] < 1e-6 and off["first.bias"] < 1e-6 and 0.01 < off["second.weight"] < 0.3, off


@pytest.mark.parametrize("index", [1, 2], ids=["evaluated before", "exchanged afterwards"])
def test_matrices_are_found_where_the_model_has_them(ranks: Any, index: int) -> None:
    for rank in ranks:
        alone, later = rank["later"][0], rank["later"][index]
        off = {name: errors([later[name]], [alone[name]])[0] for name in later}
        assert all(0.01 < off[name] < 0.3 if alone[name].ndim > 1 else off[name] < 1e-6 for name in off), off


@pytest.mark.parametrize(("index", "says"), [
    (0, "compressed already. Call remove()"),
    (1, "this Model is not sharded. Call torch.distributed.fsdp.fully_shard"),
    (2, 'fully_shard(module, mesh=mesh["shard"]), and then compress(model, replicas=mesh["replicate"])'),
    (3, "are no replicas of ranks"),
    (4, "which shard the model, are on 2 nodes. Make the mesh of (nodes, ranks of a node)"),
    (5, "'int7' is no block format: there are int8, int4"),
    (6, "reduced in torch.float64, which has no format of few bits. Give fully_shard MixedPrecisionPolicy("),
])  # fmt: skip
def test_what_has_no_seam_is_refused_in_one_sentence(ranks: Any, index: int, says: str) -> None:
    for rank in ranks:
        assert says in rank["refused"][index] and "\n" not in rank["refused"][index]


LOOPS = (Path(__file__).parents[2] / "docs" / "python.md").read_text().split("## torch's FSDP2")[1].split("```python\n")


def _page(loop: str) -> float:
    _see_no_gpu()
    names: dict[str, Any] = {}
    exec(compile(loop, "docs/python.md", "exec"), names)
    return float(names["loss"].detach())


@pytest.mark.parametrize("loop", LOOPS[1:], ids=["fsdp2", "ddp"])
def test_a_loop_of_the_page_has_30_lines_and_trains(loop: str) -> None:
    code = loop.split("```")[0]
    assert len(code.splitlines()) <= 30 and len(LOOPS) == 3
    assert max(run_ranks(2, _page, code)) < 0.5
