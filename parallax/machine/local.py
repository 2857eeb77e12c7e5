"""Choose the devices of this machine for a run, and describe them as a cluster for the planner."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from parallax.common.units import parse_bytes
from parallax.errors import ConfigError, check_choice, check_count, printable
from parallax.machine.accelerator import DeviceFacts
from parallax.machine.accelerators import (
    accelerator_named,
    known_kinds,
    present_devices,
    present_kind,
    ranks_devices,
)
from parallax.machine.host import available_memory, node_name, usable_cores
from parallax.machine.preflight.needs import PROCESS_BYTES
from parallax.machine.probes import ALONE, HostSpeeds, Probes, measure_together
from parallax.plan.analytic.catalog import UPDATE_BYTES
from parallax.plan.analytic.hardware import LINK_KINDS
from parallax.plan.cluster import Cluster, Device, Link, Node, with_buckets
from parallax.plan.tier import AUTO, HOST, ROOM_KEYS, TIERS, Tier, choose_tier

RANKS_PER_GPU = 8
MOST_PROCESSES = 8  # on a CPU with devices=auto
_ON_CPU = "cpu:"  # prefix of a budget
# small blocks of malloc and buffers of libraries: up to 7 MiB measured with one thread
CPU_RESERVE = 13 * 2**19
THREAD_RESERVE = 3 * 2**19  # the same for each further thread: 2 MiB were measured with two
GAPS = 0.015  # gaps of malloc when all freed memory is returned: up to 1 % measured
COPYING_THREADS = 2  # the default of swap.threads
# freed memory that malloc keeps, and gaps: up to 34 % measured, six times the bytes of a block itself
KEPT = 0.36


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The devices to use; ``auto`` uses those of this machine.

    ``kind``: cpu, or torch's name of an accelerator: cuda, xpu (auto: the kind that is present).
    ``devices``: the number of devices (auto: all accelerators; on a CPU as many as its cores allow, at most eight). On
        a CPU a device is a process that computes on ``threads`` cores (auto: ``OMP_NUM_THREADS``, otherwise its share
        of the cores).
    ``device_memory``: the memory budget of each device, a hard limit for parameters, gradients, optimizer states and
        activations (``cpu:BYTES`` sets it for CPU processes only, and other kinds use auto).
    ``host_memory`` and ``disk``: capacity of each offload tier for all ranks of this machine.
    ``link``: the link between nodes: measured (auto), or bytes per second, or a kind of link such as ethernet-10g.
    """

    name: str = "local"
    kind: str = AUTO
    devices: int | str = AUTO
    threads: int | str = AUTO
    device_memory: int | str = AUTO
    host_memory: int | str = AUTO
    disk: int | str = AUTO
    link: int | str = AUTO

    def __post_init__(self) -> None:
        requested_link(self)
        check_choice("cluster.kind", self.kind, [AUTO, "cpu", *known_kinds()])
        for key in ("devices", "threads"):
            check_count(f"cluster.{key}", getattr(self, key))
        self.memory_of("cpu")
        for key in ROOM_KEYS:
            if getattr(self, key) != AUTO:
                parse_bytes(getattr(self, key), f"cluster.{key}")

    def memory_of(self, kind: str) -> int | None:
        """Return the memory budget in bytes of a device of ``kind``; None if it is ``auto``."""
        wanted = self.device_memory
        if isinstance(wanted, str) and wanted.startswith(_ON_CPU):
            wanted = wanted.removeprefix(_ON_CPU) if kind == "cpu" else AUTO
        return None if wanted == AUTO else parse_bytes(wanted, "cluster.device_memory")


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The devices of a run on this machine: kind, number, and CPU threads of each.

    For accelerators also:

    ``present``  number of devices on the host
    ``shares``   for each rank, the bytes of its device and the number of ranks that share it
    ``apart``    whether at least two ranks of the run have different devices
    """

    kind: str
    count: int
    threads: int
    present: int = 0
    apart: bool = False
    shares: tuple[tuple[int, int], ...] = ()


def requested_link(config: ClusterConfig) -> Link | None:
    """Return the link between nodes that ``config`` sets; None if it must be measured."""
    if config.link == AUTO:
        return None
    if config.link in LINK_KINDS:
        return LINK_KINDS[str(config.link)].link()
    try:
        return Link(bytes_per_second=parse_bytes(config.link, "cluster.link"))
    except ConfigError:
        raise ConfigError(
            f"cluster.link={printable(str(config.link))}: accepted are auto, bytes per second such as 125MB, and "
            f"kinds of links: {', '.join(LINK_KINDS)}"
        ) from None


def chosen_kind(config: ClusterConfig) -> str:
    """Return the configured kind of device, or the kind that is present if none is configured."""
    return config.kind if config.kind != AUTO else present_kind() or "cpu"


def choose_devices(config: ClusterConfig, *, at_least: int = 1) -> DeviceChoice:
    """Return the devices of a run with the settings ``config``.

    If the number of devices is ``auto``, at least ``at_least`` devices are chosen, the number that a plan needs. Ranks
    may share a GPU, or a CPU's cores. Raises :class:`ConfigError` if an accelerator is requested and absent, or if more
    than eight ranks would share an accelerator.
    """
    kind = chosen_kind(config)
    known, seen = ranks_devices(kind), present_devices(kind) if kind != "cpu" else ()
    present = known.present if known else len(seen)
    cores, threads = usable_cores(), _requested_threads(config)
    usual = present if kind != "cpu" else min(MOST_PROCESSES, int(cores) // (threads or 1))
    count = max(at_least, usual)
    if config.devices != AUTO:
        count = int(config.devices)
    if kind != "cpu" and not 0 < count <= RANKS_PER_GPU * present:
        wanted = f"cluster.kind={kind}" if config.devices == AUTO else f"cluster.devices={count}"
        remedy = f"use {RANKS_PER_GPU * present} or fewer" if present else "use cluster.kind=cpu"
        raise ConfigError(
            f"{wanted}: torch {torch.__version__} sees {present} {kind} devices here; {remedy}"
        )
    return DeviceChoice(
        kind,
        count,
        threads or max(1, int(cores) // count),
        present=present,
        apart=known.apart if known else min(count, present) > 1,
        shares=known.shares
        if known and len(known.shares) == count
        else _distribute_ranks(seen, count),
    )


def _requested_threads(config: ClusterConfig) -> int:
    """Return the threads per rank set by ``cluster.threads`` or ``OMP_NUM_THREADS``; 0 if neither is set."""
    if config.threads != AUTO:
        return int(config.threads)
    variable = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    # torchrun sets 1 if the user has set nothing; the launch scripts, which set the rendezvous, do not
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and "PARALLAX_RENDEZVOUS" not in os.environ
    usual = by_torchrun and variable == "1"
    return int(variable) if variable.isdecimal() and not usual else 0


def processes_of(choice: DeviceChoice) -> str:
    """Return a line of text on how the processes of ``choice`` share a CPU's cores; '' for accelerators."""
    if choice.kind != "cpu":
        return ""
    count, cores = choice.count * choice.threads, usable_cores()
    processes = f"{choice.count} {'process' if choice.count == 1 else 'processes'}"
    threads = f"{choice.threads} thread{'s' if choice.threads > 1 else ''}"
    have = f"{cores:g} {'core' if cores == 1 else 'cores'}"
    if count <= max(1, cores):
        return f"{processes} × {threads} on {have}"
    return f"{processes} × {threads} share {have}: slower than with a core for each"


def _distribute_ranks(seen: Sequence[DeviceFacts], count: int) -> tuple[tuple[int, int], ...]:
    """Return, for each of ``count`` ranks, the bytes of its device and the number of ranks that share the device.

    ``seen`` are the devices that this process sees.
    """
    sharing = -(-count // max(1, len(seen)))
    found = itertools.islice(itertools.cycle(seen), count)
    return tuple((device.total_bytes, sharing) for device in found)


def build_cluster(
    config: ClusterConfig,
    choice: DeviceChoice,
    *,
    tier: str,
    probes: Probes,
    together: HostSpeeds = ALONE,
    copying_threads: int = COPYING_THREADS,
) -> Cluster:
    """Return this machine as a cluster of one node.

    ``tier`` is the setting ``swap.tier``: auto, or the name of an offload tier. ``together`` is the result of
    :func:`probe_together`. ``copying_threads`` is the setting ``swap.threads``: the threads of a rank that copy in one
    direction at the same time.

    If a memory budget is ``auto``, it leaves a margin that the plan does not use: a twentieth of an accelerator's
    memory for gaps in the allocator, or a fifth of the available RAM for the interpreter and torch itself.
    """
    target = offload_tier(choice, tier)
    copying = _copying_share(choice) if target.copied_by_threads else 1.0
    computing = _computing_share(choice, copying_threads) if target.copied_by_threads else 1.0
    write, read = (rate * copying for rate in target.bandwidth(probes))
    tier_bytes = _tier_bytes(config, target, probes) // choice.count
    devices = tuple(
        Device(
            kind=choice.kind,
            memory_bytes=memory,
            tier=target.name,
            tier_bytes=tier_bytes,
            write=Link(bytes_per_second=write),
            read=Link(bytes_per_second=read),
            reserve_bytes=CPU_RESERVE + choice.threads * THREAD_RESERVE
            if choice.kind == "cpu"
            else accelerator_named(choice.kind).reserve_bytes,
            **_beside_allocator(choice, probes),
            # An accelerator's allocator reports allocated bytes, and its own gaps are kept out of the budget.
            gap_share=GAPS if choice.kind == "cpu" else 0.0,
            kept_share=KEPT if choice.kind == "cpu" else 0.0,
            overlap_loss=1 - computing,
            tier_share=copying,
            **_beside_tier(config, choice, target, probes),
            host_update_seconds=_host_update_seconds(target, probes),
        )
        for memory in _device_memory(config, choice)
    )
    able = choice.present if choice.kind != "cpu" else usable_cores() / choice.threads
    concurrent = min(choice.count, able)
    local = Link(bytes_per_second=probes.local, latency_seconds=probes.local_latency_seconds)
    node = Node(
        name=node_name(),
        devices=devices,
        concurrent=concurrent,
        speeds=together.speeds,
        sum_seconds=together.sum_seconds,
        reduce_seconds=together.reduce_seconds,
        exchange_seconds=together.exchange_seconds,
    )
    return with_buckets(Cluster(nodes=(node,), local=local, remote=local))


def _beside_allocator(choice: DeviceChoice, probes: Probes) -> dict[str, Any]:
    """Return the device memory that a process uses outside torch's allocator, as fields of
    :class:`~parallax.plan.cluster.Device`.

    Each process has a context on its device, even if processes share the device. Communication buffers count only if
    ranks have different devices; otherwise ranks communicate through the host.
    """
    if choice.kind == "cpu":
        return {}
    accelerator, seen = accelerator_named(choice.kind), present_devices(choice.kind)
    usual = max(accelerator.usual_context_bytes(each.name) for each in seen)
    # the measurement includes memory of other processes on the device
    context = min(probes.context_bytes, 2 * usual) if usual else probes.context_bytes
    return {
        "context_bytes": context or usual,
        "collective_bytes": choice.apart * accelerator.collective_bytes,
        "edge_bytes": choice.apart * accelerator.edge_bytes,
    }


def _beside_tier(
    config: ClusterConfig, choice: DeviceChoice, tier: Tier, probes: Probes
) -> dict[str, Any]:
    """Return the bandwidth of copies between device and host memory, and the bytes of host memory for each rank, as
    fields of :class:`~parallax.plan.cluster.Device`.

    The result is empty for CPUs, and for accelerators that offload to host memory or do not offload. Only an
    accelerator with a slower offload tier, such as disk, needs these fields in addition to the fields of that tier.
    """
    if choice.kind == "cpu" or not tier.exists or tier.in_ram:
        return {}
    rate = min(HOST.bandwidth(probes))
    free = _tier_bytes(config, HOST, probes) // choice.count
    return {"host_link": Link(bytes_per_second=rate), "host_bytes": free}


def offload_tier(choice: DeviceChoice, tier: str) -> Tier:
    """Return the offload tier named ``tier`` (``swap.tier``). ``auto`` chooses one for the kind of device."""
    return choose_tier("swap.tier", tier, device_is_ram=choice.kind == "cpu")


def probe_together(choice: DeviceChoice, *, fresh: bool = False) -> HostSpeeds:
    """Return the speed of 1, 2, … devices that compute at once, relative to one device alone, and the times of their
    all-reduces.

    This is measured only for several processes that share a CPU. Otherwise the result is empty, because other devices
    do not slow each other down. ``fresh`` measures again instead of reading the cache.
    """
    if choice.kind != "cpu" or choice.count == 1:
        return ALONE
    return measure_together(choice.count, choice.threads, fresh=fresh)


def _copying_share(choice: DeviceChoice) -> float:
    """Return the fraction of a core that a copying thread gets.

    It is a half if the ranks use all cores, because the thread then shares a core with its rank.
    """
    spare = usable_cores() - choice.count * choice.threads
    return 1.0 if choice.kind != "cpu" or spare >= choice.count else 0.5


def _computing_share(choice: DeviceChoice, copying: int) -> float:
    """Return the fraction of its cores on which a rank computes while ``copying`` of its threads copy to and from the
    offload tier."""
    if _copying_share(choice) < 1 or choice.kind != "cpu":
        return _copying_share(choice)
    return min(1.0, usable_cores() / (choice.count * (choice.threads + copying)))


def _host_update_seconds(tier: Tier, probes: Probes) -> float:
    """Return the seconds of an optimizer step on the host per byte of weights, for AdamW in full precision; 0 without
    an offload tier.

    The step is limited by memory bandwidth, so the seconds follow from the measured copy bandwidth of one thread; a
    copy reads and writes each byte. The planner adds the transfers of the offload tier
    (:func:`parallax.plan.cost.states.load_states`).
    """
    if not tier.exists:
        return 0.0
    return UPDATE_BYTES / torch.float32.itemsize / (2 * probes.copy)


def _device_memory(config: ClusterConfig, choice: DeviceChoice) -> list[int]:
    if (wanted := config.memory_of(choice.kind)) is not None:
        return [wanted] * choice.count
    if choice.kind != "cpu":
        return [total * 19 // 20 // ranks for total, ranks in choice.shares]
    free = available_memory(choice.count)
    return [max(1, min(free * 8 // 10, free - PROCESS_BYTES))] * choice.count


def _tier_bytes(config: ClusterConfig, tier: Tier, probes: Probes) -> int:
    """Return the capacity of the offload ``tier`` in bytes, for all ranks of this machine together; 0 if ``tier`` is no
    offload tier.

    If the capacity is ``auto`` in ``config``, it is four fifths of the bytes that are free now.
    """
    if not tier.exists:
        return 0
    wanted = getattr(config, tier.key)
    if wanted == AUTO:
        return tier.free_bytes(Path(probes.directory), available_memory()) * 8 // 10
    return parse_bytes(wanted, f"cluster.{tier.key}")


def divided(config: ClusterConfig, copies: int, folder: Path) -> ClusterConfig:
    """Divide the devices of ``config``, the cores, and each tier into ``copies`` equal parts, and return the settings
    of one part.

    ``folder`` is the folder of the swap files, whose free bytes are divided. Raises :class:`ConfigError` if there are
    fewer devices than copies.
    """
    choice = choose_devices(config)
    if copies > choice.count:
        raise ConfigError(
            f"serve.replicas={copies}: each copy needs a device, and cluster.devices is {choice.count}; set "
            f"cluster.devices={copies} or more"
        )
    parts: dict[str, Any] = {}
    for tier in TIERS.values():
        if tier.exists:
            wanted = getattr(config, tier.key)
            free = tier.free_bytes(folder, available_memory()) * 8 // 10
            total = free if wanted == AUTO else parse_bytes(wanted, f"cluster.{tier.key}")
            parts[tier.key] = total // copies
    return replace(
        config,
        devices=choice.count // copies,
        threads=choice.threads,
        device_memory=min(_device_memory(config, choice)),
        **parts,
    )
