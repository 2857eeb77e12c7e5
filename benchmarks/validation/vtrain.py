"""Seconds of a step of GPTs under data and pipeline parallelism (Bang et al., "vTrain", MICRO 2024).

The runs are Megatron-LM's on A100-80GB, on one node of up to eight or on several, where layers are recomputed: fp16
with fp32 master copies, attention that keeps its scores, 1F1B over equal stages, and, after the last micro-batch, an
all-reduce of fp16 gradients over the replicas, one of the embedding over the first and the last stage, and Adam. A step
is predicted from the sizes in a line, the data sheet of the device, and one
:class:`~parallax.plan.analytic.efficiency.Efficiency` for all lines::

    (M − 1) · slowest stage + Σ stages + all-reduces + update + step_seconds

That is the formula by which the planner searches, with Megatron-LM's reductions after the last micro-batch. What the
planner's simulator says of the same layouts, and how it ranks them, is given beside it as ``simulated_…``: it lets
reductions overlap with the last backwards, as Parallax does.

``default_…`` is the error without calibration: the model as ``parallax plan model=transformer`` has it from its sizes,
with flash attention, by the catalog's figures of the device.

Nothing is fitted to a line that it is evaluated on. With one file, the lines are predicted in folds, each by what was
fitted to the others; all lines of a model, whatever its batch and layout, are in one fold, so the model that is
predicted was never seen; lines of one model are predicted by the catalog's figures alone. With two, all is fitted to
the first and evaluated on the lines of the second that are not in it.

Plan regret is what it costs to believe the prediction: among lines of one model, batch and number of devices, the
measured seconds of the layout that is predicted fastest, over those of the fastest, less one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from benchmarks.validation.table import Row, Table, read_rows
from parallax.errors import DataError
from parallax.plan.analytic.catalog import CatalogClusterConfig
from parallax.plan.analytic.efficiency import (
    Efficiency,
    Observation,
    calibrate,
    default_efficiency,
    price,
)
from parallax.plan.analytic.hardware import device_kind
from parallax.plan.analytic.recipe import recipe
from parallax.plan.analytic.transformer import TransformerConfig
from parallax.plan.cluster import Cluster
from parallax.plan.cost.collective import all_reduce_seconds, link_among
from parallax.plan.plan import Directive, Pipeline, StagePlan
from parallax.plan.profile import BlockCost, ModelProfile
from parallax.plan.schedule import SCHEDULES
from parallax.plan.simulation.predict import predict as planned
from parallax.plan.work import ModelWork

TIME = "iteration time (ms)"
COLUMNS = frozenset(
    {
        "GPUs",
        "global batch",
        "micro batch",
        "hidden size",
        "attention heads",
        "layers",
        "sequence length",
        "tensor parallelism",
        "data parallelism",
        "pipeline parallelism",
        TIME,
    }
)

DEVICE = device_kind("a100-80")
DEVICES_PER_NODE = 8
VOCABULARY = 51200
"""GPT-2's, padded: what Megatron-LM's scaling studies use (Narayanan et al. 2021, section 5.1)."""
DROPOUT = 0.1
"""Megatron-LM's default."""
SCORE_ACCESSES = (6, 8)
"""How often attention reads or writes all scores, forward and backward, beyond what the model's work has, in which
scale, mask and softmax are one kernel and products are counted by their operations. With 64 to 128 numbers per head a
product of scores is bound by writing (forward 1, backward 1) or reading them (1 and 3), not by computing; scale and
mask as kernels of their own read and write them (4 and 4)."""
CATALOG = default_efficiency(DEVICE)
START = Efficiency()
FOLDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One line: the model, its layout on ``data`` × ``pipeline`` devices, and what was measured."""

    hidden: int
    heads: int
    layers: int
    sequence: int
    global_batch: int
    rows: int
    data: int
    pipeline: int
    seconds: float

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return -(-self.global_batch // (self.rows * self.data))

    @property
    def devices(self) -> int:
        """Devices of all replicas of all stages."""
        return self.data * self.pipeline

    @property
    def recomputes(self) -> bool:
        """Whether the layers are recomputed, as in all runs on several nodes; the others keep all activations."""
        return self.devices > DEVICES_PER_NODE

    @property
    def model(self) -> Hashable:
        """Equal for runs of the same model."""
        return self.hidden, self.heads, self.layers, self.sequence

    @property
    def task(self) -> Hashable:
        """Equal for runs among which a planner chooses."""
        return self.model, self.global_batch, self.devices

    @property
    def layout(self) -> Hashable:
        """Equal for runs of the same configuration, measured twice."""
        return self.task, self.rows, self.data

    def __str__(self) -> str:
        return (
            f"{self.layers}×{self.hidden}, batch {self.global_batch} = {self.micro_batches}×{self.rows}×{self.data}, "
            f"{self.pipeline} stage(s)"
        )


def check(calibration: Path, evaluation: Path | None = None) -> Table:
    """Every line that is evaluated, and the means. Raises :class:`DataError` for lines that cannot be predicted."""
    known = read_runs(calibration)
    if evaluation is not None:
        seen = {run.layout for run in known}
        unseen = [run for run in read_runs(evaluation) if run.layout not in seen]
        if not unseen:
            raise DataError(
                f"{evaluation}: every line is in {calibration} too; give lines to evaluate on"
            )
        efficiency = fit(known)
        return _table([(run, efficiency) for run in unseen], {})
    if len({run.model for run in known}) < 2:
        return _table([(run, None) for run in known], {})
    by_model = cross_validate(known, [run.model for run in known])
    spread = _predicted(
        cross_validate(known, [index % FOLDS for index in range(len(known))]), predict
    )
    return _table(by_model, {"time_mean_error_known_models": _mean_error(spread)})


def read_runs(path: Path) -> list[Run]:
    """The lines of a file, without those that split tensors, which the planner does not."""
    try:
        runs = [_run(line) for line in read_rows(path) if int(line["tensor parallelism"]) == 1]
    except (KeyError, ValueError) as error:
        raise DataError(
            f"{path}: {error}; every line needs numbers for {', '.join(sorted(COLUMNS))}"
        ) from error
    if not runs:
        raise DataError(f"{path}: no line without tensor parallelism to predict")
    return runs


def _run(line: dict[str, str]) -> Run:
    pipeline, layers = int(line["pipeline parallelism"]), int(line["layers"])
    if layers % pipeline:
        raise ValueError(f"{layers} layers cannot be divided evenly among {pipeline} stages")
    if not 0 < float(line[TIME]) < math.inf:
        raise ValueError(f"{TIME} {line[TIME]} must be above zero and finite")
    return Run(
        hidden=int(line["hidden size"]),
        heads=int(line["attention heads"]),
        layers=layers,
        sequence=int(line["sequence length"]),
        global_batch=int(line["global batch"]),
        rows=int(line["micro batch"]),
        data=int(line["data parallelism"]),
        pipeline=pipeline,
        seconds=float(line[TIME]) / 1000,
    )


def predict(run: Run, efficiency: Efficiency | None) -> float:
    """Seconds of a step of ``run``; without an ``efficiency``, by the catalog's."""
    blocks = _blocks(run.hidden, run.heads, run.sequence, run.rows, efficiency)
    efficiency = efficiency or CATALOG
    layers, last = run.layers // run.pipeline, run.pipeline - 1
    embedding, layer, head = blocks.seconds
    compute = [layers * (layer + run.recomputes * blocks.layer_forward)] * run.pipeline
    compute[0] += embedding
    compute[last] += head
    cluster = _cluster(run.devices, 1.0)
    neighbour = link_among((0, run.data), cluster) if last else cluster.local
    exchange = (
        2 * (efficiency.exchange_seconds + neighbour.seconds(blocks.stream_bytes)) if last else 0.0
    )
    stages = [seconds + exchange for seconds in compute]
    pipelined = (run.micro_batches - 1) * max(stages) + sum(stages)

    # Whether one stage holds the table once or two do.
    ends = blocks.table_bytes + blocks.other_bytes
    largest = layers * blocks.layer_bytes + ends
    slower = _cluster(run.devices, efficiency.network)
    reduced = all_reduce_seconds(largest, range(run.data), slower)
    ends_of_a_pipeline = (0, run.devices - run.data)
    tied = all_reduce_seconds(blocks.table_bytes, ends_of_a_pipeline, slower) if last else 0.0
    return pipelined + reduced + tied + largest * blocks.update_seconds + efficiency.step_seconds


def simulate(run: Run, efficiency: Efficiency | None) -> float:
    """Seconds of a step of ``run`` by the planner's own simulator; without an ``efficiency``, by the catalog's."""
    work = _work(run.hidden, run.heads, run.sequence, plain=efficiency is None)
    efficiency = efficiency or CATALOG
    embedding, layer, head = work.blocks
    layers = run.layers // run.pipeline
    chain = replace(
        work,
        blocks=(embedding, *[layer] * run.layers, head),
        ties=tuple((size, (0, run.layers + 1)) for size, _ in work.ties),
    )
    ends = [0, *(1 + layers * stage for stage in range(1, run.pipeline)), run.layers + 2]
    layer_directive = Directive.RECOMPUTE if run.recomputes else Directive.KEEP
    directives = (Directive.KEEP, *[layer_directive] * run.layers, Directive.KEEP)
    stages = tuple(
        StagePlan(start=start, stop=stop, replicas=run.data, directives=directives[start:stop])
        for start, stop in pairwise(ends)
    )
    cluster = _cluster(run.devices, efficiency.network)
    local, remote = (
        replace(link, latency_seconds=max(link.latency_seconds, efficiency.exchange_seconds))
        for link in (cluster.local, cluster.remote)
    )
    cluster = replace(cluster, local=local, remote=remote)
    pipeline = Pipeline(
        schedule=SCHEDULES["1f1b"],
        stages=stages,
        global_batch=run.global_batch,
        microbatch=run.rows * run.data,
        placement=tuple(range(run.devices)),
    )
    profile = price(chain, DEVICE, efficiency)
    return planned(profile, cluster, pipeline).step_seconds + efficiency.step_seconds


def fit(runs: Sequence[Run]) -> Efficiency:
    """The efficiency that predicts ``runs`` best, starting from what software usually reaches of any device: the
    catalog's figures of this one stand for another model of attention."""
    return calibrate(
        START,
        [Observation(partial(predict, run), run.seconds) for run in runs],
    )


def cross_validate(runs: Sequence[Run], folds: Sequence[Hashable]) -> list[tuple[Run, Efficiency]]:
    """Every run, and what was fitted to the runs of other folds."""
    if len(set(folds)) < 2:
        raise DataError(
            "validation needs lines of two models or more, or a second file to evaluate on"
        )
    found = []
    for fold in dict.fromkeys(folds):
        efficiency = fit([run for run, other in zip(runs, folds) if other != fold])
        found += [(run, efficiency) for run, own in zip(runs, folds) if own == fold]
    return found


def regrets(predicted: Iterable[tuple[Run, float]]) -> dict[Hashable, float]:
    """What believing the predictions costs, per task with a choice."""
    tasks = defaultdict(list)
    for run, seconds in predicted:
        tasks[run.task].append((seconds, run.seconds))
    return {
        task: min(choices)[1] / min(measured for _, measured in choices) - 1
        for task, choices in tasks.items()
        if len(choices) > 1
    }


@dataclass(frozen=True, slots=True)
class _Blocks:
    """What the prediction needs of embedding, layer and head: ``seconds`` of forward and backward of one micro-batch,
    ``layer_forward`` of a layer's forward alone; parameter bytes of a layer, of the token table, and of what else the
    ends have; bytes between blocks."""

    seconds: tuple[float, float, float]
    layer_forward: float
    layer_bytes: int
    table_bytes: int
    other_bytes: int
    stream_bytes: float
    update_seconds: float


@lru_cache(maxsize=4096)
def _blocks(
    hidden: int, heads: int, sequence: int, rows: int, efficiency: Efficiency | None
) -> _Blocks:
    profile = _profile(hidden, heads, sequence, efficiency)
    embedding, layer, head = profile.blocks
    table = profile.ties[0][0]
    return _Blocks(
        seconds=(_seconds(embedding, rows), _seconds(layer, rows), _seconds(head, rows)),
        layer_forward=layer.forward_seconds.at(rows),
        layer_bytes=layer.parameter_bytes,
        table_bytes=table,
        other_bytes=embedding.parameter_bytes - table,
        stream_bytes=layer.output.at(rows),
        update_seconds=profile.optimizer_seconds,
    )


def _seconds(block: BlockCost, rows: int) -> float:
    return block.forward_seconds.at(rows) + block.backward_seconds.at(rows)


@lru_cache(maxsize=512)
def _profile(hidden: int, heads: int, sequence: int, efficiency: Efficiency | None) -> ModelProfile:
    work = _work(hidden, heads, sequence, plain=efficiency is None)
    return price(work, DEVICE, efficiency or CATALOG)


@lru_cache(maxsize=64)
def _work(hidden: int, heads: int, sequence: int, *, plain: bool) -> ModelWork:
    """A model of one layer, because all layers of a model are alike: ``plain``, as sizes alone describe it, or with the
    attention and the dropout of the runs."""
    model = TransformerConfig(
        layers=1, hidden=hidden, heads=heads, sequence=sequence, vocabulary=VOCABULARY
    )
    if plain:
        return model.work("fp16")
    work = replace(model, attention="full", dropout=DROPOUT).work("fp16")
    embedding, layer, head = work.blocks
    scores = recipe(work.precision).compute * heads * sequence * sequence
    forward, backward = (
        replace(done, bytes=replace(done.bytes, per_row=done.bytes.per_row + accesses * scores))
        for done, accesses in zip((layer.forward, layer.input_gradient), SCORE_ACCESSES)
    )
    return replace(
        work, blocks=(embedding, replace(layer, forward=forward, input_gradient=backward), head)
    )


@lru_cache(maxsize=64)
def _cluster(devices: int, network: float) -> Cluster:
    """The nodes that ``devices`` fill, with links of which all-reduces reach the share ``network``. A run that was
    measured is known to fit, so its devices have more memory than any run needs."""
    found = CatalogClusterConfig(
        device=DEVICE.name, devices=devices, devices_per_node=DEVICES_PER_NODE
    ).build(dtype="fp16")
    roomy = replace(found.devices[0], memory_bytes=1000 * found.devices[0].memory_bytes)
    nodes = tuple(replace(node, devices=(roomy,) * len(node.devices)) for node in found.nodes)
    local, remote = (
        replace(link, bytes_per_second=link.bytes_per_second * network)
        for link in (found.local, found.remote)
    )
    return replace(found, nodes=nodes, local=local, remote=remote)


def _table(evaluated: Sequence[tuple[Run, Efficiency | None]], more: dict[str, float]) -> Table:
    predicted, simulated = _predicted(evaluated, predict), _predicted(evaluated, simulate)
    default = _predicted([(run, None) for run, _ in evaluated], predict)
    rows = tuple(
        Row(str(run), name, 1000 * seconds, 1000 * run.seconds, "ms")
        for name, found in (("step", predicted), ("step, not calibrated", default))
        for run, seconds in found
    )
    regret, simulated_regret = regrets(predicted), regrets(simulated)
    summary = {
        "time_mean_error": _mean_error(predicted),
        "time_max_error": _max_error(predicted),
        "default_time_mean_error": _mean_error(default),
        "default_time_max_error": _max_error(default),
        "regret_mean": _mean(regret.values()),
        "regret_max": max(regret.values(), default=0.0),
        "regret_tasks": float(len(regret)),
        "simulated_time_mean_error": _mean_error(simulated),
        "simulated_regret_mean": _mean(simulated_regret.values()),
        "lines": float(len(evaluated)),
        **more,
    }
    return Table("vtrain", rows, summary)


def _predicted(
    evaluated: Iterable[tuple[Run, Efficiency | None]],
    by: Callable[[Run, Efficiency | None], float],
) -> list[tuple[Run, float]]:
    return [(run, by(run, efficiency)) for run, efficiency in evaluated]


def _mean_error(predicted: Iterable[tuple[Run, float]]) -> float:
    return _mean(abs(seconds / run.seconds - 1) for run, seconds in predicted)


def _max_error(predicted: Iterable[tuple[Run, float]]) -> float:
    return max(abs(seconds / run.seconds - 1) for run, seconds in predicted)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return fmean(found) if found else 0.0
