"""Options in folders of the user's own, beside ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallax.config import compose, dump, load
from parallax.config.options import searchpath
from tests.configs.refused import error_of


@pytest.fixture(params=["mine", "my own, 'best' (1)"])
def own(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path / request.param
    (folder / "model" / "big").mkdir(parents=True)
    (folder / "model" / "wide.yaml").write_text("defaults: [gpt]\nhidden: 640\n")
    (folder / "model" / "big" / "deep.yaml").write_text(
        "# @package model\ndefaults: [/model/gpt@_here_]\nlayers: 99\n"
    )
    (folder / "model" / "mlp.yaml").write_text("layers: 1000\n")
    (folder / "size").mkdir()
    (folder / "size" / "one.yaml").write_text("# @package _global_\ntrainer: {steps: 1}\n")
    (folder / "lost").mkdir()
    (folder / "lost" / "one.yaml").write_text("x: 1\n")
    return folder


def test_options_are_added_to_ours(own: Path) -> None:
    added = searchpath(own)
    assert compose([added, "model=wide"]).model.hidden == 640  # type: ignore[union-attr]
    assert compose([added, "model=big/deep"]).model.layers == 99  # type: ignore[union-attr]
    assert compose([added, "size=one", "model=gpt"]).trainer.steps == 1
    assert compose([added, "model=mlp"]) == compose(["model=mlp"]), "ours come first"
    wide = compose([added, "model=wide"])
    assert load(dump(wide)) == wide
    assert compose([added, "model=wide"], compose(["seed=3"])).seed == 3
    assert compose([added]) == compose([])


def test_a_file_that_changes_is_read_again(own: Path) -> None:
    added = searchpath(own)
    assert compose([added, "size=one"]).trainer.steps == 1
    (own / "size" / "one.yaml").write_text("# @package _global_\ntrainer: {steps: 22}\n")
    assert compose([added, "size=one"]).trainer.steps == 22


def test_mistakes_in_them_are_found(own: Path) -> None:
    added = searchpath(own)
    assert "big/deep" in error_of(added, "model=widd")
    assert error_of(added, "model=widd").endswith("(did you mean 'wide'?)")
    assert error_of(added, "lost=one").startswith("lost={x: 1}: unknown key")
    assert error_of("size=one").startswith("size=one: unknown key")
    (own / "size" / "two.yaml").write_text("# @package _global_\ntrainer: {stepz: 1}\n")
    assert error_of(added, "size=two").endswith("(did you mean 'steps'?)")
