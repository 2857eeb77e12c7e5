"""Too little of anything is found before a run starts: one line with the arithmetic, exit code 2, nothing begun."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from parallax import cli
from parallax.errors import PreflightError
from parallax.machine.preflight.disk import check_clock, quota_free_bytes
from parallax.machine.preflight.needs import FolderNeeds, HostNeeds, RankNeeds
from parallax.machine.preflight.start import check_host
from parallax.plan.plan import Plan
from parallax.run.preflight import check_start
from parallax.run.prepare import PreparedRun
from tests.faults.commands import DGX, MODULE, TINY, finish, one_line, prepared, start

TIB = 2**40
ONE = HostNeeds(ranks=(RankNeeds(memory_bytes=2**20),), world=1)
LIMITED = """
import resource, sys
from parallax.cli import main
if __name__ == "__main__":
    limit = int(sys.argv.pop(2))
    resource.setrlimit(getattr(resource, sys.argv.pop(1)), (limit, limit))
    sys.exit(main())
"""


@contextlib.contextmanager
def limited(name: str, value: int) -> Iterator[None]:
    number = getattr(resource, name)
    before = resource.getrlimit(number)
    resource.setrlimit(number, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(number, before)


def needing(folder: Path, size: int, largest: int = 0) -> HostNeeds:
    own = FolderNeeds(
        folder=folder, size=size, largest_bytes=largest, what="checkpoints", remedy="keep fewer"
    )
    return replace(ONE, folders=(own,))


# ---- limits of processes


@pytest.mark.parametrize(
    ("name", "mebibytes", "message"),
    [
        pytest.param("RLIMIT_DATA", 300, "340.0 MiB for its process = ", marks=pytest.mark.faults),
        (
            "RLIMIT_DATA",
            150,
            "torch alone takes 220.0 MiB of a process, and RLIMIT_DATA (ulimit -d) allows 150.0 MiB",
        ),
        (
            "RLIMIT_AS",
            500,
            "torch alone takes 620.0 MiB of a process, and RLIMIT_AS (ulimit -v) allows 500.0 MiB",
        ),
    ],
)
def test_limits_below_what_a_rank_needs(
    here: Path, name: str, mebibytes: int, message: str
) -> None:
    run = prepared(*TINY)
    before = sorted(run.iterdir())
    command = [sys.executable, "-c", LIMITED, name, str(mebibytes * 2**20)]
    code, out, err = finish(start([*command, "train", "--run-dir", str(run)]))
    assert code == PreflightError.exit_code == 2
    assert out == ""
    assert message in one_line(err)
    assert "unlimited" in err
    assert sorted(run.iterdir()) == before


@pytest.mark.faults
def test_too_few_files(here: Path) -> None:
    run = prepared(*TINY)
    command = [sys.executable, "-c", LIMITED, "RLIMIT_NOFILE", "27", "train", "--run-dir", str(run)]
    code, out, err = finish(start(command))
    assert (code, out) == (PreflightError.exit_code, "")
    assert one_line(err).endswith(
        "this host cannot run it: a rank opens 24 files + 2 connections to each of 2 ranks = 28, and RLIMIT_NOFILE "
        "(ulimit -n) allows 27: ulimit -n 1024"
    )


# ---- memory


def test_too_little_memory_for_all_ranks(
    here: Path, called: Callable[..., tuple[int, str, str]]
) -> None:
    def enormous(plan: Plan) -> Plan:
        ranks = [replace(r, peak_bytes=TIB, budget_bytes=TIB) for r in plan.prediction.ranks]
        return replace(plan, prediction=replace(plan.prediction, ranks=tuple(ranks)))

    run = prepared(*TINY, plan=enormous)
    code, out, err = called("train", "--run-dir", str(run))
    assert (code, out) == (2, "")
    line = one_line(err)
    assert (
        "2 rank(s) take 2.0 TiB by their plan + 2 × 120.0 MiB for their processes = 2.0 TiB" in line
    )
    assert "plan for less (cluster.device_memory), use fewer ranks" in line


IN_A_SMALL_ONE = """
mount -t tmpfs -o size=64k none /dev/shm || exit 77
exec "$@"
"""
SHARED = """
from parallax.machine.preflight.needs import HostNeeds, RankNeeds
from parallax.machine.preflight.start import check_host
ranks = (RankNeeds(memory_bytes=1),) * 2
check_host(HostNeeds(ranks=ranks, world=2))
try:
    check_host(HostNeeds(ranks=ranks, world=2, accelerators=2))
except Exception as error:
    print(error)
"""


@pytest.fixture
def apart() -> list[str]:
    """The beginning of a command for which ``/dev/shm`` has 64 KiB."""
    command = ["unshare", "--mount", "bash", "-c", IN_A_SMALL_ONE, "bash"]
    if os.getuid() != 0 or subprocess.run([*command, "true"], check=False).returncode:
        pytest.skip("another /dev/shm can be mounted by root alone")
    return command


def test_tiny_shared_memory(here: Path, apart: list[str]) -> None:
    _, out, _ = finish(start([*apart, sys.executable, "-c", SHARED]))
    assert out.startswith(
        "this host cannot run it: 2 devices exchange data through /dev/shm, in 32.0 MiB at least, and it has 64.0 KiB: "
        "docker run --shm-size=1g"
    )


@pytest.mark.faults
def test_ranks_on_cpus_train_with_tiny_shared_memory(here: Path, apart: list[str]) -> None:
    """Theirs has no name, which no size of a file system limits."""
    run = prepared(*TINY, "trainer.steps=2")
    code, _, err = finish(start([*apart, *MODULE, "train", "--run-dir", str(run)]))
    assert code == 0, err


# ---- disks


def test_no_disk_space_for_checkpoints(
    small: Path, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = prepared(*TINY, f"checkpoint.directory={small}", "checkpoint.keep=2")
    assert cli.main(["plan", *DGX]) == 0
    Path("plan.inputs.json").replace(run / "plan.inputs.json")
    with pytest.raises(PreflightError) as found:
        check_start(PreparedRun.read(run))
    assert re.search(
        r"\d\.\d MiB for checkpoints \(\d at once, of 1\.\d MiB each, less what is there\), and 1\.0 MiB are "
        r"free in .*: free space, or keep fewer \(checkpoint\.keep\)",
        str(found.value),
    )


@pytest.mark.faults
def test_a_run_without_disk_space_for_checkpoints_does_not_start(
    small: Path, called: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = called(
        *("train", *TINY, "name=full", "cluster.devices=1", "plan.stages=1"),
        f"checkpoint.directory={small}",
    )
    assert code == 2
    assert f"are free in {small}" in one_line(err)
    assert "step 1" not in out


def test_folders_of_one_file_system_share_it(small: Path) -> None:
    half = needing(small, 700 * 1024).folders
    check_host(replace(ONE, folders=half))
    other = replace(half[0], folder=small / "swap", what="the swap files", remedy="elsewhere")
    with pytest.raises(PreflightError) as found:
        check_host(replace(ONE, folders=(*half, other)))
    assert "700.0 KiB for checkpoints + 700.0 KiB for the swap files = 1.4 MiB, and 1" in str(
        found.value
    )


def test_files_longer_than_they_may_be(tmp_path: Path) -> None:
    with limited("RLIMIT_FSIZE", 2**20):
        check_host(needing(tmp_path, 2**20, 2**20))
        with pytest.raises(
            PreflightError, match=r"files of 2.0 MiB, and RLIMIT_FSIZE .* allows 1.0 MiB"
        ):
            check_host(needing(tmp_path, 2**21, 2**21))


def test_the_clock_of_the_file_system(tmp_path: Path) -> None:
    assert list(check_clock(tmp_path)) == []
    (found,) = check_clock(tmp_path, now=lambda: time.time() + 90)
    assert "is -90 s off this host's, and at most 60 s are accepted" in found.what
    assert list(tmp_path.iterdir()) == []


def test_a_quota_is_read_where_there_is_one(tmp_path: Path) -> None:
    assert (
        quota_free_bytes(tmp_path / "not" / "yet") is None or quota_free_bytes(tmp_path) is not None
    )
    assert quota_free_bytes(Path("/proc")) is None


# ---- and where all is well


def test_it_is_silent_and_takes_next_to_no_time(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = PreparedRun.read(prepared(*TINY))
    before = sorted(run.directory.rglob("*"))
    begun = time.process_time()
    for _ in range(10):
        check_start(run)
    assert time.process_time() - begun < 1.0  # ten times; a tenth of that where nothing else runs
    assert capfd.readouterr() == ("", "")
    assert sorted(run.directory.rglob("*")) == before
