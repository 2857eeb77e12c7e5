"""Rows of every kind are the same in a run that is killed and resumed under other plans: each row once an epoch."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parallax.config import compose
from parallax.run.job import open_source
from tests.faults.commands import running
from tests.faults.kinds_of_rows import DRAWING, KINDS, digests
from tests.results import read_metrics

Called = Callable[..., tuple[int, str, str]]
NEEDS = {
    **{"text": "tokenizers", "lines of text": "tokenizers", "chat": "transformers"},
    **{"parquet": "pyarrow", "arrow": "pyarrow", "audio": "soundfile"},
}
BATCH, STEPS = 6, 16
SETTINGS = [
    *("model=custom", "model.target=tests.faults.kinds_of_rows:Digests"),
    *("+model.kwargs.sequence=40", "+model.kwargs.vocabulary=1000"),
    *(f"trainer.global_batch={BATCH}", f"trainer.steps={STEPS}", "trainer.checkpoint_every=2"),
    *("optimizer=sgd", "optimizer.lr=1e-30", "schedule.final=1", "precision=fp64"),
    *("data.validation=0", "logger=none"),
    *("trainer.eval_every=0", "cluster.kind=cpu"),
]
PLANS = [
    (stages, replicas, microbatch)
    for stages, replicas in ((1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (2, 2))
    for microbatch in (1, 2, 3)
    if microbatch * replicas <= BATCH
]
WORKERS = [0, 1, 3]
LAST = ["continue", "keep", "drop", "repeat"]
PHASES = [(STEPS, 4, False), (STEPS, 3, False), (14, 3, True), (STEPS, 0, True)]
"""Of each start of a run: its last step, the step of its own before which a process is killed, at the latest (0 for
none), and whether the launcher starts a killed run again."""


def expected(settings: list[str]) -> tuple[list[list[float]], int]:
    """Return the digests of the rows of each step, read in this process, and the number of rows of an epoch."""
    source: Any = open_source(compose(settings))
    found = []
    for _ in range(STEPS):
        batch = source.batch(BATCH)
        parts: list[Tensor] = []
        for part in (batch.inputs(0, len(batch)), batch.targets(0, len(batch))):
            parts.append(digests(torch.as_tensor(part["x"] if isinstance(part, dict) else part)))
        found.append((parts[0] + parts[1])[:, 0].tolist())
    rows = len(source) if hasattr(source, "__len__") else 0
    del source, batch
    gc.collect()  # which closes its files
    return found, rows


def check_epochs(kind: str, steps: list[list[float]], rows: int, last: str) -> None:
    """Check that each epoch has each row once, and another order. ``last`` is data.last_batch."""
    if last == "continue":
        read = [row for step in steps for row in step]
        epochs = [read[start : start + rows] for start in range(0, len(read) - rows + 1, rows)]
    else:
        batches = rows // BATCH if last == "drop" else -(-rows // BATCH)
        starts = range(0, len(steps) - batches + 1, batches)
        epochs = [
            [row for step in steps[start : start + batches] for row in step] for start in starts
        ]
        if last == "repeat":
            for epoch in epochs:
                assert epoch[rows:] == pytest.approx(epoch[: len(epoch) - rows])
            epochs = [epoch[:rows] for epoch in epochs]
    assert len(epochs) >= 2
    for one, other in pairwise(epochs):
        assert len(set(one)) == len(one) == (rows // BATCH * BATCH if last == "drop" else rows)
        assert one != other
        if kind not in DRAWING and last != "drop":
            assert sorted(one) == pytest.approx(sorted(other))


def check_kind(here: Path, called: Called, kind: str, seed: int) -> None:
    """Kill a run of ``kind`` at random steps and resume it three times, each time under another plan. ``seed`` chooses
    the plans, the workers, the steps and how epochs end."""
    pytest.importorskip(NEEDS.get(kind, "datasets" if "Hugging" in kind else "numpy"))
    chance = random.Random(f"{kind} {seed}")
    last = "continue" if "iterable" in kind else chance.choice(LAST)
    settings = [*SETTINGS, *KINDS[kind](here / "rows"), f"data.last_batch={last}"]
    steps, rows = expected(settings)
    if rows:
        check_epochs(kind, steps, rows, last)
    for number, (until, latest, restarts) in enumerate(PHASES):
        stages, replicas, microbatch = chance.choice(PLANS)
        plan = [f"plan.stages={stages}", f"plan.replicas={replicas}"]
        plan += [f"trainer.microbatch={microbatch}", f"cluster.devices={stages * replicas}"]
        plan += [f"data.workers={chance.choice(WORKERS)}", f"trainer.steps={until}"]
        killed = here / "killed"
        killed.unlink(missing_ok=True)
        if latest:
            step = -(-4 // stages) * -(-BATCH // (replicas * microbatch))  # forwards of a rank
            (here / "kill").write_text(str(chance.randint(1, latest * step)))
        print(kind, last, plan)
        own = settings if number == 0 else []
        plan.append(f"trainer.max_restarts={int(restarts)}")
        code, _, err = called("train", "name=run", *own, *plan)
        assert killed.exists() == (latest > 0), err
        assert (code == 0) == restarts, err
    found = [each for each in read_metrics(Path("runs/run/metrics.jsonl")) if "loss" in each]
    assert [each["step"] for each in found] == list(range(1, STEPS + 1))
    means = [sum(step) / len(step) for step in steps]
    assert [each["loss"] for each in found] == pytest.approx(means, rel=1e-9, abs=1e-9)
    assert running(here) == []


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.faults
def test_a_run_that_is_killed_and_resumed_sees_the_rows_of_one_that_is_not(
    here: Path, called: Called, request: pytest.FixtureRequest
) -> None:
    """Of one kind, which the seed of the tests chooses."""
    kind = [*KINDS][request.config.option.seed % len(KINDS)]
    print(kind)
    check_kind(here, called, kind, request.config.option.seed)


@pytest.mark.faults
@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_kind(
    here: Path, called: Called, request: pytest.FixtureRequest, kind: str
) -> None:
    check_kind(here, called, kind, request.config.option.seed)
