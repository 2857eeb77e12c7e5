"""``parallax serve`` with the public clients of its protocol: those of Triton and of KServe get the same answers, those
of the model's own forward, to the bit, and the same reasons."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.runs import own_model, trained_run
from tests.serving.conftest import DONE_SECONDS, Server, close, start

tritonclient = pytest.importorskip("tritonclient.http")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("client_loop")]

KSERVE = Path(sys.prefix) / "kserve/bin/python"
"""Of an environment of its own, because KServe's client needs other versions of libraries."""
ROWS: dict[str, Any] = {
    "tokens": np.random.default_rng(2).integers(0, 16, (3, 6)),
    "shares": np.random.default_rng(3).normal(size=(3, 6)).astype(np.float32),
}
DATATYPES = {"int64": "INT64", "float32": "FP32"}
OUTPUTS = {"scores": "FP32", "best": "INT64", "positive": "BOOL"}
REAL = "the input tokens has the datatype FP32; accepted is INT64"
OTHER = "there is no model other; this one is ranker"
NONE = "inputs lack tokens, shares"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranker")
    draw = np.random.default_rng(0)
    arrays = {name: np.concatenate([array] * 4) for name, array in ROWS.items()}
    np.savez(folder / "rows.npz", **arrays, y=draw.integers(0, 4, 12))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        trained_run(
            *("model=custom", "model.target=tests.serving.ranker:Ranker", "trainer.global_batch=4"),
            *("data=arrays", "data.path=rows.npz", "data.inputs=[tokens,shares]", "loss=model"),
            name="ranker",
        )
    return folder / "runs/ranker"


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[Server]:
    words = "serve.port=0", "serve.max_batch_rows=4", "trainer.microbatch=4"
    found = start(["parallax", "serve", "ranker", *words], run.parent.parent, "ranker")
    yield found
    assert found.end() == 0
    close(found)


@pytest.fixture(scope="module")
def expected(run: Path) -> dict[str, Any]:
    with torch.no_grad():
        found = own_model(run)(**{name: torch.from_numpy(array) for name, array in ROWS.items()})
    return {name: tensor.numpy() for name, tensor in found.items()}


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("answer", [True, False])
def test_tritons_client(
    server: Server, expected: dict[str, Any], binary: bool, answer: bool
) -> None:
    client = tritonclient.InferenceServerClient(server.address)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("ranker", "1")
    assert not client.is_model_ready("other")
    described = client.get_model_metadata("ranker")
    assert [(each["name"], each["datatype"], each["shape"]) for each in described["inputs"]] == [
        ("tokens", "INT64", [-1, -1]),
        ("shares", "FP32", [-1, -1]),
    ]
    assert {each["name"]: each["datatype"] for each in described["outputs"]} == OUTPUTS

    def infer(rows: dict[str, Any], name: str = "ranker") -> dict[str, Any]:
        inputs = []
        for key, array in rows.items():
            inputs.append(tritonclient.InferInput(key, array.shape, DATATYPES[str(array.dtype)]))
            inputs[-1].set_data_from_numpy(array, binary_data=binary)
        asked = [tritonclient.InferRequestedOutput(each, binary_data=answer) for each in OUTPUTS]
        found = client.infer(name, inputs, outputs=asked)
        return {each: found.as_numpy(each) for each in OUTPUTS}

    check_same(infer(ROWS), expected)
    real = {**ROWS, "tokens": ROWS["tokens"].astype(np.float32)}
    for rows, name, status, reason in (
        (real, "ranker", 400, REAL),
        ({}, "ranker", 400, NONE),
        (ROWS, "other", 404, OTHER),
    ):
        with pytest.raises(tritonclient.InferenceServerException) as raised:
            infer(rows, name)
        assert (raised.value.status(), raised.value.message()) == (str(status), reason)
    client.close()


@pytest.mark.skipif(not KSERVE.exists(), reason="make test-slow installs it")
def test_kserves_client(server: Server, expected: dict[str, Any], tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", **ROWS)
    script = Path(__file__).with_name("kserve_client.py")
    words = [server.address, "ranker", tmp_path / "rows.npz", tmp_path / "answers.npz"]
    subprocess.run([KSERVE, "-I", script, *words], check=True, timeout=DONE_SECONDS)
    answers = dict(np.load(tmp_path / "answers.npz"))
    report = json.loads(str(answers.pop("report")))
    for form in ("json-json", "json-binary", "binary-json", "binary-binary"):
        assert report.pop(form) == ["an id", "ranker"]
        check_same({name: answers.pop(f"{form}/{name}") for name in OUTPUTS}, expected)
    assert not answers
    for what, status, reason in (
        ("real tokens", 400, REAL),
        ("no inputs", 400, NONE),
        ("another model", 404, OTHER),
    ):
        found, text = report.pop(what)
        assert found == status
        assert text.startswith(f"{reason}, '{status} ")
    assert report.pop("alone") == ["positive"]
    assert report == {"live": True, "ready": True, "model ready": True, "other ready": False}
