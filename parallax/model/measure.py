"""Measures what each block costs on the real device: seconds, saved bytes by storage, working memory.

Blocks that look the same (same structure, same parameters' shapes, same inputs) are measured once. Each is measured
at two numbers of rows, which gives the fixed and the per-row part of every cost. The result is cached by model,
device and library versions, so only the first run of a model pays.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallax.errors import DescribeError, PlanError
from parallax.files import cache_directory, replacing
from parallax.host import cpu_model
from parallax.model.describe import Chain, as_tuple, materialise
from parallax.model.precision import PrecisionConfig
from parallax.model.saved import Selector
from parallax.plan.profile import Affine, BlockCost, ModelProfile

SECONDS_PER_BLOCK = 0.4
_REPEATS = (3, 15)
Sample = Callable[[int], tuple[tuple[Tensor, ...], Tensor]]


@dataclass(frozen=True)
class _Measured:
    """One block at one number of rows."""

    rows: int
    forward_seconds: float
    backward_seconds: float
    moved: int
    stays: int
    by_loss: int
    entering: int
    leaving: int
    forward_work: int
    backward_work: int
    outputs: tuple[Tensor, ...]


def measure(
    chain: Chain,
    loss: Callable[[Any, Tensor], Tensor],
    sample: Sample,
    rows: Sequence[int],
    *,
    device: torch.device,
    precision: PrecisionConfig,
    minimum_bytes: int,
    name: str = "model",
    allocator: str = "default",
    progress: Callable[[str], None] = lambda text: None,
) -> ModelProfile:
    """The profile of ``chain``; ``sample(n)`` gives inputs and targets of n rows, ``rows`` one or two such n.

    The loss is measured with the last block. ``allocator`` names the setting under which tensors are allocated: times
    under one say nothing about another. Raises :class:`DescribeError` where blocks do not fit together.
    """
    threads, low, high = torch.get_num_threads(), min(rows), max(rows)
    inputs, _ = sample(1)
    shapes = [(str(tensor.dtype), list(tensor.shape)) for tensor in inputs]
    what = [
        chain.fingerprint(),
        _device_name(device),
        torch.__version__,
        str(precision),
        minimum_bytes,
        threads,
        allocator,
        _loss_name(loss),
    ]
    key = hashlib.sha256(json.dumps([*what, low, high, shapes]).encode()).hexdigest()[:16]
    path = cache_directory() / f"profile-{key}.json"
    if path.is_file():
        with contextlib.suppress(PlanError):  # a damaged file is measured again
            profile = replace(ModelProfile.load(path), model=name)
            progress(f"profile of {name} from {path}")
            return profile
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        bench = _Bench(chain, loss, device, precision, minimum_bytes, progress)
        measured = {n: bench.run(n, *sample(n)) for n in sorted({low, high})}
    profile = ModelProfile(
        model=name,
        fingerprint=chain.fingerprint(),
        device=f"{_device_name(device)}, {threads} thread(s)",
        precision=str(precision),
        blocks=tuple(_cost(chain, i, measured[low][i], measured[high][i]) for i in range(len(chain.blocks))),
        ties=tuple(_tie_costs(chain)),
        optimizer_seconds=_optimizer_seconds(device, chain.dtype),
    )
    with replacing(path) as temporary:
        temporary.write(profile.to_json().encode())
    return profile


class _Bench:
    """Measures block after block; remembers those that look the same."""

    def __init__(
        self,
        chain: Chain,
        loss: Callable[[Any, Tensor], Tensor],
        device: torch.device,
        precision: PrecisionConfig,
        minimum_bytes: int,
        progress: Callable[[str], None],
    ) -> None:
        self._chain, self._loss, self._device = chain, loss, device
        self._precision, self._minimum, self._progress = precision, minimum_bytes, progress

    def run(self, rows: int, inputs: tuple[Tensor, ...], targets: Tensor) -> list[_Measured]:
        """Every block for ``rows`` rows; the outputs of each are the inputs of the next."""
        entering = tuple(tensor.to(self._device) for tensor in inputs)
        known: dict[str, _Measured] = {}
        found = []
        for index, block in enumerate(self._chain.blocks):
            last = index == len(self._chain.blocks) - 1
            look = _look(block.module, entering) + (" first" if index == 0 else "") + (" with loss" if last else "")
            if look not in known:
                self._progress(
                    f"measuring block {index + 1} of {len(self._chain.blocks)} ({block.name}), {rows} row(s)"
                )
                known[look] = self._measure(index, rows, entering, targets.to(self._device) if last else None)
            found.append(known[look])
            entering = known[look].outputs
        return found

    def _measure(self, index: int, rows: int, inputs: tuple[Tensor, ...], targets: Tensor | None) -> _Measured:
        (block,) = materialise(self._chain, index, index + 1, self._device)
        leaves = tuple(tensor.detach().requires_grad_(index > 0 and tensor.is_floating_point()) for tensor in inputs)
        # As in a stage, what enters is no leaf: it comes from a node with two parents.
        anchor = torch.zeros((), device=self._device, requires_grad=True)
        entering = tuple(leaf + anchor.to(leaf.dtype) if leaf.requires_grad else leaf for leaf in leaves)
        for parameter in block.parameters():
            parameter.grad = torch.zeros_like(parameter)
        outputs = self._forward(block, entering, None)
        gradients = [torch.ones_like(t) for t in outputs if t.requires_grad]

        def forward() -> tuple[Tensor, ...]:
            return self._forward(block, entering, targets)

        def backward(results: tuple[Tensor, ...]) -> None:
            roots = [tensor for tensor in results if tensor.requires_grad]
            if roots:
                torch.autograd.backward(roots, gradients if targets is None else None)
            for leaf in (*leaves, anchor):
                leaf.grad = None

        moved, stays, by_loss, new = self._saved(block, entering, targets)
        forward_seconds, backward_seconds = self._time(forward, backward)
        forward_peak, backward_peak = self._peaks(forward, backward)
        leaving = sum(tensor.nbytes for tensor in outputs)
        return _Measured(
            rows=rows,
            forward_seconds=forward_seconds,
            backward_seconds=backward_seconds,
            moved=moved,
            stays=stays,
            by_loss=by_loss,
            entering=sum(tensor.nbytes for tensor in inputs),
            leaving=leaving,
            forward_work=max(0, forward_peak - new),
            backward_work=backward_peak,
            outputs=tuple(tensor.detach() for tensor in outputs),
        )

    def _forward(self, block: nn.Module, inputs: tuple[Tensor, ...], targets: Tensor | None) -> tuple[Tensor, ...]:
        with self._precision.autocast(self._device.type):
            try:
                outputs = as_tuple(block(*inputs))
            except (TypeError, RuntimeError) as error:
                shapes = ", ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in inputs)
                raise DescribeError(
                    f"block {type(block).__name__} does not take what the block before it returns ({shapes}): "
                    f"{str(error).splitlines()[0]}"
                ) from error
            return outputs if targets is None else self._add_loss(outputs, targets)

    def _add_loss(self, outputs: tuple[Tensor, ...], targets: Tensor) -> tuple[Tensor, ...]:
        with self._precision.autocast(self._device.type):
            return (self._loss(outputs[0] if len(outputs) == 1 else outputs, targets),)

    def _saved(
        self, block: nn.Module, entering: tuple[Tensor, ...], targets: Tensor | None
    ) -> tuple[int, int, int, int]:
        """Bytes saved for backward that may move, that stay, that the loss saves (it runs after the block, so they
        are neither offloaded nor recomputed), and all that a forward newly leaves behind."""
        selector = Selector([*block.parameters(), *block.buffers()], self._minimum)
        held = {t.untyped_storage().data_ptr() for t in [*block.parameters(), *block.buffers()]}
        entered = {t.untyped_storage().data_ptr() for t in entering}
        sizes: dict[int, tuple[int, bool]] = {}
        lost: dict[int, int] = {}
        alive = []

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in held:
                sizes[storage.data_ptr()] = (storage.nbytes(), selector.moves(tensor))
                alive.append(storage)  # so that no address is used twice
            return tensor

        def pack_loss(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            lost[storage.data_ptr()] = storage.nbytes()
            alive.append(storage)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            results = self._forward(block, entering, None)
        if targets is not None:
            with torch.autograd.graph.saved_tensors_hooks(pack_loss, lambda tensor: tensor):
                results = self._add_loss(results, targets)
        sizes = {address: found for address, found in sizes.items() if address not in lost}
        left = {address: size for address, (size, _) in sizes.items() if address not in entered} | lost
        left |= {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in results}
        moved = sum(size for size, moves in sizes.values() if moves)
        stays = sum(size for size, moves in sizes.values() if not moves)
        return moved, stays, sum(lost.values()), sum(left.values())

    def _time(self, forward: Callable[[], Any], backward: Callable[[Any], None]) -> tuple[float, float]:
        """Lower quartiles: what disturbs a measurement only ever adds to it. The first run warms up."""
        backward(forward())
        times: list[tuple[float, float]] = []
        begun = time.perf_counter()
        while len(times) < _REPEATS[0] or (
            len(times) < _REPEATS[1] and time.perf_counter() - begun < SECONDS_PER_BLOCK
        ):
            start = self._clock()
            results = forward()
            middle = self._clock()
            backward(results)
            times.append((middle - start, self._clock() - middle))
        return _quartile([t[0] for t in times]), _quartile([t[1] for t in times])

    def _clock(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _peaks(self, forward: Callable[[], Any], backward: Callable[[Any], None]) -> tuple[int, int]:
        """The most that forward, and backward, allocate beyond what was there when each began."""
        results: list[Any] = []
        up = _allocation_peak(self._device, lambda: results.append(forward()))
        down = _allocation_peak(self._device, lambda: backward(results.pop()))
        return up, down


def _quartile(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=4, method="inclusive")[0]


def _allocation_peak(device: torch.device, call: Callable[[], object]) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return int(torch.cuda.max_memory_allocated(device)) - before
    with (
        _quiet_stderr(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
    ):
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    steps = [event for event in events if event.get("name") == "[memory]" and event["args"].get("Device Type") == 0]
    level = peak = 0
    for event in sorted(steps, key=lambda event: float(event["ts"])):
        level += int(event["args"]["Bytes"])
        peak = max(peak, level)
    return peak


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """torch's profiler writes two lines to file descriptor 2 each time it runs, whatever its log level."""
    sys.stderr.flush()
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def _cost(chain: Chain, index: int, low: _Measured, high: _Measured) -> BlockCost:
    module = chain.blocks[index].module

    def line(field: str) -> Affine:
        return Affine.through((low.rows, getattr(low, field)), (high.rows, getattr(high, field)))

    return BlockCost(
        name=chain.blocks[index].name,
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        parameter_bytes=sum(parameter.numel() for parameter in module.parameters()) * chain.dtype.itemsize,
        buffer_bytes=sum(
            buffer.numel() * (chain.dtype if buffer.is_floating_point() else buffer.dtype).itemsize
            for buffer in module.buffers()
        ),
        forward_seconds=line("forward_seconds"),
        backward_seconds=line("backward_seconds"),
        moved=line("moved"),
        stays=line("stays"),
        by_loss=line("by_loss"),
        input=line("entering"),
        output=line("leaving"),
        forward_work=line("forward_work"),
        backward_work=line("backward_work"),
    )


def _tie_costs(chain: Chain) -> Iterator[tuple[int, tuple[int, ...]]]:
    for users in chain.ties.values():
        blocks = tuple(sorted({index for index, _ in users}))
        if len(blocks) > 1:
            first, name = users[0]
            yield chain.blocks[first].module.get_parameter(name).numel() * chain.dtype.itemsize, blocks


def _look(module: nn.Module, inputs: tuple[Tensor, ...]) -> str:
    """Equal for blocks that cost the same."""
    shapes = [f"{name}{tuple(tensor.shape)}" for name, tensor in module.state_dict(keep_vars=True).items()]
    entering = [f"{tensor.dtype}{tuple(tensor.shape)}" for tensor in inputs]
    return "|".join([repr(module), *shapes, *entering])


def _loss_name(loss: Callable[[Any, Tensor], Tensor]) -> str:
    """Equal for the same function, also in another process."""
    code = getattr(loss, "__code__", None)
    body = (code.co_code.hex(), code.co_names) if code is not None else ()
    return repr((getattr(loss, "__module__", ""), getattr(loss, "__qualname__", type(loss).__qualname__), body))


def _optimizer_seconds(device: torch.device, dtype: torch.dtype) -> float:
    """Seconds of a fused AdamW step per byte of parameters."""
    parameter = nn.Parameter(torch.zeros(2**20, device=device, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()
    start = time.perf_counter()
    for _ in range(4):
        optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / 4 / parameter.nbytes


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()
