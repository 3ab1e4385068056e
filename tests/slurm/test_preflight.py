"""preflight.py: the transport in NCCL's own lines, ports that are up and not used, the network for the planner."""

import json
from pathlib import Path

import pytest

from optimus_cc_ext.tools.plan.hardware import cluster_of
from optimus_cc_ext.tools.plan.seconds import Group, all_to_all
from scripts.slurm import preflight
from scripts.slurm.preflight import active_ports, network_name, node_faults, slow_path, transport

# As NCCL wrote them: siderolabs/docs#566, NVIDIA/nccl-tests#185, horovod/horovod#1523 (2.4.7), NVIDIA/nccl#1053,
# NVIDIA/nccl#226, aws-ofi-nccl.
RECORDED = {
    """nccl-test:179:179 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>
nccl-test:179:179 [0] NCCL INFO Using network IB
nccl-test:179:179 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA""": "IB",
    """dgxh100-4:460770:460842 [0] NCCL INFO NET/IB : Using [0]mlx5_10:1/RoCE [1]mlx5_11:1/RoCE [RO]; OOB enp2:11.1.1.1
dgxh100-4:460770:460842 [0] NCCL INFO Using non-device net plugin version 0
dgxh100-4:460770:460842 [0] NCCL INFO Using network IB""": "IB",
    """master_node:20:289 [0] NCCL INFO NET/Socket : Using [0]ib0:192.168.11.1<0>
master_node:20:289 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so).
master_node:20:289 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB ; OOB ib0:192.168.11.1<0>""": "IB",
    """axa:3048391:3048566 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.
axa:3048391:3048566 [0] NCCL INFO NET/Socket : Using [0]lo:127.0.0.1<0>
axa:3048391:3048566 [0] NCCL INFO Using network Socket""": "Socket",
    """ip-172-31-12-21:45361:45361 [0] NCCL INFO NET/IB : No device found.
ip-172-31-12-210:45305:45305 [0] NCCL INFO NET/Socket : Using [0]ens3:172.31.12.210<0>""": "Socket",
    "node1:4242:4250 [1] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [send] via NET/IB/0": "IB",
    "n1:1:2 [0] NCCL INFO Using network AWS Libfabric": "AWS Libfabric",
    "n1:1:2 [0] NCCL INFO cudaDriverVersion 13000": "",
}  # fmt: skip


@pytest.mark.parametrize(("lines", "took"), RECORDED.items())
def test_the_transport_is_read_from_nccls_own_lines(lines: str, took: str) -> None:
    assert transport(lines.splitlines()) == took


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """Files as the kernel's under /sys/class/infiniband: of three ports two are up."""
    for name, state, layer, rate in (
        ("mlx5_0", "4: ACTIVE", "InfiniBand", "400 Gb/sec (4X NDR)"), ("mlx5_1", "1: DOWN", "InfiniBand", "10 Gb/sec"),
        ("mlx5_2", "4: ACTIVE", "Ethernet", "100 Gb/sec (4X EDR)"),
    ):  # fmt: skip
        port = tmp_path / name / "ports/1"
        port.mkdir(parents=True)
        for file, text in (("state", state), ("link_layer", layer), ("rate", rate)):
            (port / file).write_text(f"{text}\n")
    return tmp_path


def test_sockets_beside_a_port_that_is_up_are_a_fault_unless_they_were_asked_for(devices: Path) -> None:
    ports = active_ports(devices)
    assert ports == {"mlx5_0:1": "InfiniBand 400 Gb/sec", "mlx5_2:1": "Ethernet 100 Gb/sec"}
    fault = slow_path("n1", "Socket", ports, {})
    assert fault.startswith("network: NCCL took sockets on n1, where mlx5_0:1 (InfiniBand 400 Gb/sec), mlx5_2:1")
    for environment in ({"NCCL_IB_DISABLE": "1"}, {"NCCL_NET": "Socket"}):
        assert slow_path("n1", "Socket", ports, environment) == ""
    assert slow_path("n1", "Socket", ports, {"NCCL_IB_DISABLE": "0"}) == fault
    assert slow_path("n1", "IB", ports, {}) == slow_path("n1", "Socket", active_ports(devices / "none"), {}) == ""
    assert network_name("IB", ports, "ib0") == "IB over 1 x Ethernet 100 Gb/sec, 1 x InfiniBand 400 Gb/sec"
    assert network_name("Socket", ports, "ib0") == "Socket over ib0" and network_name("", {}, "") == "gloo"


def test_a_plan_takes_the_measured_network_by_any_name_with_its_rate_of_all_to_all(tmp_path: Path) -> None:
    file = tmp_path / "preflight.json"
    measured = {"gpu": "H100", "network": "Socket over ib0", "gpus_per_node": 8, "node_rate": 4e9, "hop": 3e-5}

    def cluster(**more: object) -> float:
        file.write_text(json.dumps(measured | more))
        found = cluster_of(str(file))
        assert found.network.name == "Socket over ib0 as in preflight.json" and found.network.node_rate == 4e9
        return all_to_all(found, Group(16, 8, 1), 1e9)

    whole, quarter = cluster(), cluster(all_to_all_share=0.25)
    assert 3.9 < quarter / whole < 4
    file.write_text(json.dumps({"gpu": "H100", "network": "ours"}))
    with pytest.raises(Exception, match="unknown network 'ours'"):
        cluster_of(str(file))


def test_each_interface_of_a_list_must_be_there_and_have_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert node_faults("lo", on_gpus=False) == node_faults("lo,lo", on_gpus=False) == []
    assert "has no interface 'ib7'. Give one of " in node_faults("lo,ib7", on_gpus=False)[0]
    monkeypatch.setattr(preflight, "addressed", lambda names: ["ib0"])
    assert (
        node_faults("ib0,lo", on_gpus=False)[0].partition("'lo' on ")[2].endswith(" has no address. Give one of ib0.")
    )


def test_gpus_that_were_asked_for_and_not_seen_and_a_doctor_that_does_not_end_are_faults_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(preflight.torch.cuda, "is_available", lambda: False)
    assert preflight.works_on_gpus("cuda") and not preflight.works_on_gpus("") and not preflight.works_on_gpus("cpu")
    assert "GPUs: PyTorch sees none on " in node_faults("", on_gpus=True)[-1] and node_faults("", on_gpus=False) == []
    monkeypatch.setattr(preflight, "DOCTORS_SECONDS", 0.01)
    assert "it did not end within 0.01 s. Is the Python environment" in preflight.doctor_says()
