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
    *("data.validation=0", "data.last_batch=keep", "logger=none"),
    *("trainer.eval_every=0", "cluster.kind=cpu"),
]
PLANS = [
    ["plan.stages=2", "trainer.microbatch=2", "cluster.devices=2", "data.workers=1"],
    ["plan.stages=1", "trainer.microbatch=1", "plan.replicas=2", "data.workers=3"],
    ["plan.stages=1", "trainer.microbatch=3", "plan.replicas=1", "data.workers=0"],
]


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


def check_epochs(kind: str, steps: list[list[float]], rows: int) -> None:
    """Check that each epoch has each row once, and another order."""
    read = [row for step in steps for row in step]
    epochs = [read[start : start + rows] for start in range(0, len(read) - rows + 1, rows)]
    assert len(epochs) >= 2
    for one, other in pairwise(epochs):
        assert len(set(one)) == rows
        assert one != other
        if kind not in DRAWING:
            assert sorted(one) == pytest.approx(sorted(other))


def check_kind(here: Path, called: Called, kind: str) -> None:
    """Kill a run of ``kind`` at a random step, resume it under another plan, kill it again, and resume it."""
    pytest.importorskip(NEEDS.get(kind, "datasets" if "Hugging" in kind else "numpy"))
    settings = [*SETTINGS, *KINDS[kind](here / "rows")]
    steps, rows = expected(settings)
    if rows:
        check_epochs(kind, steps, rows)
    chance = random.Random(kind)
    for number, (plan, *limits) in enumerate(zip(PLANS, (STEPS, 11, STEPS), (40, 30, 0))):
        last, most = limits
        killed = here / "killed"
        killed.unlink(missing_ok=True)
        if most:
            (here / "kill").write_text(str(chance.randint(2, most)))
        own = settings if number == 0 else []
        restarts = f"trainer.max_restarts={number}"
        code, _, err = called("train", "name=run", *own, f"trainer.steps={last}", restarts, *plan)
        assert killed.exists() == (most > 0), err
        assert (code == 0) == (number > 0), err
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
    check_kind(here, called, kind)


@pytest.mark.faults
@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_kind(here: Path, called: Called, kind: str) -> None:
    check_kind(here, called, kind)
