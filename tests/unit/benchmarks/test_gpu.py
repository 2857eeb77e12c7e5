"""The benchmark for GPUs runs dry, keeps what it has found whatever ends it, and its results can be compared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import compare, report
from benchmarks.gpu.bars import bars
from benchmarks.gpu.parts.activations import beside_plain
from benchmarks.gpu.parts.demo import arguments as kind_arguments
from benchmarks.gpu.parts.demo import demo
from benchmarks.gpu.parts.part import Findings, Given
from benchmarks.gpu.parts.planned import allocator_cap
from benchmarks.gpu.parts.planned import rows_of as rows_of_plans
from benchmarks.gpu.parts.tests import run_tests
from benchmarks.gpu.results import (
    COMPLETE,
    FAILED,
    INTERRUPTED,
    NOT_BEGUN,
    UNDERWAY,
    Results,
    load,
    newest,
)
from benchmarks.gpu.runners import by_turns, row, running
from benchmarks.gpu.setup import BARS, CONTEXT_BYTES, dry_setup, setup_for
from benchmarks.gpu.variants import Spec
from benchmarks.teams import Answer, Run
from benchmarks.workers import Deadline, WayFailed
from parallax.config import compose
from tests.leaks import lasting
from tests.unit.benchmarks.test_benchmarks import RATIO, ROOT, run
from tests.unit.plan.test_communicators import forecast, machines
from tests.unit.plan_fakes import plan

GIB = 2**30
ABOUT = {"dry": False, "torch": "2", "cuda": "13", "python": "3.12", "host": "a host", "cores": 16}


# ------------------------------------------------------------------------------------------------------- a whole run


@pytest.mark.bench
def test_a_dry_run_goes_through_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own := tmp_path / "temporary").mkdir()  # where the folder for swap files stays
    monkeypatch.setenv("TMPDIR", str(own))
    text = run("gpu", "--dry", "--output", str(tmp_path))
    (file,) = tmp_path.glob("gpu-*.json")
    found = load(file)
    parts = found["parts"]
    assert list(parts) == list(gpu.PARTS)
    assert {part["state"] for part in parts.values()} == {COMPLETE}, text
    assert {row["outcome"] for row in parts["tests"]["rows"]} <= {"skipped", "passed"}
    for name in ("gpt", "resnet"):
        rows = {row["way"]: row for row in parts[name]["rows"]}
        assert set(rows) == set(BARS)
        for way, each in rows.items():
            assert each["reason"] is None, (way, each)
            assert set(each["over_reference"]) == RATIO
            assert each["throughput"] == pytest.approx(1 / each["over_reference"]["median"])
            assert each["losses_compared"] > 0
            assert each["losses_equal"], (name, way, each)
        assert rows["offload 50%"]["peak_bytes"] < rows["plain"]["peak_bytes"]
        assert rows["offload 50%"]["bytes_out"] > 0
    assert {row["reason"] for row in parts["host"]["rows"]} == {None}
    check_states(parts["states"])
    check_planned(parts)
    for part in ("gpt", "host"):
        trace = tmp_path / parts[part]["trace"]["file"]
        assert 0 < trace.stat().st_size < 2**20
    assert all(bar["met"] is not None for bar in found["bars"] if "tests" not in bar["name"])
    assert "0 worse by more than their spread" in text  # compared with itself at the end


def check_states(part: dict[str, Any]) -> None:
    states = {row["way"]: row for row in part["rows"]}
    assert part["states_over_cap"] >= 2
    assert "OutOfMemoryError" in states["plain"]["reason"]
    assert states["offload"]["peak_bytes"] <= part["cap_bytes"]
    assert states["offload, bf16 states"]["losses_equal"]
    assert states["offload"]["loss_difference"] < 1e-3


def check_planned(parts: dict[str, Any]) -> None:
    for name, plans in (
        ("plans", {"keep", "offload", "auto", "recompute", "host optimizer"}),
        ("pipeline", {"one process", "1f1b", "zb-h1", "swap"}),
    ):
        rows = {row["way"]: row for row in parts[name]["rows"]}
        assert set(rows) == plans
        for way, each in rows.items():
            assert each["reason"] is None, (way, each)
            assert each["loss_difference"] < 1e-2, (way, each)  # sums of two-byte numbers
            assert each["peak_of_predicted"] == each["peak_bytes"] / each["predicted_peak_bytes"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
def test_it_needs_a_device_or_dry(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        gpu.main([])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--dry" in line


@pytest.mark.parametrize("argument", [["--parts", "all"], ["--host-memory", "much"]])
def test_it_refuses_nonsense(argument: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        gpu.main(["--dry", *argument])
    assert stopped.value.code == 2
    assert argument[1] in capsys.readouterr().err


def test_a_folder_that_is_a_file_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert gpu.main(["--dry", "--output", str(tmp_path / "file")]) == 2
    assert "File exists" in capsys.readouterr().err


@pytest.mark.parametrize(("device_gib", "host_gib"), [(139, 120), (79, 120), (24, 64), (8, 16)])
def test_sizes_fit_the_machine(device_gib: int, host_gib: int) -> None:
    setup = setup_for(device_gib * GIB, host_gib * GIB)
    weights = (len(BARS) - 1) * 2 * setup.gpt.parameters + len(BARS) * CONTEXT_BYTES
    assert weights < device_gib * GIB
    assert 20 * setup.host.parameters < device_gib * GIB
    assert 40 * setup.host.parameters < host_gib * GIB
    assert min(setup.gpt_rows, setup.host_rows, setup.caps_rows) >= 1
    assert setup.resnet_rows >= 8
    if device_gib >= 79:
        assert setup.gpt.hidden > 9000  # or the link could not carry half of the activations
        assert setup.host.parameters > 1e9


def test_a_run_takes_less_than_ten_minutes_a_part_three_and_a_check_two() -> None:
    seconds = {name: seconds for name, (_, seconds) in gpu.PARTS.items()}
    assert sum(seconds.values()) <= 10 * 60 - 30
    assert max(seconds.values()) + seconds["device"] <= 3 * 60 - 30
    assert seconds["tests"] + seconds["demo"] <= 2 * 60 - 10


# ----------------------------------------------------------------------------------------------- parts and their file


def rows_of(way: str, seconds: float) -> dict[str, Any]:
    return {
        "way": way,
        "reason": None,
        "over_reference": None,
        "seconds": [seconds],
        "peak_bytes": 8,
    }


def good(given: Given) -> Findings:
    yield {"rows": [rows_of("plain", 1.0)]}
    assert load(given.file("x").parent / f"{given.name}.json")["parts"]["good"]["rows"], "written"
    yield {"rows": [rows_of("plain", 1.0), rows_of("fsdp", 2.0)]}


def broken(given: Given) -> Findings:
    yield {"rows": [rows_of("plain", 1.0)]}
    raise torch.OutOfMemoryError("too much")


def stopped(given: Given) -> Findings:
    yield {"rows": [rows_of("plain", 1.0)]}
    raise KeyboardInterrupt


def chosen(monkeypatch: pytest.MonkeyPatch, **parts: Any) -> list[str]:
    monkeypatch.setattr(gpu, "PARTS", parts)
    return list(parts)


def test_a_part_that_fails_ends_no_other_and_keeps_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = chosen(monkeypatch, broken=(broken, 20.0), good=(good, 20.0), late=(good, -60.0))
    results, messages = Results(tmp_path / "a.json", names, ABOUT), list[str]()
    gpu.run(results, messages.append, lambda parts: dry_setup(), dry=False)
    parts = load(tmp_path / "a.json")["parts"]
    assert parts["broken"]["state"] == FAILED
    assert parts["broken"]["reason"] == "OutOfMemoryError: too much"
    assert len(parts["broken"]["rows"]) == 1
    assert parts["good"]["state"] == COMPLETE
    assert len(parts["good"]["rows"]) == 2
    assert parts["late"] == {"state": NOT_BEGUN, "reason": "no time was left"}
    assert "broken: failed: OutOfMemoryError: too much" in messages


def test_an_interrupted_run_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = chosen(monkeypatch, good=(good, 20.0), stopped=(stopped, 20.0), never=(good, 20.0))
    results = Results(tmp_path / "a.json", names, ABOUT)
    with pytest.raises(KeyboardInterrupt):
        gpu.run(results, lambda text: None, lambda parts: dry_setup(), dry=False)
    parts = load(tmp_path / "a.json")["parts"]
    assert [part["state"] for part in parts.values()] == [COMPLETE, INTERRUPTED, NOT_BEGUN]
    assert len(parts["stopped"]["rows"]) == 1


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Parts of a test's own, which need no other process and no tables."""
    monkeypatch.setattr(gpu, "_prepare", lambda dry: None)
    monkeypatch.setattr(report, "tables", lambda found: ())
    return monkeypatch


def measured(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code of a dry command, and the newest file in ``folder``."""
    code = gpu.main(["--dry", "--output", str(folder), *arguments])
    return code, load(max(folder.glob("gpu-*.json")))


def test_parts_are_measured_one_command_at_a_time_into_one_file(
    tmp_path: Path, toy: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    def device(given: Given) -> Findings:
        calls.append("device")
        yield {}

    def twice(given: Given) -> Findings:
        yield {"rows": [rows_of("plain", 1.0), rows_of("fsdp", 2.0)]}

    chosen(toy, device=(device, 20.0), gpt=(twice, 20.0), caps=(stopped, 20.0))
    assert measured(tmp_path, "--parts", "caps", "--resume")[0] == 130
    toy.setitem(gpu.PARTS, "caps", (broken, 20.0))
    code, found = measured(tmp_path, "--parts", "caps", "--resume")
    assert (code, found["parts"]["caps"]["state"]) == (0, FAILED)
    toy.setitem(gpu.PARTS, "caps", (twice, 20.0))
    code, found = measured(tmp_path, "--parts", "caps", "--resume")
    assert (code, len(found["parts"]["caps"]["rows"])) == (0, 2)
    code, found = measured(tmp_path, "--parts", "gpt", "--resume")
    assert list(found["parts"]) == ["device", "gpt", "caps"], "in the order of value"
    assert {part["state"] for part in found["parts"].values()} == {COMPLETE}
    assert measured(tmp_path, "--parts", "gpt", "caps", "--resume")[0] == 0
    assert "not measured again: device, gpt, caps" in capsys.readouterr().out
    assert calls == ["device"]
    assert len(list(tmp_path.glob("gpu-*.json"))) == 1


def test_a_result_of_another_commit_is_not_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = ABOUT | {"commit": "a" * 40, "date": "2026-01-01"}
    Results(tmp_path / "gpu-1.json", ["tests"], about)
    (tmp_path / "gpu-2.json").write_text("{")
    assert newest(tmp_path, about | {"date": "2026-01-02"}) == tmp_path / "gpu-1.json"
    assert newest(tmp_path, about | {"commit": "b" * 40}) is None


def missed(given: Given) -> Findings:
    yield {"rows": [rows_of("rank 0", 1.0) | {"peak_of_predicted": 1.1, "seconds_error": 0.0}]}


def held(given: Given) -> Findings:
    yield {"rows": [rows_of("rank 0", 1.0) | {"peak_of_predicted": 0.9, "seconds_error": 0.0}]}


@pytest.mark.parametrize(("part", "code"), [(held, 0), (missed, 1), (broken, 1)])
def test_a_check_fails_where_a_part_or_a_bar_does(
    tmp_path: Path, toy: pytest.MonkeyPatch, part: Any, code: int
) -> None:
    def demo(given: Given) -> Findings:
        for found in part(given):
            rows = [{"peak_of_predicted": 0.9, **row} for row in found["rows"]]
            yield {"rows": rows}

    chosen(toy, demo=(demo, 20.0))
    assert measured(tmp_path, "--parts", "demo", "--check")[0] == code
    assert measured(tmp_path, "--parts", "demo")[0] == 0


@pytest.mark.slow
def test_the_demo_is_held_against_its_plan(tmp_path: Path) -> None:
    given = Given(
        kind="cpu",
        sized=lambda parts: dry_setup(),
        deadline=Deadline(120.0),
        say=print,
        folder=tmp_path,
        name="a",
        cache=tmp_path,
    )
    (found,) = demo(given)
    assert found["rows"][0]["way"] == "rank 0 (stage 0, replica 0)"
    for rank in found["rows"]:
        assert len(rank["seconds"]) == 2
        assert 0 < rank["peak_bytes"] <= rank["predicted_peak_bytes"]
    (bar,) = [bar for bar in bars({"demo": found}) if bar.name.startswith("demo")]
    assert bar.met
    with pytest.raises(WayFailed, match="no end within"):
        next(demo(replace(given, deadline=Deadline(0.0))))


def test_the_demo_on_a_gpu_is_the_one_of_make_train() -> None:
    on_gpu, plain = (
        compose(
            [each for each in kind_arguments(kind) if each.startswith(("experiment", "trainer"))]
        )
        for kind in ("cuda", "cpu")
    )
    assert compose(kind_arguments("cuda")).cluster.kind == "cuda"
    assert (on_gpu.plan.stages, on_gpu.trainer.steps) == (2, 20)
    assert plain.trainer.steps == 2


def test_make_hands_parts_on() -> None:
    def typed(*targets: str) -> str:
        command = ["make", "-n", *targets]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "benchmarks.gpu --parts tests demo --check --dry" in typed("gpu-check", "ARGS=--dry")
    assert "benchmarks.gpu --parts gpt plans --resume" in typed("bench-gpu", "PART=gpt plans")
    assert "--resume" not in typed("bench-gpu")


KILLED = """
import os, sys
from benchmarks.gpu import __main__ as gpu
folder, number = sys.argv[1:]
def hurt(given):
    yield {"rows": []}
    os.kill(os.getpid(), int(number))
    yield {"rows": []}
gpu.PARTS = {"tests": (hurt, 20.0), "device": (hurt, 20.0)}
sys.exit(gpu.main(["--dry", "--output", folder, "--parts", "tests", "device"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "state"),
    [
        (signal.SIGKILL, UNDERWAY),
        pytest.param(signal.SIGTERM, INTERRUPTED, marks=pytest.mark.thorough),
    ],
)
def test_a_killed_run_leaves_its_file(tmp_path: Path, sent: int, state: str) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(int(sent))]
    # A killed process cannot empty it; the names of its sockets must be short.
    with tempfile.TemporaryDirectory(dir="/tmp") as own:
        ended = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"TMPDIR": own},
            capture_output=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == (-sent if sent == signal.SIGKILL else 128 + sent), ended.stderr
    (file,) = tmp_path.glob("*.json")
    found = load(file)
    assert [part["state"] for part in found["parts"].values()] == [state, NOT_BEGUN]


def test_a_variant_out_of_memory_ends_no_other() -> None:
    setup = dry_setup()
    free = Spec(way="plain", device="cpu", rows=2, minimum_bytes=1024)
    specs = {"small": Spec(way="plain", device="cpu", rows=2, cap_bytes=300 * 1024), "plain": free}
    deadline = Deadline(60.0)
    with lasting(), running(setup.gpt, specs, deadline) as runners:  # the server of forks stays
        for runner in runners.values():
            runner.warm_up(deadline)
        rounds = sum(1 for _ in by_turns(list(runners.values()), 2, 1, deadline))
        found = {name: row(each, runners["plain"], setup.gpt) for name, each in runners.items()}
    assert rounds == 2
    assert "OutOfMemoryError" in found["small"]["reason"]
    assert len(found["plain"]["seconds"]) == 2
    assert found["plain"]["throughput"] == 1


@pytest.mark.thorough
def test_where_plain_does_not_fit_its_peers_still_run(tmp_path: Path) -> None:
    setup, messages = dry_setup(), list[str]()
    given = Given(
        kind="cpu",
        sized=lambda parts: setup,
        deadline=Deadline(60.0),
        say=messages.append,
        folder=tmp_path,
        name="a",
        cache=tmp_path,
    )
    small = Spec(way="plain", device="cpu", rows=1, cap_bytes=300 * 1024, minimum_bytes=1024)
    free = replace(small, cap_bytes=None)
    specs = {"plain": small, "offload 50%": replace(free, way="offload"), "save_on_cpu": free}
    with lasting():
        *_, found = beside_plain(given, setup.gpt, 2, specs)
    rows = {row["way"]: row for row in found["rows"]}
    assert "OutOfMemoryError" in rows["plain"]["reason"]
    assert rows["offload 50%"]["reason"].startswith("its cap is a share of plain's activations")
    assert rows["save_on_cpu"]["reason"] is None
    assert rows["save_on_cpu"]["rows"] == 1  # half of them, as for all
    assert rows["save_on_cpu"]["throughput"] is None
    console = report.wide_console()
    with console.capture() as printed:
        for table in report.tables(
            {"parts": {"gpt": {"state": COMPLETE, **found}}, "bars": [], "dry": True}
        ):
            console.print(table)
    assert "OutOfMemoryError" in printed.get()


@pytest.mark.thorough  # as one that is out of memory, but after a while
def test_a_variant_that_hangs_ends_no_other() -> None:
    setup = dry_setup()
    fine = Spec(way="plain", device="cpu", rows=2, minimum_bytes=1024)
    specs = {"hangs": Spec(way="plain", device="cpu", rows=2, warm_seconds=600.0), "fine": fine}
    with lasting(), running(setup.gpt, specs, Deadline(60.0)) as runners:
        for _ in by_turns(list(runners.values()), 2, 1, Deadline(4.0)):
            pass
    assert runners["hangs"].why == "no answer within 2 s"
    assert runners["fine"].why is None
    assert runners["fine"].turns


# ------------------------------------------------------------------------------------------------------ tests as rows

SEVERAL = """
import os, time, pytest
def test_passes(): pass
def test_fails(): assert 1 == 2, "numbers"
@pytest.mark.skip(reason="not today")
def test_skipped(): pass
def test_dies(): os._exit(7)
def test_hangs(): time.sleep(600)
def test_after(): pass
"""


def outcomes(folder: Path, **options: Any) -> dict[str, Any]:
    *_, found = run_tests(str(folder), Deadline(60.0), lambda text: None, **options)
    found["rows"] = {row["way"].rpartition("::")[2]: row for row in found["rows"]}
    return found


def test_each_test_is_a_row_whatever_another_does(tmp_path: Path) -> None:
    (tmp_path / "test_several.py").write_text(SEVERAL)
    rows = outcomes(tmp_path, sanitizer=None, quiet=1.0)["rows"]
    assert {name: row["outcome"] for name, row in rows.items()} == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_skipped": "skipped",
        "test_dies": "failed",
        "test_hangs": "failed",
        "test_after": "passed",
    }
    assert "numbers" in rows["test_fails"]["reason"]
    assert rows["test_skipped"]["reason"] == "not today"
    assert rows["test_dies"]["reason"] == "its process ended with exit code 7"
    assert rows["test_hangs"]["reason"] == "no end within 1 s"


def test_a_file_that_cannot_be_imported_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "test_bad.py").write_text("import nothing_of_that_name")
    (found,) = outcomes(tmp_path, sanitizer=None)["rows"].values()
    assert found["outcome"] == "failed"
    assert "nothing_of_that_name" in found["reason"]


def test_what_the_sanitizer_says_stands_beside_the_tests(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_one(): pass")
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        '#!/bin/sh\nwhile case "$1" in --*) true;; *) false;; esac; do shift; done\n'
        'echo "========= Invalid __global__ write of size 4 bytes"\n"$@"\n'
        'echo "========= ERROR SUMMARY: 2 errors"\n'
    )
    tool.chmod(0o755)
    found = outcomes(tmp_path, sanitizer=str(tool))
    assert found["rows"]["test_one"] | {"seconds": 0} == {
        "way": found["rows"]["test_one"]["way"],
        "outcome": "passed",
        "seconds": 0,
        "sanitized": "passed",
    }
    assert found["sanitizer"]["errors"] == 2
    assert "Invalid __global__ write" in found["sanitizer"]["lines"][0]


# ------------------------------------------------------------------------------------------- predicted and measured


def test_peaks_of_the_allocator_are_compared_with_its_part_of_the_prediction() -> None:
    """max_memory_allocated, which has no context, was divided by a peak with one: half of it, and all bars were met."""
    found = forecast([1, 2], machines(3, memory=10**4, context_bytes=4000))
    planned = plan(prediction=replace(plan().prediction, ranks=found.ranks, stages=found.stages))
    most = max(planned.allocator_peak_bytes(rank) for rank in range(3))
    answer, ran = Answer(plan=planned), Run(seconds=[1.0], losses=[1.0], peak_bytes=2 * most)
    (row,) = rows_of_plans({"keep": answer}, {"keep": ran}, "keep", dry_setup().plans, 4)
    assert row["predicted_peak_bytes"] == most <= max(r.peak_bytes for r in found.ranks) - 4000
    assert row["peak_of_predicted"] == 2
    (bar,) = [
        bar
        for bar in bars({"pipeline": {"rows": [row]}})
        if "over its pred" in bar.name and bar.value
    ]
    assert not bar.met


def test_a_cap_of_the_allocator_leaves_memory_for_a_context() -> None:
    found = forecast([1, 2], machines(3, memory=10**4, context_bytes=4000))
    planned = plan(prediction=replace(plan().prediction, ranks=found.ranks, stages=found.stages))
    assert allocator_cap(planned) == min(planned.allocator_bytes(rank) for rank in range(3)) < 6000


# ---------------------------------------------------------------------------------------------------- bars, comparing


def sample(ours: float = 1.0, peak: int = 100) -> dict[str, Any]:
    """Parts of a run in which ``ours`` is what the offload's step takes beside plain's of 1."""
    times = [ours * noise for noise in (0.99, 1.0, 1.01)]
    over = {"fastest": ours, "median": ours, "low": 0.99 * ours, "high": 1.01 * ours}
    half = rows_of("offload 50%", 1.0) | {"seconds": times, "over_reference": over}
    half |= {"peaks": [peak] * 3, "peak_bytes": peak, "budget_bytes": 100}
    plain = rows_of("plain", 1.0) | {"seconds": [1.0] * 3}
    peer = rows_of("save_on_cpu", 1.0) | {"seconds": [2.5] * 3}
    plan = rows_of("keep", 1.0) | {"seconds_error": -0.05, "peak_of_predicted": 0.97}
    failed = {"way": "fsdp", "reason": "OutOfMemoryError: x"}
    return {
        "tests": {"state": COMPLETE, "rows": [{"way": "a", "outcome": "passed"}]},
        "gpt": {"state": COMPLETE, "rows": [plain, half, peer, failed], "static_bytes": 0},
        "plans": {"state": COMPLETE, "rows": [plan, plan | {"seconds_error": 0.2}]},
    }


def test_bars_are_met_missed_or_not_measured() -> None:
    found = {bar.name: bar for bar in bars(sample(ours=1.01))}
    at_half = found["gpt: plain's throughput at 50% of its activations"]
    assert at_half.met
    assert at_half.value == pytest.approx(1 / 1.01)
    assert found["gpt: at 50%, over save_on_cpu"].value == pytest.approx(2.5 / 1.01)
    assert found["gpt: at 50%, over FSDP2 CPU offload"].met is None
    assert found["plans: highest peak over its prediction"].met
    assert found["plans: largest error of a predicted step"].met is False
    assert found["tests/gpu that fail"].met
    assert found["tests/gpu: errors that compute-sanitizer finds"].met is None
    assert {bar.met for bar in bars({})} == {None}


def write(path: Path, **parts: Any) -> str:
    results = Results(path, [], ABOUT)
    results.found["parts"] = parts
    results._write()
    return str(path)


def test_what_got_worse_by_more_than_its_spread_is_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = write(tmp_path / "old.json", **sample())
    new = write(tmp_path / "new.json", **sample(ours=1.2, peak=90))
    assert compare.main([old, new]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split("  ")[1].strip() for line in lines if line.rstrip().endswith("worse")} == {
        "gpt: offload 50%, throughput",
        "gpt: offload 50%, seconds of a step",
    }
    assert lines[-1].endswith("2 worse by more than their spread")
    write(tmp_path / "new.json", **sample(ours=1.005))
    assert compare.main([old, new]) == 0
    assert "0 worse by more than their spread" in capsys.readouterr().out


def test_incomparable_results_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = write(tmp_path / "old.json", **sample(), device={"state": COMPLETE, "name": "one"})
    later = sample() | {"plans": {"state": UNDERWAY}}
    new = write(tmp_path / "new.json", **later, device={"state": COMPLETE, "name": "two"})
    assert compare.main([old, new]) == 0
    text = capsys.readouterr().out
    assert "not of the same kind: one before, two after" in text
    assert "after: plans is underway" in text
    assert "not measured" in text


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (None, "No such file"),
        ("{", "no JSON"),
        ("\xff\xfe", "no JSON"),
        ("[]", "names no format"),
        ('{"format": "other 2"}', "'other 2'"),
        ('{"format": "parallax benchmarks.gpu 1"}', "its parts"),
        ('{"format": "parallax benchmarks.gpu 1", "parts": {"gpt": {}}}', "its parts"),
        (
            '{"format": "parallax benchmarks.gpu 1", "parts": {"gpt": {"state": "complete", "rows": [{}]}}}',
            "part gpt",
        ),
    ],
)
def test_bad_and_foreign_files_are_refused_in_a_line(
    tmp_path: Path, text: str | None, messages: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good_one = write(tmp_path / "good.json", **sample())
    bad = tmp_path / "bad.json"
    if text is not None:
        bad.write_bytes(text.encode("latin-1"))
    for pair in ([good_one, str(bad)], [str(bad), good_one]):
        assert compare.main(pair) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert str(bad) in line
        assert messages in line


def test_a_results_file_is_plain_json(tmp_path: Path) -> None:
    write(tmp_path / "a.json", **sample())
    found = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert {bar["met"] for bar in found["bars"]} == {True, False, None}
