"""Weights that are a multiple of the memory there is, on a limit that the kernel enforces."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallax.machine.device import CpuCopies
from parallax.machine.host import ResidentMeter, return_freed_memory
from parallax.model.split_backward import WeightGradStore
from parallax.swap.parameters.offloaded import OffloadedParameters
from parallax.swap.stores.store import DiskStore

MIB = 2**20
BLOCKS, WIDTH = 9, 1024
BLOCK_BYTES = 3 * WIDTH * WIDTH * 4
WEIGHTS = BLOCKS * BLOCK_BYTES  # 108 MiB, and as much again for gradients
ALLOWED = 92 * MIB  # beyond what torch itself takes; of it 32 MiB are stacks of the store's threads


class Block(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(index)
        self.weights = nn.ParameterList(
            torch.randn(WIDTH, WIDTH, generator=generator) / 32 for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(F.linear(x, weight))
        return x


def digest(tensors: Iterable[Tensor]) -> int:
    found = 0
    for tensor in tensors:
        found = zlib.crc32(memoryview(tensor.numpy()), found)  # type: ignore[arg-type]
    return found


def losses(
    blocks: nn.ModuleList, *, split: bool, stream: OffloadedParameters | None = None
) -> list[float]:
    """Two micro-batches, both in flight at once; with ``split`` backwards, all input-gradient passes come first."""
    x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(99))
    roots = []
    for micro in x:
        deferred = WeightGradStore(None, *([] if stream is None else [stream.holds_memory_of]))
        with deferred.splitting() if split else nullcontext():
            for block in blocks:
                micro = block(micro)
        roots.append((micro.square().mean(), deferred))
    for root, _ in roots:
        root.backward()
    for _, deferred in roots:
        if stream is None:
            deferred.finish()
        else:
            deferred.finish(stream.offload_gradient, begin=stream.fetch_gradient)
    return [root.item() for root, _ in roots]


def resident(count: int = BLOCKS, *, split: bool = False) -> tuple[list[float], int]:
    blocks = nn.ModuleList(Block(index) for index in range(count))
    found = losses(blocks, split=split)
    return found, digest(p.grad for p in blocks.parameters() if p.grad is not None)


def streamed(
    scratch: Path, count: int = BLOCKS, *, split: bool = False
) -> tuple[list[float], int, int, int]:
    store = DiskStore(scratch, 4 * WEIGHTS, CpuCopies(), threads=2)
    blocks = nn.ModuleList()

    def make() -> Iterator[Iterator[nn.Parameter]]:
        for index in range(count):
            blocks.append(Block(index))
            yield blocks[-1].parameters()

    meter = ResidentMeter()
    stream = OffloadedParameters(make(), store)
    for index, block in enumerate(blocks):
        stream.attach(index, block)
    try:
        found = losses(blocks, split=split, stream=stream)
        grads = digest(stream.read_gradient(p) for p in blocks.parameters())  # type: ignore[misc]
        return found, grads, stream.limit_bytes, meter.peak_bytes()
    finally:
        stream.close()
        store.close()


def limited(scratch: str, split: bool) -> None:
    """In a process of its own: resident until the kernel refuses memory; then it continues, and offloads under the same
    limit."""
    return_freed_memory()
    resident(1, split=split)
    streamed(Path(scratch), 1, split=split)  # what torch loads on first use is not the model's
    status = Path("/proc/self/status").read_text().split()
    limit = int(status[status.index("VmData:") + 1]) * 1024 + ALLOWED
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    failure = ""
    try:
        resident(split=split)
    except RuntimeError as error:
        failure = str(error)
    print(json.dumps([failure, *streamed(Path(scratch), split=split)]))


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_weights_that_do_not_fit_train(scratch: Path, split: bool) -> None:
    command = [
        sys.executable,
        "-c",
        f"from tests.unit.swap.test_parameters_memory import limited; limited({str(scratch)!r}, {split})",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        unlimited = resident(split=split)
        output, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    found: list[Any] = json.loads(output.splitlines()[-1])
    failure, *same, limit_bytes, peak_bytes = found
    assert "DefaultCPUAllocator: can't allocate memory" in failure
    assert tuple(same) == unlimited
    assert limit_bytes == 3 * BLOCK_BYTES
    assert peak_bytes < limit_bytes + 8 * MIB < WEIGHTS / 2
