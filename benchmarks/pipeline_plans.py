"""Are pipelines as fast as planned, and plans better than even ones?  ``python -m benchmarks.pipeline_plans [--json]``

Everything is measured in one run: what the blocks cost and what the machine does in a clean process, nothing read from
earlier runs; then whole training steps (``Engine.step``) of every plan by turns, in processes of one thread each.
Machines are noisy, so only ratios within a run mean something (benchmarks/ratios.py): medians of neighbouring turns,
with quartiles.

``speedup``   Do two stages deliver what the simulator promises over one process on one core? A GPT is planned for two
              devices, one stage each, under every schedule, and for one device. Beside the speed-up stand the
              predicted one and their quotient, ``of_prediction``: the bar is 0.95. ``step_over_prediction`` is the
              measured step over the predicted, without any division by one process: the machine's noise is in it.
``uneven``    A model whose last (first) block cannot be divided and is twice as heavy as all the others together, on
              three ranks: is the plan with two replicas for it, 1→2 (2→1), faster than the best even plan, as the
              planner says? Even plans are three stages of one replica, where the heavy block holds up the others, and
              one stage of three replicas. Nothing forbids the latter: the light blocks have most of the parameters,
              and three copies of them cost an all-reduce and three updates, which the heavy block's do not. Schedule
              and micro-batch are left to the planner for each. ``chosen`` is the planner's choice without settings.

The heavy block multiplies by one small matrix again and again, as recurrent models do; how often is measured out, so
that it weighs the request (``weight``). Were every rank on a core of its own, 1→2 could be up to twice as fast as
three stages, which wait for the heavy one. On two cores it is at most 4/3: three ranks share them, so the work of
all, three times that of the light blocks, takes half of it, and the heavy block alone takes two; and one stage of three
replicas then lacks nothing but its all-reduce and updates. The planner knows how many cores there are, and so do its
predictions.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.ratios import ratios, show
from benchmarks.teams import Answer, Ask, Place, Run, Team, by_turns, check_same_losses, plans
from benchmarks.workers import Worker
from parallax.model.describe import Chain, describe
from parallax.model.factory.gpt import GPT, GPTConfig
from parallax.model.precision import PrecisionConfig
from parallax.plan.config import PlanConfig
from parallax.runtime.batch import TensorRows

SCHEDULES = ("1f1b", "zb-h1", "interleaved")
BAR = 0.95
WEIGHT = 2.0  # of the heavy block, in all others
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured. Of GPT: 16 micro-batches of ``rows``. ``light`` blocks are square matrices of ``width``, the
    heavy one's is of ``inner``; ``batch`` rows of ``positions`` vectors make a step of the uneven model: what few rows
    cost, which is measured, must not be the reading of the weights alone."""

    repetitions: int = 15
    layers: int = 6
    hidden: int = 256
    heads: int = 4
    sequence: int = 128
    vocabulary: int = 256
    rows: int = 2
    micro_batches: int = 16
    light: int = 2
    width: int = 4096
    inner: int = 1024
    positions: int = 16
    batch: int = 16


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A GPT over random tokens without tied weights, so that only activations cross the boundary."""

    config: GPTConfig
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)

    def chain(self) -> Chain:
        """Embedding, layers, head."""
        return describe(self.config.build, dtype=self.precision.parameter_dtype)

    def batch(self, rows: int) -> TensorRows:
        """Random tokens and those that follow."""
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(
            0, self.config.vocabulary, (rows, self.config.sequence + 1), generator=generator
        )
        return TensorRows(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Cross-entropy."""
        return GPT.loss(outputs, targets)


class Light(nn.Module):
    """Many parameters, each used once for a row."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(inside), nn.Linear(inside, outside)

    def forward(self, x: Tensor) -> Tensor:
        """(…, inside) → (…, outside)."""
        return F.gelu(self.linear(self.norm(x)))


class Heavy(nn.Module):
    """Few parameters, each used ``passes`` times for a row, in one module, which the planner cannot divide."""

    def __init__(self, width: int, passes: int) -> None:
        super().__init__()
        self.norm, self.linear, self.passes = nn.LayerNorm(width), nn.Linear(width, width), passes

    def extra_repr(self) -> str:
        """Return the text by which fingerprints of chains differ."""
        return f"passes={self.passes}"

    def forward(self, x: Tensor) -> Tensor:
        """(…, width) → the same."""
        for _ in range(self.passes):
            x = self.norm(x + F.gelu(self.linear(x)))
        return x


@dataclass(frozen=True, kw_only=True)
class Lopsided:
    """``light`` blocks and a heavy one, last or first."""

    light: int
    width: int
    inner: int
    positions: int
    passes: int
    heavy_last: bool
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)

    def chain(self) -> Chain:
        """The light blocks lead from ``width`` to the heavy one's ``inner``, or back."""
        return describe(self._build)

    def _build(self) -> nn.Module:
        widths = [*[self.width] * self.light, self.inner]
        heavy = Heavy(self.inner, self.passes)
        if self.heavy_last:
            return nn.Sequential(*(Light(a, b) for a, b in pairwise(widths)), heavy)
        widths.reverse()
        return nn.Sequential(heavy, *(Light(a, b) for a, b in pairwise(widths)))

    def batch(self, rows: int) -> TensorRows:
        """Noise."""
        first, last = (self.width, self.inner) if self.heavy_last else (self.inner, self.width)
        generator = torch.Generator().manual_seed(1)
        return TensorRows(
            *(
                torch.randn(rows, self.positions, width, generator=generator)
                for width in (first, last)
            )
        )

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Squared error."""
        return F.mse_loss(outputs, targets)


@contextlib.contextmanager
def _planner(
    model: Any, rows: int, cache: str
) -> Iterator[tuple[list[float], Callable[[Ask], Answer]]]:
    worker = Worker("planner", plans, model, rows, Place(), cache)
    try:
        yield worker.ready(), worker.ask
    finally:
        worker.close()


def _measured(model: Any, rows: int, plans_: dict[str, Answer], sizes: Sizes) -> dict[str, Run]:
    """Steps of every plan, by turns; those of as many ranks share processes."""
    with contextlib.ExitStack() as stack:
        steps, teams = {}, dict[int, Team]()
        for name, answer in plans_.items():
            assert answer.plan is not None
            ranks = answer.plan.world_size
            if ranks not in teams:
                teams[ranks] = stack.enter_context(Team(model, rows, ranks, Place()))
            teams[ranks].build(name, answer.plan)
            steps[name] = partial(teams[ranks].step, name)
        runs = by_turns(steps, sizes.repetitions)
    check_same_losses(runs)
    return runs


def _row(answer: Answer, run: Run) -> dict[str, Any]:
    seconds = statistics.median(run.seconds)
    return {
        "plan": answer.summary,
        "predicted_seconds": answer.seconds,
        "seconds": seconds,
        "step_over_prediction": seconds / answer.seconds,
    }


def speedup(sizes: Sizes, cache: str, say: Say) -> dict[str, Any]:
    """Two stages against one process."""
    model = Transformer(
        config=GPTConfig(
            layers=sizes.layers,
            hidden=sizes.hidden,
            heads=sizes.heads,
            sequence=sizes.sequence,
            vocabulary=sizes.vocabulary,
            tied=False,
        )
    )
    rows = sizes.rows * sizes.micro_batches
    asks = {"one process": Ask(devices=1, config=PlanConfig(stages=1), microbatch=sizes.rows)}
    for schedule in SCHEDULES:
        config = PlanConfig(stages=2, replicas=1, schedule=schedule)
        asks[schedule] = Ask(devices=2, config=config, microbatch=sizes.rows)
    with _planner(model, rows, cache) as (_, ask):
        answers = {name: ask(each) for name, each in asks.items()}
    for name, answer in answers.items():
        say(f"speedup: {name}: {answer.reason or answer.summary}")
    possible = {name: answer for name, answer in answers.items() if answer.plan is not None}
    one = possible["one process"]
    runs = _measured(model, rows, possible, sizes)
    found = {}
    for name, answer in answers.items():
        if answer.reason is not None:
            found[name] = {"reason": answer.reason}
            continue
        predicted = one.seconds / answer.seconds
        faster = ratios(runs["one process"].seconds, runs[name].seconds)
        of_prediction = {reading: value / predicted for reading, value in faster.items()}
        found[name] = _row(answer, runs[name]) | {
            "reason": None,
            "predicted_speedup": predicted,
            "speedup": faster,
            "of_prediction": of_prediction,
            "met": of_prediction["median"] >= BAR,
        }
    return {"one": found.pop("one process"), "schedules": found}


def twice_as_heavy(sizes: Sizes, cache: str) -> int:
    """How often the heavy block multiplies so that it weighs :data:`WEIGHT`: as many products as the others would have,
    corrected by what these and those take."""
    products = (sizes.light - 1) * sizes.width**2 + sizes.width * sizes.inner
    passes = max(1, round(WEIGHT * products / sizes.inner**2))
    with _planner(_lopsided(sizes, passes, heavy_last=True), sizes.batch, cache) as (seconds, _):
        return max(1, round(passes * WEIGHT / _weight(seconds, heavy_last=True)))


def _lopsided(sizes: Sizes, passes: int, *, heavy_last: bool) -> Lopsided:
    return Lopsided(
        light=sizes.light,
        width=sizes.width,
        inner=sizes.inner,
        positions=sizes.positions,
        passes=passes,
        heavy_last=heavy_last,
    )


def uneven(sizes: Sizes, passes: int, heavy_last: bool, cache: str, say: Say) -> dict[str, Any]:
    """Two replicas for the heavy block against even plans."""
    model = _lopsided(sizes, passes, heavy_last=heavy_last)
    replicas = [1, 2] if heavy_last else [2, 1]
    name = "→".join(map(str, replicas))
    configs = {
        name: PlanConfig(stages=2, replicas=replicas),
        "3 stages": PlanConfig(stages=3, replicas=1),
        "3 replicas": PlanConfig(stages=1, replicas=3),
    }
    with _planner(model, sizes.batch, cache) as (seconds, ask):
        answers = {plan: ask(Ask(devices=3, config=config)) for plan, config in configs.items()}
        free = ask(Ask(devices=3, config=PlanConfig()))
    for plan, answer in answers.items():
        say(f"uneven: {plan}: {answer.reason or answer.summary}")
    possible = {plan: answer for plan, answer in answers.items() if answer.plan is not None}
    runs = _measured(model, sizes.batch, possible, sizes)
    found: dict[str, Any] = {}
    for plan, answer in answers.items():
        if answer.reason is not None:
            found[plan] = {"reason": answer.reason}
            continue
        found[plan] = _row(answer, runs[plan]) | {"reason": None}
        if plan != name:
            found[plan]["predicted_over_uneven"] = answer.seconds / answers[name].seconds
            found[plan]["over_uneven"] = ratios(runs[plan].seconds, runs[name].seconds)
    even = {plan: row for plan, row in found.items() if plan != name and row["reason"] is None}
    best = min(even, key=lambda plan: even[plan]["over_uneven"]["median"])
    return {
        "uneven": name,
        "passes": passes,
        "weight": _weight(seconds, heavy_last),
        "chosen": free.reason or free.summary,
        "plans": found,
        "best_even": best,
        "predicted_over_uneven": min(row["predicted_over_uneven"] for row in even.values()),
        "over_uneven": even[best]["over_uneven"],
        "met": even[best]["over_uneven"]["median"] > 1,
        "predicted": all(row["predicted_over_uneven"] > 1 for row in even.values()),
    }


def _weight(seconds: Sequence[float], heavy_last: bool) -> float:
    heavy = seconds[-1 if heavy_last else 0]
    return heavy / (sum(seconds) - heavy)


def run(sizes: Sizes, say: Say) -> dict[str, Any]:
    """Answer both questions, and return the numbers as plain data."""
    with tempfile.TemporaryDirectory(prefix="parallax-benchmark-") as cache:
        passes = twice_as_heavy(sizes, cache)
        return {
            "torch": torch.__version__,
            "cores": os.cpu_count(),
            "sizes": asdict(sizes),
            "speedup": speedup(sizes, cache, say),
            "uneven": {
                where: uneven(sizes, passes, where == "last", cache, say)
                for where in ("last", "first")
            },
        }


def _print(console: Console, found: dict[str, Any]) -> None:
    one = found["speedup"]["one"]
    table = Table(
        title=f"2 stages over one process, torch {found['torch']}, {found['cores']} cores"
    )
    for column in (
        "schedule",
        "step",
        "step / predicted",
        "speed-up",
        "predicted",
        "of prediction",
        "≥ 0.95",
    ):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    table.add_row("one process", f"{one['seconds']:.3f} s", f"{one['step_over_prediction']:.3f}")
    for name, row in found["speedup"]["schedules"].items():
        if row["reason"] is not None:
            table.add_row(name, row["reason"])
            continue
        table.add_row(
            name,
            f"{row['seconds']:.3f} s",
            f"{row['step_over_prediction']:.3f}",
            show(row["speedup"]),
            f"{row['predicted_speedup']:.3f}",
            show(row["of_prediction"]),
            "yes" if row["met"] else "NO",
        )
    console.print(table)
    for where, part in found["uneven"].items():
        table = Table(
            title=f"{where} block {part['weight']:.2f} × all others, 3 ranks, {found['cores']} cores"
        )
        for column in (
            "pipeline",
            "step",
            "step / predicted",
            f"over {part['uneven']}",
            "predicted",
        ):
            table.add_column(column, justify="left" if column == "pipeline" else "right")
        for name, row in part["plans"].items():
            if row["reason"] is not None:
                table.add_row(name, row["reason"])
                continue
            over = (
                (show(row["over_uneven"]), f"{row['predicted_over_uneven']:.3f}")
                if "over_uneven" in row
                else ("", "")
            )
            times = (f"{row['seconds']:.3f} s", f"{row['step_over_prediction']:.3f}")
            table.add_row(name, *times, *over)
        table.caption = f"the planner's choice without settings: {part['chosen']}"
        console.print(table)


def _parse(arguments: Sequence[str] | None) -> tuple[Sizes, bool]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline_plans",
        description="plans against their predictions, and against even ones",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    for key, default in asdict(Sizes()).items():
        parser.add_argument(
            f"--{key.replace('_', '-')}", type=int, default=default, help=f"default {default}"
        )
    options = vars(parser.parse_args(arguments))
    as_json = options.pop("json")
    if min(options.values()) < 1:
        parser.error("sizes start at 1")
    if options["light"] < 2 or options["batch"] < 2:
        parser.error(
            "three stages need two light blocks, two replicas two rows: --light and --batch start at 2"
        )
    return Sizes(**options), as_json


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    sizes, as_json = _parse(arguments)
    console = Console(soft_wrap=True)
    found = run(sizes, lambda text: console.print(text, highlight=False))
    _print(console, found)
    if as_json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
