"""``parallax train`` on the simulated accelerator, as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallax.common.files import cache_directory
from parallax.plan.profile import ModelProfile
from tests.distributed.pool import ROOT
from tests.sim.build import library, missing

TINY = ["experiment=tiny", "data.max_bytes=64KiB", "trainer.global_batch=4", "trainer.steps=1"]
# Every Python gets the device, of a kind that has variables, and writes down at its end how much of it it has used, and
# which variables it was given.
SITE = """
import atexit, json, os, torch
from pathlib import Path
from parallax.machine.accelerators import register_accelerator
from tests.sim.device import SIM, Sim

class WithVariables(Sim):
    environment = {"SIM_CHANNELS": "4", "SIM_CHOSEN": "by us", "SIM_EMPTY": "no more"}

def note():
    used = torch.accelerator.max_memory_allocated(SIM)
    found = {key: value for key, value in os.environ.items() if key.startswith("SIM_")}
    (Path(os.environ["USED"]) / str(os.getpid())).write_text(json.dumps([used, found]))

register_accelerator(WithVariables("sim"))
atexit.register(note)
"""


def test_a_launcher_keeps_nothing_of_the_device(tmp_path: Path) -> None:
    """It has measured there, and goes on without a context and cached blocks, which its ranks need; and they get the
    variables of its kind, but for those that the user has set."""
    if why := missing():
        pytest.skip(why)
    library()
    (cache := tmp_path / "cache" / "parallax").mkdir(parents=True)
    (cache / "simgpu").symlink_to(cache_directory() / "simgpu")  # nothing else was done before
    (tmp_path / "sitecustomize.py").write_text(SITE)
    (used := tmp_path / "used").mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
        "USED": str(used),
        "XDG_CACHE_HOME": str(cache.parent),
        "SIM_CHOSEN": "by the user",
        "SIM_EMPTY": "",
    }
    settings = [
        "name=sim",
        "cluster.kind=sim",
        "cluster.devices=1",
        "plan.stages=1",
        "logger.tensorboard=false",
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "parallax", "train", *TINY, *settings],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as launcher:
        said, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, said
    run = tmp_path / "runs" / "sim"
    assert "simulated" in ModelProfile.load(run / "profile.json").device
    assert json.loads((run / "summary.json").read_text())["ended"] == "steps"
    noted = {file.name: json.loads(file.read_text()) for file in used.iterdir()}
    its_own = {"SIM_CHOSEN": "by the user", "SIM_EMPTY": ""}
    assert noted.pop(str(launcher.pid)) == [0, its_own]
    given = {"SIM_CHANNELS": "4", "SIM_CHOSEN": "by the user", "SIM_EMPTY": "no more"}
    assert [variables for bytes_used, variables in noted.values() if bytes_used] == [given]
