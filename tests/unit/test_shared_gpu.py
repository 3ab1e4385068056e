"""Devices that ranks get, and refusals for several ranks on one GPU; tests/distributed tests the backend itself."""

import os

import pytest
import torch

from optimus_cc_ext.devices import cpu_runtime, shared_gpu
from optimus_cc_ext.errors import OptimusError, is_first_local_rank
from tests.device import device_of, said_of

GIB = 1 << 30


@pytest.mark.parametrize(
    "ranks, gpus, device", [(4, 0, "cpu"), (4, 1, "shared-gpu"), (4, 3, "shared-gpu"), (4, 4, "cuda"), (1, 8, "cuda")]
)
def test_a_gpu_for_each_rank_else_shared_gpus_else_the_cpu(ranks: int, gpus: int, device: str) -> None:
    assert shared_gpu.device_for(ranks, gpus) == device


def test_a_smoke_test_takes_the_gpus_there_are_and_says_so_and_other_tests_the_cpu() -> None:
    smoke = {"OPTIMUS_CC_TEST_MEGATRON": "0.19.2"}
    assert [device_of(smoke, gpus) for gpus in (0, 1, 3, 4)] == ["cpu", "shared-gpu", "shared-gpu", "cuda"]
    assert device_of({}, 1) == device_of(smoke | {"OPTIMUS_CC_DEVICE": "cpu"}, 1) == "cpu"
    (line,) = said_of("shared-gpu", 1)
    assert line.startswith("4 ranks train on 1 GPU(s) (shared-gpu)") and not said_of("cpu", 0)


def test_every_rank_has_an_equal_share_and_too_little_is_refused() -> None:
    assert [shared_gpu.ranks_on(gpu, 5, 2) for gpu in range(2)] == [3, 2]
    assert shared_gpu.memory_share(4, 80 * GIB, 80 * GIB) == pytest.approx((20 - 0.5) / 80)
    for ranks, free in ((8, 8 * GIB), (2, GIB // 2)):
        with pytest.raises(
            OptimusError, match=rf"{ranks} ranks on a GPU of 8\.0 GiB.*less than 1\.0 GiB for each: end"
        ):
            shared_gpu.memory_share(ranks, 8 * GIB, free)


def test_a_rank_takes_its_gpu_and_its_share_and_two_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"OPTIMUS_CC_DEVICE": "shared-gpu", "RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4"}
    for name, value in (given | {"LOCAL_WORLD_SIZE": "4"}).items():
        monkeypatch.setenv(name, value)
    took: list[object] = []
    answers = {
        "is_available": lambda: True, "device_count": lambda: 2, "set_device": took.append,
        "mem_get_info": lambda device: (40 * GIB, 40 * GIB),
        "set_per_process_memory_fraction": lambda share, device: took.append(share),
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    assert cpu_runtime.device_choice() == "shared-gpu"
    for _ in range(2):  # activating the device a second time changes nothing
        said = shared_gpu.activate()
        assert took == [1, pytest.approx(19.5 / 40)] and os.environ["LOCAL_RANK"] == "1"
        assert "4 ranks on 2 GPU(s), 19.5 GiB for each" in said and "times mean nothing" in said
        took.clear()
    assert not is_first_local_rank(), "rank 0 speaks, not each that has GPU 0"
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(OptimusError, match=r"8 ranks, but only 4 of them on this.*Start all ranks on one"):
        shared_gpu.activate()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTIMUS_CC_DEVICE", "shared-gpu")
    with pytest.raises(RuntimeError, match=r"OPTIMUS_CC_DEVICE=shared-gpu, but .* no CUDA device: unset the variable"):
        cpu_runtime.activate()
