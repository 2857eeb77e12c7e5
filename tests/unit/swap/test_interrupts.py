"""An interrupt from the keyboard reaches the loop wherever it arrives, and what was begun is taken down."""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import gc
import linecache
import os
import random
import signal
import sys
import threading
import time
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import parallax
from parallax.errors import ParallaxError
from parallax.model.describe import describe
from parallax.model.factory.gpt import GPT, GPTConfig
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.swap.config import SwapConfig
from tests.alone import alone
from tests.plans import make_plan

TIMES = 25


def interrupted(folder: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(30)])
    limit = 2 * sum(p.nbytes for p in model.parameters()) + 100_000
    rng, lost = random.Random(0), []

    def unraisable(problem: Any) -> None:
        if problem.exc_type is KeyboardInterrupt:
            lost.append(problem)

    sys.unraisablehook = unraisable
    for _ in range(TIMES):
        main = threading.main_thread().ident
        assert main is not None
        timer = threading.Timer(rng.uniform(0.02, 0.08), lambda: os.kill(os.getpid(), 2))
        begun = time.monotonic()
        try:
            with parallax.swap(model, limit, minimum_bytes=0, directory=folder):
                timer.start()
                while time.monotonic() < begun + 100 and not lost:
                    model(torch.randn(64, 32))  # and lets go of the whole graph
        except KeyboardInterrupt:
            pass
        except ParallaxError as error:
            raise AssertionError("another error than the interrupt") from error
        assert not lost, lost
        assert time.monotonic() < begun + 100
    left = [
        thread.name for thread in threading.enumerate() if thread.name.startswith("parallax-swap")
    ]
    assert not left, left


def test_an_interrupt_is_never_lost(scratch: Path) -> None:
    """It was, whenever it arrived while a saved tensor was let go of."""
    alone(interrupted, scratch)


# ---- an optimizer whose states are offloaded, stepped in pieces


WIDE = 64


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDE, WIDE, bias=False) for _ in range(4)])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def gradients(model: nn.Module) -> None:
    x = torch.randn(8, WIDE, generator=torch.Generator().manual_seed(1))
    model(x).square().mean().backward()


def states(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [copy.deepcopy(dict(optimizer.state[p])) for p in optimizer.param_groups[0]["params"]]


class Keyboard:
    """Presses Ctrl-C before line number ``at`` of the package runs, on this thread. Not before the line of a ``with``,
    which also runs when its block ends, where Python itself heeds no signal."""

    def __init__(self, at: int) -> None:
        self.at, self.lines = at, list[str]()

    def __enter__(self) -> None:
        sys.settrace(self)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def __call__(self, frame: FrameType, event: str, _: object) -> Keyboard | None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        if event == "call":
            return self if "/parallax/" in file else None
        if event == "line" and not linecache.getline(file, line).strip().startswith("with "):
            self.lines.append(f"{Path(file).name}:{line}")
            if len(self.lines) == self.at:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self


def step_interrupted(at: int, where: str, folder: Path) -> Keyboard:
    """Steps under a limit, with Ctrl-C in the third step or while the scope is left; checks what is there then."""
    plain, same = build()
    expected = []
    for _ in range(3):
        gradients(plain)
        same.step()
        same.zero_grad()
        expected.append(states(same))
    model, optimizer = build()
    size = 4 * WIDE * WIDE
    keyboard, interrupted = Keyboard(at), False
    limit = 2 * 4 * size + 3 * 2 * size + 4096
    scope = parallax.swap(
        model, limit, optimizer=optimizer, minimum_bytes=1, piece_bytes=1, directory=folder
    )
    try:
        with scope:
            for number in range(3):
                gradients(model)
                assert number == 0 or scope.states[0].offloaded_bytes > 0
                with keyboard if (number, where) == (2, "step") else contextlib.nullcontext():
                    optimizer.step()
                optimizer.zero_grad()
            if where == "exit":
                keyboard.__enter__()
        keyboard.__exit__()
    except KeyboardInterrupt:
        interrupted = True
    hit = f"line {at}, {keyboard.lines[-1]}"
    assert interrupted == (len(keyboard.lines) >= at), hit
    assert not scope.open, hit
    assert not [*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks], hit
    for parameter, before, after in zip(model.parameters(), *expected[1:]):
        found = optimizer.state[parameter]
        assert type(found) is dict, hit
        assert found.keys() == before.keys(), hit
        for key, value in found.items():
            assert torch.equal(value, before[key]) or torch.equal(value, after[key]), (hit, key)
    del scope
    deadline = time.monotonic() + 10
    while any(t.name.startswith("parallax-swap") for t in threading.enumerate()):
        gc.collect()
        assert time.monotonic() < deadline, (hit, "threads are left")
    return keyboard


def steps_interrupted(where: str, thorough: bool, folder: Path) -> None:
    """Each time that a line runs; or some lines, and all that move states, once. But for the first of an exit: before
    that no Python can help."""
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(500, exit=True)
    lines = step_interrupted(10**9, where, folder).lines
    first = sorted({line: at for at, line in reversed([*enumerate(lines, 1)])}.values())
    some = {*first[::64], *(at for at in first if lines[at - 1].startswith("offloaded_states.py"))}
    for at in range(1, len(lines) + 1) if thorough else sorted(some):
        if (at, where) != (1, "exit"):
            step_interrupted(at, where, folder)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["step", "exit"])
@pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_an_interrupt_tears_no_state(where: str, thorough: bool, scratch: Path) -> None:
    """Those that were being read held whatever was in the memory, others could not be read at all; a checkpoint that
    is saved because of the interrupt would have had them."""
    alone(steps_interrupted, where, thorough, scratch, seconds=560)


# ---- the engine's step, with activations and optimizer states offloaded


def engine_interrupted(at: int, plan: dict[str, Any], folder: Path) -> Keyboard:
    """Ctrl-C in the second step, beside which the first one is applied; then the engine is closed."""
    config = GPTConfig(layers=2, hidden=32, heads=2, sequence=16, vocabulary=16)
    chain = describe(config.build)
    tokens = torch.randint(0, 16, (8, 17), generator=torch.Generator().manual_seed(1))
    batch = TensorRows(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    threads = {*threading.enumerate()}
    swap = SwapConfig(minimum_bytes=1)
    engine = Engine.build(chain, make_plan(chain, **plan), loss=GPT.loss, scratch=folder, swap=swap)
    keyboard, interrupted = Keyboard(at), False
    try:
        first = engine.step(batch)
        assert first.swap.bytes_out > 0
        with keyboard:
            engine.step(batch)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        engine.close()
    hit = f"line {at}, {keyboard.lines[-1]}"
    assert interrupted == (len(keyboard.lines) >= at), hit
    kept = weakref.ref(engine)
    del engine
    gc.collect()
    assert kept() is None, hit
    assert {*threading.enumerate()} <= threads, hit
    return keyboard


PLANS: dict[str, dict[str, Any]] = {
    "activations": {"directive": "offload", "swap_limit": 2**16},
    "optimizer": {"directive": "offload", "optimizer_offload": 1.0},
}


def engines_interrupted(name: str, some: int, folder: Path) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(500, exit=True)
    lines = engine_interrupted(10**9, PLANS[name], folder).lines
    first = sorted({line: at for at, line in reversed([*enumerate(lines, 1)])}.values())
    for at in first[:: -(-len(first) // some)]:
        engine_interrupted(at, PLANS[name], folder)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("some", [3, pytest.param(60, marks=pytest.mark.thorough)])
def test_an_interrupted_step_of_the_engine_ends(name: str, some: int, scratch: Path) -> None:
    alone(engines_interrupted, name, some, scratch, seconds=560)
