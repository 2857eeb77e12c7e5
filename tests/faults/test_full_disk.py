"""A disk that is full or may not be written: a run continues without its logs, and keeps its last checkpoint."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from parallax.common.events import EventLog, Span, read_events
from parallax.common.files import AppendedFile
from parallax.errors import CheckpointError
from parallax.runtime.checkpoint import list_checkpoints
from parallax.train.monitor import LoggerConfig, MetricsLog, Unwritten
from tests.faults.commands import finish, prepared, running, start
from tests.faults.test_requests_to_end import LONG
from tests.results import read_metrics

LIMIT = 64 * 1024  # bytes of any one file: what is longer fails as on a full disk


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


LIMITED = f"""
import resource, sys
from parallax.cli import main
if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, ({LIMIT}, {LIMIT}))
    sys.exit(main())
"""


@pytest.mark.faults
def test_a_run_continues_without_its_logs(here: Path) -> None:
    """Metrics, events, curves, summary and pictures grow beyond the limit; checkpoints are smaller pieces here."""
    own = ["model.hidden=8", "model.layers=2"]
    run = prepared(*LONG, *own, "logger=tensorboard", "trainer.steps=240")
    code, out, err = finish(start([sys.executable, "-c", LIMITED, "train", "--run-dir", str(run)]))
    assert code == 0, err
    assert "Traceback" not in out + err
    assert "Exception in thread" not in err
    for name in ("events-rank0.jsonl", "events-rank1.jsonl", "metrics.jsonl"):
        assert out.count(f"cannot write {run / name}: File too large, ") == 1
        assert err.count(f"cannot write {run / name}: File too large, ") == 1
    assert all(line.endswith("; the run continued without it") for line in err.splitlines())
    assert " times); the run continued without it" in err
    steps = [record["step"] for record in read_metrics(run / "metrics.jsonl")]
    # What is there is whole; the last, of the end, is shorter.
    assert steps[:-1] == list(range(1, len(steps)))
    assert 0 < len(steps) < 240
    assert {span.rank for span in read_events(run / "events-rank1.jsonl")} == {1}
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["step-00000240"]
    assert running(here) == []


@pytest.mark.thorough  # as test_disk_full of the checkpoints, but that the run ends in one line
def test_a_checkpoint_that_cannot_be_written_keeps_the_last(
    here: Path, called: Callable[..., tuple[int, str, str]]
) -> None:
    run = prepared(*LONG, "logger.events=false", "trainer.steps=2", replicas=(1,))
    assert called("train", "--run-dir", str(run))[0] == 0
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("\n  steps: 2\n", "\n  steps: 4\n"))
    code, _, err = finish(start([sys.executable, "-c", LIMITED, "train", "--run-dir", str(run)]))
    assert code == CheckpointError.exit_code
    (line,) = err.splitlines()
    assert line.startswith("parallax: cannot write ")
    assert line.endswith(" free; the last checkpoint is untouched")
    left = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert left == ["last-start.json", "step-00000002"]


def test_a_line_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    file = AppendedFile(tmp_path / "log")
    with files_of_at_most(10):
        file.append(b"12345\n")
        with pytest.raises(OSError, match="File too large"):
            file.append(b"67890\n")
    file.append(b"abc\n")
    file.close()
    assert (tmp_path / "log").read_bytes() == b"12345\nabc\n"


def test_metrics_and_events_continue_once_the_disk_has_space(tmp_path: Path) -> None:
    unwritten = Unwritten()
    span = Span(0, 1, "forward", 0, 0, 0.0, 1.0)
    with (
        MetricsLog(tmp_path, LoggerConfig(to=[]), unwritten) as log,
        EventLog(tmp_path / "e") as events,
    ):
        log.write({"step": 1})
        with files_of_at_most(8):
            for step in (2, 3):
                log.write({"step": step})
                with unwritten.trying(events.path):
                    events.extend([span])
                    events.flush()
        log.write({"step": 4})
        events.extend([span])
    assert [record["step"] for record in read_metrics(log.path)] == [1, 4]
    assert list(read_events(events.path)) == [span]
    assert len(unwritten.news()) == 2
    assert not unwritten.has_news
    assert [line.rpartition(" ")[0][-2:] for line in unwritten.lines()] == ["(2", "(2"]


def test_the_reason_is_one_line_and_anything_else_is_raised(tmp_path: Path) -> None:
    unwritten = Unwritten()
    with unwritten.trying(Path("/dev/full")), open("/dev/full", "wb", buffering=0) as full:
        full.write(b"x")
    (line,) = unwritten.news()
    assert line.startswith("cannot write /dev/full: No space left on device, ")
    with unwritten.trying(tmp_path / "a\x1b[31m\nb"):
        raise OSError(30, os.strerror(30))
    (line,) = unwritten.news()
    assert line.isprintable()
    assert "Read-only file system" in line
    with pytest.raises(ValueError, match="boom"), unwritten.trying(tmp_path):
        raise ValueError("boom")
    assert json.dumps(unwritten.lines())
