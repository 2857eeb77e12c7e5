"""A run that begins with weights of files which no model can have: one line, exit code 2, before its first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.faults.commands import declare, one_line, prepared, running, temporary

Called = Callable[..., tuple[int, str, str]]
MODULE = """
import torch
from torch import nn
from parallax import TensorRows

class Source:
    def batch(self, rows): return TensorRows(torch.ones(rows, 4), torch.zeros(rows, dtype=torch.int64))
    def validation(self, index, rows): return self.batch(rows)
    def state_dict(self): return {}
    def load_state_dict(self, state): pass

def build():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    model[1].register_buffer("limit", torch.zeros(3))
    return model

def broken():
    model = build()
    with torch.no_grad():
        model[2].bias.fill_(float("nan"))
    return model
"""
OWN = [
    *("model=custom", "model.target=begins:build", "data=custom", "data.target=begins:Source"),
    *("trainer.global_batch=4", "trainer.steps=2", "schedule.warmup=1"),
    *("logger=none", "trainer.eval_every=0", "model.verify=false"),
]


def sample() -> dict[str, Tensor]:
    """Weights of that model."""
    torch.manual_seed(1)
    return {
        "0.weight": torch.randn(8, 4),
        "0.bias": torch.zeros(8),
        "1.weight": torch.ones(8),
        "1.bias": torch.zeros(8),
        "1.running_mean": torch.zeros(8),
        "1.running_var": torch.ones(8),
        "1.num_batches_tracked": torch.tensor(3),
        "1.limit": torch.full((3,), -torch.inf),
        "2.weight": torch.randn(8, 8),
        "2.bias": torch.zeros(8),
    }


@pytest.fixture
def begun(here: Path, called: Called) -> Callable[..., str]:
    """Return the error of a run that starts from such weights."""
    (here / "begins.py").write_text(MODULE)

    def run(held: dict[str, Tensor], kind: str = "") -> str:
        save_file(held, "w.safetensors")
        if kind:
            declare(Path("w.safetensors"), "2.bias", kind)
        code, _, err = called("train", *OWN, "model.weights=w.safetensors", "name=other")
        assert code == 2
        assert not Path("runs/other/checkpoints").exists()
        return one_line(err)

    return run


OTHER = {
    "int8": torch.int8,
    "bool": torch.bool,
    "uint16": torch.uint16,
    "complex64": torch.complex64,
}


@pytest.mark.parametrize("dtype", OTHER)
def test_numbers_of_another_kind(begun: Callable[..., str], dtype: str) -> None:
    line = begun({**sample(), "2.bias": torch.zeros(8, dtype=OTHER[dtype])})
    assert f"2.bias is in torch.{dtype}, but in the model it is in torch.float32: accepted" in line


def test_a_number_format_that_is_not_read(begun: Callable[..., str]) -> None:
    line = begun({**sample(), "2.bias": torch.zeros(2).half()}, "F4")
    assert "2.bias is in number format F4, which is not supported: accepted are F64, F32" in line


@pytest.mark.faults
@pytest.mark.parametrize(
    ("name", "value"), [("2.bias", torch.nan), ("2.bias", torch.inf), ("0.weight", -torch.inf)]
)
def test_non_finite_values(begun: Callable[..., str], name: str, value: float) -> None:
    held = sample()
    held[name][3] = value
    count, whole = held[name][3].numel(), held[name].numel()
    line = begun(held)
    assert f"weights w.safetensors: {name} holds {count} number(s) that are NaN or infinite" in line
    assert f"of {whole}, so it cannot be trained" in line


@pytest.mark.faults
def test_numbers_that_are_too_large(begun: Callable[..., str]) -> None:
    line = begun({**sample(), "2.bias": torch.full((8,), 1e300, dtype=torch.float64)})
    assert "2.bias holds numbers that are too large for torch.float32" in line


@pytest.mark.faults
def test_non_finite_values_of_a_constructor(here: Path, called: Called) -> None:
    (here / "begins.py").write_text(MODULE)
    code, _, err = called("train", *OWN, "model.target=begins:broken", "name=other")
    assert code == 2
    assert "parameter 2.bias holds 8 number(s) that are NaN or infinite, of 8" in one_line(err)


@pytest.mark.faults
def test_a_run_that_is_planned(here: Path, called: Called) -> None:
    """Its files were changed meanwhile; and infinities of a buffer, as masks have them, are let be."""
    (here / "begins.py").write_text(MODULE)
    save_file(sample(), "w.safetensors")
    overrides = [*OWN, "model.weights=w.safetensors"]
    assert called("train", "--run-dir", str(prepared(*overrides, name="good")))[0] == 0
    run = prepared(*overrides)
    save_file({**sample(), "2.bias": torch.full((8,), torch.nan)}, "w.safetensors")
    code, _, err = called("train", "--run-dir", str(run))
    assert code == 2
    assert "2.bias holds 8 number(s) that are NaN or infinite, of 8" in one_line(err)
    assert not (run / "checkpoints").exists()
    assert running(here) == []
    assert temporary() == []
