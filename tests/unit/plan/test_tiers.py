"""Tiers are objects: each is described once, and a registered tier is planned for and used as any other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import parallax
from parallax.errors import ConfigError, PlanError, SwapError
from parallax.machine.device import CpuCopies
from parallax.machine.local import ClusterConfig, build_cluster, choose_devices
from parallax.machine.probes import Probes
from parallax.model.describe import Chain, describe
from parallax.model.factory.mlp import MLP, MLPConfig
from parallax.plan.analytic.catalog import CatalogClusterConfig
from parallax.plan.config import PlanConfig
from parallax.plan.plan import Plan
from parallax.plan.search.search import search
from parallax.plan.tier import DISK, HOST, NONE, TIERS, Tier, choose_tier, tier_named, usual_tier
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.swap.config import SwapConfig
from parallax.swap.stores import tiers
from parallax.swap.stores.slots import SlotMap, StoreSlot
from parallax.swap.stores.store import DiskStore, Store
from parallax.swap.stores.tiers import StoreRequest, register_tier
from tests.plans import make_plan
from tests.unit.plan_fakes import block, profile

ROWS, STEPS, MIB = 8, 3, 2**20
WISHES = {
    "activations": {},
    "states": {"optimizer": "host", "parameters": "device"},
    "parameters": {"optimizer": "host", "parameters": "host"},
}
PROBES = Probes(
    directory="/",
    copy=8e9,
    disk_write=1e9,
    disk_read=2e9,
    disk_write_synced=1e9,
    host_write=4e9,
    host_read=4e9,
    local=1e9,
    local_latency_seconds=1e-4,
)

# ------------------------------------------------------------- what somebody writes who wants another tier

SECOND = Tier(
    name="second",
    key="disk",
    shared=True,
    steps=False,
    copied_by_threads=True,
    in_ram=False,
    bandwidth=lambda found: (found.disk_write / 2, found.disk_read / 2),
    free_bytes=lambda folder, memory: 2**30,
)
MEMORY = Tier(
    name="memory",
    key="host_memory",
    shared=False,
    steps=True,
    copied_by_threads=False,
    in_ram=False,  # of another process, say
    bandwidth=lambda found: (found.copy, found.copy),
    free_bytes=lambda folder, memory: memory,
)


class Copied:
    """A copy that is done when it begins."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def cancel(self) -> bool:
        return False

    def seconds(self) -> float:
        return 0.0


class MemoryStore:
    """Bytes in one array."""

    def __init__(self, request: StoreRequest) -> None:
        self.tier, self.waste_bytes = request.tier.name, 0
        self.slots = SlotMap(
            request.capacity, "the memory", request.remedies.when_full(request.tier)
        )
        self._bytes = torch.empty(2 * request.capacity, dtype=torch.uint8)

    def write(self, data: Tensor) -> tuple[StoreSlot, Copied]:
        slot = self.slots.allocate(data.numel())
        for at, part in self._parts(slot, data):
            self._bytes[at : at + part.numel()] = part
        return slot, Copied()

    def read(self, slot: StoreSlot, target: Tensor) -> Copied:
        for at, part in self._parts(slot, target):
            part.copy_(self._bytes[at : at + part.numel()])
        return Copied()

    def free(self, slot: StoreSlot) -> None:
        self.slots.release(slot)

    def close(self) -> None:
        pass

    def _parts(self, slot: StoreSlot, data: Tensor) -> Iterator[tuple[int, Tensor]]:
        done = 0
        for offset, size in slot.parts(0, slot.size):
            yield offset, data[done : done + size]
            done += size


def open_second(folder: Path, opened: list[Store]) -> Callable[[StoreRequest], Store]:
    def open_store(request: StoreRequest) -> Store:
        store = DiskStore(folder, request.capacity, request.copies, threads=1, tier=request.tier)
        opened.append(store)
        return store

    return open_store


def open_memory(opened: list[Store]) -> Callable[[StoreRequest], Store]:
    def open_store(request: StoreRequest) -> Store:
        opened.append(MemoryStore(request))
        return opened[-1]

    return open_store


# ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[list[Store]]:
    """The stores that were opened in tiers of one's own."""
    found: list[Store] = []
    register_tier(SECOND, open_second(tmp_path / "second", found))
    register_tier(MEMORY, open_memory(found))
    yield found
    for tier in (SECOND, MEMORY):
        del TIERS[tier.name], tiers._OPENERS[tier.name]


def planned(chain: Chain, tier: str, **wishes: str) -> Plan:
    """By the planner, for one device of this machine whose tier is ``tier``."""
    blocks = []
    for described in chain.blocks:
        size = sum(p.numel() * 4 for p in described.module.parameters())
        blocks.append(block(parameters=size // 4, parameter_bytes=size, moved=4096, input=4096))
    costs = replace(profile(blocks), fingerprint=chain.fingerprint())
    config = ClusterConfig(kind="cpu", devices=1, threads=1, device_memory="1GiB")
    config = replace(config, host_memory="64MiB", disk="64MiB")
    machines = build_cluster(config, choose_devices(config), tier=tier, probes=PROBES)
    plan, _ = search(
        costs,
        machines,
        PlanConfig(stages=1, schedule="1f1b", activations="offload", **wishes),
        global_batch=ROWS,
        microbatch=2,
        swap=True,
    )
    return plan


def trained(chain: Chain, plan: Plan, scratch: Path) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, weights, and the bytes of offloaded activations."""
    swap = SwapConfig(tier=plan.tier, minimum_bytes=1)
    engine = Engine.build(chain, plan, loss=MLP.loss, scratch=scratch, swap=swap)
    draw = torch.Generator().manual_seed(1)
    batch = TensorRows(
        torch.randint(0, 256, (ROWS, 4), generator=draw),
        torch.randint(0, 256, (ROWS,), generator=draw),
    )
    try:
        results = [engine.step(batch) for _ in range(STEPS)]
        weights = {name: tensor.detach().clone() for name, tensor in engine.parameters.items()}
        return [r.loss for r in results], weights, sum(r.swap.bytes_out for r in results)
    finally:
        engine.close()


@pytest.mark.sampled
@pytest.mark.parametrize("wishes", WISHES.values(), ids=WISHES)
@pytest.mark.parametrize("tier", [SECOND, MEMORY], ids=lambda tier: tier.name)
def test_a_tier_of_ones_own_is_planned_for_and_trains_the_same(
    opened: list[Store], tmp_path: Path, tier: Tier, wishes: dict[str, str]
) -> None:
    chain = describe(MLPConfig(layers=3, hidden=16, embedding=4, sequence=4).build)
    plan = planned(chain, tier.name, **wishes)
    assert plan.tier == tier.name
    plan.save(tmp_path / "plan.yaml")
    kept = trained(chain, make_plan(chain, global_batch=ROWS), tmp_path / "unused")
    offloaded = trained(chain, Plan.load(tmp_path / "plan.yaml"), tmp_path / "unused")
    assert offloaded[0] == kept[0]
    assert all(torch.equal(offloaded[1][name], tensor) for name, tensor in kept[1].items())
    assert offloaded[2] > kept[2] == 0
    assert {store.tier for store in opened} == {tier.name}
    stage = plan.stages[0]
    states, streamed = stage.optimizer_offload > 0, stage.parameter_offload > 0
    assert (states, streamed) == ("optimizer" in wishes, wishes.get("parameters") == "host")
    assert len(opened) == 1 + (states and not tier.steps) + streamed  # states stay where they step
    assert not (tmp_path / "unused").exists()


def test_the_machine_and_the_catalog_ask_the_tier(opened: list[Store]) -> None:
    config = ClusterConfig(kind="cpu", devices=4, threads=1, disk="6GiB", host_memory="2GiB")
    choice = choose_devices(config)
    device = build_cluster(config, choice, tier="second", probes=PROBES).devices[0]
    disk = build_cluster(config, choice, tier="disk", probes=PROBES).devices[0]
    assert (device.tier, device.swaps_to, device.tier_bytes) == ("second", SECOND, 3 * 2**29)
    assert device.write.bytes_per_second == disk.write.bytes_per_second / 2
    machines = build_cluster(config, choice, tier="second", probes=PROBES)
    assert machines.while_all_swap(device).read.bytes_per_second < device.read.bytes_per_second
    memory = build_cluster(config, choice, tier="memory", probes=PROBES)
    assert memory.while_all_swap(memory.devices[0]) == memory.devices[0]
    assert (memory.devices[0].tier_bytes, memory.devices[0].overlap_loss) == (2**29, 0.0)
    far = CatalogClusterConfig(disk="8TiB").build(tier="second").devices[0]
    assert (far.tier, far.tier_bytes, far.host_update_seconds) == ("second", 2**40, 0.0)


def test_a_loop_of_ones_own_swaps_there(opened: list[Store]) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    limit = sum(2 * p.nbytes for p in model.parameters()) + 2**16
    with parallax.swap(model, limit, tier="second", minimum_bytes=1) as swapping:
        model(torch.ones(128, 64)).square().sum().backward()
    assert swapping.statistics.bytes_out > 0
    assert "in the second tier" in swapping.report()
    assert [store.tier for store in opened] == ["second"]


def test_what_is_full_names_the_tier_and_its_key(opened: list[Store], tmp_path: Path) -> None:
    config, data = SwapConfig(tier="second"), torch.zeros(2 * MIB, dtype=torch.uint8)
    store = config.open_store("second", MIB, CpuCopies(), tmp_path)
    with pytest.raises(SwapError, match=r"the second tier in .* is full: .*\(cluster\.disk\)"):
        store.write(data)
    store.close()
    store = config.open_store("memory", MIB, CpuCopies(), tmp_path)
    with pytest.raises(SwapError, match=r"is full: .*\(cluster\.host_memory\)"):
        store.write(data)


def test_names_are_taken_once(opened: list[Store]) -> None:
    for name in ("host", "second", "auto"):
        with pytest.raises(PlanError, match=f"tier {name}: the name is taken"):
            register_tier(replace(SECOND, name=name), open_memory([]))
    with pytest.raises(ConfigError, match="accepted are host_memory, disk"):
        replace(SECOND, name="third", key="ssd")


def test_unknown_tiers(tmp_path: Path) -> None:
    chain = describe(MLPConfig(layers=2, hidden=8, embedding=4, sequence=4).build)
    for tier, message in (("second", "tier second is not registered"), ("none", "holds no data")):
        plan = make_plan(chain, directive="offload", global_batch=ROWS, tier=tier)
        with pytest.raises(PlanError, match=message):
            Engine.build(chain, plan, loss=MLP.loss, scratch=tmp_path)
    with pytest.raises(
        ConfigError, match=r"swap\.tier=second: accepted are auto, host, disk, none"
    ):
        SwapConfig(tier="second")
    with pytest.raises(PlanError, match="registered are host, disk, none"):
        tier_named("tape")


def test_what_auto_means_is_reported_once() -> None:
    assert usual_tier(device_is_ram=True) is choose_tier("t", "auto", device_is_ram=True) is DISK
    assert usual_tier(device_is_ram=False) is choose_tier("t", "auto", device_is_ram=False) is HOST
    assert choose_tier("t", "none", device_is_ram=True) is NONE
    with pytest.raises(
        ConfigError, match="t=host: on a CPU the RAM is the device itself; use t=disk"
    ):
        choose_tier("t", "host", device_is_ram=True)
