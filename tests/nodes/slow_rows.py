"""Rows that come one batch at a time, slowly: so a run lasts as long as a test needs, whatever the machine."""

from __future__ import annotations

import time
from typing import Any

import torch

from parallax import TensorRows

ROWS, WIDTH = 512, 32


def build(seconds: float = 0.0) -> SlowRows:
    return SlowRows(seconds)


class SlowRows:
    def __init__(self, seconds: float) -> None:
        generator = torch.Generator().manual_seed(1)
        self._tokens = torch.randint(0, 256, (ROWS, WIDTH + 1), generator=generator)
        self._seconds, self._next = seconds, 0

    def batch(self, rows: int) -> TensorRows:
        time.sleep(self._seconds)
        self._next += 1
        return self._rows(self._next - 1, rows)

    def validation(self, index: int, rows: int) -> TensorRows:
        return self._rows(index, rows)

    def _rows(self, index: int, rows: int) -> TensorRows:
        chosen = self._tokens[(torch.arange(rows) + index * rows) % ROWS]
        return TensorRows(chosen[:, :-1], chosen[:, 1:])

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = int(state["next"])
