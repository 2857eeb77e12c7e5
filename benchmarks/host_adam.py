"""Is an optimizer step on the host as fast as torch's own?  ``python -m benchmarks.host_adam [--json]``

One AdamW step on the parameters of a GPT of about 100 million, on the CPU, by turns in one process:

``parallax``      ``HostOptimizer``: commit, and wait until all is done; the states stay in host memory
``fused``         ``torch.optim.AdamW(fused=True)``, then ``zero_grad(set_to_none=False)``: the same end state, because
                  a step of ours leaves zeros in the gradients
``fused alone``   the same without ``zero_grad``
``for-loop``      ``torch.optim.AdamW(foreach=False, fused=False)``: a few kernels for each parameter
``DeepSpeed``     its CPU Adam, where it can be imported

All work on the same parameters with states of their own; gradients are filled before each turn, outside the time.
Seconds are per 10⁹ parameters. ``over_fused`` and ``over_fused_alone`` are ratios within one run
(benchmarks/ratios.py). The bar: parallax over fused ≤ 1.02.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.ratios import ratios, show
from benchmarks.workers import reason, rotated
from parallax.machine.device import copies_for
from parallax.model.factory.gpt import GPTConfig
from parallax.swap.optimizer.host import HostOptimizer

GOAL = 1.02
SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
Step = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is stepped: 12 layers of 768 and a vocabulary of 20,000 are 101 million parameters in 148 tensors."""

    repetitions: int = 9
    layers: int = 12
    hidden: int = 768
    heads: int = 12
    vocabulary: int = 20000
    sequence: int = 1024


@contextlib.contextmanager
def _parallax(parameters: Sequence[nn.Parameter]) -> Iterator[Step]:
    meant = torch.optim.AdamW(parameters, fused=True, **SETTINGS)
    stepper = HostOptimizer(meant, parameters, copies=copies_for(torch.device("cpu")))

    def step() -> None:
        stepper.commit()
        stepper.finish()

    try:
        yield step
    finally:
        stepper.close()


@contextlib.contextmanager
def _fused(parameters: Sequence[nn.Parameter]) -> Iterator[Step]:
    optimizer = torch.optim.AdamW(parameters, fused=True, **SETTINGS)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    yield step


@contextlib.contextmanager
def _fused_alone(parameters: Sequence[nn.Parameter]) -> Iterator[Step]:
    yield torch.optim.AdamW(parameters, fused=True, **SETTINGS).step


@contextlib.contextmanager
def _for_loop(parameters: Sequence[nn.Parameter]) -> Iterator[Step]:
    yield torch.optim.AdamW(parameters, foreach=False, fused=False, **SETTINGS).step


@contextlib.contextmanager
def _deepspeed(parameters: Sequence[nn.Parameter]) -> Iterator[Step]:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    yield DeepSpeedCPUAdam(list(parameters), adamw_mode=True, **SETTINGS).step


WAYS = {
    "fused": _fused,
    "parallax": _parallax,
    "fused alone": _fused_alone,
    "for-loop": _for_loop,
    "DeepSpeed": _deepspeed,
}


def run(sizes: Sizes, threads: int) -> dict[str, Any]:
    """Measure every variant, and return the numbers as plain data."""
    torch.set_num_threads(threads)
    config = GPTConfig(
        layers=sizes.layers,
        hidden=sizes.hidden,
        heads=sizes.heads,
        vocabulary=sizes.vocabulary,
        sequence=sizes.sequence,
    )
    torch.manual_seed(0)
    parameters = list(config.build().parameters())
    count = sum(parameter.numel() for parameter in parameters)
    seconds, reasons = _measure(parameters, sizes.repetitions)
    rows = [
        {
            "name": name,
            "seconds_per_1e9": min(taken) / count * 1e9,
            "over_fused": ratios(taken, seconds["fused"]),
            "over_fused_alone": ratios(taken, seconds["fused alone"]),
            "seconds": taken,
        }
        for name, taken in seconds.items()
    ]
    return {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "threads": threads,
        "sizes": asdict(sizes),
        "parameters": count,
        "tensors": len(parameters),
        "goal": GOAL,
        "ratio": next(row["over_fused"]["median"] for row in rows if row["name"] == "parallax"),
        "rows": rows,
        "did_not_run": reasons,
    }


def _measure(
    parameters: Sequence[nn.Parameter], repetitions: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    gradients = [torch.randn_like(parameter) * 1e-3 for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    steps: dict[str, Step] = {}
    reasons: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for name, way in WAYS.items():
            try:
                step = stack.enter_context(way(parameters))
                _time(step, parameters, gradients)  # the first step makes the states
                _time(step, parameters, gradients)
            except (
                Exception
            ) as error:  # an optional peer: not there, or it cannot build its kernels here
                if name != "DeepSpeed":
                    raise
                reasons[name] = reason(error)
            else:
                steps[name] = step
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(repetitions):
            for name in rotated(list(steps), turn):
                seconds[name].append(_time(steps[name], parameters, gradients))
    return seconds, reasons


def _time(step: Step, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> float:
    for parameter, gradient in zip(parameters, gradients):
        assert parameter.grad is not None
        parameter.grad.copy_(gradient)
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def table(found: dict[str, Any]) -> Table:
    """Return the numbers as a table."""
    shape = f"{found['parameters'] / 1e6:.0f} M parameters in {found['tensors']} tensors, {found['threads']} threads"
    result = Table(title=f"one AdamW step on the host, {shape}")
    for name in ("way", "s per 1e9", "over fused", "fastest", "over fused alone"):
        result.add_column(name, no_wrap=True, justify="left" if name == "way" else "right")
    for row in found["rows"]:
        over, alone = row["over_fused"], row["over_fused_alone"]
        result.add_row(
            row["name"],
            f"{row['seconds_per_1e9']:.2f}",
            show(over),
            f"{over['fastest']:.3f}",
            show(alone),
        )
    notes = [f"{name} did not run: {why}" for name, why in found["did_not_run"].items()]
    result.caption = "\n".join(
        [f"parallax over fused: {found['ratio']:.3f}, goal {found['goal']}", *notes]
    )
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host_adam",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    cores = os.cpu_count() or 1
    parser.add_argument("--threads", type=int, default=cores, help=f"default {cores}: all cores")
    for name, value in asdict(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    given = vars(parser.parse_args(arguments))
    as_json, threads = given.pop("json"), given.pop("threads")
    if min(threads, *given.values()) < 1:
        parser.error("threads, repetitions and sizes start at 1")
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console = Console(stderr=as_json, width=100)
    with console.status("measuring"):
        found = run(Sizes(**given), threads)
    console.print(table(found))
    if as_json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
