"""``parallax serve`` over several ranks: answers are the model's own forward, also while ranks are killed and
weights are replaced."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.serving.conftest import ROOT, Server, close, start, wait_for
from tests.serving.trained import ROWS, body, forward, infer_plainly, trained

pytestmark = pytest.mark.slow
Serving = Callable[..., Server]
TWO_STAGES = [
    "cluster.devices=2",
    "plan.stages=2",
    "serve.max_batch_rows=4",
    "trainer.microbatch=4",
]
OF_RANKS = "parallax rank "


def ranks_of(server: Server) -> list[psutil.Process]:
    found = psutil.Process(server.process.pid).children(recursive=True)
    return [each for each in found if OF_RANKS in " ".join(each.cmdline())]


def replicas(server: Server) -> dict[str, int]:
    found: dict[str, int] = server.get("/v2/models/tiny/replicas").json
    return found


def scale(server: Server, count: object) -> int:
    content = f'{{"replicas": {count}}}'.encode()
    return server.call("POST", "/v2/models/tiny/replicas", content).status


def test_two_stages_answer_as_the_model_start_again_after_a_kill_and_go_on_after_a_wrong_row(
    folder: Path, serving_run: Serving
) -> None:
    server, model = serving_run(*TWO_STAGES), trained(folder)
    assert len(ranks_of(server)) == 2
    for rows in (ROWS[:1], ROWS[:3], ROWS[4:8]):
        assert np.array_equal(infer_plainly(server, rows), forward(model, rows))
    for rank in (0, 1):
        ranks_of(server)[rank].kill()
        wait_for(lambda: server.get("/v2/health/ready").status == 503)
        # A request that arrives meanwhile waits for the ranks.
        assert np.array_equal(infer_plainly(server, ROWS[:1]), forward(model, ROWS[:1]))
        assert server.get("/v2/health/ready").status == 200
    wrong, before = ROWS[:1].copy(), {each.pid for each in ranks_of(server)}
    wrong[0, 3] = 256  # no token
    refused = server.infer(body(wrong))
    assert (refused.status, refused.error) == (
        500,
        "the model failed: IndexError: index out of range in self",
    )
    assert np.array_equal(infer_plainly(server, ROWS[:1]), forward(model, ROWS[:1]))
    assert {each.pid for each in ranks_of(server)} == before
    assert server.metric("parallax_ready_replicas") == 1
    assert server.end() == 0


def test_streamed_weights_are_counted(folder: Path, serving_run: Serving) -> None:
    server = serving_run(*TWO_STAGES, "plan.parameters=host")
    assert np.array_equal(infer_plainly(server, ROWS[:2]), forward(trained(folder), ROWS[:2]))
    assert server.metric("parallax_fetched_bytes") > 0
    assert server.end() == 0


def test_requests_are_answered_once_while_replicas_are_killed_and_scaled(
    folder: Path, serving_run: Serving
) -> None:
    server, model = serving_run("cluster.devices=2", "serve.replicas=2"), trained(folder)
    assert replicas(server) == {"replicas": 2, "ready": 2, "most": 2}
    expected = [forward(model, ROWS[i : i + 1]) for i in range(len(ROWS))]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(2):
            sent = [
                pool.submit(infer_plainly, server, ROWS[i % 12 : i % 12 + 1]) for i in range(96)
            ]
            wait_for(sent[8].done)
            ranks_of(server)[0].kill()
            for index, answer in enumerate(sent):
                np.testing.assert_allclose(answer.result(), expected[index % 12], atol=1e-5)
            wait_for(lambda: replicas(server)["ready"] == 2)
        sent = [pool.submit(infer_plainly, server, ROWS[i % 12 : i % 12 + 1]) for i in range(48)]
        assert scale(server, 1) == 200
        for index, answer in enumerate(sent):
            np.testing.assert_allclose(answer.result(), expected[index % 12], atol=1e-5)
    wait_for(lambda: len(ranks_of(server)) == 1)
    assert scale(server, 2) == 200
    wait_for(lambda: replicas(server) == {"replicas": 2, "ready": 2, "most": 2})
    for wrong in (0, 3, "true", "null", '"2"', "1.5", "[1]"):
        assert scale(server, wrong) == 400
    assert server.end() == 0


@pytest.mark.parametrize("words", [[], TWO_STAGES], ids=["one process", "two stages"])
def test_new_checkpoints_are_taken_over_between_requests(
    folder: Path, serving_run: Serving, tmp_path: Path, words: list[str]
) -> None:
    run = tmp_path / "runs/tiny"
    shutil.copytree(folder / "runs/tiny", run)
    kept = tmp_path / "last"
    last = max((run / "checkpoints").iterdir())
    last.rename(kept)
    server = serving_run("serve.follow=true", *words, within=tmp_path)
    before = server.infer(body(ROWS[:2])).json
    assert before["model_version"] == "2"
    kept.rename(last)
    wait_for(lambda: server.infer(body(ROWS[:2])).json["model_version"] == "4")
    found = infer_plainly(server, ROWS[:2])
    np.testing.assert_allclose(found, forward(trained(folder), ROWS[:2]), atol=1e-5)
    assert server.get("/v2/models/tiny").json["versions"] == ["4"]
    assert server.get("/v2/models/tiny/versions/2/ready").status == 404
    if words:  # ranks that start later load the new one, too
        ranks_of(server)[0].kill()
        wait_for(lambda: server.get("/v2/health/ready").status == 503)
        assert server.infer(body(ROWS[:2])).json["model_version"] == "4"
    assert server.end() == 0


def test_ranks_of_torchrun_serve_and_drain(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torchrun = [
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--master-port",
        str(port),
        "--log-dir",
        str(folder / "logs"),
    ]
    words = ["-m", "parallax", "serve", "tiny", "serve.port=0", *TWO_STAGES[1:]]
    server = start([*torchrun, *words], folder, "tiny")
    try:
        assert np.array_equal(infer_plainly(server, ROWS[:3]), forward(trained(folder), ROWS[:3]))
        wrong = np.full_like(ROWS[:1], 256)  # no token
        assert server.infer(body(wrong)).status == 500
        assert np.array_equal(infer_plainly(server, ROWS[:3]), forward(trained(folder), ROWS[:3]))
        children = psutil.Process(server.process.pid).children()
        for each in children:
            each.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0  # all ranks have ended in order
    finally:
        close(server)


def test_copies_that_cannot_start_end_the_server(folder: Path) -> None:
    command = [sys.executable, "-m", "parallax", "serve", "tiny", "serve.port=0", *TWO_STAGES]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "none9"}
    found = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert found.returncode == 2
    assert "GLOO_SOCKET_IFNAME" in found.stderr.splitlines()[-1]
