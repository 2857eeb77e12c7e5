"""Functions that the user names: what is wrong with a name, or with arguments, is one line that says what is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from parallax import cli
from parallax.common.targets import call_target, check_call, load_target
from parallax.config import compose
from parallax.errors import ConfigError
from parallax.run.job import build_loss, first_batch, open_source

OWN = """
from dataclasses import dataclass
import torch
from torch import nn
from parallax import TensorRows

@dataclass
class Sizes:
    width: int = 4

class Net(nn.Sequential):
    def __init__(self, width, *, layers=2):
        super().__init__(*(nn.Linear(width, width) for _ in range(layers)))

class WithLoss(Net):
    def loss(self, outputs):
        return outputs.mean()

class JudgedByModule(Net):
    def __init__(self, width=4):
        super().__init__(width)
        self.loss = nn.Softmax(0)

class Counted(Net):
    def loss(self, outputs, targets):
        return outputs.sum()
    loss.count = lambda: 3

class Rows:
    def __init__(self, wide=4):
        self.wide = wide
    def batch(self, rows):
        return TensorRows(torch.zeros(rows, self.wide), torch.zeros(rows))
    def validation(self, index, rows):
        return self.batch(rows)
    def state_dict(self):
        return {}
    def load_state_dict(self, state):
        pass

class Pairs(Rows):
    def batch(self, rows):
        return torch.zeros(rows, 4), torch.zeros(rows)

class Forgetful(Rows):
    def validation(self, rows):
        return self.batch(rows)

def passing(**kwargs):
    return Net(**kwargs)

def further(**kwargs):
    return nn.Linear(4, 4, **kwargs)

def through_sizes(**kwargs):
    return Net(Sizes(**kwargs).width)

def decorated(*args, **options):
    return passing(*args, **options)

def into_one(**kwargs):
    return with_bias(**kwargs)

def with_bias(biased):
    return nn.Linear(4, 4, biased=biased)

def mistaken(biased):
    return with_bias(biased)

def mistaken_later(**kwargs):
    return without(kwargs["width"])

def without(wide):
    return nn.Linear(4, 4, width=wide)

def only(width, /):
    return Net(width)

def fails(width):
    return len(width)

def short(pipeline_ranks, pipeline_rank):
    return []
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_targets.py").write_text(OWN)
    (tmp_path / "broken_target.py").write_text("def build(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)


def refused(target: str, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call_target("model", target, kwargs)
    return str(caught.value)


def test_a_keyword_that_is_not_taken() -> None:
    assert refused("own_targets:Net", widht=3) == (
        "model.kwargs.widht: own_targets:Net takes no such argument; accepted are width, layers (did you mean 'width'?)"
    )
    assert (
        "model.kwargs: own_targets:Net(width, *, layers=2): missing a required argument: 'width'; add"
        in refused("own_targets:Net", layers=3)
    )
    assert "own_targets:only(width, /): missing a required argument: 'width'" in refused(
        "own_targets:only"
    )
    assert isinstance(
        call_target("model", "own_targets:Net", {"width": 3, "layers": 3}), nn.Sequential
    )


def test_a_keyword_that_is_handed_on() -> None:
    line = refused("own_targets:passing", width=3, leyers=2)
    assert line.startswith("model.kwargs.leyers: own_targets:passing passes it to Net.__init__ (")
    assert line.endswith(
        "which takes no such argument; accepted are width, layers (did you mean 'layers'?)"
    )
    assert "(did you mean 'width'?)" in refused("own_targets:through_sizes", wodth=3)
    assert "passes it to Linear.__init__" in refused("own_targets:further", biass=False)


def test_a_keyword_that_is_handed_on_and_on() -> None:
    assert "passes it to Net.__init__" in refused("own_targets:decorated", width=3, leyers=2)
    assert "passes it to Linear.__init__" in refused("own_targets:into_one", biased=False)


def test_a_wrong_keyword_inside_a_library_is_its_own_error() -> None:
    for target, kwargs in (("mistaken", {"biased": True}), ("mistaken_later", {"width": 3})):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            call_target("model", f"own_targets:{target}", kwargs)


def test_what_the_function_itself_raises_is_its_own() -> None:
    with pytest.raises(TypeError, match="has no len"):
        call_target("model", "own_targets:fails", {"width": 3})


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("", "accepted is package.module:factory"),
        ("own_targets", "accepted is package.module:factory"),
        (".own_targets:Net", "accepted is package.module:factory"),
        ("own..targets:Net", "accepted is package.module:factory"),
        ("own targets:Net", "cannot import own targets"),
        ("./own_targets.py:Net", "accepted is package.module:factory"),
        ("own_targets:Nets", "has no Nets (did you mean 'Net'?)"),
        ("own_targets:__name__", "is not callable"),
        ("nowhere_at_all:build", "cannot import nowhere_at_all"),
        ("broken_target:build", "broken_target.py, line 1: invalid syntax"),
    ],
)
def test_a_name_that_means_nothing(target: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_target("model.target", target)
    assert expected in str(caught.value)


@pytest.mark.parametrize("module", ["train-gpt", "01_model", "own-package.02"])
def test_a_file_whose_name_is_no_identifier(tmp_path: Path, module: str) -> None:
    path = tmp_path / f"{module.replace('.', '/')}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(OWN)
    assert load_target("model.target", f"{module}:Net").__name__ == "Net"


def test_calls_that_cannot_be_made() -> None:
    check_call("f", lambda a, b=1: None, "a")
    check_call("f", print, "a", "b")
    with pytest.raises(
        ConfigError, match=r"^f\(a\): it is called with \(x, y\); too many positional arguments$"
    ):
        check_call("f", lambda a: None, "x", "y")


def custom(*typed: str) -> list[str]:
    return [
        "model=custom",
        "+model.kwargs={width:4}",
        "data=custom",
        "trainer.global_batch=4",
        *typed,
    ]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (
            ["model.target=own_targets:WithLoss", "data.target=own_targets:Rows"],
            "the loss of WithLoss: loss(outputs): ",
        ),
        (
            ["model.target=own_targets:JudgedByModule", "data.target=own_targets:Rows"],
            "loss(input: ",
        ),
        (
            ["model.target=own_targets:Counted", "data.target=own_targets:Rows"],
            "the loss of Counted: count(): ",
        ),
        (
            ["model.target=own_targets:Net", "data.target=own_targets:Rows", "+data.kwargs.wode=3"],
            "data.kwargs.wode: ",
        ),
        (
            ["model.target=own_targets:Net", "data.target=own_targets:Pairs"],
            "gave a tuple without inputs, targets",
        ),
        (
            ["model.target=own_targets:Net", "data.target=own_targets:Forgetful"],
            "with validation(rows): it is called",
        ),
        (
            ["plan.schedule=own_targets:short"],
            "own_targets:short(pipeline_ranks, pipeline_rank): it is called with (pipeline_ranks, ",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_command_says_so_in_one_line(
    capfd: pytest.CaptureFixture[str], typed: list[str], expected: str
) -> None:
    assert cli.main(["plan", *custom(*typed)]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("parallax: ")
    assert expected in line
    assert list(Path.cwd().glob("*.yaml")) == []


def test_what_is_right_is_taken() -> None:
    config = compose(
        custom(
            "model.target=own_targets:Net", "data.target=own_targets:Rows", "+data.kwargs.wide=8"
        )
    )
    assert len(first_batch(config, open_source(config))) == 4
    build_loss(config)
