"""Measure and limit the memory that a rank uses in addition to what its process held before the engine was built."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from parallax.machine.host import (
    SMALLEST_TRIM,
    MemoryBound,
    ResidentMeter,
    data_bytes,
    keep_freed_memory,
    return_freed_memory,
    use_one_arena,
)
from parallax.model.precision import PrecisionConfig
from parallax.model.split_backward import WeightGradStore
from parallax.plan.plan import Directive, RankPrediction, StagePlan
from parallax.runtime.optim.kinds.adamw import AdamWConfig
from parallax.runtime.replicas.reducer import touch_reducer

# The share of a rank's predicted peak for temporary tensors of a block and shared memory of channels.
_UNSEEN = 1 / 32
_BEYOND = 1 / 8  # of the predicted peak: twice the distance that a bound and its looks keep


def device_memory(
    device: torch.device,
    precision: PrecisionConfig,
    stages: Iterable[StagePlan],
    *,
    reduces: bool = False,
) -> Callable[[], int]:
    """Start to measure the device memory of a rank with ``stages``. Return a function that returns the peak since then,
    in bytes.

    ``reduces`` is True if torch's DDP reducer will sum the gradients of replicas.
    """
    if device.type != "cpu":
        # Before 2.13 torch does not reset the peak of a device without an allocation.
        torch.empty(0, device=device)
        torch.accelerator.reset_peak_memory_stats(device)
        return lambda: int(torch.accelerator.max_memory_allocated(device))
    use_one_arena()
    # torch.utils.checkpoint loads torch's compiler.
    recomputes = any(Directive.RECOMPUTE in stage.directives for stage in stages)
    _touch_libraries(precision, recomputes=recomputes)
    if reduces:
        touch_reducer()
    return ResidentMeter().peak_bytes


def return_freed(device: torch.device, prediction: RankPrediction) -> None:
    """From now on, return freed memory of a CPU rank to the system at once, if the plan of ``prediction`` assumes this.

    Call this function before the stage is built. If it is called later, malloc serves large blocks from memory that it
    already holds, and can return only the end of that memory.
    """
    if device.type == "cpu" and prediction.peak_bytes > 0 and prediction.returns_freed:
        return_freed_memory()


def bound_memory(
    device: torch.device, prediction: RankPrediction, before_bytes: int, *, trains: bool
) -> Callable[[], None]:
    """Keep the memory of a CPU rank below its predicted peak plus ``before_bytes``; return a function that removes this
    bound. A rank that ``trains`` may exceed its predicted peak by an eighth, if its budget allows.

    Freed memory is returned to the system when the process would exceed the bound
    (:class:`~parallax.machine.host.MemoryBound`).

    No-op without a prediction, for a rank that already returns freed memory at once (:func:`return_freed`), and for an
    accelerator, whose allocator has its own limit.
    """
    if device.type != "cpu" or prediction.peak_bytes <= 0 or prediction.returns_freed:
        return lambda: None
    keep_freed_memory()  # after the weights, which are never freed
    bound_bytes = _bound_bytes(prediction, trains=trains)
    return MemoryBound(before_bytes + bound_bytes - data_bytes()).close


def _bound_bytes(prediction: RankPrediction, *, trains: bool) -> int:
    """Return the memory of a rank at which freed memory is returned to the system.

    The bound keeps a distance from the most bytes that the rank may hold, because memory grows between two looks at it.
    If the budget allows, the most bytes in training are so far above the predicted peak that a rank with this peak is
    not trimmed: a step that trims makes all of its activations of fresh pages, which may take half of the step's time.
    """
    beyond = int(_BEYOND * prediction.peak_bytes) + SMALLEST_TRIM if trains else 0
    most_bytes = prediction.peak_bytes + beyond
    most_bytes = max(prediction.peak_bytes, min(most_bytes, prediction.budget_bytes))
    return most_bytes - SMALLEST_TRIM - int(_UNSEEN * most_bytes)


@cache  # once per process
def _touch_libraries(precision: PrecisionConfig, *, recomputes: bool) -> None:
    """Run the usual operators once on tiny tensors, so that the memory of their code and tables counts as memory of the
    process, not of the stage. ``recomputes`` is True if the plan recomputes activations."""
    with torch.random.fork_rng(devices=[]):
        layer = torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).to(
            precision.parameter_dtype
        )
        optimizer = AdamWConfig().create([{"params": layer.parameters()}])
        if recomputes:
            again = checkpoint(torch.nn.Linear(2, 2), torch.zeros(1, 2), use_reentrant=False)
            again.sum().backward()
        for _ in range(2):
            weight_gradients = WeightGradStore()
            with precision.autocast("cpu"), weight_gradients.splitting():
                outputs = layer(torch.zeros(2, 4, 32, dtype=precision.parameter_dtype)).flatten(
                    0, 1
                )
                loss = torch.nn.functional.cross_entropy(
                    outputs.float(), torch.zeros(8, dtype=torch.int64)
                )
            # As in a stage that is not the last: torch imports modules for a backward from gradient edges.
            torch.autograd.backward([get_gradient_edge(loss)], [torch.ones_like(loss)])
            weight_gradients.finish()
            torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()
