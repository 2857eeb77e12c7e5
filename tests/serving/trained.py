"""The run that the fixture ``folder`` trains, and clients of its server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from parallax.run.job import model_factory
from parallax.run.resume import StoredRun
from parallax.runtime.checkpoint import CheckpointReader, list_checkpoints
from tests.serving.conftest import Server

INPUT = "tokens"
ROWS = np.random.default_rng(1).integers(0, 256, (12, 64))


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
    tritonclient = pytest.importorskip("tritonclient.http")
    client = tritonclient.InferenceServerClient(server.address)
    given = tritonclient.InferInput(INPUT, rows.shape, "INT64")
    given.set_data_from_numpy(rows)
    found: NDArray[np.float32] = client.infer("tiny", [given]).as_numpy("output")
    client.close()
    return found


def body(rows: NDArray[np.int64]) -> dict[str, object]:
    entry = {"name": INPUT, "shape": rows.shape, "datatype": "INT64", "data": rows.tolist()}
    return {"inputs": [entry]}


def infer_plainly(server: Server, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Infer on any thread, without the event loop of the client."""
    (output,) = server.infer(body(rows)).json["outputs"]
    return np.array(output["data"], np.float32).reshape(output["shape"])


def forward(model: nn.Module, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    with torch.no_grad():
        found: NDArray[np.float32] = model(torch.from_numpy(rows)).numpy()
    return found
