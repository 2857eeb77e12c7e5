"""timm without torchvision, or with one of does not match torch: one line that says what to install."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from parallax.errors import ConfigError
from parallax.model.factory.timm import _timm
from tests.distributed.pool import ROOT


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        ("ImportError('No module named torchvision')", r"pip install 'parallax-train\[timm\]'"),
        (
            "RuntimeError('operator torchvision::nms does not exist')",
            r"does not match torch .*--no-deps torchvision --index-url https://\S+$",
        ),
    ],
)
def test_a_timm_that_cannot_be_imported_says_what_to_install(
    raised: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "timm.py").write_text(f"raise {raised}\n")
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=message) as found:
        _timm()
    assert str(found.value).isprintable()


def test_constraints_name_the_torchvision_of_their_torch() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    minor = int(pins["torch"].split(".")[1])
    assert pins["torchvision"].startswith(f"0.{minor + 15}.")
