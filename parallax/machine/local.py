"""The devices of this machine, and the cluster that a run on it can use."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
from parallax.machine.probes import Probes, measure_speeds
from parallax.plan.analytic.catalog import UPDATE_BYTES
from parallax.plan.analytic.hardware import LINK_KINDS
from parallax.plan.cluster import Cluster, Device, Link, Node, with_buckets
from parallax.plan.tier import AUTO, ROOM_KEYS, Tier, choose_tier

RANKS_PER_GPU = 8
MOST_PROCESSES = 8  # of a CPU, where nobody says how many
_ON_CPU = "cpu:"  # before a budget
# Small blocks of malloc, buffers of libraries: with one thread, up to 7 MiB measured.
CPU_RESERVE = 13 * 2**19
THREAD_RESERVE = 3 * 2**19  # of it for each thread: with two, 2 MiB more were measured
GAPS = 0.015  # of malloc, where all freed memory goes back: up to 1 % measured
COPYING_THREADS = 2  # as many as a rank has where nobody says (swap.threads)
# Freed memory that malloc keeps, and the holes between: up to 34 % measured, and six times what a block needs itself.
KEPT = 0.36


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The devices to use; ``auto`` asks the machine.

    ``kind``: cpu, or an accelerator by torch's name: cuda, xpu (auto: what is present). ``devices``: how many (auto:
    all accelerators; on a CPU no more than its cores, at most eight). On a CPU a device is a process that computes on
    ``threads`` cores (auto: ``OMP_NUM_THREADS``, otherwise its part of them). ``device_memory``: the budget
    of each device, a hard limit for parameters, gradients, optimizer states and activations (``cpu:BYTES``: of a CPU's
    processes, and auto of anything else). ``host_memory`` and
    ``disk``: bytes that all offloaded data of this machine may take in either tier. ``link``: what goes between nodes
    is measured (auto), or known: bytes per second, or a kind of link such as ethernet-10g.
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
        asked_link(self)
        check_choice("cluster.kind", self.kind, [AUTO, "cpu", *known_kinds()])
        for key in ("devices", "threads"):
            check_count(f"cluster.{key}", getattr(self, key))
        self.memory_of("cpu")
        for key in ROOM_KEYS:
            if getattr(self, key) != AUTO:
                parse_bytes(getattr(self, key), f"cluster.{key}")

    def memory_of(self, kind: str) -> int | None:
        """The budget of a device of ``kind``; None where the machine is asked."""
        asked = self.device_memory
        if isinstance(asked, str) and asked.startswith(_ON_CPU):
            asked = asked.removeprefix(_ON_CPU) if kind == "cpu" else AUTO
        return None if asked == AUTO else parse_bytes(asked, "cluster.device_memory")


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The devices of a run on this machine: what kind, how many, and how many cores each computes on. Of accelerators
    ``present`` are there, ``shares`` are the bytes of each rank's, and how many ranks have that; ``apart`` says whether
    some two ranks of the run have one each."""

    kind: str
    count: int
    threads: int
    present: int = 0
    apart: bool = False
    shares: tuple[tuple[int, int], ...] = ()


def asked_link(config: ClusterConfig) -> Link | None:
    """The link between nodes that ``config`` names; None where it is to be measured."""
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
    """The kind of device that is asked for, or the one that is there."""
    return config.kind if config.kind != AUTO else present_kind() or "cpu"


def choose_devices(config: ClusterConfig, *, at_least: int = 1) -> DeviceChoice:
    """Resolve ``auto``, to ``at_least`` as many devices as the plan asks for. Ranks may share a GPU, or a CPU's cores.

    Raises :class:`ConfigError` where an accelerator is asked for and absent, or more than eight ranks would share one.
    """
    kind = chosen_kind(config)
    told, seen = ranks_devices(kind), present_devices(kind) if kind != "cpu" else ()
    present = told.present if told else len(seen)
    cores, threads = usable_cores(), _asked_threads(config)
    usual = present if kind != "cpu" else min(MOST_PROCESSES, int(cores) // (threads or 1))
    count = max(at_least, usual)
    if config.devices != AUTO:
        count = int(config.devices)
    if kind != "cpu" and not 0 < count <= RANKS_PER_GPU * present:
        asked = f"cluster.kind={kind}" if config.devices == AUTO else f"cluster.devices={count}"
        remedy = f"use {RANKS_PER_GPU * present} or fewer" if present else "use cluster.kind=cpu"
        raise ConfigError(
            f"{asked}: torch {torch.__version__} sees {present} {kind} devices here; {remedy}"
        )
    return DeviceChoice(
        kind,
        count,
        threads or max(1, int(cores) // count),
        present=present,
        apart=told.apart if told else min(count, present) > 1,
        shares=told.shares if told and len(told.shares) == count else _dealt(seen, count),
    )


def _asked_threads(config: ClusterConfig) -> int:
    """The threads of each rank that the user asks for, by ``cluster.threads`` or ``OMP_NUM_THREADS``; 0 where nobody
    does."""
    if config.threads != AUTO:
        return int(config.threads)
    variable = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    # Torchrun sets 1 where the user has set nothing; the launch scripts, which say where ranks meet, do not.
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and "PARALLAX_RENDEZVOUS" not in os.environ
    usual = by_torchrun and variable == "1"
    return int(variable) if variable.isdecimal() and not usual else 0


def processes_of(choice: DeviceChoice) -> str:
    """How a CPU's cores are shared by the processes of ``choice``, in one line; empty for accelerators."""
    if choice.kind != "cpu":
        return ""
    count, cores = choice.count * choice.threads, usable_cores()
    processes = f"{choice.count} {'process' if choice.count == 1 else 'processes'}"
    threads = f"{choice.threads} thread{'s' if choice.threads > 1 else ''}"
    have = f"{cores:g} {'core' if cores == 1 else 'cores'}"
    if count <= max(1, cores):
        return f"{processes} × {threads} on {have}"
    return f"{processes} × {threads} share {have}: as asked for, and slower than a core for each thread"


def _dealt(seen: Sequence[DeviceFacts], count: int) -> tuple[tuple[int, int], ...]:
    """The share of each of ``count`` ranks in the devices that this process has ``seen``."""
    sharing = -(-count // max(1, len(seen)))
    found = itertools.islice(itertools.cycle(seen), count)
    return tuple((device.total_bytes, sharing) for device in found)


def build_cluster(
    config: ClusterConfig,
    choice: DeviceChoice,
    *,
    tier: str,
    probes: Probes,
    speeds: tuple[float, ...] = (),
    copying_threads: int = COPYING_THREADS,
) -> Cluster:
    """This machine as a cluster of one node. ``tier``: auto, or a tier's name (``swap.tier``). ``speeds``: of each of
    1, 2, … of its devices that compute at once, from :func:`probe_speeds`. ``copying_threads``: those of a rank that
    copy one way at the same time (``swap.threads``).

    A budget left at auto keeps a margin for what no plan counts: the allocator's gaps (a twentieth of the device), the
    interpreter and torch itself (a fifth of the available RAM).
    """
    below = tier_below(choice, tier)
    copying = _copying_share(choice) if below.copied_by_threads else 1.0
    computing = _computing_share(choice, copying_threads) if below.copied_by_threads else 1.0
    write, read = (rate * copying for rate in below.bandwidth(probes))
    tier_bytes = _tier_bytes(config, below, probes) // choice.count
    devices = tuple(
        Device(
            kind=choice.kind,
            memory_bytes=memory,
            tier=below.name,
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
            host_update_seconds=_host_update_seconds(below, probes, write, read),
        )
        for memory in _device_memory(config, choice)
    )
    able = choice.present if choice.kind != "cpu" else usable_cores() / choice.threads
    concurrent = min(choice.count, able)
    local = Link(bytes_per_second=probes.local, latency_seconds=probes.local_latency_seconds)
    node = Node(name=node_name(), devices=devices, concurrent=concurrent, speeds=speeds)
    return with_buckets(Cluster(nodes=(node,), local=local, remote=local))


def _beside_allocator(choice: DeviceChoice, probes: Probes) -> dict[str, int]:
    """What a process takes of a device that torch's allocator knows nothing of. Each of those that share one has a
    context; they talk through the host where no two ranks have a device each."""
    if choice.kind == "cpu":
        return {}
    accelerator, seen = accelerator_named(choice.kind), present_devices(choice.kind)
    usual = max(accelerator.usual_context_bytes(each.name) for each in seen)
    # What others hold there was measured as if it were the context's.
    context = min(probes.context_bytes, 2 * usual) if usual else probes.context_bytes
    return {
        "context_bytes": context or usual,
        "collective_bytes": choice.apart * accelerator.collective_bytes,
        "edge_bytes": choice.apart * accelerator.edge_bytes,
    }


def tier_below(choice: DeviceChoice, tier: str) -> Tier:
    """The tier that takes what is offloaded, where ``tier`` (``swap.tier``) may be auto."""
    return choose_tier("swap.tier", tier, device_is_ram=choice.kind == "cpu")


def probe_speeds(choice: DeviceChoice, *, fresh: bool = False) -> tuple[float, ...]:
    """How fast each of 1, 2, … devices computes while all do. Measured only for processes that share one processor;
    devices that share nothing slow nobody down."""
    if choice.kind != "cpu" or choice.count == 1:
        return ()
    return measure_speeds(choice.count, choice.threads, fresh=fresh)


def _copying_share(choice: DeviceChoice) -> float:
    """What a thread that copies to and from the tier gets of a core: where ranks leave none for it, it shares one with
    its rank, which computes as much more slowly."""
    spare = usable_cores() - choice.count * choice.threads
    return 1.0 if choice.kind != "cpu" or spare >= choice.count else 0.5


def _computing_share(choice: DeviceChoice, copying: int) -> float:
    """What a rank computes with while threads of its own copy to and from the tier: where all of them have more work
    than there are cores, each thread gets its share."""
    if _copying_share(choice) < 1 or choice.kind != "cpu":
        return _copying_share(choice)
    return min(1.0, usable_cores() / (choice.count * (choice.threads + copying)))


def _host_update_seconds(tier: Tier, probes: Probes, write: float, read: float) -> float:
    """The step of one byte of weights below the device, in full precision with AdamW: memory traffic of one thread,
    whose copies read and write each byte, and where the tier is no place to step in, its two bytes of states up and
    down. What the planner adds for gradients going down and weights coming up
    (:func:`parallax.plan.cost.stage.load_states`) is one of these two."""
    if not tier.exists:
        return 0.0
    stepping = UPDATE_BYTES / torch.float32.itemsize / (2 * probes.copy)
    return stepping + (0.0 if tier.steps else 1 / write + 1 / read)


def _device_memory(config: ClusterConfig, choice: DeviceChoice) -> list[int]:
    if (asked := config.memory_of(choice.kind)) is not None:
        return [asked] * choice.count
    if choice.kind != "cpu":
        return [total * 19 // 20 // ranks for total, ranks in choice.shares]
    free = available_memory(choice.count)
    return [max(1, min(free * 8 // 10, free - PROCESS_BYTES))] * choice.count


def _tier_bytes(config: ClusterConfig, tier: Tier, probes: Probes) -> int:
    """What all ranks together may offload; auto leaves a fifth of what is free to others."""
    if not tier.exists:
        return 0
    asked = getattr(config, tier.key)
    if asked == AUTO:
        return tier.free_bytes(Path(probes.directory), available_memory()) * 8 // 10
    return parse_bytes(asked, f"cluster.{tier.key}")
