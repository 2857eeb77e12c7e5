"""The disk under a run's swap fails: the run ends with path and bytes, and never trains on other bytes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from parallax.errors import ParallaxError
from parallax.plan.plan import Directive, Plan
from tests.faults.commands import MODULE, TINY, finish, one_line, prepared, start
from tests.faults.test_left_over import SWAPPING


def offloading(plan: Plan) -> Plan:
    """The same, with every block's activations offloaded."""
    stages = [
        replace(stage, directives=(Directive.OFFLOAD,) * len(stage.directives))
        for stage in plan.stages
    ]
    return replace(plan, stages=tuple(stages))


@pytest.mark.faults
def test_a_disk_that_is_full_ends_the_run_with_path_and_bytes(here: Path, small: Path) -> None:
    run = prepared(
        *TINY, *SWAPPING, f"swap.directory={small}/swap", "trainer.steps=20", plan=offloading
    )
    (small / "taken").write_bytes(b"x" * (1000 * 1024))
    code, out, err = finish(start([*MODULE, "train", "--run-dir", str(run)]))
    assert code == ParallaxError.exit_code
    line = one_line(err)
    assert f"of swapped data in {small}/swap: No space left on device" in line
    assert "are in use there: free space or set swap.directory" in line
    assert "step 2/" not in out
    assert [path.name for path in (small / "swap").iterdir()] == []


@pytest.mark.faults
@pytest.mark.parametrize(
    ("how", "message"),
    [("foreign", "is another user's: set swap.directory"), ("unwritable", "Read-only file system")],
)
def test_a_folder_that_cannot_be_used_is_refused(
    here: Path, small: Path, called: Callable[..., tuple[int, str, str]], how: str, message: str
) -> None:
    """Root, who may write everywhere, too."""
    folder = small / "swap"
    folder.mkdir(mode=0o700)
    if how == "foreign":
        os.chown(folder, 65534, 65534)
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    run = prepared(*TINY, *SWAPPING, f"swap.directory={folder}", plan=offloading)
    code, out, err = called("train", "--run-dir", str(run))
    assert code != 0
    line = one_line(err)
    assert str(folder) in line
    assert message in line
    assert "step 1/" not in out
    assert list(folder.iterdir()) == []
