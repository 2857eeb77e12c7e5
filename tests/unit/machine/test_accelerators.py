"""Devices other than CPUs, as a cluster and in the environment of ranks. A simulated accelerator replaces the CUDA
runtime's answers: the number of devices, their names, and their bytes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallax.config import compose
from parallax.errors import ConfigError
from parallax.machine import accelerators
from parallax.machine.accelerator import Accelerator, DeviceFacts
from parallax.machine.accelerators import (
    OwnDevice,
    RanksDevices,
    limit_device_memory,
    ranks_devices,
    register_accelerator,
    set_ranks_devices,
)
from parallax.machine.cuda import Cuda
from parallax.machine.local import RANKS_PER_GPU, ClusterConfig, build_cluster, choose_devices
from parallax.machine.probes import Probes
from parallax.nodes.places import ALONE
from parallax.plan.analytic.hardware import (
    CHANNELS,
    EDGE_CHANNELS,
    collective_bytes,
    edge_bytes,
    usual_context,
)
from parallax.plan.cluster import Cluster
from parallax.run.job import check_devices
from parallax.run.nodes import share_devices
from parallax.run.prepare import PreparedRun
from parallax.run.processes.launch import rank_environment
from tests.unit.plan_fakes import plan

GIB, MIB = 2**30, 2**20
H100, UNKNOWN = "NVIDIA H100 80GB HBM3", "a device that in no catalog"
GROUP, WAY = "NCCL_MAX_NCHANNELS", "NCCL_MAX_P2P_NCHANNELS"


class Rack(Cuda):
    """CUDA's logic, and devices that are not there."""

    def __init__(self, present: Sequence[DeviceFacts]) -> None:
        super().__init__("rack", "nccl", "gloo")
        self.present = tuple(present)

    def devices(self) -> tuple[DeviceFacts, ...]:
        return self.present


class Plain(Rack):
    """An accelerator of which torch says no more than of any."""

    collective_bytes = Accelerator.collective_bytes
    edge_bytes = Accelerator.edge_bytes
    environment = Accelerator.environment
    reserve_bytes = Accelerator.reserve_bytes
    usual_context_bytes = Accelerator.usual_context_bytes


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is registered here, and what the user has set, is no matter of other tests."""
    monkeypatch.setattr(accelerators, "_KNOWN", dict(accelerators._KNOWN))
    monkeypatch.setattr(accelerators, "_of_ranks", None)
    for name in (GROUP, WAY, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def install(*totals: int, name: str = H100, kind: type[Rack] = Rack) -> None:
    register_accelerator(kind([DeviceFacts(i, name, size) for i, size in enumerate(totals)]))


def cluster_of(
    folder: Path, *, tier: str = "auto", context: int = 0, **requested: object
) -> Cluster:
    speeds = {
        f.name: 1e9
        for f in dataclasses.fields(Probes)
        if f.name not in ("directory", "context_bytes")
    }
    probes = Probes(directory=str(folder), context_bytes=context, **speeds)
    config = ClusterConfig(kind="rack", **requested)  # type: ignore[arg-type]
    return build_cluster(config, choose_devices(config), tier=tier, probes=probes)


def environment_of(tmp_path: Path) -> dict[str, str]:
    """What a rank gets that the launcher starts."""
    config = compose(["cluster.kind=rack", "cluster.devices=1", "cluster.threads=3"])
    return rank_environment(PreparedRun(tmp_path, config, plan()))


def test_every_device_is_one_of_the_cluster(tmp_path: Path) -> None:
    install(80 * GIB, 40 * GIB)
    found = cluster_of(tmp_path)
    assert [device.memory_bytes for device in found.devices] == [76 * GIB, 38 * GIB]
    assert found.nodes[0].concurrent == 2
    for device in found.devices:
        assert (device.kind, device.tier) == ("rack", "host")
        assert device.reserve_bytes == (2 * 32 + 22 + 8) * MIB, (
            "workspaces of cuBLAS, the allocator's last pieces, and small numbers"
        )
        assert device.context_bytes == usual_context(H100)
        assert device.collective_bytes == collective_bytes(CHANNELS)
        assert device.edge_bytes == edge_bytes(EDGE_CHANNELS)
        assert (device.gap_share, device.overlap_loss) == (0, 0)


def test_the_memory_of_the_host_is_known_beside_another_tier(tmp_path: Path) -> None:
    install(80 * GIB, 80 * GIB)
    onto_disk = cluster_of(tmp_path, tier="disk", host_memory="8GiB").devices[0]
    assert (onto_disk.tier, onto_disk.host_bytes) == ("disk", 4 * GIB)
    onto_host = cluster_of(tmp_path, tier="host", host_memory="8GiB").devices[0]
    assert onto_disk.offloading_to_host() == onto_host
    assert onto_host.offloading_to_host() is None
    assert cluster_of(tmp_path, tier="none").devices[0].offloading_to_host() is None


def test_ranks_that_share_a_device_have_a_context_each_and_talk_through_the_host(
    tmp_path: Path,
) -> None:
    install(80 * GIB)
    for device in cluster_of(tmp_path, devices=3).devices:
        assert device.memory_bytes == 76 * GIB // 3
        assert device.context_bytes == usual_context(H100)
        assert (device.collective_bytes, device.edge_bytes) == (0, 0)


def test_some_of_those_that_share_devices_have_a_neighbour_on_another(tmp_path: Path) -> None:
    """Three ranks on two devices: what 0 and 1 exchange goes from device to device."""
    install(80 * GIB, 80 * GIB)
    found = cluster_of(tmp_path, devices=3)
    assert found.nodes[0].concurrent == 2
    for device in found.devices:
        assert device.memory_bytes == 38 * GIB
        assert (device.collective_bytes, device.edge_bytes) == (
            collective_bytes(CHANNELS),
            edge_bytes(EDGE_CHANNELS),
        )


def own(identity: str, gib: int = 80, kind: str = "rack") -> OwnDevice:
    return OwnDevice(kind, identity, gib * GIB)


@pytest.mark.parametrize(
    ("others", "mine", "present", "apart", "budgets"),
    [
        ("b", "a", 1, True, [76]),  # a device on each of two hosts
        ("a", "a", 1, False, [38]),  # two containers of a host that have one device
        ("", "abcd", 4, True, [76] * 4),  # each rank sees its own alone
        ("", "abcdefghijkl", 12, True, [76] * 12),  # the same, and more than may share one
        ("", "aab", 2, True, [38, 38, 76]),  # one of two devices is shared
        ("", "aa", 1, False, [38] * 2),
    ],
)
def test_devices_are_those_that_all_ranks_have(
    tmp_path: Path, others: str, mine: str, present: int, apart: bool, budgets: list[int]
) -> None:
    """Of which this one sees a single one."""
    install(80 * GIB)
    ranks = [own(identity) for identity in others + mine]
    set_ranks_devices(RanksDevices.collect(ranks, range(len(others), len(ranks))))
    found = cluster_of(tmp_path, devices=len(mine))
    assert found.nodes[0].concurrent == present
    assert [device.memory_bytes for device in found.devices] == [each * GIB for each in budgets]
    for device in found.devices:
        assert (device.collective_bytes > 0, device.edge_bytes > 0) == (apart, apart)


def test_each_rank_has_the_budget_of_its_own_device(tmp_path: Path) -> None:
    """Not that of the one which plans."""
    install(80 * GIB)
    set_ranks_devices(RanksDevices.collect([own("a"), own("b", 40)], range(2)))
    assert [d.memory_bytes for d in cluster_of(tmp_path, devices=2).devices] == [76 * GIB, 38 * GIB]


@pytest.mark.parametrize(
    "found",
    [
        [own("a"), own("b", kind="other")],
        [own("a"), own("")],
        [own("a"), None],
        [None, None],
        [],
    ],
    ids=["two kinds", "one without a name", "one without a device", "CPUs", "no request"],
)
def test_devices_that_some_ranks_do_not_report_are_not_collected(
    found: list[OwnDevice | None],
) -> None:
    assert RanksDevices.collect(found, range(len(found))) is None


@pytest.mark.parametrize(
    ("local_rank", "selected", "index"),
    [("1", 0, 1), ("5", 0, 1), (None, 2, 2), (None, 0, 0), ("1", 3, 3)],
    ids=[
        "torchrun's",
        "more ranks",
        "the user's own",
        "without an owner",
        "the user's under torchrun",
    ],
)
def test_a_rank_has_the_device_that_it_selected_or_will(
    monkeypatch: pytest.MonkeyPatch, local_rank: str | None, selected: int, index: int
) -> None:
    install(*([80 * GIB] * 4))
    requested: list[int] = []
    monkeypatch.setattr(Rack, "lasting_identity", lambda self, i: requested.append(i) or f"{i}")
    monkeypatch.setattr("torch.accelerator.current_device_index", lambda: selected)
    if local_rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    share_devices(ClusterConfig(kind="rack"), ALONE, select=False)
    assert requested == [index]
    assert ranks_devices("rack") == RanksDevices("rack", 1, False, ((80 * GIB, 1),))


def test_a_budget_may_be_of_cpus_alone(tmp_path: Path) -> None:
    """That of the main job is less than a context takes, and its first run was refused."""
    install(80 * GIB)
    for requested, elsewhere, cpus in (
        ("cpu:130MiB", 76 * GIB, 130 * MIB),
        ("130MiB", 130 * MIB, 130 * MIB),
    ):
        assert cluster_of(tmp_path, device_memory=requested).devices[0].memory_bytes == elsewhere
        config = ClusterConfig(kind="cpu", devices=1, device_memory=requested)
        assert config.memory_of("cpu") == cpus
    assert compose([]).cluster.memory_of("rack") is None
    with pytest.raises(ConfigError, match=r"cluster\.device_memory=much"):
        ClusterConfig(device_memory="cpu:much")


def test_a_device_that_torch_cannot_use_is_not_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It once trained on the CPU without a message."""
    monkeypatch.setattr(accelerators, "NVIDIA_DEVICE", tmp_path)
    monkeypatch.setattr(accelerators, "present_kind", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match=r"torch .* cannot use it: .* cluster\.kind=cpu"):
        check_devices(compose([]))
    check_devices(compose(["cluster.kind=cpu"]))
    for hidden in ("", "-1", "none", "NoDevFiles", "-2,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        check_devices(compose([]))
    for shown in ("0", "1,0", "GPU-8932f937", "MIG-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        with pytest.raises(ConfigError):
            check_devices(compose([]))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    check_devices(compose([]))  # of another job


def test_what_was_measured_is_given_back_before_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks may share the device."""
    done: list[str] = []

    class Limited(Rack):
        def limit_memory(self, device: torch.device, limit_bytes: int) -> None:
            done.append(f"{limit_bytes} bytes")

    monkeypatch.setattr("torch.accelerator.empty_cache", lambda: done.append("emptied"))
    monkeypatch.setitem(accelerators._KNOWN, "cuda", Limited(()))
    limit_device_memory(torch.device("cuda", 0), 5)
    limit_device_memory(torch.device("cpu"), 5)
    assert done == ["emptied", "5 bytes"]


def test_variables_are_set_before_the_first_device_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for their properties makes torch's allocator, which reads them."""
    requested: list[str] = []

    class Watched(Rack):
        def devices(self) -> tuple[DeviceFacts, ...]:
            requested.append(os.environ.get("PYTORCH_ALLOC_CONF", ""))
            return self.present

        def lasting_identity(self, index: int) -> str:
            return str(index)

    # torch knows no device of the kind
    monkeypatch.setattr(
        "parallax.run.nodes.select_device", lambda kind, rank: SimpleNamespace(index=rank)
    )
    for name in Cuda("rack").environment:
        monkeypatch.setenv(name, "")  # and gone after the test
    install(80 * GIB, kind=Watched)
    share_devices(ClusterConfig(kind="rack"), ALONE, select=True)
    assert set(requested) == {"expandable_segments:True"}


def test_identities_of_another_kind_of_device_are_ignored(tmp_path: Path) -> None:
    install(80 * GIB)
    set_ranks_devices(
        RanksDevices.collect([own(each, kind="another") for each in "abcd"], range(4))
    )
    assert cluster_of(tmp_path, devices=2).devices[0].memory_bytes == 38 * GIB


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"uuid": "GPU-1", "pci_bus_id": 1}, {"uuid": "GPU-1", "pci_bus_id": 1}, True),
        ({"uuid": "GPU-1", "pci_bus_id": 1}, {"uuid": "GPU-2", "pci_bus_id": 1}, False),
        ({"uuid": "GPU-XX", "pci_bus_id": 1}, {"uuid": "GPU-XX", "pci_bus_id": 2}, False),
    ],
    ids=["one device", "two parts of one", "a driver that calls all the same"],
)
def test_devices_are_distinguished(
    monkeypatch: pytest.MonkeyPatch, one: dict[str, Any], other: dict[str, Any], same: bool
) -> None:
    class Seen(Accelerator):
        module = SimpleNamespace(
            get_device_properties=lambda index: SimpleNamespace(**(one, other)[index])
        )

    seen = Seen("seen")
    assert (seen.lasting_identity(0) == seen.lasting_identity(1)) == same
    assert seen.identity(0) == seen.lasting_identity(0)
    monkeypatch.setattr("socket.gethostname", lambda: "a container of the same host")
    assert seen.identity(0) == seen.lasting_identity(0) == Seen("seen").identity(0)


def test_a_device_that_has_no_name_is_each_process_s_own() -> None:
    class Nameless(Accelerator):
        module = SimpleNamespace(get_device_properties=lambda index: SimpleNamespace())

    assert Nameless("it").lasting_identity(0) == ""
    assert Nameless("it").identity(0) != Nameless("it").identity(1)


def test_a_single_rank_has_no_groups(tmp_path: Path) -> None:
    install(80 * GIB, 80 * GIB)
    (device,) = cluster_of(tmp_path, devices=1).devices
    assert device.memory_bytes == 76 * GIB
    assert (device.collective_bytes, device.edge_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("measured", "counted"),
    [(0, usual_context(H100)), (300 * MIB, 300 * MIB), (40 * GIB, 2 * usual_context(H100))],
)
def test_a_context_is_as_measured_or_usual(tmp_path: Path, measured: int, counted: int) -> None:
    """What others hold there was measured as if it were the context's."""
    install(80 * GIB)
    assert cluster_of(tmp_path, context=measured).devices[0].context_bytes == counted


def test_a_device_of_no_known_kind_has_the_largest_context(tmp_path: Path) -> None:
    install(80 * GIB, name=UNKNOWN)
    assert cluster_of(tmp_path).devices[0].context_bytes == usual_context(UNKNOWN) >= 800 * MIB


def test_an_accelerator_of_which_nothing_is_known_takes_what_was_measured(tmp_path: Path) -> None:
    install(16 * GIB, 16 * GIB, kind=Plain)
    device = cluster_of(tmp_path, context=5 * GIB).devices[0]
    assert (device.context_bytes, device.reserve_bytes) == (5 * GIB, 8 * MIB)
    assert (device.collective_bytes, device.edge_bytes) == (0, 0)
    assert environment_of(tmp_path) == {"OMP_NUM_THREADS": "3"}


@pytest.mark.parametrize("devices", [2 * RANKS_PER_GPU + 1, 10**6])
def test_more_ranks_than_may_share_are_refused(tmp_path: Path, devices: int) -> None:
    install(80 * GIB, 80 * GIB)
    assert len(cluster_of(tmp_path, devices=2 * RANKS_PER_GPU).devices) == 2 * RANKS_PER_GPU
    with pytest.raises(ConfigError, match=rf"cluster.devices={devices}: .* sees 2 rack .* use 16"):
        cluster_of(tmp_path, devices=devices)


def test_a_host_without_devices_of_the_kind_says_so(tmp_path: Path) -> None:
    install()
    with pytest.raises(ConfigError, match=r"sees 0 rack devices here; use cluster\.kind=cpu"):
        cluster_of(tmp_path)


def test_ranks_open_as_many_channels_as_are_counted(tmp_path: Path) -> None:
    install(80 * GIB, 80 * GIB)
    given = environment_of(tmp_path)
    assert given[GROUP] == str(CHANNELS)
    assert given[WAY] == str(EDGE_CHANNELS)
    assert given["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    device = cluster_of(tmp_path).devices[0]
    assert device.collective_bytes == collective_bytes(int(given[GROUP]))
    assert device.edge_bytes == edge_bytes(int(given[WAY]))


def test_the_channels_that_the_user_sets_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GROUP, "32")
    install(80 * GIB, 80 * GIB)
    device = cluster_of(tmp_path).devices[0]
    assert device.collective_bytes == collective_bytes(32) == 2 * collective_bytes(CHANNELS)
    assert device.edge_bytes == edge_bytes(EDGE_CHANNELS)
    given = environment_of(tmp_path)
    assert GROUP not in given, "the ranks inherit it"
    assert given[WAY] == str(EDGE_CHANNELS)


def test_a_variable_that_is_set_to_nothing_is_not_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL would open as many channels as it likes, where the plan counts the usual number."""
    monkeypatch.setenv(GROUP, "")
    install(80 * GIB, 80 * GIB)
    assert cluster_of(tmp_path).devices[0].collective_bytes == collective_bytes(CHANNELS)
    assert environment_of(tmp_path)[GROUP] == str(CHANNELS)


@pytest.mark.parametrize("nonsense", ["many", "-1", "0"])
def test_no_fewer_channels_are_counted_than_nccl_makes_of_nonsense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nonsense: str
) -> None:
    """Which is one."""
    monkeypatch.setenv(GROUP, nonsense)
    install(80 * GIB, 80 * GIB)
    assert cluster_of(tmp_path).devices[0].collective_bytes >= collective_bytes(1)
    assert GROUP not in environment_of(tmp_path)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_users_allocator_settings_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64")
    install(80 * GIB)
    assert "PYTORCH_ALLOC_CONF" not in environment_of(tmp_path)
