"""``parallax train`` on the simulated accelerator, as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallax.common.files import cache_directory
from parallax.plan.plan import Plan
from parallax.plan.profile import ModelProfile
from tests.distributed.pool import ROOT
from tests.sim.build import library, missing

TINY = [
    "experiment=tiny",
    "plan=two_stages",
    "data.max_bytes=64KiB",
    "trainer.global_batch=4",
    "trainer.steps=1",
]
# Every Python gets the device, of a kind that has variables, and writes down at its end how much of it it has used, and
# which variables it was given, whether it was given some after it had used the device, and how much of another.
CONTEXT = 2**26
SITE = f"""
CONTEXT = {CONTEXT}"""
SITE += """
import atexit, json, os, torch
from pathlib import Path
from parallax.machine.accelerators import register_accelerator
from tests.sim.device import SIM, Sim

late = False

class WithVariables(Sim):
    @property
    def environment(self):
        global late
        late = late or ("SIM_CHANNELS" not in os.environ and torch.get_device_module("sim").is_initialized())
        return {"SIM_CHANNELS": "4", "SIM_CHOSEN": "by us", "SIM_EMPTY": "no more"}

    def usual_context_bytes(self, name):
        return CONTEXT

def note():
    used, other = (torch.accelerator.max_memory_allocated(torch.device("sim", i)) for i in range(2))
    found = {key: value for key, value in os.environ.items() if key.startswith("SIM_")}
    (Path(os.environ["USED"]) / str(os.getpid())).write_text(json.dumps([used, found, late, other]))

register_accelerator(WithVariables("sim"))
atexit.register(note)
"""


ITS_OWN = {"SIM_CHOSEN": "by the user", "SIM_EMPTY": ""}
GIVEN = {"SIM_CHANNELS": "4", "SIM_CHOSEN": "by the user", "SIM_EMPTY": "no more"}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]


def on_the_device(tmp_path: Path) -> dict[str, str]:
    """The environment of processes that have the device and write notes to the folder ``used``."""
    if why := missing():
        pytest.skip(why)
    library()
    (cache := tmp_path / "cache" / "parallax").mkdir(parents=True)
    (cache / "simgpu").symlink_to(cache_directory() / "simgpu")  # nothing else was done before
    (tmp_path / "sitecustomize.py").write_text(SITE)
    (used := tmp_path / "used").mkdir()
    return {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
        "USED": str(used),
        "TMPDIR": str(tmp_path),  # torchrun leaves its logs there
        "XDG_CACHE_HOME": str(cache.parent),
        **ITS_OWN,
    }


def trained(tmp_path: Path, tier: str, *prefix: str) -> tuple[str, dict[str, Any]]:
    """The number of the process that was started, and what each has noted."""
    environment, used = on_the_device(tmp_path), tmp_path / "used"
    settings = [
        "name=sim",
        "cluster.kind=sim",
        "cluster.devices=1",
        "plan.stages=1",
        f"swap.tier={tier}",
        "swap.minimum_bytes=1",  # so that offloading is measured
        "logger=none",
    ]
    with subprocess.Popen(
        [sys.executable, *prefix, "-m", "parallax", "train", *TINY, *settings],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as launcher:
        output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, output
    run = tmp_path / "runs" / "sim"
    assert "simulated" in ModelProfile.load(run / "profile.json").device
    summary, plan = json.loads((run / "summary.json").read_text()), Plan.load(run / "plan.yaml")
    assert summary["ended"] == "steps"
    # What no allocator sees is in no peak that is compared.
    (found,), (predicted,) = summary["ranks"], plan.prediction.ranks
    assert predicted.budget_bytes - found["budget_bytes"] == CONTEXT
    assert predicted.peak_bytes - found["predicted_peak_bytes"] == CONTEXT
    return str(launcher.pid), {file.name: json.loads(file.read_text()) for file in used.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tier", "prefix"), [("disk", []), ("host", TORCHRUN)], ids=["alone", "torchrun"]
)
def test_ranks_have_what_their_device_needs_and_a_launcher_none(
    tmp_path: Path, tier: str, prefix: list[str]
) -> None:
    """The launcher has measured there, and continues without a context and cached blocks, which its ranks need. These
    have the variables of their device, but for those that the user has set, before an allocator reads them; torchrun's
    had none, and NCCL opened more channels than were counted."""
    launcher, noted = trained(tmp_path, tier, *prefix)
    bytes_used, variables, _, of_another = noted.pop(launcher)  # it sets them for others
    assert (bytes_used, variables, of_another) == (0, ITS_OWN, 0)
    used = [each for each in noted.values() if each[0]]
    (probe,) = [each for each in used if each[3]]
    used.remove(probe)
    assert [rest for _, *rest in used] == [[GIVEN, False, 0]], "no context on a neighbour's device"


@pytest.mark.slow
def test_evaluate_predict_and_serve_run_on_the_device(tmp_path: Path) -> None:
    """A process that has measured is replaced once, and not again because it reads the properties of the device."""
    trained(tmp_path, "disk")
    environment = on_the_device(tmp_path / "again") | {
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"
    }

    def run(*words: str) -> None:
        command = [sys.executable, "-m", "parallax", *words]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=120)

    run("evaluate", "sim")
    np.save(tmp_path / "x.npy", np.zeros((3, 64), np.int64))
    run("predict", "sim", "--inputs", "x.npy", "--out", "y.npy")
    assert len(np.load(tmp_path / "y.npy")) == 3
    pytest.importorskip("uvicorn")
    command = [sys.executable, "-m", "parallax", "serve", "sim", "serve.port=0"]
    words = ["cluster.devices=2", "serve.replicas=2", "serve.max_batch_rows=2"]
    with subprocess.Popen(
        [*command, *words], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            assert any("serving http://" in line for line in server.stdout)
            server.terminate()
            server.communicate(timeout=120)
        finally:
            server.kill()
    assert server.returncode == 0
