"""Peak memory of every stage and seconds of a step of tuned training runs (Zhu et al., "Mist", EuroSys 2025).

The runs are on NVIDIA L4s: fp16 with fp32 master copies, AdamW whose states are sharded over the replicas (ZeRO-1),
1F1B, partitions that are not even, layers that are recomputed, optimizer states that live on the host. Embedding and
head are two matrices and nothing is dropped out. A MB of the table is 2²⁰ bytes: with 10⁶, the parameters, states and
saved activations of two first stages would alone exceed what was allocated there.

Parameters, states and saved activations follow from shapes; nothing is fitted to them. One number is fitted to what
PyTorch's allocator reserves beyond its tensors. That does not grow with the micro-batches in flight, because what one
leaves behind the next one uses; it does grow with the size of tensors, because that is the size of the holes. The
number is in the middle of those that keep every stage between 0 and 5 % above what was reserved, and the one found
without any one of the runs keeps that run's stages there too: the test of this module finds it.
Seconds have one calibration of the device's efficiency for the whole table; ``time_unseen_error`` says what such a
calibration is worth for runs that were left out of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from benchmarks.validation.table import Row, Table, read_rows
from parallax.errors import DataError
from parallax.plan.catalog import ALLOCATOR_BYTES, CatalogClusterConfig
from parallax.plan.cluster import Cluster
from parallax.plan.cost import Below, load_stage
from parallax.plan.efficiency import Efficiency, Observation, calibrate, default_efficiency, price
from parallax.plan.hardware import device_kind
from parallax.plan.plan import Directive, StagePlan
from parallax.plan.predict import Pipeline, predict
from parallax.plan.profile import ModelProfile
from parallax.plan.schedule import in_flight
from parallax.plan.transformer import TransformerConfig
from parallax.plan.work import ModelWork

COLUMNS = frozenset({"model", "flash", "partition", "ckpt_layers", "optimizer_offload", "peak_reserved_MB"})

MIB = 2**20
DEVICE = "l4"
DEVICES_PER_NODE = 8
NETWORK = "ethernet-100g"
SIZES = {"1.3b": (24, 2048, 16), "2.7b": (32, 2560, 32), "7b": (32, 4096, 32)}
"""Layers, hidden, heads by the size in a model's name."""
FITTED = ("matmul", "bandwidth")
FOLDS = 3
"""Of so many parts of the runs, each is predicted by a calibration to the others."""
SCHEDULE = "1f1b"
START = default_efficiency(device_kind(DEVICE))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: a line of the table, with one entry per stage in each tuple."""

    name: str
    model: TransformerConfig
    devices: int
    global_batch: int
    micro_batches: int
    replicas: tuple[int, ...]
    partition: tuple[int, ...]
    recomputed: tuple[int, ...]
    optimizer_offload: tuple[float, ...]
    activation_offload: tuple[float, ...]
    seconds: float
    allocated: tuple[float, ...]
    reserved: tuple[float, ...]

    @property
    def microbatch(self) -> int:
        """Rows of a micro-batch, over all replicas."""
        return self.global_batch // self.micro_batches

    @cached_property
    def work(self) -> ModelWork:
        """What the model asks of a device."""
        return self.model.work("fp16")

    def rows(self, stage: int) -> int:
        """Rows of a micro-batch on the fullest rank of a stage."""
        return math.ceil(self.microbatch / self.replicas[stage])

    @cached_property
    def cluster(self) -> Cluster:
        """The machines. What ran is known to fit, so their memory is no limit to what may be predicted; and what a
        rank steps on the host is its shard of the states."""
        nodes = CatalogClusterConfig(
            device=DEVICE, devices=self.devices, devices_per_node=DEVICES_PER_NODE, remote=NETWORK
        ).build(dtype="fp16", tier="host", weight_bytes=2)
        device = nodes.devices[0]
        device = replace(
            device,
            memory_bytes=2 * device.memory_bytes,
            host_update_seconds=device.host_update_seconds / min(self.replicas),
        )
        return replace(nodes, nodes=tuple(replace(node, devices=(device,) * len(node.devices)) for node in nodes.nodes))

    def profile(self, efficiency: Efficiency, replicas: int) -> ModelProfile:
        """The model on the device, of whose optimizer each of ``replicas`` holds and steps its share (ZeRO-1,
        Rajbhandari et al. 2020)."""
        whole = price(self.work, device_kind(DEVICE), efficiency)
        return replace(
            whole,
            optimizer_bytes=whole.optimizer_bytes / replicas,
            master_bytes=whole.master_bytes / replicas,
            optimizer_seconds=whole.optimizer_seconds / replicas,
        )

    def stages(self, profile: ModelProfile) -> tuple[StagePlan, ...]:
        """The stages as a plan has them; the first holds the embedding too and the last the head. Offloaded
        activations get room for two blocks: one that is written or fetched while another is used."""
        found, start, last = [], 0, len(self.partition) - 1
        for index, layers in enumerate(self.partition):
            recomputed = self.recomputed[index]
            offloaded = math.floor(self.activation_offload[index] * (layers - recomputed))
            directives = [Directive.RECOMPUTE] * recomputed + [Directive.OFFLOAD] * offloaded
            directives += [Directive.KEEP] * (layers - len(directives))
            ends = [Directive.KEEP]
            directives = ends * (index == 0) + directives + ends * (index == last)
            moved = profile.blocks[1].moved.at(self.rows(index)) if offloaded else 0.0
            found.append(
                StagePlan(
                    start=start,
                    stop=start + len(directives),
                    replicas=self.replicas[index],
                    directives=tuple(directives),
                    swap_limit_bytes=2 * math.ceil(moved),
                    optimizer_offload=self.optimizer_offload[index],
                )
            )
            start += len(directives)
        return tuple(found)

    def memory(self) -> list[dict[str, int]]:
        """Bytes by term at the peak of every stage, without the driver's context, which PyTorch does not count."""
        found = []
        device = replace(self.cluster.devices[0], reserve_bytes=ALLOCATOR_BYTES)
        for index, replicas in enumerate(self.replicas):
            profile = self.profile(START, replicas)
            stage = self.stages(profile)[index]
            load = load_stage(
                profile,
                stage.start,
                stage.directives,
                self.rows(index),
                device=device,
                below=Below(stage.optimizer_offload),
            )
            flight = in_flight(SCHEDULE, len(self.partition), index, self.micro_batches)
            found.append(load.memory(flight, stage.swap_limit_bytes))
        return found

    def step_seconds(self, efficiency: Efficiency) -> float:
        """Seconds of a step."""
        profile = self.profile(efficiency, min(self.replicas))
        pipeline = Pipeline(
            schedule=SCHEDULE,
            stages=self.stages(profile),
            global_batch=self.global_batch,
            microbatch=self.microbatch,
            order=tuple(range(self.devices)),
        )
        return predict(profile, self.cluster, pipeline).step_seconds


def check(path: Path) -> Table:
    """Predicted against measured for every run of the file. Raises :class:`DataError` for lines that are none."""
    cases = [parse(line) for line in read_rows(path)]
    rows: list[Row] = []
    for case in cases:
        for index, memory in enumerate(case.memory()):
            whole = sum(memory.values())
            tensors = whole - memory["reserve"]
            name = f"{case.name}, stage {index}"
            rows.append(Row(name, "reserved", whole / MIB, case.reserved[index], "MiB"))
            rows.append(Row(name, "allocated", tensors / MIB, case.allocated[index], "MiB"))
    fitted = _fit(cases)
    rows += [Row(case.name, "step", case.step_seconds(fitted), case.seconds, "s") for case in cases]
    unseen = []
    for fold in range(min(FOLDS, len(cases))):
        others = _fit([case for index, case in enumerate(cases) if index % FOLDS != fold])
        unseen += [Row(c.name, "step, unseen", c.step_seconds(others), c.seconds, "s") for c in cases[fold::FOLDS]]
    reserved = [row.error for row in rows if row.quantity == "reserved"]
    summary = {
        "memory_mean_error": _mean(reserved),
        "memory_worst_error": max(abs(error) for error in reserved),
        "memory_underestimates": float(sum(error < 0 for error in reserved)),
        "time_mean_error": _mean([row.error for row in rows if row.quantity == "step"]),
        "time_unseen_error": _mean([row.error for row in unseen]),
    }
    return Table("Mist on L4", (*rows, *unseen), summary)


def _fit(cases: Sequence[Case]) -> Efficiency:
    """One efficiency of the device for all ``cases``."""
    observations = [Observation(case.step_seconds, case.seconds) for case in cases]
    return calibrate(START, observations, FITTED)


def _mean(errors: Sequence[float]) -> float:
    return sum(abs(error) for error in errors) / len(errors)


def parse(line: dict[str, str]) -> Case:
    """The run of one line. Raises :class:`DataError` where it is none, or contradicts itself."""
    try:
        return _case(line)
    except (KeyError, ValueError) as error:
        raise DataError(
            f"not a run of the Mist table: {line}: {error!r}; it needs columns {sorted(COLUMNS)}"
        ) from error


def _case(line: dict[str, str]) -> Case:
    partition = tuple(int(value) for value in line["partition"].split("/"))

    def numbers(column: str) -> tuple[float, ...]:
        values = [float(value) for value in line[column].split("/")]
        if len(values) not in (1, len(partition)):
            raise ValueError(f"{column} needs one value, or one for each of {len(partition)} stages")
        return tuple(values * len(partition) if len(values) == 1 else values)

    def whole(column: str) -> tuple[int, ...]:
        return tuple(int(value) for value in numbers(column))

    family = line["model"].rstrip("b.0123456789")
    layers, hidden, heads = SIZES[line["model"].removeprefix(family)]
    gated = family == "llama"
    model = TransformerConfig(
        name=line["model"],
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocabulary=50304,
        sequence=int(line["seq"]),
        attention="flash" if line["flash"] == "T" else "full",
        gated=gated,
        positions="rotary" if gated else "learned",
        bias=not gated,
        tied=False,
    )
    case = Case(
        name=f"{line['model']} on {line['L4s']}",
        model=model,
        devices=int(line["L4s"]),
        global_batch=int(line["global_batch"]),
        micro_batches=int(line["micro_batches"]),
        replicas=whole("DP_per_stage"),
        partition=partition,
        recomputed=whole("ckpt_layers"),
        optimizer_offload=numbers("optimizer_offload"),
        activation_offload=numbers("act_offload"),
        seconds=float(line["iter_s"]),
        allocated=numbers("peak_alloc_MB"),
        reserved=numbers("peak_reserved_MB"),
    )
    if sum(partition) != layers or sum(case.replicas) != case.devices:
        raise ValueError(f"{layers} layers and {case.devices} devices are not what its stages add up to")
    return case
