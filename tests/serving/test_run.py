"""``parallax serve`` on a trained run: answers are the model's own forward, to the bit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from parallax import cli
from parallax.commands import serve as command
from parallax.run.job import model_factory
from parallax.run.resume import StoredRun
from parallax.runtime.checkpoint import CheckpointReader, list_checkpoints
from tests.serving.conftest import Server, close, start

tritonclient = pytest.importorskip("tritonclient.http")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("client_loop")]
TINY = ["experiment=tiny", "data.max_bytes=64KiB", "trainer.checkpoint_every=2", "logger=none"]
INPUT = "tokens"
ROWS = np.random.default_rng(1).integers(0, 256, (12, 64))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a run of four steps, and a checkpoint after the second."""
    found = tmp_path_factory.mktemp("run")
    train = [sys.executable, "-m", "parallax", "train", *TINY, "name=tiny", "cluster.devices=1"]
    subprocess.run(train, cwd=found, check=True, capture_output=True)
    return found


@pytest.fixture
def serving_run(folder: Path) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def begin(*words: str) -> Server:
        command = ["parallax", "serve", "tiny", "serve.port=0", *words]
        started.append(start(command, folder, "tiny"))
        return started[-1]

    yield begin
    for server in started:
        close(server)


def trained(folder: Path, step: int = -1) -> nn.Module:
    """The model of the run with the weights of a checkpoint, in torch alone."""
    run = StoredRun.read(folder / "runs/tiny")
    paths = list_checkpoints(folder / "runs/tiny/checkpoints")
    reader = CheckpointReader(paths[step])
    model = model_factory(run.config)()
    model.load_state_dict(
        {n: reader.read(f"model/{n}") for n in reader.model_tensors()}, strict=False
    )
    return model.eval()


def infer(server: Server, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    client = tritonclient.InferenceServerClient(server.address)
    given = tritonclient.InferInput(INPUT, rows.shape, "INT64")
    given.set_data_from_numpy(rows)
    found: NDArray[np.float32] = client.infer("tiny", [given]).as_numpy("output")
    client.close()
    return found


def infer_plainly(server: Server, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Infer on any thread, without the event loop of the client."""
    entry = {"name": INPUT, "shape": rows.shape, "datatype": "INT64", "data": rows.tolist()}
    (output,) = server.infer({"inputs": [entry]}).json["outputs"]
    return np.array(output["data"], np.float32).reshape(output["shape"])


def forward(model: nn.Module, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    with torch.no_grad():
        found: NDArray[np.float32] = model(torch.from_numpy(rows)).numpy()
    return found


def test_answers_are_the_models_own_forward(
    folder: Path, serving_run: Callable[..., Server]
) -> None:
    server, model = serving_run("serve.max_batch_rows=4", "trainer.microbatch=4"), trained(folder)
    for rows in (ROWS[:1], ROWS[:3], ROWS[4:8]):
        assert np.array_equal(infer(server, rows), forward(model, rows))
    refused = server.infer(b'{"inputs": []}')
    assert refused.error == f"inputs lack {INPUT}"
    wrong = ROWS[:1].copy()
    wrong[0, 3] = 256  # no token
    with pytest.raises(tritonclient.InferenceServerException, match="the model failed: IndexError"):
        infer(server, wrong)
    assert np.array_equal(infer(server, ROWS[:1]), forward(model, ROWS[:1]))
    assert server.end() == 0


def test_answers_do_not_depend_on_the_batch(
    folder: Path, serving_run: Callable[..., Server]
) -> None:
    server = serving_run("serve.max_batch_rows=8", "serve.batch_invariant=true", "--step", "2")
    assert not any("depend on" in line for line in server.lines)
    alone = [infer(server, ROWS[i : i + 1]) for i in range(len(ROWS))]
    with ThreadPoolExecutor(6) as pool:
        found = [
            *pool.map(lambda i: infer_plainly(server, ROWS[i : i + 2]), [*range(0, 12, 2)] * 5)
        ]
    for index, pair in enumerate(found):
        first = index % 6 * 2
        assert np.array_equal(pair, np.concatenate(alone[first : first + 2]))
    torch.testing.assert_close(
        torch.from_numpy(np.concatenate(alone)), torch.from_numpy(forward(trained(folder, 0), ROWS))
    )
    assert server.get("/v2/models/tiny").json["versions"] == ["2"]
    assert server.end() == 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["serve.prot=1"], "did you mean 'port'"),
        (["serve.port=70000"], "serve.port=70000"),
        (["trainer.steps=3"], "trainer.steps: it does not change"),
        (["--step", "3"], "accepted are the existing checkpoints"),
        (["serve.host=256.0.0.1"], "serve.host=256.0.0.1 serve.port=8000: cannot listen there"),
        (["serve.token_file=none"], "serve.token_file=none"),
        (["cluster.devices=2", "plan.stages=2"], "set cluster.devices=1"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_input_ends_in_one_line(
    folder: Path,
    words: list[str],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    assert cli.main(["serve", "tiny", *words]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert reason in line


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert cli.main(["serve", "tiny"]) == 2
    assert "pip install 'parallax-train[serve]'" in capfd.readouterr().err
