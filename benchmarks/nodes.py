"""Plans over two hosts against what they were predicted to take, and the planner's choice against the others.

Two network namespaces with a core each, joined by a link of 1 Gbit/s, run every shape of pipeline that four ranks can
have, two on each host, and the one that two ranks can have; for two stages of two replicas both placements. The
planner's choice should be the fastest of those measured, and steps within 15% of their prediction::

    python -m benchmarks.nodes            needs root, a quarter of an hour
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from benchmarks.hosts import HostError, TwoHosts

SETTINGS = (
    "plan=auto",
    "cluster.device_memory=auto",
    "swap=off",
    "trainer.eval_batches=1",
    "trainer.checkpoint_every=0",
    "checkpoint.keep=1",
)
STEPS = 14
ENDS_SECONDS = 300.0


@dataclass
class Shape:
    """The request, and seconds of a step, by run: as predicted and as measured."""

    name: str
    processes: int
    settings: tuple[str, ...]
    moved: bool = False  # the placement that the planner did not choose
    plan: str = ""
    predicted: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Measured to predicted."""
        return statistics.median(m / p for m, p in zip(self.measured, self.predicted))


def shapes() -> list[Shape]:
    """Return the shapes, the planner's choice first."""
    pairs = ("plan.stages=2", "plan.replicas=2")
    return [
        Shape("four ranks, as planned", 2, ()),
        Shape("two stages of two replicas", 2, pairs),
        Shape("the same, placed otherwise", 2, pairs, moved=True),
        Shape("four stages", 2, ("plan.stages=4",)),
        Shape("four replicas", 2, ("plan.stages=1",)),
        Shape("two ranks in two stages", 1, ("plan.stages=2",)),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--model", default="gpt", help="an option of configs/model")
    parsed = parser.parse_args(arguments)
    found = shapes()
    try:
        with tempfile.TemporaryDirectory() as folder, TwoHosts(Path(folder)) as hosts:
            for turn in range(parsed.repeats):
                for number, shape in enumerate(found):
                    hosts.move(Path(folder) / f"{turn}-{number}")
                    _measure(hosts, shape, parsed.steps, parsed.model)
                    print(
                        f"{shape.name}: {shape.measured[-1]:.3f} s, predicted {shape.predicted[-1]:.3f} s, "
                        f"{shape.plan}",
                        file=sys.stderr,
                    )
    except HostError as error:
        print(f"no hosts: {error}", file=sys.stderr)
        return 2
    return _print(found)


def _measure(hosts: TwoHosts, shape: Shape, steps: int, model: str) -> None:
    settings = ("name=run", f"model={model}", f"trainer.steps={steps}", *SETTINGS, *shape.settings)
    if shape.moved:
        _train(hosts, shape.processes, "trainer.steps=1", *settings)
        _move(hosts.a.folder / "runs" / "run", steps)
        shutil.rmtree(hosts.b.folder / "runs")
        _train(hosts, shape.processes, "--run-dir", "runs/run")
    else:
        _train(hosts, shape.processes, *settings)
    run = hosts.a.folder / "runs" / "run"
    summary = json.loads((run / "summary.json").read_text())
    plan = yaml.safe_load((run / "plan.yaml").read_text())
    shape.measured.append(float(summary["step_seconds_median"]))
    shape.predicted.append(float(summary["predicted_step_seconds"]))
    replicas = [stage["replicas"] for stage in plan["stages"]]
    shape.plan = (
        f"{plan['schedule']}, replicas {replicas}, placement {plan['placement'] or 'in order'}"
    )


def _move(run: Path, steps: int) -> None:
    """Give the plan of a run its other placement: replicas of a stage on one host, or each on another."""
    path = run / "plan.yaml"
    plan = yaml.safe_load(path.read_text())
    plan["placement"] = [0, 2, 1, 3] if not plan["placement"] else []
    path.write_text(yaml.safe_dump(plan, sort_keys=False))
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["trainer"]["steps"] = steps
    (run / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    shutil.rmtree(run / "checkpoints", ignore_errors=True)


def _train(hosts: TwoHosts, processes: int, *settings: str) -> None:
    codes = [process.wait(ENDS_SECONDS) for process in hosts.start(processes, settings)]
    if codes != [0, 0]:
        output = "\n".join((host.folder / "out.txt").read_text() for host in hosts.hosts)
        raise RuntimeError(f"{' '.join(settings)} ended with {codes}:\n{output}")


def _print(found: Sequence[Shape]) -> int:
    four = [shape for shape in found if shape.processes == 2]
    fastest = min(statistics.median(shape.measured) for shape in four)
    chosen = statistics.median(found[0].measured)
    planned = [shape for shape in found if not shape.moved]
    far = [shape.name for shape in planned if abs(shape.ratio - 1) > 0.15]
    print(
        json.dumps(
            {
                "shapes": {
                    shape.name: {
                        "plan": shape.plan,
                        "predicted_seconds": round(statistics.median(shape.predicted), 4),
                        "measured_seconds": round(statistics.median(shape.measured), 4),
                        "measured_to_predicted": round(shape.ratio, 3),
                    }
                    for shape in found
                },
                "planned_to_fastest": round(chosen / fastest, 3),
                "further_than_15_percent": far,
            }
        )
    )
    return 1 if far or chosen > 1.05 * fastest else 0


if __name__ == "__main__":
    sys.exit(main())
