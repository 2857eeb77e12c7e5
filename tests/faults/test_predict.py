"""``parallax predict``: the model's own outputs in the order of the rows, by any plan; a killed one continues."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from parallax import cli
from tests.faults.commands import TORCHRUN, call, one_line, prepared, weights

Called = Callable[..., tuple[int, str, str]]

MODELS = """
import os
import signal
from pathlib import Path

import torch
from torch import nn


def dense():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def pixels():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 16), nn.ReLU(), nn.Linear(16, 3))


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 200

    def __getitem__(self, row):
        if row == 150 and Path("kill").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((8,), float(row)).sin(), 0


def rows():
    return Rows()
"""
SMALL = "trainer.global_batch=8", "trainer.steps=1", "logger=none", "loss=cross_entropy"
ARRAYS = "data=arrays", "data.path=rows", "data.inputs=x", "data.targets=y"
ROWS = 40


def dense() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
    )


def train(called: Called, *settings: str) -> Path:
    run = prepared(*settings, replicas=(1,))
    code, _, err = called("train", "--run-dir", str(run))
    assert code == 0, err
    return run


@pytest.fixture
def trained(here: Path, called: Called) -> Path:
    """A run of a model of arrays, trained for a step, beside new rows."""
    (here / "predicted_models.py").write_text(MODELS)
    draw = np.random.default_rng(0)
    (here / "rows").mkdir()
    np.save(here / "rows" / "x.npy", draw.normal(size=(16, 8)).astype(np.float32))
    np.save(here / "rows" / "y.npy", draw.integers(0, 4, 16))
    np.save(here / "new.npy", draw.normal(size=(ROWS, 8)).astype(np.float32))
    return train(called, "model=custom", "model.target=predicted_models:dense", *ARRAYS, *SMALL)


def outputs_of(
    run: Path, rows: NDArray[np.float32], size: int, layers: int = 5
) -> NDArray[np.float32]:
    """The model's own forward, ``size`` rows at once, of the first ``layers``."""
    model = dense()
    stored = {k.removeprefix("model/"): v for k, v in weights(run).items() if k[:6] == "model/"}
    model.load_state_dict(stored)
    with torch.no_grad():
        parts = [model[:layers](part) for part in torch.from_numpy(rows).split(size)]
    return torch.cat(parts).numpy()


@pytest.mark.faults
def test_outputs_are_the_models_own_by_any_plan(called: Called, here: Path, trained: Path) -> None:
    new = np.load(here / "new.npy")
    plans: Sequence[tuple[str, int, tuple[str, ...]]] = [
        ("one", 4, ()),
        ("stages", 4, ("cluster.devices=2", "plan.stages=2")),
        ("replicas", 2, ("cluster.devices=2", "plan.stages=1", "plan.replicas=2")),
        ("streamed", 4, ("plan.parameters=host", "swap=disk")),
    ]
    for name, size, settings in plans:
        out = f"{name}.npy"
        code, text, err = called(
            *("predict", "run", "--inputs", "new.npy", "--out", out),
            *("trainer.microbatch=4", *settings),
        )
        assert code == 0, err
        assert ("2 processes" in text) == ("cluster.devices=2" in settings)
        assert f"{out}: {ROWS} rows of step-00000001, trained weights" in text
        np.testing.assert_array_equal(np.load(out), outputs_of(trained, new, size), err_msg=name)
        assert not Path(f"{out}.parts").exists()
    code, _, err = call(
        *("predict", "run", "--inputs", "new.npy", "--out", "torchrun.npy"),
        *("trainer.microbatch=4", "plan.stages=2"),
        launcher=[*TORCHRUN, "-m", "parallax"],
    )
    assert code == 0, err
    assert Path("torchrun.npy").read_bytes() == Path("stages.npy").read_bytes()


@pytest.mark.faults
def test_features_are_the_outputs_of_a_module(called: Called, here: Path, trained: Path) -> None:
    new = np.load(here / "new.npy")
    wanted = outputs_of(trained, new, 4, layers=3)
    plans: Sequence[tuple[str, tuple[str, ...]]] = [
        ("one", ()),
        ("stages", ("cluster.devices=2", "plan.stages=2")),
        ("streamed", ("plan.parameters=host", "swap=disk")),
    ]
    for name, settings in plans:
        code, _, err = called(
            *("predict", "run", "--inputs", "new.npy", "--out", f"{name}.npy", "--layer", "2"),
            *("trainer.microbatch=4", *settings),
        )
        assert code == 0, err
        np.testing.assert_array_equal(np.load(f"{name}.npy"), wanted, err_msg=name)
    code, _, err = call(
        *("predict", "run", "--inputs", "new.npy", "--out", "torchrun.npy", "--layer", "2"),
        *("trainer.microbatch=4", "plan.stages=2"),
        launcher=[*TORCHRUN, "-m", "parallax"],
    )
    assert code == 0, err
    np.testing.assert_array_equal(np.load("torchrun.npy"), wanted)


@pytest.mark.faults
def test_a_killed_prediction_continues_to_the_same_bytes(
    called: Called, here: Path, trained: Path
) -> None:
    """Parts end after 64 batches, here of one row. Row 150 is killed, so 128 rows are not computed again."""

    def predict(out: str, *more: str) -> tuple[int, str, str]:
        return called(
            *(
                "predict",
                "run",
                "--out",
                out,
                "data=dataset",
                "data.target=predicted_models:rows",
                *more,
            ),
            *("data.workers=0", "trainer.global_batch=1"),
        )

    for suffix, layer in (("parquet", ()), ("npy", ("--layer", "2"))):
        code, _, err = predict(f"whole.{suffix}", *layer)
        assert code == 0, err
        (here / "kill").touch()
        code, _, err = predict(f"killed.{suffix}", *layer)
        assert code != 0
        assert "SIGKILL" in err
        assert not Path(f"killed.{suffix}").exists()
        code, _, err = predict(f"killed.{suffix}", "--top=2", "--bad=skip")
        assert code == 2
        assert suffix == "npy" or "other --top" in one_line(err)
        code, _, err = predict(f"killed.{suffix}", "--layer", "0")
        assert code == 2
        assert "other --layer" in one_line(err)
        (here / "kill").unlink()
        code, text, err = predict(f"killed.{suffix}", *layer)
        assert code == 0, err
        assert "200 rows" in text
        assert "72 computed" in text
        assert Path(f"killed.{suffix}").read_bytes() == Path(f"whole.{suffix}").read_bytes()


@pytest.mark.faults
def test_images_of_a_folder(called: Called, here: Path) -> None:
    (here / "predicted_models.py").write_text(MODELS)
    draw = np.random.default_rng(0)
    for place in ("photos/a", "photos/b", "photos/c", "new/more"):
        (here / place).mkdir(parents=True)
        for number in range(4):
            pixels = draw.integers(0, 256, (9, 11, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(here / place / f"{number}.png")
    train(
        called,
        *(
            "model=custom",
            "model.target=predicted_models:pixels",
            "data=images",
            "data.path=photos",
        ),
        *("data.size=8", *SMALL),
    )
    (here / "photos").rename(here / "away")  # the rows of the training are not needed
    (here / "new" / "broken.png").write_bytes((here / "new" / "more" / "1.png").read_bytes()[:90])
    asked = "predict", "run", "--inputs", "new", "--out", "out.parquet", "--top", "2"
    code, _, err = called(*asked)
    assert code == 2
    assert "broken.png" in one_line(err)
    assert "--bad skip" in err
    code, text, err = called(*asked, "--bad", "skip")
    assert code == 0, err
    assert "1 row could not be read" in text
    table = pyarrow.parquet.read_table("out.parquet").to_pydict()
    assert table["row"] == [1, 2, 3, 4]
    assert table["file"] == [f"more/{number}.png" for number in range(4)]
    assert all(one >= other for one, other in table["scores"])
    assert all(len(set(each)) == 2 and set(each) <= {0, 1, 2} for each in table["classes"])
    (skipped,) = map(json.loads, Path("out.parquet.skipped.jsonl").read_text().splitlines())
    assert (skipped["row"], skipped["file"]) == (0, "broken.png")

    (here / "new" / "broken.png").unlink()
    code, _, err = called(*asked, "--force")
    assert code == 0, err
    again = pyarrow.parquet.read_table("out.parquet").to_pydict()
    np.testing.assert_allclose(again["scores"], table["scores"], rtol=1e-5)
    assert not Path("out.parquet.skipped.jsonl").exists()


@pytest.mark.faults
def test_lines_of_text_without_their_padding(called: Called, here: Path) -> None:
    train(called, "experiment=tiny", "data.max_bytes=64KiB", *SMALL[:3], "model.sequence=16")
    lines = ["to be", "", "or not to be", "that is the question, is it not"]
    (here / "lines.txt").write_text("\n".join(lines))
    asked = "predict", "run", "--inputs", "lines.txt", "--out", "out.jsonl"
    code, _, err = called(*asked)
    assert code == 2
    assert "lines.txt:4: the line has 31 bytes, more than the model's 16" in err
    code, _, err = called(*asked, "--bad", "skip")
    assert code == 0, err
    found: list[dict[str, Any]] = [
        json.loads(line) for line in Path("out.jsonl").read_text().splitlines()
    ]
    assert [each["row"] for each in found] == [0, 1, 2]
    assert [len(each["output"]) for each in found] == [len(line) for line in lines[:3]]


def test_wrong_input_is_refused_in_one_line(
    here: Path, trained: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def line(*arguments: str, out: str = "out.npy") -> str:
        capfd.readouterr()
        assert cli.main(["predict", *arguments, "--out", out]) == 2
        return one_line(capfd.readouterr().err)

    new = "run", "--inputs", "new.npy"
    assert "name the directory of a run" in line("--inputs", "new.npy")
    assert "runs/absent is no run directory" in line("absent", "--inputs", "new.npy")
    assert "name the rows" in line("run")
    assert "--inputs=absent.npy" in line("run", "--inputs", "absent.npy")
    assert "accepted are files that end in" in line(*new, out="out.txt")
    assert "a .npy file holds one" in line(*new, "--top", "2")
    assert "--layer 7: Sequential has no module of that name" in line(*new, "--layer", "7")
    assert "--top -1" in line(*new, "--top", "-1", out="out.jsonl")
    assert "cannot be written" in line(*new, out="absent/out.npy")
    assert "optimizer.lr" in line(*new, "optimizer.lr=1")
    assert "there is no z" in line("run", "--inputs", "rows", "data.inputs=z")
    (here / "out.npy").touch()
    assert "--force" in line(*new)
    (here / "blob.dat").write_bytes(b"\0" * 100)
    assert "no kind of data" in line("run", "--inputs", "blob.dat", out="x.npy")
