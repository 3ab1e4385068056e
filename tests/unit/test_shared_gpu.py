"""Devices that ranks get, and refusals for several ranks on one GPU."""

import os

import pytest
import torch

from optimus_cc_ext.errors import OptimusError, is_first_local_rank
from optimus_cc_ext.tools.cpu import cpu_runtime, shared_gpu
from optimus_cc_ext.tools.doctor import gpu
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


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Rank 3 of 4 on a machine with two GPUs; the fixture is what the rank sets: the GPU's number."""
    given = {"OPTIMUS_CC_DEVICE": "shared-gpu", "RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4"}
    nccls = dict.fromkeys(("NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "CUDA_MPS_PIPE_DIRECTORY"), "")
    for name, value in (given | nccls | {"LOCAL_WORLD_SIZE": "4"}).items():
        monkeypatch.setenv(name, value)  # the variables are restored even where the rank itself sets them
    for name in nccls:
        monkeypatch.delenv(name)
    took: list[object] = []
    answers = {
        "is_available": lambda: True, "device_count": lambda: 2, "set_device": took.append,
        "mem_get_info": lambda device: (40 * GIB, 40 * GIB),
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return took


def test_a_rank_takes_its_gpu_and_is_a_host_of_its_own_to_nccl(
    two_gpus: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cpu_runtime.device_choice() == "shared-gpu"
    for _ in range(2):  # activating the device a second time changes nothing
        said = shared_gpu.activate()
        assert (two_gpus.pop(), os.environ["LOCAL_RANK"]) == (1, "1") and not two_gpus
        assert os.environ["NCCL_HOSTID"] == "rank3", "NCCL refuses two ranks of one host on one GPU"
        assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
        assert "4 ranks on 2 GPU(s)" in said and "by turns (without MPS), so that times mean little" in said
    assert not is_first_local_rank(), "rank 0 speaks, not each that has GPU 0"
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/mps")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    assert (
        shared_gpu.activate().endswith("they compute at the same time") and os.environ["NCCL_SOCKET_IFNAME"] == "eth0"
    )


def test_too_little_memory_is_refused(two_gpus: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * GIB, 40 * GIB))
    with pytest.raises(OptimusError, match=r"2\.0 GiB of GPU 1 are free, less than 1\.5 for each of its 2 ranks: end"):
        shared_gpu.activate()


def test_a_gpu_that_takes_one_process_only_is_refused_with_the_cure(
    two_gpus: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(device: int) -> None:
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nFor debugging consider")

    monkeypatch.setattr(torch.cuda, "mem_get_info", busy)
    with pytest.raises(OptimusError, match=r"GPU 1 takes no further process \(.*unavailable\): use `nvidia-smi -c D"):
        shared_gpu.activate()
    assert gpu.find_gpu().free == 0, "doctor says that no memory is free, instead of a traceback"


def test_two_machines_are_refused(two_gpus: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(OptimusError, match=r"8 ranks, but only 4 of them on this.*Start all ranks on one"):
        shared_gpu.activate()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTIMUS_CC_DEVICE", "shared-gpu")
    with pytest.raises(RuntimeError, match=r"OPTIMUS_CC_DEVICE=shared-gpu, but .* no CUDA device: unset the variable"):
        cpu_runtime.activate()
