"""Models for tests of the server, and the server's process: ``python -m tests.serving.models KIND key=value ...``."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import yaml
from torch import Tensor

from parallax.serve.config import ServeConfig
from parallax.serve.model import DTYPES, BatchOutputs, ServedModel, TensorSpec
from parallax.serve.server import serve

FAILS, WAITS = 13.0, 99.0


class Echo(ServedModel):
    """Returns its inputs, one of each datatype."""

    name, version = "echo", "1"
    inputs = tuple(TensorSpec(name, dtype, (-1, 3)) for name, dtype in DTYPES.items())
    outputs = inputs

    def run(self, tensors: Sequence[Tensor]) -> BatchOutputs:
        return BatchOutputs(list(tensors), self.version)


class Steered(ServedModel):
    """Returns twice ``x``, and the rows of the batch. It raises for the value ``FAILS``, and waits for the file ``go``
    where ``x`` holds ``WAITS``; ``computed`` lists the first value of each row."""

    name, version = "steered", "7"
    inputs = (TensorSpec("x", torch.float32, (-1, -1)),)
    outputs = (
        TensorSpec("y", torch.float32, (-1, -1)),
        TensorSpec("rows", torch.int64, (-1,)),
    )

    def run(self, tensors: Sequence[Tensor]) -> BatchOutputs:
        (x,) = tensors
        with Path("computed").open("a") as file:
            file.write(" ".join(f"{value:g}" for value in x[:, 0].tolist()) + "\n")
        while bool((x == WAITS).any()) and not Path("go").exists():
            time.sleep(0.005)
        if bool((x == FAILS).any()):
            raise ValueError("thirteen\nand more")
        return BatchOutputs([2 * x, torch.full((len(x),), len(x))], self.version)


KINDS: dict[str, type[ServedModel]] = {"echo": Echo, "steered": Steered}

if __name__ == "__main__":
    values = dict(word.split("=", 1) for word in sys.argv[2:])
    config = ServeConfig(port=0, **{key: yaml.safe_load(value) for key, value in values.items()})
    serve(KINDS[sys.argv[1]](), config, lambda address: print(address, flush=True), "0")
