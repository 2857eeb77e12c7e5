"""The settings of a server, and the comparison of batches at its start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parallax.errors import ConfigError
from parallax.serve.config import ServeConfig
from parallax.serve.invariance import batch_difference, difference_text
from parallax.serve.model import BatchOutputs, ServedModel, TensorSpec


class Scaled(ServedModel):
    """A model whose outputs depend on the number of rows, or on the other rows."""

    name, version = "scaled", "1"
    inputs = (TensorSpec("x", torch.float32, (-1, 4)), TensorSpec("k", torch.int64, (-1, -1)))
    outputs = (TensorSpec("y", torch.float32, (-1, 4)),)

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def run(self, tensors: Sequence[Tensor]) -> BatchOutputs:
        x, _ = tensors
        factor = {"none": 1.0, "rows": 1 + len(x) * 2**-20, "others": x.mean()}[self.kind]
        return BatchOutputs([x * factor], "1")


@pytest.mark.parametrize(
    ("kind", "invariant", "differs"),
    [
        ("none", False, False),
        ("rows", False, True),
        ("rows", True, False),
        ("others", False, True),
        ("others", True, True),
    ],
)
def test_a_dependence_on_the_batch_is_found(kind: str, invariant: bool, differs: bool) -> None:
    config = ServeConfig(batch_invariant=invariant)
    found = batch_difference(Scaled(kind), config)
    assert (found is not None) == differs
    if found is not None:
        assert found.amount > 0
        text = difference_text(found, config)
        assert "output y" in text
        wanted = "serve.max_batch_rows=1" if invariant else "serve.batch_invariant=true pads"
        assert wanted in text


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"port": 65536}, "serve.port=65536"),
        ({"port": -1}, "serve.port=-1"),
        ({"host": ""}, "serve.host"),
        ({"max_batch_rows": 0}, "serve.max_batch_rows=0"),
        ({"max_wait": -1.0}, "serve.max_wait=-1"),
        ({"max_wait": float("inf")}, "serve.max_wait=inf"),
        ({"max_wait": "soon"}, "serve.max_wait=soon: accepted are seconds such as 0.05 or 50ms"),
        ({"requests_per_second": -1.0}, "serve.requests_per_second=-1"),
        ({"requests_per_second": float("inf")}, "serve.requests_per_second=inf"),
        ({"requests_per_second": 9.0, "p99": "fast"}, "serve.p99=fast"),
        ({"p99": "50ms"}, "add serve.requests_per_second=N"),
        ({"timeout": 0.0}, "serve.timeout=0"),
        ({"timeout": float("nan")}, "serve.timeout=nan"),
        ({"queue_rows": 31}, "accepted are 32"),
        ({"max_body_bytes": "many"}, "serve.max_body_bytes=many"),
    ],
    ids=str,
)
def test_wrong_settings(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ServeConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wait", "seconds"), [(0.005, 0.005), ("5ms", 0.005), ("auto", 0.0), ("1s", 1.0), (0, 0.0)]
)
def test_waits(wait: float | str, seconds: float) -> None:
    config = ServeConfig(max_wait=wait, requests_per_second=20.0, p99="50ms")
    assert (config.wait_seconds, config.waits_auto) == (seconds, wait == "auto")
    assert config.p99_seconds == 0.05


@pytest.mark.parametrize(
    "content", [b"", b"short", b"two words of text", b"x" * 5000, b"\xff" * 20]
)
def test_a_token_file_that_holds_no_token(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="16 to 4096 printable"):
        ServeConfig(token_file=str(file)).token()


def test_a_token_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name a readable file"):
        ServeConfig(token_file=str(tmp_path / "none")).token()
