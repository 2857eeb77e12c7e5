"""A run whose model has changed since it was saved: refused by name before anything is measured or made."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from parallax import cli
from parallax.errors import CheckpointError
from parallax.run import job
from parallax.runtime.checkpoint import list_checkpoints
from parallax.runtime.checkpoint.checksums import SEAL, seal
from tests.faults.commands import one_line, prepared
from tests.faults.test_import import train

MODEL = """
from pathlib import Path
from torch import nn
def build():
    biases = Path("layers.txt").read_text().split()
    layers = [nn.Linear(16, 16, bias=bias == "bias") for bias in biases]
    return nn.Sequential(nn.Embedding(256, 16), *layers, nn.Linear(16, 256))
"""
OWN = ("model=custom", "model.target=changing_model:build", "model.verify=false")
SHORT = (
    "data.max_bytes=64KiB",
    "trainer.global_batch=4",
    "trainer.eval_every=0",
    "trainer.steps=60",
)


@pytest.fixture
def run(here: Path) -> Path:
    (here / "changing_model.py").write_text(MODEL)
    (here / "layers.txt").write_text("bias bias")
    run = prepared(*OWN, *SHORT)
    train(run, 1)
    return run


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("bias bias bias", "missing 4.bias, 4.weight (2), extra nothing"),
        ("bias", "missing nothing, extra 3.bias, 3.weight (2)"),
        ("bias none", "missing nothing, extra 2.bias (1)"),
    ],
)
def test_it_is_refused_before_anything_is_made(
    run: Path,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    layers: str,
    message: str,
) -> None:
    (here / "layers.txt").write_text(layers)
    monkeypatch.setattr(job, "plan_model", None)  # nothing is measured
    monkeypatch.setattr(job, "build_loss", None)  # and the model is not called
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*") if path.is_file())
    assert cli.main(["train", "name=run"]) == 2
    line = one_line(capfd.readouterr().err)
    assert "step-00000001 holds another model" in line
    assert message in line
    assert (
        sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*") if path.is_file())
        == before
    )


DAMAGES: dict[str, Callable[[Path], object]] = {
    "index": lambda folder: (folder / "checkpoint.json").write_text("{"),
    "truncated": lambda folder: _weights(folder).write_bytes(_weights(folder).read_bytes()[:99]),
}


def _weights(folder: Path) -> Path:
    return folder / "stage-00.safetensors"


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_left_to_the_one_before(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], how: str
) -> None:
    """It says nothing of the model; loading falls back."""
    (last,) = list_checkpoints(run / "checkpoints")
    DAMAGES[how](last)

    class Reached(Exception):
        pass

    def reached(*_: object, **__: object) -> None:
        raise Reached

    monkeypatch.setattr(job, "plan_model", reached)
    assert cli.main(["train", "name=run"]) == 1
    assert "Reached" in capfd.readouterr().err


@pytest.mark.parametrize("key", ["trained_by", "fingerprint", "structure", "dtype", "optimizer"])
def test_a_class_path_in_a_checkpoint_is_data(run: Path, key: str) -> None:
    """The digests do not protect, because the author of a folder also wrote them."""
    (last,) = list_checkpoints(run / "checkpoints")
    mark = run / "executed"
    index = json.loads((last / "checkpoint.json").read_text())
    hostile = {"_target_": "os.mkdir", "_args_": [str(mark)], "path": "os:mkdir"}
    index |= {key: [hostile] if key == "optimizer" else "os:mkdir"}
    index["state"]["source"]["_target_"] = "os.mkdir"
    index |= {"base": "os:mkdir", "scale": {"_target_": "os.mkdir", "factor": 1.0}}
    index.pop(SEAL)
    (last / "checkpoint.json").write_text(json.dumps({SEAL: seal(index), **index}))
    with contextlib.suppress(CheckpointError):  # it may say something else, or nothing
        train(run, 1)
    assert not mark.exists()


def test_names_that_were_changed_in_the_files_are_refused(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (last,) = list_checkpoints(run / "checkpoints")
    held = load_file(_weights(last))
    held["model/9.weight"] = held.pop("model/2.weight")
    save_file(held, _weights(last))
    assert cli.main(["export", "run", "--to", "safetensors", "--out", "out"]) == 2
    assert "is not of the model in the run's present settings" in one_line(capfd.readouterr().err)
    assert not Path("out").exists()


def test_other_frozen_parameters_are_named(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    groups = 'optimizer.groups=[{match: "0.*", freeze: true}]'
    assert cli.main(["train", "name=run", groups, "trainer.steps=2"]) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert (
        "frozen parameters; resume with the model and the optimizer.groups of the training" in line
    )
