"""Loggers in whole runs: one run at each destination after a kill, with the figures of ``metrics.jsonl``."""

from __future__ import annotations

import contextlib
import csv
import json
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

from tests.faults.commands import call, one_line, prepared, running
from tests.faults.killing import kill_at
from tests.results import read_metrics

STEPS = 8
KEY = "0123456789abcdef" * 2 + "01234567"
Called = Callable[..., tuple[int, str, str]]
Curves = dict[str, list[tuple[int, float]]]


def logged(run: Path) -> Curves:
    """The curves that metrics.jsonl has."""
    curves: Curves = defaultdict(list)
    for record in read_metrics(run / "metrics.jsonl"):
        for name, value in record.items():
            if name != "step" and value is not None:
                curves[name].append((record["step"], float(value)))
    return curves


def check(run: Path, found: Curves, lost: int = 0) -> None:
    """Each step is there once, in order, with the figures of metrics.jsonl, but at most ``lost`` steps, which were on
    their way when the process was killed."""
    expected = logged(run)
    for name in ("loss", "gradient_norm", "learning_rate", "validation_loss"):
        steps, figures = [step for step, _ in found[name]], dict(expected[name])
        assert steps == [step for step in figures if step in steps], name
        assert len(steps) >= len(figures) - lost, name
        assert [value for _, value in found[name]] == pytest.approx(
            [figures[step] for step in steps], rel=1e-5
        )
    for rank in (0, 1):
        for figure in ("peak_bytes", "memory", "utilisation"):
            assert found[f"rank/{rank}/{figure}"][-1][0] == STEPS
    assert all(value > 0 for _, value in found["rank/1/memory"])


def killed_and_continued(called: Called, monkeypatch: pytest.MonkeyPatch, *names: str) -> Path:
    """A run of which rank 0, which logs, is killed in its sixth step, and which continues after its fourth."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    run = prepared(
        *kill_at((0, 5, "backward")),
        f"logger.to=[{','.join(names)}]",
        "logger.project=tests",
        "logger.tags=[quick]",
        f"trainer.steps={STEPS}",
        "trainer.eval_every=2",
        "trainer.max_restarts=1",
    )
    code, out, err = called("train", "--run-dir", str(run))
    assert code == 0, err
    assert one_line(err).endswith("starting again from step-00000004 (0 of 1 restarts left)")
    assert KEY not in out + err
    assert not [path for path in run.rglob("*") if path.is_file() and KEY in _text(path)]
    assert json.loads((run / "summary.json").read_text())["restarts"] == 1
    return run


def _text(path: Path) -> str:
    return path.read_bytes().decode("latin-1")


def of_table(path: Path) -> Curves:
    curves: Curves = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value and name != "step":
                    curves[name].append((int(row["step"]), float(value)))
    return curves


@pytest.mark.faults
def test_files_have_each_step_once_after_a_kill(
    here: Path, called: Called, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = killed_and_continued(called, monkeypatch, "csv", "tensorboard")
    check(run, of_table(run / "metrics.csv"))
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    tensors = {name: events.Tensors(name) for name in events.Tags()["tensors"]}
    check(
        run,
        defaultdict(
            list,
            {
                name: [(each.step, each.tensor_proto.float_val[0]) for each in found]
                for name, found in tensors.items()
            },
        ),
    )
    assert running(here) == []


def log_records(content: bytes) -> Iterator[bytes]:
    """The records of a file in the format of LevelDB's logs: pieces in blocks of 32 KiB, of which the first begins with
    seven bytes of W&B's own. A killed process may leave a piece that is cut off."""
    place, record = 7, b""
    while place + 7 <= len(content):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4) and place <= len(content):  # the whole record, or its last piece
            yield record
            record = b""


def of_wandb(run: Path) -> tuple[set[str], Curves, dict[str, Any]]:
    """The identities, the curves and the configuration of all offline runs in a folder."""
    from wandb.proto import wandb_internal_pb2 as messages

    identities, curves, config = set(), defaultdict[str, list[tuple[int, float]]](list), {}
    for path in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        for data in log_records(path.read_bytes()):
            record = messages.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                identities.add(record.run.run_id)
                assert (record.run.project, record.run.display_name) == ("tests", "run")
                assert list(record.run.tags) == ["quick"]
            for update in record.config.update:
                config[update.key] = json.loads(update.value_json)
            for item in record.run.config.update:
                config[item.key] = json.loads(item.value_json)
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                if not name.startswith("_"):
                    curves[name].append((record.history.step.num, json.loads(item.value_json)))
    return identities, curves, config


@pytest.mark.faults
@pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb")
def test_wandb_has_one_run_after_a_kill(
    here: Path, called: Called, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = killed_and_continued(called, monkeypatch, "wandb")
    identities, curves, config = of_wandb(run)
    assert len(identities) == 1
    assert len(list(run.glob("wandb/offline-run-*"))) == 2
    check(run, curves, lost=1)
    assert config["trainer"]["steps"] == STEPS
    assert running(here) == []


@pytest.mark.faults
@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs mlflow")
def test_mlflow_has_one_run_after_a_kill(
    here: Path, called: Called, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{here}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = killed_and_continued(called, monkeypatch, "mlflow")
    client = MlflowClient()
    experiment = client.get_experiment_by_name("tests")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "run"
    assert found.data.tags["quick"] == "true"
    assert found.data.params["trainer.steps"] == str(STEPS)
    curves: Curves = defaultdict(list)
    for name in found.data.metrics:
        for each in client.get_metric_history(found.info.run_id, name):
            curves[name].append((each.step, each.value))
    check(run, curves)
    assert running(here) == []


@pytest.mark.faults
@pytest.mark.skipif(find_spec("trackio") is None, reason="needs trackio")
def test_trackio_has_one_run_after_a_kill(
    here: Path, called: Called, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sqlite3

    monkeypatch.setenv("TRACKIO_DIR", str(here / "trackio"))
    run = killed_and_continued(called, monkeypatch, "trackio")
    (file,) = (here / "trackio").glob("*.db")
    with contextlib.closing(sqlite3.connect(file)) as database:
        rows = database.execute(
            "select run_name, step, metrics from metrics order by id"
        ).fetchall()
    assert len({name for name, _, _ in rows}) == 1
    curves: Curves = defaultdict(list)
    for _, step, text in rows:
        for name, value in json.loads(text).items():
            curves[name].append((step, value))
    check(run, curves)


@pytest.mark.faults
def test_a_missing_package_ends_the_run_before_its_first_step(here: Path) -> None:
    """Python finds a module of that name that cannot be imported, which is what a package that is not there is."""
    (here / "trackio.py").write_text("raise ImportError('No module named trackio')\n")
    run = prepared(*kill_at(), "logger=trackio", "trainer.steps=2")
    code, _, err = call("train", "--run-dir", str(run))
    assert code == 2
    assert one_line(err) == (
        "parallax: logger.to=trackio: the package trackio cannot be imported (No module named trackio); "
        "pip install trackio, or leave it out of logger.to"
    )
    assert not (run / "metrics.jsonl").exists()


@pytest.mark.faults
@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs mlflow")
def test_a_server_that_is_down_warns_once(
    here: Path, called: Called, monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://someone:{KEY}@127.0.0.1:{port}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run = prepared(*kill_at(), "logger.to=[mlflow,csv]", "trainer.steps=20")
    code, out, err = called("train", "--run-dir", str(run))
    assert code == 0, err
    assert KEY not in out + err
    assert out.count("the logger mlflow cannot be opened: ") == 1
    assert one_line(err).endswith("; the run continued without it")
    assert len(of_table(run / "metrics.csv")["loss"]) == 20
