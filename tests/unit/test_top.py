"""``parallax top``: frames from stored status files, at several sizes, in all states of a run."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from parallax import cli
from parallax.common.lock import locked
from parallax.report.live import STALE_SECONDS, RunState, newest_run, read_live
from parallax.report.ranks import RankSnapshot, load_snapshots, snapshot_path
from parallax.report.top import frame, sparkline

NOW = 1_700_000_000.0
GIB = 2**30


def snapshot(rank: int, ranks: int = 4, **fields: Any) -> RankSnapshot:
    usual: dict[str, Any] = {
        "stage": rank // 2,
        "replica": rank % 2,
        "host": "node",
        "time": NOW - 0.5,
        "steps": 400,
        "doing": f"forward of micro-batch {rank}",
        "step": 120,
        "step_seconds": 0.84,
        "rows_per_second": 9.5,
        "tokens_per_second": 9728.0,
        "utilization": 0.41,
        "device_bytes": int((60 + rank) * GIB / 10),
        "device_budget_bytes": 8 * GIB,
        "host_bytes": 3 * GIB,
        "host_budget_bytes": 16 * GIB,
        "stall_share": 0.02 * rank,
        "input_share": 0.0,
        "swap_bytes_per_second": 1.25e9,
        "seconds_left": 235.2,
    }
    return RankSnapshot(rank=rank, ranks=ranks, **(usual | fields))


def stored(folder: Path, *snapshots: RankSnapshot, losses: int = 120) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for each in snapshots:
        each.save(folder)
    lines = [json.dumps({"step": step, "loss": 5.0 - step / 50}) for step in range(1, losses + 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def drawn(folder: Path, width: int, height: int, sort: str = "rank") -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=width, height=height, color_system=None)
    console.print(frame(read_live(folder, NOW), width, height, sort))
    lines = file.getvalue().rstrip("\n").split("\n")
    assert all(len(line) <= width for line in lines)
    assert len(lines) < height
    return [line.rstrip() for line in lines]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_frame_of_80_columns_has_all_figures(here: Path) -> None:
    folder = stored(Path("runs/deeper"), *(snapshot(rank) for rank in range(4)))
    assert drawn(folder, 80, 24) == [
        "runs/deeper  training  step 120 of 400  0:03:55 left",
        "19 rows/s  19.5k tokens/s  MFU 41%  840 ms a step",
        "loss 2.6000  █████▇▇▇▇▇▇▇▇▇▇▆▆▆▆▆▆▆▆▆▅▅▅▅▅▅▅▅▅▅▄▄▄▄▄▄▄▄▄▃▃▃▃▃▃▃▃▃▃▂▂▂▂▂▂▂▂▂▁▁▁▁▁",
        "",
        "rank stage rep doing     rows/s tok/s MFU    device     host  swap stall input",
        "   0     0   0 forward 0    9.5 9.73k 41% 6.0G/8.0G 3.0G/16G 1.25G    0%    0%",
        "   1     0   1 forward 1    9.5 9.73k 41% 6.1G/8.0G 3.0G/16G 1.25G    2%    0%",
        "   2     1   0 forward 2    9.5 9.73k 41% 6.2G/8.0G 3.0G/16G 1.25G    4%    0%",
        "   3     1   1 forward 3    9.5 9.73k 41% 6.3G/8.0G 3.0G/16G 1.25G    6%    0%",
        "keys: m by memory, s by stall, r by rank, q quit",
    ]


def test_a_frame_of_200_columns_writes_figures_out(here: Path) -> None:
    about = {"temperature": 61.0, "power_watts": 412.6}
    folder = stored(Path("runs/deeper"), *(snapshot(rank, **about) for rank in range(4)))
    lines = drawn(folder, 200, 50)
    assert lines[4].split() == [
        *("rank", "stage", "replica", "doing", "step", "rows/s", "tokens/s", "MFU"),
        *("device", "memory", "host", "memory", "swap", "stall", "input", "°C", "W"),
    ]
    assert "6.0 GiB of 8.0 GiB (75%)" in lines[5]
    assert lines[5].endswith("1.25G/s    0%    0% 61 413")


def test_columns_without_a_figure_are_hidden(here: Path) -> None:
    absent = dict.fromkeys(
        ("tokens_per_second", "utilization", "swap_bytes_per_second", "stall_share")
    )
    text = "\n".join(drawn(stored(Path("a"), snapshot(0, 1, **absent)), 200, 50))
    for name in ("tokens", "MFU", "swap", "stall ", "°C", "W\n"):
        assert name not in text
    assert "device memory" in text


def test_a_narrow_frame_names_what_it_leaves_out(here: Path) -> None:
    lines = drawn(stored(Path("a"), *(snapshot(rank) for rank in range(4))), 50, 24)
    assert lines[-1].startswith("too narrow for: host, tok/s")
    assert "MFU" in lines[4]


def test_many_ranks_fit_the_height(here: Path) -> None:
    folder = stored(Path("a"), *(snapshot(rank, 100) for rank in range(100)))
    lines = drawn(folder, 80, 24)
    assert len(lines) == 23
    assert lines[-1].startswith("83 more ranks; ")


def test_ranks_are_sorted_by_memory_stall_and_number(here: Path) -> None:
    ranks = [snapshot(rank, stall_share=(0.1, 0.4, 0.2, 0.0)[rank]) for rank in range(4)]
    folder = stored(Path("a"), *ranks)
    found = {
        sort: [line.split()[0] for line in drawn(folder, 80, 24, sort)[5:-1]]
        for sort in ("memory", "stall", "rank")
    }
    assert found == {
        "memory": ["3", "2", "1", "0"],
        "stall": ["1", "2", "0", "3"],
        "rank": ["0", "1", "2", "3"],
    }


def test_an_impossible_utilization_is_marked(here: Path) -> None:
    lines = drawn(stored(Path("a"), snapshot(0, 1, utilization=1.07)), 80, 24)
    assert "MFU 107%!" in lines[1]
    assert "107%!" in lines[5]


def test_the_states_of_a_run(here: Path) -> None:
    folder = Path("runs/a")
    with locked(folder):
        assert read_live(folder, NOW).state is RunState.STARTING
        assert read_live(folder, NOW).message == "planning"
        (folder / "plan.yaml").touch()
        assert read_live(folder, NOW).message == "starting its ranks"
    assert read_live(folder, NOW).state is RunState.IDLE
    stored(folder, *(snapshot(rank, 2, step=0) for rank in range(2)))
    assert read_live(folder, NOW).message == "before the first step"
    stored(folder, snapshot(0, 2), snapshot(1, 2, time=NOW - STALE_SECONDS - 2))
    found = read_live(folder, NOW)
    assert (found.state, found.message) == (RunState.FAILING, "rank 1 last seen 12.0 s ago")
    assert any("seen -12.0 s" in line for line in drawn(folder, 60, 24))
    later = read_live(folder, NOW + 100)
    assert later.state is RunState.DEAD
    assert later.message == "died, or its hosts cannot be reached: last seen 100 s ago"
    assert later.seconds_left is None
    stored(folder, *(snapshot(rank, 2, ended="steps") for rank in range(2)))
    assert read_live(folder, NOW + 1000).message == "ended: all steps are done"
    os.utime(folder / "plan.yaml")
    with locked(folder):  # the same run, started again: its lock is newer than its files
        os.utime(folder / ".lock", (NOW + 9, NOW + 9))
        assert read_live(folder, NOW + 10).message == "planning"


def test_a_silent_rank_of_a_run_whose_launcher_lives_is_restarting(here: Path) -> None:
    folder = stored(Path("runs/a"), snapshot(0, 1, time=NOW - 60))
    with locked(folder):
        os.utime(folder / ".lock", (NOW - 300, NOW - 300))
        found = read_live(folder, NOW)
    assert (found.state, found.message) == (
        RunState.STARTING,
        "restarting: its ranks were last seen 60.0 s ago",
    )


def test_files_that_are_no_status_are_ignored(here: Path) -> None:
    folder = stored(Path("a"), snapshot(0, 2))
    for text in ("", "{", "[]", '{"rank": 1}', '{"rank": "1\\u001b"}'):
        snapshot_path(folder, 1).write_text(text)
        assert [each.rank for each in load_snapshots(folder)] == [0]
    assert read_live(folder, NOW).message == "training; 1 rank(s) write their status on other hosts"


def test_ranks_of_an_earlier_start_with_more_ranks_are_left_out(here: Path) -> None:
    folder = stored(Path("a"), *(snapshot(rank, 4, time=NOW - 999) for rank in range(4)))
    snapshot(0, 1).save(folder)
    assert [each.rank for each in load_snapshots(folder)] == [0]


def test_control_characters_do_not_reach_the_terminal(here: Path) -> None:
    text = "\n".join(drawn(stored(Path("a"), snapshot(0, 1, doing="\x1b[2Jboo\n")), 80, 24))
    assert "\x1b" not in text


def test_the_newest_run_is_that_whose_files_changed_last(here: Path) -> None:
    assert newest_run(Path("runs")) is None
    for age, name in enumerate(("one", "sweep/point", "old")):
        folder = stored(Path("runs") / name, snapshot(0, 1))
        (folder / "plan.yaml").touch()
        for path in (folder / "plan.yaml", folder / "ranks", snapshot_path(folder, 0)):
            os.utime(path, (NOW - 10 * abs(age - 1), NOW - 10 * abs(age - 1)))
    assert newest_run(Path("runs")) == Path("runs/sweep/point")


def test_one_frame_and_json_on_the_command_line(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stored(Path("runs/deeper"), *(snapshot(rank) for rank in range(4)))
    (folder / "plan.yaml").touch()
    assert cli.main(["top", "--once", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run"] == "runs/deeper"
    assert (found["state"], found["step"], found["loss"]) == ("dead", 120, 2.6)
    assert [rank["stage"] for rank in found["ranks"]] == [0, 0, 1, 1]
    assert cli.main(["top", "deeper", "--once"]) == 0
    shown = capsys.readouterr().out
    assert "rank stage" in shown
    assert "keys:" not in shown
    assert cli.main(["top", "deeper", "--json"]) == 2
    assert cli.main(["top", "absent", "--once"]) == 2
    assert "absent: no run has this name in runs/" in capsys.readouterr().err


def test_sparkline() -> None:
    assert sparkline([1.0], 10) == "▁"
    assert sparkline([3.0, 3.0], 10) == "▁▁"
    assert sparkline([0.0, 7.0], 10) == "▁█"
    assert len(sparkline([float(number) for number in range(1000)], 40)) == 40
