"""A kind of model or of rows is one module and one option file; nothing else names it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallax.common import registered
from parallax.common.registered import Registered
from parallax.config import RunConfig, compose, dump, load, options
from parallax.config.options import searchpath
from parallax.errors import ConfigError
from parallax.model import factory
from parallax.model.source import ModelConfig
from parallax.run.job import build_chain, first_batch, open_source, tokens_per_row
from parallax.train import data
from parallax.train.data.source import DataConfig

MODEL = '''
from dataclasses import dataclass
from torch import nn
from parallax.model.source import ModelConfig

@dataclass(frozen=True, kw_only=True)
class LineConfig(ModelConfig):
    """Linear layers. ``width``: of each."""
    name: str = "line"
    width: int = 4
    verify: bool | str = "auto"
    def build(self):
        return nn.Sequential(*(nn.Linear(self.width, self.width) for _ in range(3)))
'''
ROWS = '''
from dataclasses import dataclass
import torch
from parallax.runtime.batch import TensorRows
from parallax.train.data.source import DataConfig

class Noise:
    def batch(self, rows): return self.validation(0, rows)
    def validation(self, index, rows): return TensorRows(torch.randn(rows, 4), torch.zeros(rows, dtype=torch.long))
    def state_dict(self): return {}
    def load_state_dict(self, state): pass

@dataclass(frozen=True, kw_only=True)
class NoiseConfig(DataConfig):
    """Random rows."""
    name: str = "noise"
    def open(self, model, seed, *, quiet=True): return Noise()
'''


@pytest.fixture
def two_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for package, name, text, group in (
        (factory, "line", MODEL, "model"),
        (data, "noise", ROWS, "data"),
    ):
        folder = tmp_path / package.__name__
        folder.mkdir()
        (folder / f"{name}.py").write_text(text)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
        (tmp_path / "options" / group).mkdir(parents=True)
        option = f"defaults: [/parallax/{group}/{name}@_here_]\n"
        (tmp_path / "options" / group / f"{name}.yaml").write_text(option)
    registered._kinds.cache_clear()
    yield searchpath(tmp_path / "options")
    registered._kinds.cache_clear()
    for name in ("parallax.model.factory.line", "parallax.train.data.noise"):
        sys.modules.pop(name, None)


def test_a_kind_is_a_module_and_an_option(two_kinds: str) -> None:
    overrides = [two_kinds, "model=line", "data=noise", "trainer.steps=1", "trainer.global_batch=4"]
    config = compose(overrides)
    assert load(dump(config)) == config
    assert [len(build_chain(config).blocks), tokens_per_row(config)] == [3, 1]
    batch = first_batch(config, open_source(config))
    assert batch.inputs(0, 2)[0].shape == (2, 4)
    with pytest.raises(ConfigError, match=r"model\.width=x"):
        compose([*overrides, "model.width=x"])


@pytest.mark.parametrize("base", [ModelConfig, DataConfig])
def test_every_kind_has_an_option_of_its_name(base: type[Registered]) -> None:
    group = {ModelConfig: "model", DataConfig: "data"}[base]
    names = [kind.name for kind in base.kinds()]
    assert names[-1] == "custom"
    assert set(names) <= set(options.OptionFolders.of([])[0].groups[group])
    assert type(getattr(compose([]), group)) in base.kinds()
    assert group in RunConfig.__annotations__
