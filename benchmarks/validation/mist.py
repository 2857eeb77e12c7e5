"""Peak memory of every stage and seconds of a step of tuned training runs (Zhu et al., "Mist", EuroSys 2025).

The runs are on NVIDIA L4s: fp16 with fp32 master copies, AdamW whose states are sharded over the replicas (ZeRO-1),
1F1B, partitions that are not even, layers that are recomputed, optimizer states that live on the host. Embedding and
head are two matrices and nothing is dropped out. A MB of the table is 2²⁰ bytes: with 10⁶, the parameters, states and
saved activations of two first stages would alone exceed what was allocated there.

Parameters, states and saved activations follow from shapes; nothing is fitted to them. Most of what PyTorch's allocator
reserves beyond its tensors follows from shapes too: the engine of these runs widens gradients module by module (one is
the embedding, a layer, or the head), and holds two copies in fp32 of a module's shard while it does (its published
source, ``ModuleOptimizerHandle``). No block that activations have left is as large, and what is allocated on one stream
serves no other. So the largest such pair of each of two streams is never given back: that of the first two modules,
widened where the layers compute, and that of all others, widened where states are copied.

What is still missing is holes. They do not grow with the micro-batches in flight, because what one leaves behind the
next one uses; they do grow with the size of tensors (``docs/adr/008-what-the-allocator-holds.md``). Their number has a
margin that comes from the residuals of the published stages: it is the upper limit, with 95 % confidence, of the
residual of a stage that was not seen. ``memory_unseen_*`` says how runs are predicted by the limit of the others.
Seconds have one calibration of the device's efficiency for the whole table; ``time_unseen_error`` says what such a
calibration is worth for runs that were left out of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.validation.table import Row, Table, read_rows
from parallax.errors import DataError
from parallax.plan.analytic.catalog import ALLOCATOR_BYTES, CatalogClusterConfig
from parallax.plan.analytic.efficiency import (
    Efficiency,
    Observation,
    calibrate,
    default_efficiency,
    price,
)
from parallax.plan.analytic.hardware import device_kind
from parallax.plan.analytic.transformer import TransformerConfig
from parallax.plan.cluster import Cluster
from parallax.plan.cost.stage import load_stage
from parallax.plan.cost.states import OffloadFractions
from parallax.plan.plan import Directive, Pipeline, StagePlan
from parallax.plan.profile import ModelProfile
from parallax.plan.schedule import SCHEDULES
from parallax.plan.simulation.predict import predict
from parallax.plan.work import ModelWork

COLUMNS = frozenset(
    {"model", "flash", "partition", "ckpt_layers", "optimizer_offload", "peak_reserved_MB"}
)

MIB = 2**20
DEVICE = "l4"
DEVICES_PER_NODE = 8
NETWORK = "ethernet-100g"
SIZES = {"1.3b": (24, 2048, 16), "2.7b": (32, 2560, 32), "7b": (32, 4096, 32)}
"""Layers, hidden, heads by the size in a model's name."""
WIDENED_BYTES = 2 * 4
"""Bytes per parameter of a module whose gradients are widened: an empty fp32 tensor, and the one that replaces it."""
COMPUTE_MODULES = 2
"""So many first modules are stepped on the stream that computes; the others on the one that copies states."""
GAP_TENSORS = 27.2
"""Holes, in tensors between layers: :func:`gap_limit` of the eight published stages."""
STUDENT = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
"""95 % quantiles of Student's t for 1, 2, … degrees of freedom; of more than these it is no larger."""
FITTED = ("matmul", "bandwidth")
FOLDS = 3
"""Of so many parts of the runs, each is predicted by a calibration to the others."""
SCHEDULE = SCHEDULES["1f1b"]
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
            device=DEVICE,
            devices=self.devices,
            devices_per_node=DEVICES_PER_NODE,
            remote=NETWORK,
        ).build(dtype="fp16", tier="host", weight_bytes=2)
        device = nodes.devices[0]
        device = replace(
            device,
            memory_bytes=2 * device.memory_bytes,
            gap_tensors=GAP_TENSORS,
            host_update_seconds=device.host_update_seconds / min(self.replicas),
        )
        return replace(
            nodes,
            nodes=tuple(
                replace(node, devices=(device,) * len(node.devices)) for node in nodes.nodes
            ),
        )

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
        activations get memory for two blocks: one that is written or fetched while another is used."""
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
        """Bytes by term at the peak of every stage, without the driver's context, which PyTorch does not count;
        ``widened`` and ``reserve`` are held by the allocator and used by no tensor at that moment."""
        found = []
        beside = {"context_bytes": 0, "collective_bytes": 0, "edge_bytes": 0}
        device = replace(self.cluster.devices[0], reserve_bytes=ALLOCATOR_BYTES, **beside)
        for index, replicas in enumerate(self.replicas):
            profile = self.profile(START, replicas)
            stage = self.stages(profile)[index]
            load = load_stage(
                profile,
                stage.start,
                stage.directives,
                self.rows(index),
                device=device,
                offload=OffloadFractions(stage.optimizer_offload),
            )
            flight = SCHEDULE.in_flight(len(self.partition), index, self.micro_batches)
            widened = self.widened(profile, stage.start, stage.stop, replicas)
            memory = load.memory(flight, stage.swap_limit_bytes)
            reserve = memory["reserve"] + memory["allocator"]
            found.append({**memory, "allocator": 0, "reserve": reserve, "widened": widened})
        return found

    def widened(self, profile: ModelProfile, start: int, stop: int, replicas: int) -> int:
        """Bytes that both streams keep of the gradients that they widen."""
        shards = [block.parameters / replicas for block in profile.blocks[start:stop]]
        streams = shards[:COMPUTE_MODULES], shards[COMPUTE_MODULES:]
        return math.ceil(WIDENED_BYTES * sum(max(modules, default=0.0) for modules in streams))

    def tensor(self, stage: int) -> float:
        """Bytes of a tensor between layers."""
        return self.work.blocks[1].output.at(self.rows(stage))

    def gaps(self) -> list[float]:
        """What was reserved of each stage beyond all that is predicted without holes, in tensors between layers; below
        zero where the predicted is an upper bound that was not reached."""
        found = []
        for index, memory in enumerate(self.memory()):
            tensor = self.tensor(index)
            rest = sum(memory.values()) - GAP_TENSORS * tensor
            found.append((self.reserved[index] * MIB - rest) / tensor)
        return found

    def step_seconds(self, efficiency: Efficiency) -> float:
        """Seconds of a step."""
        profile = self.profile(efficiency, min(self.replicas))
        pipeline = Pipeline(
            schedule=SCHEDULE,
            stages=self.stages(profile),
            global_batch=self.global_batch,
            microbatch=self.microbatch,
            placement=tuple(range(self.devices)),
        )
        return predict(profile, self.cluster, pipeline).step_seconds


def check(path: Path) -> Table:
    """Predicted against measured for every run of the file. Raises :class:`DataError` for lines that are none."""
    cases = [parse(line) for line in read_rows(path)]
    rows: list[Row] = []
    for case in cases:
        for index, memory in enumerate(case.memory()):
            whole = reserved(memory)
            tensors = sum(memory.values()) - memory["reserve"] - memory["widened"]
            name = f"{case.name}, stage {index}"
            rows.append(Row(name, "reserved", whole / MIB, case.reserved[index], "MiB"))
            rows.append(Row(name, "allocated", tensors / MIB, case.allocated[index], "MiB"))
    fitted = _fit(cases)
    rows += [Row(case.name, "step", case.step_seconds(fitted), case.seconds, "s") for case in cases]
    unseen = []
    for fold in range(min(FOLDS, len(cases))):
        others = _fit([case for index, case in enumerate(cases) if index % FOLDS != fold])
        unseen += [
            Row(c.name, "step, unseen", c.step_seconds(others), c.seconds, "s")
            for c in cases[fold::FOLDS]
        ]
    errors = [row.error for row in rows if row.quantity == "reserved"]
    left_out = unseen_memory(cases)
    summary = {
        "memory_mean_error": _mean(errors),
        "memory_worst_error": max(abs(error) for error in errors),
        "memory_underestimates": float(sum(error < 0 for error in errors)),
        "memory_unseen_mean_error": _mean(left_out),
        "memory_unseen_underestimates": float(sum(error < 0 for error in left_out)),
        "time_mean_error": _mean([row.error for row in rows if row.quantity == "step"]),
        "time_unseen_error": _mean([row.error for row in unseen]),
    }
    return Table("Mist on L4", (*rows, *unseen), summary)


def reserved(memory: dict[str, int]) -> int:
    """Bytes that the allocator reserves for the terms of a stage. It never has more than the device: before it fails,
    it gives back what is in no use."""
    whole = sum(memory.values())
    used = whole - memory["reserve"] - memory["widened"]
    return max(used, min(whole, device_kind(DEVICE).memory_bytes))


def gap_limit(gaps: Sequence[float]) -> float:
    """What the gap of one stage more stays below with 95 % confidence, from those of two stages or more: Student's
    prediction limit, mean + t · s · √(1 + 1/n)."""
    count = len(gaps)
    quantile = STUDENT[min(count - 1, len(STUDENT)) - 1]
    return fmean(gaps) + quantile * stdev(gaps) * math.sqrt(1 + 1 / count)


def unseen_memory(cases: Sequence[Case]) -> list[float]:
    """Errors of what is reserved, of every stage, with the limit that the stages of the other runs give; by one run
    nothing is learned."""
    gaps = [case.gaps() for case in cases]
    found: list[float] = []
    for index, case in enumerate(cases):
        others = [gap for other, listed in enumerate(gaps) if other != index for gap in listed]
        limit = gap_limit(others) if len(others) > 1 else GAP_TENSORS
        found += [
            (limit - gap) * case.tensor(stage) / (case.reserved[stage] * MIB)
            for stage, gap in enumerate(gaps[index])
        ]
    return found


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
            raise ValueError(
                f"{column} needs one value, or one for each of {len(partition)} stages"
            )
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
        raise ValueError(
            f"{layers} layers and {case.devices} devices are not what its stages add up to"
        )
    return case
