"""The process from which ranks are forked: what it must not do before, and what it hands on."""

from __future__ import annotations

import subprocess
import sys

# Whoever asks for a device, or starts a thread, cannot be forked any more.
WARMS_UP = """
import os, sys
import torch

def refuse(*arguments, **named):
    raise AssertionError("a device was asked for")

for name in ("is_available", "device_count", "_lazy_init", "current_device", "get_device_properties"):
    setattr(torch.cuda, name, refuse)
torch.accelerator.current_accelerator = torch.accelerator.is_available = refuse
from parallax.run.processes.forkserver import warm_up
warm_up(sys.argv[1:])
print(len(os.listdir("/proc/self/task")), [name for name in sys.argv[1:] if name not in sys.modules])
"""


def test_a_server_starts_no_thread_and_asks_for_no_device() -> None:
    command = [sys.executable, "-c", WARMS_UP, "tensorboard.summary", "no_such_library"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.stderr == ""
    assert found.stdout == "1 ['no_such_library']\n"
