"""The doctor: it finishes everywhere, programs can read it, and it finds what was made wrong on purpose."""

from __future__ import annotations

import io
import json
import resource
from pathlib import Path

import pytest
from rich.console import Console

from parallax.machine.doctor import examine, file_system, print_report, run_doctor
from tests.alone import alone


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(runs: Path) -> str:
    return "\n".join(f"{finding.what} => {finding.remedy}" for finding in examine(runs).findings)


def test_json_is_complete_and_leaves_nothing_behind(
    capsys: pytest.CaptureFixture[str], place: Path
) -> None:
    assert run_doctor(as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"devices", "cores", "memory", "limits", "probes", "versions", "findings"}
    assert set(report["versions"]) == {"python", "torch", "gloo", "nccl", "cuda", "cudnn"}
    assert report["probes"]["disk_write"] > 0
    assert all(finding["what"] and finding["remedy"] for finding in report["findings"])
    assert [path.name for path in place.iterdir()] == ["cache"]


def test_tables_for_people() -> None:
    report = examine(Path("runs"))
    console = Console(file=io.StringIO(), width=100, record=True)
    print_report(report, console)
    text = console.export_text()
    for part in (
        "devices",
        "memory",
        "bandwidths",
        "versions",
        "problems to expect",
        "disk read",
        "gloo",
    ):
        assert part in text
    assert text.count("remedy:") == len(report.findings)
    kinds = {device["kind"] for device in report.devices}
    assert ("device to host" in text) == (kinds != {"cpu"})


def test_a_place_where_runs_cannot_be_stored_is_pointed_out() -> None:
    text = found(Path("/proc/runs"))
    assert "no file can be made in /proc" in text
    assert "the disk could not be measured" in text
    assert examine(Path("/proc/runs")).probes is None


@pytest.mark.skipif(file_system(Path("/dev/shm")) != "tmpfs", reason="no RAM file system here")
def test_swap_in_ram_is_pointed_out() -> None:
    assert "tmpfs, which is RAM: swapping there frees nothing => set swap.directory" in found(
        Path("/dev/shm/runs")
    )


def found_under_a_limit() -> list[str]:
    """In a process of its own: a hard limit cannot be raised again."""
    resource.setrlimit(resource.RLIMIT_DATA, (3 << 30, 3 << 30))
    return [each.what for each in examine(Path("runs")).findings]


def test_a_limit_in_force_is_pointed_out() -> None:
    assert any(
        "RLIMIT_DATA allows each rank 3.0 GiB" in what for what in alone(found_under_a_limit)
    )
