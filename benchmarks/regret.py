"""How much faster than the plan that the planner chose is the best of a grid of plans requested by hand?

Seventeen questions, from 7 billion parameters to a trillion, on 8 to 1,024 devices of four kinds, with little and much
memory and small and large batches. For each the planner chooses; then every plan of a grid is requested: stages ×
micro-batch × schedule × interleave, and around the best of them activations × sharding. All are forecast in the same
way, so the planner is held against its own prediction: *regret* is what the chosen plan takes over the fastest one of
the grid, less one. *gap* is what the planner itself says that it may be off by, from its lower bound; *seconds* are
processor time of the search on one core.

``python -m benchmarks.regret`` runs all for an hour; ``--questions 7b`` those whose name has it; ``--chosen`` asks no
grid. The grids of the two deepest models are coarser, as each of their plans takes ten seconds to find. The last line
of ``--json`` has ``worst_regret``, ``median_gap``, ``worst_seconds``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from parallax.config import RunConfig, compose
from parallax.errors import ParallaxError
from parallax.plan.analytic.catalog import CatalogClusterConfig
from parallax.plan.cluster import Cluster
from parallax.plan.config import PlanConfig
from parallax.plan.plan import Plan
from parallax.plan.profile import ModelProfile
from parallax.plan.search.search import describe, search
from parallax.run.job import profile_run
from parallax.run.stepping import stepped_by

_SIZES = {
    "7b": "model.layers=32 model.hidden=4096 model.heads=32 model.sequence=2048",
    "13b": "model.layers=40 model.hidden=5120 model.heads=40 model.sequence=2048",
    "22b": "model.layers=48 model.hidden=6144 model.heads=48 model.sequence=2048",
    "70b": "model.layers=80 model.hidden=8192 model.heads=64 model.kv_heads=8 model.gated=true model.ffn=28672 "
    "model.sequence=4096 model.tied=false model.positions=rotary",
    "175b": "model.layers=96 model.hidden=12288 model.heads=96 model.sequence=2048",
    "530b": "model.layers=105 model.hidden=20480 model.heads=128 model.sequence=2048",
    "1t": "model.layers=128 model.hidden=25600 model.heads=160 model.sequence=2048",
    "deep": "model.layers=998 model.hidden=8192 model.heads=64 model.sequence=1024",
}

QUESTIONS = {
    "7b a100x8 bf16": (
        "7b",
        "precision=mixed_bf16 cluster=dgx_a100 cluster.nodes=1 trainer.global_batch=512",
    ),
    "7b a100x8 bf16 tight": (
        "7b",
        "precision=mixed_bf16 cluster=dgx_a100 cluster.nodes=1 cluster.device_memory=32GiB trainer.global_batch=64",
    ),
    "7b v100x64 fp32": (
        "7b",
        "precision=fp32 cluster=v100 cluster.nodes=8 trainer.global_batch=512",
    ),
    "7b l4x16 bf16": (
        "7b",
        "precision=mixed_bf16 cluster=l4_pcie cluster.nodes=2 trainer.global_batch=128",
    ),
    "7b h100x32 fp32": (
        "7b",
        "precision=fp32 cluster=dgx_h100 cluster.nodes=4 trainer.global_batch=2048",
    ),
    "13b l4x64 bf16": (
        "13b",
        "precision=mixed_bf16 cluster=l4_pcie cluster.nodes=8 trainer.global_batch=1024",
    ),
    "13b v100x32 fp32 small batch": (
        "13b",
        "precision=fp32 cluster=v100 cluster.nodes=4 trainer.global_batch=32",
    ),
    "22b a100x32 bf16": (
        "22b",
        "precision=mixed_bf16 cluster=dgx_a100 cluster.nodes=4 trainer.global_batch=512",
    ),
    "22b v100x256 fp32": (
        "22b",
        "precision=fp32 cluster=v100 cluster.nodes=32 trainer.global_batch=1024",
    ),
    "70b h100x64 bf16": (
        "70b",
        "precision=mixed_bf16 cluster=dgx_h100 cluster.nodes=8 trainer.global_batch=512",
    ),
    "70b a100x512 fp32": (
        "70b",
        "precision=fp32 cluster=dgx_a100 cluster.nodes=64 trainer.global_batch=4096",
    ),
    "175b a100x128 bf16": (
        "175b",
        "precision=mixed_bf16 cluster=dgx_a100 cluster.nodes=16 trainer.global_batch=1536",
    ),
    "175b a100x1024 bf16": (
        "175b",
        "precision=mixed_bf16 cluster=dgx_a100 cluster.nodes=128 trainer.global_batch=1536",
    ),
    "530b h100x512 bf16": (
        "530b",
        "precision=mixed_bf16 cluster=dgx_h100 cluster.nodes=64 trainer.global_batch=2048",
    ),
    "1t a100x1024 bf16": (
        "1t",
        "precision=mixed_bf16 cluster=dgx_a100 cluster.nodes=128 trainer.global_batch=1536",
    ),
    "800b a100x1024 fp32 tight": (
        "deep",
        "precision=fp32 cluster=dgx_a100 cluster.nodes=128 cluster.device_memory=24GiB trainer.global_batch=2048",
    ),
    "800b a100x1024 bf16": (
        "deep",
        "precision=bf16 cluster=dgx_a100 cluster.nodes=128 trainer.global_batch=4096",
    ),
}
SCHEDULES = (
    ("1f1b", 1),
    ("gpipe", 1),
    ("zb-h1", 1),
    ("zb-h2", 1),
    ("interleaved", 2),
    ("interleaved", 4),
)
ACTIVATIONS = ("auto", "keep", "offload", "recompute")
SHARDS = ("auto", "none", "optimizer")
DEEP = 500  # blocks from which on one plan takes ten seconds to find, and the grid is coarser


@dataclass(frozen=True)
class GridSize:
    """How fine a grid is: numbers of stages, micro-batches for each, schedules, and of its best plans those around
    which activations and sharding are varied."""

    stages: int = 14
    microbatches: int = 16
    schedules: tuple[tuple[str, int], ...] = SCHEDULES
    refined: int = 12


FINE = GridSize()
COARSE = GridSize(3, 2, (("1f1b", 1), ("zb-h1", 1)), 1)


@dataclass(frozen=True)
class Question:
    """What is planned: a model, machines, and a batch."""

    name: str
    profile: ModelProfile
    cluster: Cluster
    global_batch: int

    @classmethod
    def of(cls, name: str) -> Question:
        """The question of that name."""
        size, rest = QUESTIONS[name]
        return cls.composed(
            name, compose(["model=transformer", *_SIZES[size].split(), *rest.split()])
        )

    @classmethod
    def composed(cls, name: str, config: RunConfig) -> Question:
        """The question that a configuration asks of a catalog cluster."""
        assert isinstance(config.cluster, CatalogClusterConfig)
        profile = stepped_by(profile_run(config, lambda text: None), config.optimizer)
        parameters = sum(block.parameters for block in profile.blocks)
        weight_bytes = round(sum(block.parameter_bytes for block in profile.blocks) / parameters)
        cluster = config.cluster.build(
            dtype=config.precision.compute, tier=config.swap.tier, weight_bytes=weight_bytes
        )
        return cls(name, profile, cluster, config.trainer.global_batch)

    @property
    def grid_size(self) -> GridSize:
        """How fine its grid is."""
        return COARSE if len(self.profile.blocks) >= DEEP else FINE

    def ask(self, cell: Cell | None = None) -> Plan:
        """The planner's choice, in all or for one cell of the grid."""
        plan, _ = search(
            self.profile,
            self.cluster,
            cell.config if cell else PlanConfig(),
            global_batch=self.global_batch,
            microbatch=cell.microbatch if cell else "auto",
        )
        return plan


@dataclass(frozen=True)
class Cell:
    """One plan of the grid."""

    stages: int
    microbatch: int
    schedule: str
    interleave: int
    activations: str = "auto"
    shard: str = "auto"

    @property
    def config(self) -> PlanConfig:
        """The requested plan."""
        interleave = {"interleave": self.interleave} if self.interleave > 1 else {}
        return PlanConfig(
            stages=self.stages,
            schedule=self.schedule,
            activations=self.activations,
            shard=self.shard,
            **interleave,
        )


@dataclass(frozen=True)
class Answer:
    """One question's figures."""

    question: str
    seconds: float
    megabytes: int
    step_seconds: float
    gap: float
    regret: float
    cells: int
    chosen: str
    better: str


def stage_counts(question: Question) -> list[int]:
    """Numbers of stages for the grid: those that divide devices or layers, of which some of all sizes."""
    devices, blocks = len(question.cluster.devices), len(question.profile.blocks)
    counts = [
        n for n in range(1, min(devices, blocks) + 1) if devices % n == 0 or (blocks - 2) % n == 0
    ]
    return _spread(counts, question.grid_size.stages)


def _spread(values: list[int], most: int) -> list[int]:
    """Return at most ``most`` of ``values``, evenly chosen from the first to the last."""
    return [
        values[place]
        for place in sorted({round(i * (len(values) - 1) / (most - 1)) for i in range(most)})
    ]


def grid(question: Question) -> Iterator[Cell]:
    """Every cell with everything else left to the planner."""
    devices = len(question.cluster.devices)
    for stages in stage_counts(question):
        replicas = max(1, devices // stages)
        sizes = {min(question.global_batch, rows * replicas) for rows in (1, 2, 3, 4, 8, 16)}
        sizes |= {
            2**n
            for n in range(question.global_batch.bit_length())
            if replicas <= 2**n <= 16 * replicas
        }
        some = _spread(sorted(sizes), question.grid_size.microbatches)
        for microbatch, (schedule, interleave) in itertools.product(
            some, question.grid_size.schedules
        ):
            if stages > 1 or schedule == "1f1b":
                yield Cell(stages, microbatch, schedule, interleave)


def answer(name: str, with_grid: bool) -> Answer:
    """Ask one question, and its grid."""
    question = Question.of(name)
    begun = time.process_time()
    chosen = question.ask()
    seconds = time.process_time() - begun
    found = dict(_requested_plan(question, grid(question), name)) if with_grid else {}
    around = sorted(found, key=found.__getitem__)[: question.grid_size.refined]
    varied = (
        replace(c, activations=a, shard=s)
        for c in around
        for a, s in itertools.product(ACTIVATIONS, SHARDS)
    )
    found |= dict(_requested_plan(question, varied, name))
    best = min(found, key=found.__getitem__, default=None)
    least = found[best] if best else math.inf
    step = chosen.prediction.step_seconds
    return Answer(
        question=name,
        seconds=round(seconds, 2),
        megabytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        step_seconds=step,
        gap=round(chosen.gap, 4),
        regret=round(max(0.0, step / least - 1), 5),
        cells=len(found),
        chosen=describe(chosen),
        better=str(best) if least < step else "",
    )


def _requested_plan(
    question: Question, cells: Iterator[Cell], name: str
) -> Iterator[tuple[Cell, float]]:
    for number, cell in enumerate(cells):
        print(f"\r{name}: {number} plans requested", end="", file=sys.stderr, flush=True)
        try:
            yield cell, question.ask(cell).prediction.step_seconds
        except ParallaxError:  # it does not fit, or cannot be
            continue
    print(end="\r\033[K", file=sys.stderr)


def main() -> None:
    """Run the questions and print a line for each."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.regret", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument(
        "--questions", default="", metavar="TEXT", help="only those whose name contains it"
    )
    parser.add_argument("--chosen", action="store_true", help="ask no grid: gap and seconds alone")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a line, the figures of all last"
    )
    parsed = parser.parse_args()
    answers = []
    for name in QUESTIONS:
        if parsed.questions not in name:
            continue
        found = answer(name, not parsed.chosen)
        answers.append(found)
        if parsed.json:
            print(json.dumps(asdict(found)), flush=True)
        else:
            print(
                f"{found.question:30s} {found.step_seconds:9.3f} s  gap {found.gap:6.1%}  regret {found.regret:6.2%} "
                f"of {found.cells} plans  {found.seconds:5.1f} s  {found.megabytes} MB\n    {found.chosen}"
                + (f"\n    better: {found.better}" if found.better else ""),
                flush=True,
            )
    if not answers:
        sys.exit(f"no question contains {parsed.questions!r}: there are {', '.join(QUESTIONS)}")
    figures = {
        "worst_regret": max(found.regret for found in answers),
        "median_gap": round(statistics.median(found.gap for found in answers), 4),
        "worst_seconds": max(found.seconds for found in answers),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
