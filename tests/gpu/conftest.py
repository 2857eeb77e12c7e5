from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.leaks import lasting


@pytest.fixture(scope="session", autouse=True)
def begun(own_temporary_folder: Path) -> None:
    """What the first use of a device leaves in a process, such as files of its driver and a variable that torch sets,
    belongs to the session and not to the test that happens to be the first."""
    if torch.cuda.is_available():
        with lasting():
            ones = torch.ones(64, 64, device="cuda", requires_grad=True)
            (ones @ ones).sum().backward()
            torch.ones(1).pin_memory().to("cuda", non_blocking=True)
            torch.cuda.synchronize()
