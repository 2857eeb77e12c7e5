"""Checkpoints survive everything that can happen to them, and any plan continues what another began."""

from __future__ import annotations

import json
import os
import pickle
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from parallax.errors import CheckpointError
from parallax.runtime.checkpoint import (
    checkpoint_name,
    list_checkpoints,
)
from parallax.runtime.checkpoint.config import CheckpointConfig
from parallax.runtime.optim.kinds.lion import LionConfig
from parallax.train.loop import TrainerConfig, train
from parallax.train.monitor import LoggerConfig
from tests.distributed.pool import Pool
from tests.distributed.test_engine import (
    Case,
    Outcome,
    compare,
    gpt,
    half_frozen,
    make_batch,
    same,
    with_unused,
)
from tests.results import read_metrics

CASE = Case(gpt(), sizes=(8, 3, 7, 1, 2))
STATE = {"source": {"position": 7}}


# ---- jobs


def training(case: Case, folder: Path, first: int, last: int, loaded: int | None) -> Outcome:
    """Steps ``first`` to ``last``, after loading the checkpoint of step ``loaded``; then saves."""
    engine = case.engine(folder)
    if loaded is not None:
        assert engine.load(folder / checkpoint_name(loaded)) == STATE
        assert engine.completed_steps == loaded
    results = [engine.step(batch) for batch in case.batches()[first:last]]
    weights = {name: tensor.detach().clone() for name, tensor in engine.parameters.items()}
    assert engine.save(folder, STATE) == folder / checkpoint_name(last)
    engine.close()
    return Outcome([r.loss for r in results], [r.gradient_norm for r in results], weights)


def loading(case: Case, path: Path) -> tuple[str, bool, int]:
    """What refused, whether anything changed, and the step."""
    engine = case.engine(path.parent)
    for batch in case.batches()[:1]:
        engine.step(batch)
    parameters = list(engine.parameters.values())
    before = [tensor.detach().clone() for tensor in parameters]
    states = [{k: v.clone() for k, v in engine._optimizer.states(p).items()} for p in parameters]
    message = ""
    try:
        engine.load(path)
    except CheckpointError as error:
        message = str(error)
    changed = any(not torch.equal(a, b) for a, b in zip(parameters, before))
    for parameter, state in zip(parameters, states):
        changed |= any(
            not torch.equal(engine._optimizer.states(parameter)[k], v) for k, v in state.items()
        )
    engine.close()
    return message, changed, engine.completed_steps


def saved(pool: Pool, folder: Path, case: Case = CASE, steps: int = 2) -> Path:
    """A checkpoint made by one rank."""
    pool.run(training, 1, case.under((1,)), folder, 0, steps, None)
    return folder / checkpoint_name(steps)


# ---- any plan continues another's


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("before", "after"),
    [((1, 1), (1,)), ((1, 2), (2, 1)), ((2,), (1, 1, 1)), ((2, 1), (2, 1)), ((1, 2), (1, 2))],
    ids=str,
)
def test_training_continues_under_any_plan(
    pool: Pool, tmp_path: Path, before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    whole = pool.run(training, sum(after), CASE.under(after), tmp_path / "whole", 0, 5, None)
    first = CASE.under(before)
    pool.run(training, first.world, first, tmp_path, 0, 3, None)
    resumed = pool.run(training, sum(after), CASE.under(after), tmp_path, 3, 5, 3)
    expected = Outcome(
        whole[0].losses[3:], whole[0].norms[3:], {n: w for o in whole for n, w in o.weights.items()}
    )
    compare(resumed, expected, 1e-12)
    if before == after:
        same(resumed, [Outcome(o.losses[3:], o.norms[3:], o.weights) for o in whole])


@pytest.mark.parametrize("factory", [half_frozen, with_unused], ids=lambda f: f.__name__)
def test_what_has_no_optimizer_state_is_loaded_all_the_same(
    pool: Pool, tmp_path: Path, factory: Callable[[], nn.Module]
) -> None:
    case = Case(factory, sizes=(4, 4)).under((1,))
    whole = pool.run(training, 1, case, tmp_path / "whole", 0, 2, None)
    pool.run(training, 1, case, tmp_path, 0, 1, None)
    resumed = pool.run(training, 1, case, tmp_path, 1, 2, 1)
    same(resumed, [Outcome(o.losses[1:], o.norms[1:], o.weights) for o in whole])


# ---- damaged


def flip(path: Path, name: str) -> None:
    """One bit of the last number of a tensor."""
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    end = json.loads(data[8 : 8 + length])[name]["data_offsets"][1]
    data[8 + length + end - 1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["model/layers.1.up.weight", "exp_avg/layers.1.up.weight"])
def test_flipped_bit_is_named_and_nothing_changes(pool: Pool, tmp_path: Path, name: str) -> None:
    path = saved(pool, tmp_path)
    flip(path / "stage-00.safetensors", name)
    for message, changed, step in pool.run(loading, 2, CASE.under((1, 1)), path):
        assert name in message
        assert "checksum" in message
        assert not changed
        assert step == 1


@pytest.mark.parametrize("left", [0, 7, 100, 3000, -1])
def test_truncated_file(pool: Pool, tmp_path: Path, left: int) -> None:
    path = saved(pool, tmp_path)
    file = path / "stage-00.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    ((message, changed, _),) = pool.run(loading, 1, CASE.under((1,)), path)
    assert str(path) in message
    assert "earlier" in message
    assert not changed


JUNK = [
    "",
    "[]",
    "7",
    "null",
    "[" * 100000,
    '{"version": 1}',
    '{"version": 99}',
    '{"version": "\\u001b[31m\\n"}',
    '{"version": 1, "checksums": [1]}',
    '{"version": 1, "step": "x", "state": {}, "fingerprint": "", "optimizer": [], "checksums": {}}',
]


@pytest.mark.parametrize("text", JUNK, ids=lambda text: text[:30])
def test_junk_index(pool: Pool, tmp_path: Path, text: str) -> None:
    path = tmp_path / checkpoint_name(2)
    path.mkdir()
    (path / "checkpoint.json").write_text(text)
    ((message, changed, _),) = pool.run(loading, 1, CASE.under((1,)), path)
    assert str(path) in message
    assert message.isprintable()
    assert not changed


def test_missing_part_is_damage(pool: Pool, tmp_path: Path) -> None:
    pool.run(training, 2, CASE.under((1, 1)), tmp_path, 0, 2, None)
    path = tmp_path / checkpoint_name(2)
    (path / "stage-01.safetensors").unlink()
    ((message, _, _),) = pool.run(loading, 1, CASE.under((1,)), path)
    assert "has no readable model/layers.1" in message or "has no readable model/head" in message


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change tensors and make the checksums right again."""
    file, index = path / "stage-00.safetensors", json.loads((path / "checkpoint.json").read_text())
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    index["checksums"] = {
        n: zlib.crc32(t.reshape(-1).view(torch.uint8).numpy()) for n, t in tensors.items()
    }
    del index["files"], index["sha256"]  # as older ones are
    (path / "checkpoint.json").write_text(json.dumps(index))


def test_missing_and_extra_names(pool: Pool, tmp_path: Path) -> None:
    path = saved(pool, tmp_path)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model/layers.1.down.wait"] = tensors.pop("model/layers.1.down.weight")

    rewrite(path, rename)
    for message, changed, _ in pool.run(loading, 2, CASE.under((1, 1)), path):
        assert "missing layers.1.down.weight (1), extra layers.1.down.wait (1)" in message
        assert not changed


def test_wrong_shape(pool: Pool, tmp_path: Path) -> None:
    path = saved(pool, tmp_path)
    rewrite(
        path,
        lambda tensors: tensors.update(
            {"model/layers.0.up.bias": torch.zeros(1, dtype=torch.float64)}
        ),
    )
    ((message, changed, _),) = pool.run(loading, 1, CASE.under((1,)), path)
    assert "layers.0.up.bias has shape [1] where [128] is expected" in message
    assert not changed


def test_wrong_model(pool: Pool, tmp_path: Path) -> None:
    path = saved(pool, tmp_path)
    for message, changed, _ in pool.run(
        loading, 2, Case(gpt(layers=3), sizes=(8,)).under((1, 1)), path
    ):
        assert (
            "missing layers.2.down.bias, layers.2.down.weight, layers.2.norm1.bias (12), extra nothing"
            in message
        )
        assert not changed
    ((message, _, _),) = pool.run(loading, 1, Case(gpt(hidden=16), sizes=(8,)).under((1,)), path)
    assert (
        "its tensors have the same names, but other shapes, blocks or frozen parameters" in message
    )


def test_another_optimizer(pool: Pool, tmp_path: Path) -> None:
    path, lion = saved(pool, tmp_path), replace(CASE, optimizer=LionConfig())
    for message, changed, _ in pool.run(loading, 2, lion.under((1, 1)), path):
        assert "was trained by adamw, whose states lion cannot use: use optimizer=adamw" in message
        assert not changed


class _Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("file", ["stage-00.safetensors", "checkpoint.json", "stage-00.pt"])
def test_a_pickle_is_never_executed(pool: Pool, tmp_path: Path, file: str) -> None:
    path, target = saved(pool, tmp_path), tmp_path / "executed"
    (path / file).write_bytes(pickle.dumps(_Bomb(target)))
    ((message, _, _),) = pool.run(loading, 1, CASE.under((1,)), path)
    assert (message == "") == (file == "stage-00.pt")  # a stranger's file is not even looked at
    assert not target.exists()


# ---- the loop


class CountingSource:
    """Batches by number."""

    def __init__(self) -> None:
        self.step = 0

    def batch(self, rows: int) -> Any:
        self.step += 1
        return make_batch(rows, self.step)

    def validation(self, index: int, rows: int) -> Any:
        return make_batch(rows, -1 - index)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def looping(
    case: Case,
    folder: Path,
    options: dict[str, Any],
    checkpoint: CheckpointConfig | None = None,
) -> dict[str, torch.Tensor] | str:
    engine = case.engine(folder)
    trainer = TrainerConfig(
        **{"global_batch": 4, "eval_every": 0, "eval_batches": 1, "checkpoint_every": 1, **options}
    )
    logger = LoggerConfig(to=[], events=False)
    try:
        train(
            engine,
            CountingSource(),
            trainer,
            logger,
            folder,
            tokens_per_row=16,
            checkpoint=checkpoint,
        )
    except CheckpointError as error:
        return str(error)
    finally:
        engine.close()
    return {name: tensor.detach().clone() for name, tensor in engine.parameters.items()}


def equal(found: list[Any], expected: list[Any]) -> bool:
    return all(
        torch.equal(a[name], b[name])
        for a, b in zip(found, expected, strict=True)
        for name in a | b
    )


def test_loop_keeps_the_last_checkpoints_and_falls_back(pool: Pool, tmp_path: Path) -> None:
    case = CASE.under((1, 1))
    run = tmp_path / "run"
    for folder in (run, tmp_path / "whole"):
        folder.mkdir()
    whole = pool.run(looping, 2, case, tmp_path / "whole", {"steps": 6})
    pool.run(looping, 2, case, run, {"steps": 4}, CheckpointConfig(keep=3))
    checkpoints = run / "checkpoints"
    assert [path.name for path in list_checkpoints(checkpoints)] == [
        checkpoint_name(s) for s in (2, 3, 4)
    ]
    flip(checkpoints / checkpoint_name(4) / "stage-01.safetensors", "model/head.norm.bias")
    (checkpoints / checkpoint_name(3) / "checkpoint.json").write_text("{")
    (checkpoints / ".saving-step-00000005").mkdir()
    assert equal(pool.run(looping, 2, case, run, {"steps": 6}, CheckpointConfig(keep=3)), whole)
    assert [path.name for path in list_checkpoints(checkpoints)] == [
        checkpoint_name(s) for s in (4, 5, 6)
    ]
    summary = (run / "summary.json").read_text()
    assert equal(pool.run(looping, 2, case, run, {"steps": 6}, CheckpointConfig(keep=0)), whole)
    assert (run / "summary.json").read_text() == summary
    for path in list_checkpoints(checkpoints):
        (path / "stage-00.safetensors").unlink()
    for message in pool.run(looping, 2, case, run, {"steps": 7}):
        assert "step-00000006 has no readable" in message


def test_skipped_checkpoints_do_not_count_as_kept(pool: Pool, tmp_path: Path) -> None:
    """A damaged last checkpoint must not count as kept, or the checkpoint from which the run resumed is removed."""
    case = CASE.under((1, 1))
    pool.run(
        looping, 2, case, tmp_path, {"steps": 4, "checkpoint_every": 2}, CheckpointConfig(keep=2)
    )
    flip(
        tmp_path / "checkpoints" / checkpoint_name(4) / "stage-01.safetensors",
        "model/head.norm.bias",
    )
    pool.run(
        looping, 2, case, tmp_path, {"steps": 5, "checkpoint_every": 0}, CheckpointConfig(keep=2)
    )
    assert steps_left(tmp_path) == [2, 4, 5]


def steps_left(run: Path) -> list[int]:
    return [int(path.name[5:]) for path in list_checkpoints(run / "checkpoints")]


@pytest.mark.slow
def test_every_nth_and_the_best_stay_also_after_a_restart(pool: Pool, tmp_path: Path) -> None:
    """The best checkpoint is the one with the smallest validation loss."""
    case = CASE.under((1, 1))
    config = CheckpointConfig(keep=1, keep_every=3, best=1)
    for steps in (4, 7):
        pool.run(looping, 2, case, tmp_path, {"steps": steps}, config)
        records = read_metrics(tmp_path / "metrics.jsonl")
        losses = {r["step"]: r["validation_loss"] for r in records if "validation_loss" in r}
        assert len(losses) == steps
        every = {step for step in losses if step % 3 == 0}
        assert set(steps_left(tmp_path)) == {steps, min(losses, key=losses.__getitem__), *every}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_loop_saves_alike_either_way(pool: Pool, tmp_path: Path, asynchronous: bool) -> None:
    """And says for how long it waited."""
    config = CheckpointConfig(asynchronous=asynchronous, keep=0)
    options = {"steps": 6, "checkpoint_every": 2}
    for folder, chosen in (("plain", replace(config, asynchronous=False)), ("run", config)):
        (tmp_path / folder).mkdir()
        pool.run(looping, 2, CASE.under((1, 1)), tmp_path / folder, options, chosen)
        assert steps_left(tmp_path / folder) == [2, 4, 6]
    for step in (2, 4, 6):
        found, plain = (
            json.loads(
                (
                    tmp_path / f / "checkpoints" / checkpoint_name(step) / "checkpoint.json"
                ).read_text()
            )
            for f in ("run", "plain")
        )
        assert found["files"] == plain["files"]
        assert found["metrics"]["loss"] == plain["metrics"]["loss"]
    seconds = [
        record["checkpoint_seconds"]
        for record in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if "loss" in record
    ]
    assert [each > 0 for each in seconds[:4]] == [False, False, True, asynchronous]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (
        summary["checkpoint_seconds"] > 0
    )  # of rank 0, the end included; those were the longest of any
