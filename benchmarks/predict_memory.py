"""Memory of a long prediction: bytes a row, as the slope over thousands of rows.

    python -m benchmarks.predict_memory [--rows 200000] [--format npy|parquet|jsonl]
    python -m benchmarks.predict_memory --images FOLDER --pixels 64

Predicts rows of an array with a small model in this process, and after every part of 64 batches notes the resident
memory and the bytes of all live tensors and arrays. With ``--images``, the rows are photographs, the model is a
ResNet-50 up to its last pooling, in batches of 4. Prints one line of JSON with the slopes of both over the rows after
the first quarter, by least squares; a prediction that keeps nothing has a slope of about zero.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from parallax.model.describe import Chain, describe
from parallax.run.predicting import predict
from parallax.run.predictions import Outputs, PredictedRows
from parallax.runtime.forward import ForwardEngine
from parallax.train.data.arrays import ArraysDataConfig
from parallax.train.data.images import ImagesDataConfig
from parallax.train.data.indexed import IndexedDataConfig
from parallax.train.unlabelled import STOP, UnlabelledDataConfig
from parallax.train.watchdog import NoWatchdog
from parallax.workloads.vision import resnet
from tests.plans import make_plan

BATCH, WIDTH = 32, 64
POOLING = "18.0"  # of ResNet-50


def build() -> nn.Sequential:
    """Return the model."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


@dataclass
class MeasuredOutputs(Outputs):
    """Outputs that note the memory after every part."""

    rows: list[int] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    live: list[int] = field(default_factory=list)

    def add(self, rows: PredictedRows) -> None:
        super().add(rows)
        if len(self._pending) == 0:  # a part was written: batches wait for no other
            self.rows.append(rows.end)
            self.resident.append(resident_bytes())
            self.live.append(live_bytes())


def resident_bytes() -> int:
    """Return the resident memory of this process, without pages of mapped files, which the kernel takes back."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 2**10 for line in status if line.startswith("RssAnon"))


def live_bytes() -> int:
    """Return the bytes of all tensors and arrays that Python holds."""
    gc.collect()
    kinds = torch.Tensor, np.ndarray
    return sum(each.nbytes for each in gc.get_objects() if type(each) in kinds)


def measure(rows: int, suffix: str, folder: Path) -> MeasuredOutputs:
    """Predict ``rows`` rows into a file in ``folder``, in this process."""
    np.save(folder / "x.npy", np.random.default_rng(0).normal(size=(rows, WIDTH)).astype("f4"))
    kind = ArraysDataConfig(path=str(folder / "x.npy"), workers=0)
    chain = describe(build, sample=lambda count: torch.zeros(count, WIDTH))
    return written(chain, kind, MeasuredOutputs(folder / f"out.{suffix}", 0, STOP, False, {}))


def measure_features(
    images: Path, pixels: int, suffix: str, folder: Path, batch: int = 4
) -> MeasuredOutputs:
    """Write the output of a ResNet-50's last pooling for all photographs in ``images``, in this process."""
    kind = ImagesDataConfig(path=str(images), size=pixels, workers=0)
    chain = describe(resnet, layer=POOLING)
    outputs = MeasuredOutputs(folder / f"out.{suffix}", 0, STOP, False, {})
    return written(chain, kind, outputs, batch)


def written(
    chain: Chain, kind: IndexedDataConfig, outputs: MeasuredOutputs, batch: int = BATCH
) -> MeasuredOutputs:
    """Predict all rows of ``kind`` into ``outputs``, ``batch`` rows at a time."""
    model: Any = SimpleNamespace(name="custom")
    source = UnlabelledDataConfig.of(kind, STOP).indexed(model, 0)
    plan = make_plan(chain, replicas=(1,), global_batch=batch, microbatch=batch)
    engine = ForwardEngine.build(chain, plan)
    outputs.folder.mkdir()
    (outputs.folder / "request.json").write_text("{}")
    predict(engine, source, batch, NoWatchdog(), outputs)
    engine.close()
    return outputs


def slope(rows: list[int], values: list[int]) -> float:
    """Return the slope of ``values`` over the rows after the first quarter, by least squares."""
    first = len(rows) // 4
    return float(np.polyfit(rows[first:], values[first:], 1)[0])


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--format", choices=("npy", "parquet", "jsonl"), default="npy")
    parser.add_argument("--images", type=Path, help="a folder of photographs")
    parser.add_argument("--pixels", type=int, default=64)
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if parsed.images:
            found = measure_features(parsed.images, parsed.pixels, parsed.format, Path(name))
        else:
            found = measure(parsed.rows, parsed.format, Path(name))
    first = next(at for at, rows in enumerate(found.rows) if rows >= found.rows[-1] // 4)
    figures = {
        "rows": found.rows[-1],
        "format": parsed.format,
        "samples": len(found.rows),
        "resident_bytes_per_row": round(slope(found.rows, found.resident), 2),
        "live_bytes_per_row": round(slope(found.rows, found.live), 4),
        "resident_bytes": [found.resident[at] for at in (0, first, -1)],
        "most_resident_bytes": max(found.resident),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
