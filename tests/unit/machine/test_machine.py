"""The machine: limits are found where kernels put them, peaks follow memory, auto means what it says."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
import re
import resource
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from parallax.common.files import disk_free_bytes, existing_parent, replacing
from parallax.errors import ConfigError
from parallax.machine import host
from parallax.machine import local as machine
from parallax.machine import probes as module
from parallax.machine.host import (
    ResidentMeter,
    available_memory,
    data_bytes,
    memory_limits,
    peak_resident_bytes,
    reset_peak_resident,
    resident_bytes,
    usable_cores,
)
from parallax.machine.local import (
    ClusterConfig,
    build_cluster,
    choose_devices,
    probe_together,
    processes_of,
)
from parallax.machine.pinned import ApartArena
from parallax.machine.probes import (
    ALONE,
    Probes,
    compute_together,
    measure_probes,
    probe_disk,
    shared_speeds,
)
from parallax.plan.cluster import Cluster
from tests.alone import alone

MIB = 2**20
no_cuda = pytest.mark.skipif(
    torch.cuda.is_available(), reason="what a machine without CUDA answers"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "parallax"


@pytest.fixture
def probes(tmp_path: Path) -> Probes:
    speeds = {
        f.name: float(i) for i, f in enumerate(dataclasses.fields(Probes)) if f.name != "directory"
    }
    return Probes(directory=str(tmp_path), **speeds)


def cluster_of(config: ClusterConfig, *, tier: str, probes: Probes) -> Cluster:
    return build_cluster(config, choose_devices(config), tier=tier, probes=probes)


def tree(root: Path, groups: str, files: dict[str, str]) -> Path:
    """The files that a kernel would show below ``root``."""
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def test_cores_are_limited_by_a_v2_quota_anywhere_above(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/job/cpu.max": "50000 100000",
        "sys/fs/cgroup/job/task/cpu.max": "max 100000",
    }
    assert usable_cores(tree(tmp_path, "0::/job/task", files)) == 0.5


def test_cores_are_limited_by_a_v1_quota(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/cpu,cpuacct/docker/cpu.cfs_quota_us": "75000",
        "sys/fs/cgroup/cpu,cpuacct/docker/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    root = tree(tmp_path, "5:cpuset:/other\n4:cpu,cpuacct:/docker\n0::/", files)
    assert usable_cores(root) == 0.75


def cores_of_one() -> float:
    """In a process of its own."""
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    return usable_cores()


def test_cores_follow_the_affinity_mask() -> None:
    assert alone(cores_of_one) <= 1


def test_memory_limits_of_v2_count_dropped_cache_as_free(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/job/memory.max": str(512 * MIB),
        "sys/fs/cgroup/job/memory.current": str(300 * MIB),
        "sys/fs/cgroup/job/memory.stat": f"anon 1\ninactive_file {200 * MIB}",
        "sys/fs/cgroup/memory.max": "max",
    }
    (limit,) = memory_limits(tree(tmp_path, "0::/job", files))
    assert (limit.limit_bytes, limit.free_bytes, limit.per_process) == (512 * MIB, 412 * MIB, False)


def test_memory_limits_of_v1_inside_a_container_with_a_foreign_path(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(256 * MIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(100 * MIB),
        "sys/fs/cgroup/memory/memory.stat": "cache 5\ntotal_inactive_file 0",
    }
    (limit,) = memory_limits(tree(tmp_path, "4:memory:/docker/unseen\n1:cpu:/", files))
    assert limit.free_bytes == 156 * MIB
    assert "memory.limit_in_bytes" in limit.name
    (tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory_limits(tmp_path) == ()


@pytest.mark.parametrize(
    ("groups", "folder", "limit", "used", "caches"),
    [
        (
            "0::/job",
            "job",
            "memory.max",
            "memory.current",
            ["inactive_file", "active_file", "slab_reclaimable"],
        ),
        (
            "4:memory:/job",
            "memory/job",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            ["total_inactive_file", "total_active_file"],
        ),
    ],
    ids=["v2", "v1"],
)
def test_all_caches_that_the_kernel_gives_up_count_as_free(
    tmp_path: Path, groups: str, folder: str, limit: str, used: str, caches: list[str]
) -> None:
    """What was just read is active: a data set would leave no memory for its own training."""
    group = f"sys/fs/cgroup/{folder}"
    held = "\n".join(["anon 1", *(f"{each} {20 * MIB}" for each in caches)])
    files = {
        f"{group}/{limit}": str(512 * MIB),
        f"{group}/{used}": str(300 * MIB),
        f"{group}/memory.stat": held,
    }
    (found,) = memory_limits(tree(tmp_path, groups, files))
    assert found.free_bytes == (212 + 20 * len(caches)) * MIB


def limits_of_a_gibibyte() -> tuple[list[tuple[str, int]], int, int]:
    """In a process of its own: a hard limit cannot be raised again."""
    resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))
    limits = [(each.name, each.limit_bytes) for each in memory_limits() if each.per_process]
    return limits, available_memory(1), available_memory(2)


def test_a_process_limit_is_seen_and_caps_the_device_memory() -> None:
    limits, one, two = alone(limits_of_a_gibibyte)
    assert limits == [("RLIMIT_DATA", 2**30)]
    assert one == two < 2**30


def test_available_memory_is_shared_by_processes() -> None:
    assert 0 < available_memory(4) <= available_memory() / 4 * 1.2
    assert available_memory() <= psutil.virtual_memory().total


@pytest.mark.skipif(not reset_peak_resident(), reason="/proc/self/clear_refs cannot be written")
def test_the_peak_follows_memory_and_can_be_reset() -> None:
    def touch(count: int) -> None:
        with mmap.mmap(-1, count) as area:
            area.write(b"x" * count)

    touch(64 * MIB)
    high = peak_resident_bytes()
    assert high >= resident_bytes() + 48 * MIB
    assert reset_peak_resident()
    assert peak_resident_bytes() <= high - 48 * MIB
    touch(32 * MIB)
    assert peak_resident_bytes() >= resident_bytes() + 24 * MIB


@pytest.mark.skipif(not reset_peak_resident(), reason="/proc/self/clear_refs cannot be written")
def test_pages_of_a_file_are_in_no_peak_also_when_it_is_closed(tmp_path: Path) -> None:
    """As of a checkpoint, which a resumed run reads before its first step."""
    path = tmp_path / "states"
    path.write_bytes(b"x" * 64 * MIB)
    meter = ResidentMeter()
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    assert sum(pages[place] for place in range(0, 64 * MIB, 4096)) > 0
    with host.unmapping_files():
        pages.close()
    assert meter.peak_bytes() < 8 * MIB


@pytest.mark.skipif(not reset_peak_resident(), reason="/proc/self/clear_refs cannot be written")
def test_what_is_kept_apart_is_in_no_peak() -> None:
    def hold(count: int) -> mmap.mmap:
        area = mmap.mmap(-1, count)
        for _ in range(count // MIB):
            area.write(b"x" * MIB)
        return area

    meter, before, other = ResidentMeter(), data_bytes(), ResidentMeter()
    hold(32 * MIB).close()
    ApartArena(MIB).close()
    assert min(meter.peak_bytes(), other.peak_bytes()) > 30 * MIB, "all see what was"
    meter = ResidentMeter()
    first, own = ApartArena(64 * MIB), hold(32 * MIB)
    assert 30 * MIB < meter.peak_bytes() < 40 * MIB
    own.close()
    first.close()
    second, third = ApartArena(48 * MIB), ApartArena(16 * MIB)
    view = second.data[:100]
    assert meter.peak_bytes() < 40 * MIB, "one follows the other"
    second.close()
    assert len(view) == 100, "and may be looked at"
    del third  # whose owner failed
    assert abs(data_bytes() - before) < 8 * MIB
    own = hold(64 * MIB)
    assert meter.peak_bytes() > 60 * MIB
    own.close()


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="no huge pages"
)
@pytest.mark.parametrize("returns_freed", [False, True])
def test_large_new_memory_prefers_huge_pages_if_freed_memory_is_returned(
    returns_freed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_returns_freed", returns_freed)
    size = 8 * 2**20
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapped:
        address = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
        host.prefer_huge_pages(address + 64, size - 64)
        advised = [
            (int(area.split("-")[0], 16), flags.split())
            for area, flags in re.findall(
                r"^([0-9a-f]+-[0-9a-f]+) .*?^VmFlags: (.*?)$",
                Path("/proc/self/smaps").read_text(),
                re.MULTILINE | re.DOTALL,
            )
        ]
        found = any(address <= start < address + size and "hg" in flags for start, flags in advised)
    assert found == returns_freed


def test_peaks_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_status_bytes", lambda field: 0)
    assert peak_resident_bytes() == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert resident_bytes() > 10 * MIB


def test_replacing_is_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    with replacing(path) as file:
        file.write(b"good")
    with pytest.raises(TypeError), replacing(path) as file:
        file.write("half")  # type: ignore[arg-type]
    assert path.read_bytes() == b"good"
    assert os.listdir(path.parent) == ["file"]


def test_existing_parent(tmp_path: Path) -> None:
    assert existing_parent(tmp_path / "not" / "yet") == tmp_path
    assert existing_parent(Path("runs/not/yet")).is_dir()
    assert disk_free_bytes(tmp_path / "not" / "yet") > 0


def test_probes_are_measured_once_and_again_on_request(tmp_path: Path, cache: Path) -> None:
    threads, handles = threading.active_count(), len(os.listdir("/proc/self/fd"))
    first = measure_probes(tmp_path / "runs" / "swap")
    assert not (tmp_path / "runs").exists()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, handles)
    assert all(
        value > 10 * MIB
        for name, value in dataclasses.asdict(first).items()
        if name in ("copy", "local")
    )
    assert 0 < first.local_latency_seconds < 0.1
    assert first.disk_write_synced <= first.disk_write * 3
    (kept,) = cache.iterdir()
    assert measure_probes(tmp_path / "runs" / "swap") == first
    assert measure_probes(tmp_path) == dataclasses.replace(first, directory=str(tmp_path))
    kept.write_text(json.dumps({"copy": -1}))  # damaged: measured again
    assert measure_probes(tmp_path, fresh=False).copy > 0
    assert json.loads(kept.read_text())["copy"] > 0


def test_a_disk_that_cannot_be_written_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"cannot write 64 MiB in /proc .*name another folder"):
        probe_disk(Path("/proc/nowhere"))


def test_probes_refuse_nonsense(probes: Probes) -> None:
    with pytest.raises(ConfigError, match="probe local=0"):
        dataclasses.replace(probes, local=0.0)


def test_speeds_follow_cores_and_shared_memory() -> None:
    assert shared_speeds([1.0, 1.0, 1.0], 2.0) == pytest.approx((1.0, 1.0, 2 / 3))
    assert shared_speeds([1.0, 1.25, 1.25, 1.6], 4.0) == pytest.approx((1.0, 0.8, 0.8, 0.625))
    # More are never faster.
    assert shared_speeds([1.0, 1.1, 0.9], 8.0) == pytest.approx((1.0, 1 / 1.1, 1 / 1.1))
    assert shared_speeds([1.0], 0.5) == (0.5,)


@pytest.mark.slow
def test_processes_that_compute_together_are_timed_and_leave_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "TURNS", 1)
    found = compute_together(2, 1)
    assert [len(each) for each in found] == [2, 2, 2, 2]
    assert all(0 < seconds < 60 for each in found[:3] for seconds in each)
    assert all(0 <= seconds < 60 for seconds in found[3])


def test_numbers_of_processes_between_powers_of_two_are_interpolated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each number from 1 to 4 was measured, in up to a minute on two cores."""
    requests: list[tuple[int, int]] = []

    def answer(worker: int) -> str:
        computing = requests[-1][1] if requests else 0
        return f"{1 + computing / 8} 0.1 0.1 {computing * module.REDUCED_BYTES} 0.5 0.0"

    monkeypatch.setattr(module, "_worker", lambda rank, *_: contextlib.nullcontext(rank))
    monkeypatch.setattr(module, "_request", lambda *request: requests.append(request))
    monkeypatch.setattr(module, "_answer", answer)
    seconds, sums, reductions, exchanges = compute_together(6, 1)
    assert seconds == pytest.approx([1 + count / 8 for count in range(1, 7)])
    assert sums == pytest.approx([0.1] * 6)
    assert reductions == pytest.approx([1, 2, 3, 4, 5, 6])
    assert exchanges == pytest.approx([0.5] * 6)
    assert [count for rank, count in requests if rank == 0] == [1, 2, 4, 6] * module.TURNS


def test_a_process_that_cannot_compute_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match="measure the cores ended with 1: is there memory"):
        compute_together(1, 1)


@no_cuda
def test_processes_are_measured_together_once(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    def compute(count: int, threads: int) -> tuple[list[float], ...]:
        requests.append((count, threads))
        found = [1.0, 1.5, 2.0], [0.001, 0.002, 0.003], [1e-9, 2e-9, 3e-9], [0.002, 0.003, 0.004]
        return tuple(each[:count] for each in found)

    monkeypatch.setattr(module, "compute_together", compute)
    three = ClusterConfig(kind="cpu", devices=3, threads=1, device_memory="1GiB")
    assert probe_together(choose_devices(three)).sum_seconds == (0.001, 0.002, 0.003)
    config = ClusterConfig(kind="cpu", devices=2, threads=1, device_memory="1GiB")
    first = probe_together(choose_devices(config))
    assert (first.sum_seconds, first.reduce_seconds) == ((0.001, 0.002), (1e-9, 2e-9))
    assert first.exchange_seconds == (0.002, 0.003)
    assert probe_together(choose_devices(config)) == first
    assert requests == [(3, 1)]
    assert probe_together(choose_devices(config), fresh=True) == first
    assert requests == [(3, 1), (2, 1)]
    assert probe_together(choose_devices(ClusterConfig(kind="cpu", devices=1))) == ALONE


def test_malloc_keeps_freed_memory_with_and_without_a_budget(probes: Probes) -> None:
    kept = cluster_of(
        ClusterConfig(kind="cpu", devices=1, threads=2, device_memory="1GiB"),
        tier="none",
        probes=probes,
    )
    free = cluster_of(ClusterConfig(kind="cpu", devices=1, threads=1), tier="none", probes=probes)
    for (device,) in (kept.devices, free.devices):
        assert device.gap_share < 0.05 < device.kept_share
    assert kept.devices[0].reserve_bytes > free.devices[0].reserve_bytes


@no_cuda
@pytest.mark.parametrize(
    ("cores", "variable", "settings", "expected"),
    [
        (0.5, "", {}, (1, 1)),
        (1, "", {}, (1, 1)),
        (2, "", {}, (2, 1)),
        (3.5, "", {}, (3, 1)),
        (16, "", {}, (8, 2)),
        (2, "", {"devices": 1}, (1, 2)),
        (2, "", {"devices": 3}, (3, 1)),
        (2, "1", {"devices": 1}, (1, 1)),
        (2, "2", {}, (1, 2)),
        (8, "4", {}, (2, 4)),
        (8, "4,2", {"devices": 4}, (4, 4)),
        (8, "many", {}, (8, 1)),
        (8, "0", {}, (8, 1)),
        (8, "4", {"threads": 2}, (4, 2)),
        (2, "", {"threads": 5}, (1, 5)),
    ],
)
def test_auto_starts_no_more_threads_than_cores(
    monkeypatch: pytest.MonkeyPatch,
    cores: float,
    variable: str,
    settings: dict[str, Any],
    expected: tuple[int, int],
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: float(cores))
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    choice = choose_devices(ClusterConfig(**settings))
    assert (choice.kind, choice.count, choice.threads) == ("cpu", *expected)


@no_cuda
def test_the_one_thread_that_torchrun_sets_is_no_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 8.0)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    monkeypatch.delenv("PARALLAX_RENDEZVOUS", raising=False)
    assert choose_devices(ClusterConfig(devices=2)).threads == 4
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert choose_devices(ClusterConfig(devices=2)).threads == 2


@no_cuda
def test_more_threads_than_cores_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 2.0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    output = [
        processes_of(choose_devices(ClusterConfig(devices=count))) for count in ("auto", 1, 3)
    ]
    assert output[:2] == ["2 processes × 1 thread on 2 cores", "1 process × 2 threads on 2 cores"]
    assert output[2].startswith(
        "3 processes × 1 thread share 2 cores: slower than with a core for each"
    )


@no_cuda
@pytest.mark.parametrize("devices", ["auto", 2])
def test_more_cuda_devices_than_present(devices: int | str) -> None:
    with pytest.raises(ConfigError, match=r"sees 0 cuda devices here; use cluster.kind=cpu"):
        choose_devices(ClusterConfig(kind="cuda", devices=devices))


def test_the_cluster_of_this_machine(tmp_path: Path, probes: Probes) -> None:
    cluster = cluster_of(
        ClusterConfig(kind="cpu", devices=4, threads=1), tier="auto", probes=probes
    )
    (node,) = cluster.nodes
    assert len(cluster.devices) == 4
    assert node.concurrent == min(4, usable_cores())
    first = cluster.devices[0]
    assert (first.kind, first.tier) == ("cpu", "disk")
    assert first.memory_bytes == pytest.approx(available_memory(4) * 0.8, rel=0.3)
    assert first.tier_bytes == pytest.approx(disk_free_bytes(tmp_path) * 0.8 / 4, rel=0.3)
    # A thread that copies has a core for itself, or its rank's half.
    share = 1.0 if usable_cores() >= 8 else 0.5
    assert first.write.bytes_per_second == probes.disk_write * share
    assert first.read.bytes_per_second == probes.disk_read * share
    # Its rank shares a core with it, or all cores with the two that each rank has.
    assert first.overlap_loss == 1 - (0.5 if share < 1 else min(1.0, usable_cores() / 12))


@no_cuda
@pytest.mark.parametrize(
    ("cores", "devices", "copying", "loss"),
    [
        (2, 1, 2, 1 / 3),
        (2, 1, 1, 0.0),
        (3, 1, 2, 0.0),
        (2, 2, 2, 0.5),
        (4, 2, 2, 1 / 3),
        (8, 2, 2, 0.0),
        (4, 2, 1, 0.0),
    ],
)
def test_a_rank_shares_the_cores_with_the_threads_that_copy_for_it(
    monkeypatch: pytest.MonkeyPatch,
    probes: Probes,
    cores: int,
    devices: int,
    copying: int,
    loss: float,
) -> None:
    """A rank on two cores has two threads that write: all three cannot run at once."""
    monkeypatch.setattr(machine, "usable_cores", lambda: float(cores))
    choice = choose_devices(ClusterConfig(kind="cpu", devices=devices, threads=1))
    cluster = build_cluster(
        ClusterConfig(devices=devices), choice, tier="disk", probes=probes, copying_threads=copying
    )
    assert cluster.devices[0].overlap_loss == pytest.approx(loss)
    assert cluster.local.bytes_per_second == probes.local


def test_given_sizes_win(probes: Probes) -> None:
    config = ClusterConfig(kind="cpu", devices=2, threads=1, device_memory="1GiB", disk="3GiB")
    for tier, expected in (("disk", 3 * 2**30 // 2), ("none", 0)):
        device = cluster_of(config, tier=tier, probes=probes).devices[1]
        assert (device.memory_bytes, device.tier, device.tier_bytes) == (2**30, tier, expected)


def test_host_tier_needs_cuda(probes: Probes) -> None:
    with pytest.raises(ConfigError, match=r"swap.tier=host: .* use swap.tier=disk"):
        cluster_of(ClusterConfig(kind="cpu"), tier="host", probes=probes)
    with pytest.raises(ConfigError, match=r"swap.tier=dsk.*did you mean 'disk'"):
        cluster_of(ClusterConfig(kind="cpu"), tier="dsk", probes=probes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_machine_uses_all_devices_and_pinned_memory(tmp_path: Path) -> None:
    measured = measure_probes(tmp_path)
    cluster = cluster_of(ClusterConfig(), tier="auto", probes=measured)
    assert len(cluster.devices) == torch.cuda.device_count() == cluster.nodes[0].concurrent
    for device in cluster.devices:
        assert (device.kind, device.tier) == ("cuda", "host")
        assert 0.9 < device.memory_bytes / torch.cuda.get_device_properties(0).total_memory <= 0.95
        assert device.write.bytes_per_second == measured.host_write > 2**30
    with pytest.raises(ConfigError, match=r"cluster\.devices=99"):
        cluster_of(ClusterConfig(devices=99), tier="auto", probes=measured)
