"""Part ``demo``: twenty steps of ``experiment=demo`` on the device, by the command that a user types.

A row for each rank: the peak of its allocator beside the peak that the plan predicted, and the run's step seconds
beside the predicted ones. A dry run trains ``experiment=tiny`` on the CPU for two steps.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts.part import Findings, Given
from benchmarks.workers import WayFailed

ROOT = Path(__file__).parents[3]
NAME, STEPS = "gpu-check", 20


def arguments(kind: str) -> list[str]:
    """The settings of the run."""
    if kind == "cpu":
        return ["experiment=tiny", "trainer.steps=2", "cluster.kind=cpu", f"name={NAME}"]
    return ["experiment=demo", f"trainer.steps={STEPS}", f"cluster.kind={kind}", f"name={NAME}"]


def demo(given: Given) -> Findings:
    """Rows of the ranks. Raises :class:`WayFailed` where the run fails, with the last line that it printed."""
    with tempfile.TemporaryDirectory(prefix="parallax-benchmark-") as folder:
        command = [sys.executable, "-m", "parallax", "train", *arguments(given.kind)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        output = Path(folder) / "output.txt"
        with output.open("wb") as file:
            try:
                ended = subprocess.run(
                    command,
                    cwd=folder,
                    env={**os.environ, "PYTHONPATH": path},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=given.deadline.left(),
                    check=False,
                )
                why = f"exit code {ended.returncode}" if ended.returncode else ""
            except subprocess.TimeoutExpired as late:
                why = f"no end within {late.timeout:.0f} s"
        lines = output.read_text(encoding="utf-8", errors="replace").split("\n")
        if why:
            last = next((line for line in reversed(lines) if line.strip()), "it printed nothing")
            raise WayFailed(f"parallax train {' '.join(arguments(given.kind))}: {why}: {last}")
        yield _found(Path(folder) / "runs" / NAME) | {"output": lines}


def _found(run: Path) -> dict[str, Any]:
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    metrics = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [line for line in map(json.loads, metrics) if "step_seconds" in line]
    seconds = [line["step_seconds"] for line in steps]
    predicted, measured = summary["predicted_step_seconds"], summary["step_seconds_median"]
    losses = [line["loss"] for line in steps]
    rows = [
        {
            "way": f"rank {rank['rank']} (stage {rank['stage']}, replica {rank['replica']})",
            "reason": None,
            "seconds": seconds,
            "predicted_seconds": predicted,
            "seconds_error": predicted / measured - 1,
            "tokens_per_second": summary["tokens_per_second"],
            "peak_bytes": rank["measured_peak_bytes"],
            "predicted_peak_bytes": rank["predicted_peak_bytes"],
            "peak_of_predicted": rank["measured_peak_bytes"] / rank["predicted_peak_bytes"],
            "bytes_out": rank["offloaded_bytes_per_step"],
            "bytes_in": rank["offloaded_bytes_per_step"],
            "stall_seconds": rank["stall_seconds_per_step"],
            "plan": f"{len(seconds)} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}",
            "over_reference": None,
            "throughput": None,
            "losses_equal": False,
            "loss_difference": None,
        }
        for rank in summary["ranks"]
    ]
    return {"rows": rows, "step_seconds_median": statistics.median(seconds)}
