"""Callbacks on two ranks: the order of hooks, requests of one rank, errors, and states over a resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallax import Callback, TrainingRun
from parallax.errors import CallbackError, ConfigError
from parallax.runtime.checkpoint import list_checkpoints
from parallax.train.callbacks import HOOKS, NamedCallback
from parallax.train.loop import TrainerConfig, train
from parallax.train.monitor import LoggerConfig
from tests.distributed.pool import Pool
from tests.distributed.test_stop import SameRows, an_engine
from tests.results import read_metrics

STEPS = 6
Seen = list[tuple[str, int]]


class Recorder:
    """Records its hooks with the steps, and makes one request or error at one of them, on one rank."""

    def __init__(self, rank: int = 1, at: str = "", step: int = 0, do: str = "") -> None:
        self.rank, self.at, self.step, self.do = rank, at, step, do
        self.seen: Seen = []
        self.figures: dict[str, Any] = {}
        self.ended, self.saved = "", list[str]()

    def __getattr__(self, name: str) -> Callable[[TrainingRun], None]:
        if name not in HOOKS:
            raise AttributeError(name)
        return lambda run: self.hook(name, run)

    def hook(self, name: str, run: TrainingRun) -> None:
        self.seen.append((name, run.step))
        self.ended = run.ended
        if name == "on_step_end":
            self.figures[f"loss {run.step}"] = run.loss
        if name == "on_evaluate":
            self.figures[f"validation {run.step}"] = run.validation["validation_loss"]
        if name == "on_checkpoint":
            assert run.checkpoint is not None
            assert (run.checkpoint / "checkpoint.json").exists()
            self.saved.append(run.checkpoint.name)
        if (name, run.step, run.rank) == (self.at, self.step, self.rank):
            if self.do == "stop":
                run.stop("it is good enough")
            elif self.do == "save":
                run.save()
            elif self.do == "evaluate":
                run.evaluate()
            elif self.do:
                raise ValueError(self.do)


def trained(
    folder: Path, callbacks: list[Any], every: int = 0, steps: int = STEPS
) -> dict[str, Any]:
    engine = an_engine(folder)
    trainer = TrainerConfig(
        steps=steps, global_batch=4, eval_every=every, eval_batches=1, checkpoint_every=every
    )
    try:
        return train(
            engine,
            SameRows(),
            trainer,
            LoggerConfig(to=[], events=False),
            folder,
            tokens_per_row=1,
            callbacks=callbacks,
        )
    finally:
        engine.close()


def recorded(
    folder: Path, every: int, at: str, step: int, do: str
) -> tuple[Recorder, dict[str, Any]]:
    callback = Recorder(1, at, step, do)
    return callback, trained(folder, [callback], every)


def test_hooks_are_called_in_the_same_order_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(recorded, 2, tmp_path, 3, "", 0, "")
    (one, summary), (two, _) = found
    assert one.seen == two.seen
    assert one.figures == two.figures
    steps = [each for each in one.seen if each[0] in ("on_step_start", "on_step_end")]
    assert steps == [
        (hook, step + late)
        for step in range(STEPS)
        for hook, late in (("on_step_start", 0), ("on_step_end", 1))
    ]
    assert one.seen[0] == ("on_run_start", 0)
    assert one.seen[-1] == ("on_run_end", STEPS)
    assert [each for each in one.seen if each[0] == "on_evaluate"] == [
        ("on_evaluate", 3),
        ("on_evaluate", 6),
    ]
    assert one.saved == ["step-00000003", "step-00000006"]
    assert one.ended == "steps"
    records = {r["step"]: r for r in read_metrics(tmp_path / "metrics.jsonl") if "loss" in r}
    assert [one.figures[f"loss {step}"] for step in records] == [
        r["loss"] for r in records.values()
    ]
    assert one.figures["validation 6"] == summary["validation_loss"]


@pytest.mark.parametrize(
    ("every", "at", "step", "ends"),
    [
        (0, "on_step_end", 2, 2),
        (0, "on_step_start", 2, 3),
        (2, "on_evaluate", 4, 4),
        (0, "on_run_start", 0, 0),
        (0, "on_step_end", 6, 6),
    ],
)
def test_a_request_to_stop_ends_all_ranks_after_the_same_step(
    pool: Pool, tmp_path: Path, every: int, at: str, step: int, ends: int
) -> None:
    for callback, summary in pool.run(recorded, 2, tmp_path, every, at, step, "stop"):
        assert summary["steps"] == ends
        assert (summary["ended"], summary["callback"]) == ("callback", "it is good enough")
        assert callback.ended == "callback"
        assert callback.seen[-1] == ("on_run_end", ends)
    kept = [path.name for path in list_checkpoints(tmp_path / "checkpoints")]
    assert kept[-1:] == ([f"step-{ends:08}"] if ends else [])


@pytest.mark.parametrize("do", ["save", "evaluate"])
def test_a_request_of_one_rank_saves_or_evaluates_after_the_step(
    pool: Pool, tmp_path: Path, do: str
) -> None:
    hook = {"save": "on_checkpoint", "evaluate": "on_evaluate"}[do]
    for callback, summary in pool.run(recorded, 2, tmp_path, 0, "on_step_end", 2, do):
        assert summary["ended"] == "steps"
        assert len([each for each in callback.seen if each[0] == hook]) == 2
        if do == "save":
            assert callback.saved == ["step-00000002", "step-00000006"]
        else:
            assert {"validation 2", "validation 6"} <= callback.figures.keys()


def noted(folder: Path) -> dict[str, Any]:
    failing = NamedCallback("own:Failing", Recorder(1, "on_step_end", 2, "bad"), "note")
    return trained(folder, [failing, Recorder()])


def test_an_error_that_is_noted_does_not_end_the_run(pool: Pool, tmp_path: Path) -> None:
    for summary in pool.run(noted, 2, tmp_path):
        assert (summary["ended"], summary["steps"]) == ("steps", STEPS)
        assert summary["unwritten"] == [
            "the callback own:Failing failed in on_step_end on rank 1: ValueError: bad (once)"
        ]


def failing(folder: Path) -> str:
    # On both ranks: another rank would wait for one that has failed.
    callbacks = [Recorder(rank, "on_step_end", 2, f"bad {rank}") for rank in (0, 1)]
    with pytest.raises(CallbackError) as error:
        trained(folder, callbacks)
    assert isinstance(error.value.__cause__, ValueError)
    assert not error.value.may_pass
    return str(error.value)


def test_an_error_names_callback_hook_and_rank(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(failing, 2, tmp_path) == [
        "the callback Recorder failed in on_step_end on rank 0: ValueError: bad 0",
        "the callback Recorder (2) failed in on_step_end on rank 1: ValueError: bad 1",
    ]


class Counting(Callback):
    """Counts steps, also those of earlier starts."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, run: TrainingRun) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def in_two_starts(folder: Path) -> list[int]:
    counts = []
    for steps in (4, 6):
        one, two = Counting(), Counting()
        trained(folder, [one, two, Recorder()], steps=steps)
        counts += [one.steps, two.steps]
    return counts


def test_states_are_saved_and_restored(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(in_two_starts, 2, tmp_path) == [[4, 4, 6, 6]] * 2
    last = list_checkpoints(tmp_path / "checkpoints")[-1]
    index = json.loads((last / "checkpoint.json").read_text())
    assert index["state"]["callbacks"] == {"Counting": {"steps": 6}, "Counting (2)": {"steps": 6}}


def unequal(folder: Path) -> str:
    engine = an_engine(folder)
    mine = [Counting()] if engine.mesh.rank else []
    engine.close()
    with pytest.raises(ConfigError) as error:
        trained(folder, mine)
    return str(error.value)


def test_ranks_with_other_callbacks_are_refused(pool: Pool, tmp_path: Path) -> None:
    assert set(pool.run(unequal, 2, tmp_path)) == {
        "callbacks: rank 1 has Counting, and rank 0 has none: pass the same on every rank"
    }


def test_an_object_without_hooks_is_refused() -> None:
    class Misspelt:
        def on_step_ends(self) -> None: ...

    with pytest.raises(ConfigError, match=r"has no hook; .*did you mean 'on_step_end'"):
        NamedCallback("own", Misspelt())
