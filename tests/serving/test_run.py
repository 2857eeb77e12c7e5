"""``parallax serve`` on a trained run: answers are the model's own forward, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from parallax import cli
from parallax.commands import serve as command
from tests.serving.conftest import Server
from tests.serving.trained import INPUT, ROWS, forward, infer, infer_plainly, trained

tritonclient = pytest.importorskip("tritonclient.http")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("client_loop")]


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


def test_a_stated_rate_is_predicted(serving_run: Callable[..., Server]) -> None:
    stated = "serve.max_wait=auto", "serve.requests_per_second=20", "serve.p99=10s"
    server = serving_run("serve.max_batch_rows=4", *stated)
    printed = "\n".join(server.lines)
    assert "serve.max_wait=auto is " in printed
    assert "at 20 requests/s: predicted latency p50 " in printed
    assert "; it meets serve.p99=10s" in printed
    assert infer_plainly(server, ROWS[:1]).shape[0] == 1
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
        (["serve.replicas=2", "cluster.devices=1"], "set cluster.devices=2 or more"),
        (["serve.replicas=0"], "serve.replicas=0"),
        (["serve.follow=true", "--step", "2"], "leave out one of both"),
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
