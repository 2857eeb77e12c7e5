"""Composing leaves nothing behind, in its own process and in another program of Hydra's."""

import logging
import os
from pathlib import Path

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.version import getbase

from parallax.config import compose
from tests.configs.refused import error_of


def composed_and_refused() -> None:
    compose(["model=mlp"])
    error_of("trainer.steps=${nope}")
    error_of("optimizer.betas.5=1")


def test_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    handlers, level, environment = logging.root.handlers[:], logging.root.level, dict(os.environ)
    composed_and_refused()
    assert not GlobalHydra.instance().is_initialized()
    assert not HydraConfig.initialized()
    assert "parallax" not in ConfigStore.instance().repo
    assert (logging.root.handlers, logging.root.level) == (handlers, level)
    assert dict(os.environ) == environment
    assert list(tmp_path.iterdir()) == []


def test_inside_another_hydra_program(tmp_path: Path) -> None:
    (tmp_path / "outer.yaml").write_text("x: 3\n")
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.2"):
        base, instance = getbase(), GlobalHydra.instance()
        composed_and_refused()
        assert getbase() == base
        assert GlobalHydra.instance() is instance
        assert hydra.compose("outer").x == 3
