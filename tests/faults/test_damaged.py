"""Files that are damaged, or made to do harm, and data without rows: one line, exit code 2, nothing written."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallax import cli
from parallax.common.events import EventLog, Span, read_events
from parallax.errors import ConfigError
from tests.faults.commands import DGX, MODULE, TINY, finish, one_line, prepared, start

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi")
)
WORTHLESS = {
    "empty": b"",
    "binary": bytes(range(256)) * 20,
    "list": b"[]",
    "null": b"null",
    "text": b'"x"',
    "object": b'{"a": null}',
    "tag": b"!!python/object/apply:os.system ['touch mark']",
    "deep": b"[" * 50_000,
    "deeper": b'{"a":' * 50_000,
    "bomb": BOMB.encode(),
    "huge": b"a" * 3_000_000,
}


def damages(data: bytes) -> Iterator[tuple[str, bytes]]:
    """A good file, damaged at random; some changes leave it valid."""
    yield from WORTHLESS.items()
    yield "half", data[: len(data) // 2]
    yield "utf-16", data.decode().encode("utf-16")
    for value in (
        b"-5",
        b"null",
        b"[]",
        b'"x"',
        b"1e400",
        b"NaN",
        b".nan",
        b"99999999999999999999",
    ):
        for count in (1, 0):
            yield (
                f"{value!r} {count}",
                re.sub(rb": -?\d+(\.\d+)?", b": " + value, data, count=count),
            )
    lines = data.splitlines(keepends=True)
    for number in range(0, len(lines), max(1, len(lines) // 6)):
        yield f"without line {number}", b"".join(lines[:number] + lines[number + 1 :])
        yield f"line {number} twice", b"".join(lines[: number + 1] + lines[number:])


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a plan, its inputs and what its ranks did."""
    planning = ["plan", *DGX, "plan.stages=2", "plan.schedule=1f1b", "trainer.microbatch=4"]
    with contextlib.chdir(tmp_path_factory.mktemp("whole")):
        assert cli.main(planning) == 0
        run = prepared(*TINY).absolute()
        for name in ("plan.yaml", "plan.inputs.json"):
            Path(name).replace(run / name)
    (run / "summary.json").write_text(
        json.dumps({"ranks": [{"rank": 0, "stage": 0, "replica": 0, "swap": {"a": 1}}]})
    )
    with EventLog(run / "events-rank0.jsonl") as log:
        for step in range(5):
            log.extend([Span(0, step, "forward", 0, 0, step, step + 0.5)])
    return run


@pytest.fixture
def run(here: Path, whole_run: Path, capfd: pytest.CaptureFixture[str]) -> Path:
    """A copy of it in ``here``, to be damaged."""
    capfd.readouterr()
    return Path(shutil.copytree(whole_run, Path("runs/run")))


READERS = [
    ("config.yaml", ["calibrate", "run"]),
    ("config.yaml", ["train", "name=run", "model.layers=7"]),
    ("plan.yaml", ["explain", "run", "--json"]),
    ("plan.yaml", ["simulate", "run", "--json"]),
    ("plan.inputs.json", ["simulate", "run", "--json"]),
    ("summary.json", ["explain", "run"]),
    ("events-rank0.jsonl", ["simulate", "run", "--png", "step.png"]),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "command"), READERS, ids=lambda value: " ".join(value) if value is list else value
)
def test_every_reader_says_so_in_one_line(
    run: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    command: list[str],
) -> None:
    monkeypatch.setattr("parallax.commands.simulate.timeline_png", lambda *_: None)
    # Never reached with a configuration that is damaged.
    monkeypatch.setattr("parallax.run.prepare.plan_run", None)
    good = (run / name).read_bytes()
    refused = 0
    for how, damaged in damages(good):
        (run / name).write_bytes(damaged)
        before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
        code = cli.main(command)
        lines = capfd.readouterr().err.splitlines()
        # A setting that the file lacks gets its default; then there is nothing to plan with.
        err = "\n".join(line for line in lines if "was written before these settings" not in line)
        still_good = command[0] == "train" and "'NoneType' object is not callable" in err
        assert code in (0, 2) or still_good, (how, err)
        if code == 2:
            refused += 1
            assert len(one_line(err)) < 700, how
            assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before, how
        assert how not in WORTHLESS or code == 2 or name.startswith("events") or how == "object", (
            how
        )
    assert refused > 10
    assert not Path("mark").exists()


def test_events_of_another_plan(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for odd in (
        Span(0, 9, "forward", 7, 0, 9, 9.5),
        Span(99, 9, "forward", 0, 0, 9, 9.5),
        Span(0, 9, "x", 0, 0, 9, 9),
    ):
        with EventLog(run / "events-rank0.jsonl") as log:
            log.extend([odd])
        assert cli.main(["calibrate", "run"]) == 2
        assert "which its plan.yaml has not" in one_line(capfd.readouterr().err)


def test_a_truncated_last_line_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.extend([Span(0, 1, "forward", 0, 0, 0.0, 1.0)])
    whole = path.read_text()
    path.write_text(whole + whole[:20])
    assert len(list(read_events(path))) == 1
    path.write_text(whole + whole[:20] + "\n")
    with pytest.raises(ConfigError, match=r"line 2"):
        list(read_events(path))


# ---- names


@pytest.mark.parametrize(
    "name", ["a\x1b[31mb", "a\nb", "a/b", "..", ".hidden", "a" * 101, "ü", "a b", "-x"]
)
def test_names_that_are_no_folder_names(
    here: Path,
    capfd: pytest.CaptureFixture[str],
    name: str,
) -> None:
    assert cli.main(["train", f"name='{name}'"]) == 2
    assert len(one_line(capfd.readouterr().err)) < 400
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["a\x1b[31mb", "a\nb", "a" * 300, "a/" * 3000, "a\0b", "ü", "../.."]
)
def test_paths_that_lead_nowhere(here: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    for command in (
        ["explain", name],
        ["simulate", name],
        ["calibrate", name],
        ["train", "--run-dir", name],
    ):
        assert cli.main(command) == 2
        one_line(capfd.readouterr().err)
    assert cli.main(["plan", "--profile", name, *DGX]) == 2
    one_line(capfd.readouterr().err)
    assert list(here.iterdir()) == []


def test_a_run_is_explained_by_its_name(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    (run / "summary.json").unlink()
    assert cli.main(["explain", "run"]) == 0
    assert "swap: there is no runs/run/summary.json" in capfd.readouterr().out


# ---- data


ROWS = """
import torch
class Rows:
    def __init__(self, rows): self.rows = rows
    def __len__(self): return self.rows
    def inputs(self, start, stop): return torch.zeros(stop - start, 8, dtype=torch.int64)
    def targets(self, start, stop): return torch.zeros(stop - start, 8, dtype=torch.int64)
class Source:
    def __init__(self, rows): self.rows = rows
    def batch(self, rows): return Rows(min(rows, self.rows))
    def validation(self, index, rows): return Rows(min(rows, self.rows))
    def state_dict(self): return {}
    def load_state_dict(self, state): pass
def build(rows): return Source(rows)
"""


def test_data_without_enough_rows(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "few_rows.py").write_text(ROWS)
    for folder, text in (
        ("empty", None),
        ("binary", b"\0" * 9999),
        ("short", b"x" * 99),
        ("few", b"text " * 200),
    ):
        (here / folder).mkdir()
        if text is not None:
            (here / folder / "a.txt").write_bytes(text)
    own = ["data=custom", "data.target=few_rows:build"]
    before = sorted(here.rglob("*"))
    for settings, expected in (
        (["data.path=empty"], "data.path=empty: no text in files"),
        (["data.path=binary"], "data.path=binary: no text in files"),
        (["data.path=short"], "data.path=short holds 99 bytes of text"),
        (
            ["data.path=few", "data.validation=0.2", "trainer.global_batch=64"],
            "use trainer.global_batch=12 or less",
        ),
        (["data.path=few", "data.pattern=*.md"], "no text in files"),
        ([*own, "data.kwargs.rows=0"], "validation(0, 8) gave 0 row(s)"),
        ([*own, "data.kwargs.rows=3"], "use trainer.global_batch=3 or less"),
    ):
        tiny = [] if settings[0] == own[0] else ["experiment=tiny"]
        arguments = [*tiny, "trainer.steps=3", "trainer.global_batch=8", *settings]
        assert cli.main(["train", *arguments]) == 2
        assert expected in one_line(capfd.readouterr().err)
    assert sorted(path for path in here.rglob("*") if "__pycache__" not in str(path)) == before


# ---- ports


@pytest.mark.faults
def test_a_port_in_use(here: Path) -> None:
    run = prepared(*TINY)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        world = {
            "WORLD_SIZE": "2",
            "RANK": "0",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        code, _, err = finish(start([*MODULE, "train", "--run-dir", str(run)], **world))
    assert code == 2
    (line,) = [line for line in err.splitlines() if line.startswith("parallax: ")]
    assert f"cannot join at MASTER_ADDR=127.0.0.1 MASTER_PORT={port}" in line
    assert "choose a free port" in line
    assert "Traceback" not in err
