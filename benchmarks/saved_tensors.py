"""How much Python goes with a saved tensor?  ``python -m benchmarks.saved_tensors [--simulated] [--json]``

A forward saves many small tensors, one for each operator, and backward takes them back. What that takes beyond the same
without hooks, divided by their number, is the way of one saved tensor, down and up, in microseconds:

``nothing``    hooks in Python that do nothing: what torch itself takes for calling them
``save_on_cpu``  torch.autograd.graph.save_on_cpu
``bare``       a copy down and a copy up beside the computing, with the events that order them, and nothing else
``stays``      ours, of tensors that the selector keeps: they are smaller than ``swap.minimum_bytes``
``fits``       ours, of tensors that may move, and need not: all of them fit
``swap``       the same inside ``parallax.swap``, with an optimizer: what a loop of somebody else's has
``leaves``     ours, of tensors that are all written to host memory and come back

All take their turns in one process; the time is what the process computes, in all of its threads. ``--simulated`` runs
on the simulated accelerator of the tests instead of the CPU, with its streams and events, whose own bookkeeping is in
the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import parallax
from benchmarks.workers import rotated
from parallax.machine.device import Event, copies_for
from parallax.model.saved import Selector
from parallax.swap.activations.hooks import offloading
from parallax.swap.activations.manager import SwapManager
from parallax.swap.activations.policy import Policy
from parallax.swap.stores.store import HostStore

PAGE = 4096
Hooks = Callable[[], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """``tensors`` are saved in each of ``repetitions`` turns, of ``numbers`` numbers each."""

    repetitions: int = 15
    tensors: int = 400
    numbers: int = 64


@contextlib.contextmanager
def _ours(
    sizes: Sizes, device: torch.device, *, minimum: int, limit: int, eager: bool
) -> Iterator[Hooks]:
    store = HostStore(2 * PAGE * sizes.tensors, copies_for(device))
    manager = SwapManager(store, limit_bytes=limit, policy=Policy(eager=eager))
    selector = Selector([], minimum_bytes=minimum)
    try:
        yield lambda: offloading(manager, selector, 0)
    finally:
        manager.close()


def _ways(sizes: Sizes, device: torch.device, stack: contextlib.ExitStack) -> dict[str, Hooks]:
    size = 4 * sizes.numbers

    def ours(*, minimum: int = 1, limit: int = 2**30, eager: bool = False) -> Hooks:
        return stack.enter_context(_ours(sizes, device, minimum=minimum, limit=limit, eager=eager))

    return {
        "plain": contextlib.nullcontext,
        "nothing": lambda: saved_tensors_hooks(_as_it_is, _as_it_is),
        "save_on_cpu": save_on_cpu,
        "bare": _bare(sizes, device, stack),
        "stays": ours(minimum=2**20),
        "fits": ours(),
        "swap": _swap(device),
        "leaves": ours(limit=size * max(8, sizes.tensors // 8), eager=True),
    }


def _swap(device: torch.device) -> Hooks:
    model = torch.nn.Linear(1, 1, device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    return lambda: parallax.swap(model, 2**40, optimizer=optimizer, tier="disk", minimum_bytes=1)


def _bare(sizes: Sizes, device: torch.device, stack: contextlib.ExitStack) -> Hooks:
    copies, size = copies_for(device), 4 * sizes.numbers
    arena = copies.arena(size * sizes.tensors)
    stack.callback(arena.close)
    free = [*arena.data.view(torch.float32).split(sizes.numbers)]

    def pack(tensor: Tensor) -> tuple[Tensor, Event, Tensor]:
        place = free.pop()
        return place, copies.copy(tensor, place), tensor.detach()

    def unpack(packed: tuple[Tensor, Event, Tensor]) -> Tensor:
        place, written, source = packed
        written.wait_host()
        target = torch.empty_like(source)
        copies.copy(place, target).wait_stream()
        free.append(place)
        return target

    return lambda: saved_tensors_hooks(pack, unpack)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _turn(hooks: Hooks, sizes: Sizes, device: torch.device) -> tuple[float, float]:
    """Seconds of a forward and of its backward."""
    x = torch.ones(sizes.numbers, requires_grad=True).to(device)
    gc.collect()
    gc.disable()
    with hooks():
        start = time.process_time()
        for _ in range(sizes.tensors):
            x = x.sin()
        middle = time.process_time()
        x.backward(torch.ones_like(x))
        end = time.process_time()
    gc.enable()
    return middle - start, end - middle


def measure(sizes: Sizes, device: torch.device) -> dict[str, dict[str, float]]:
    """Microseconds for each saved tensor and way: down, up, and both."""
    taken: dict[str, list[tuple[float, float]]] = {}
    with contextlib.ExitStack() as stack:
        ways = _ways(sizes, device, stack)
        for turn in range(sizes.repetitions + 1):
            for name in rotated([*ways], turn):
                found = _turn(ways[name], sizes, device)
                if turn:  # the first is for warming up
                    taken.setdefault(name, []).append(found)
    return {name: _over(times, taken["plain"], sizes) for name, times in taken.items()}


def _over(
    times: Sequence[tuple[float, float]], plain: Sequence[tuple[float, float]], sizes: Sizes
) -> dict[str, float]:
    """What ``times`` take beyond ``plain``: the fastest turn of each, since other work only ever slows a turn down,
    and the median of neighbours."""

    def each(seconds: float) -> float:
        return seconds / sizes.tensors * 1e6

    down, up = (min(t[i] for t in times) - min(t[i] for t in plain) for i in (0, 1))
    middle = statistics.median(sum(a) - sum(b) for a, b in zip(times, plain, strict=True))
    return {"down": each(down), "up": each(up), "both": each(down + up), "median": each(middle)}


def _show(found: dict[str, dict[str, float]], title: str) -> None:
    table = Table(title=title)
    table.add_column("way")
    for column in ("down", "up", "both", "median"):
        table.add_column(f"{column}, µs", justify="right")
    for name, row in found.items():
        table.add_row(name, *(f"{value:.1f}" for value in row.values()))
    Console().print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--simulated", action="store_true", help="on the simulated accelerator")
    parser.add_argument("--json", action="store_true", help="print JSON")
    for name, value in asdict(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    given: dict[str, Any] = vars(parser.parse_args())
    simulated, as_json = given.pop("simulated"), given.pop("json")
    device = torch.device("cpu")
    if simulated:
        from tests.sim.device import SIM

        device = SIM
    torch.set_num_threads(1)
    sizes = Sizes(**given)
    found = measure(sizes, device)
    if as_json:
        print(json.dumps({"device": str(device), "sizes": asdict(sizes), "microseconds": found}))
    else:
        _show(found, f"a saved tensor's way on {device}, beyond plain")


if __name__ == "__main__":
    main()
