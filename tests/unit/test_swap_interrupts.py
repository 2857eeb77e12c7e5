"""An interrupt from the keyboard reaches the loop wherever it arrives, and what was begun is taken down."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import parallax
from parallax.errors import ParallaxError

TIMES = 25


def interrupted(folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
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
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("parallax-swap")]
    assert not left, left
    print("done")


def test_an_interrupt_is_never_lost(scratch: Path) -> None:
    """It was, whenever it arrived while a saved tensor was let go of."""
    code = f"from tests.unit.test_swap_interrupts import *; interrupted(Path({str(scratch)!r}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=160, check=False)
    assert found.stdout == "done\n", (found.returncode, found.stderr[-3000:])
