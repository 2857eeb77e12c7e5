"""A chain that ends at a module: its outputs are those of a forward hook on the model, and it has no later block."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.errors import ConfigError
from parallax.model.block import flatten, transform
from parallax.model.describe import Chain, as_tuple, describe
from parallax.model.materialise import materialise
from tests.zoo import FAMILIES, ZOO

ROWS = 4


class Blocks(nn.Module):
    """Names its blocks. A list of modules, which no forward calls, holds the last of them once more."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.last = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        self.pooled = nn.ModuleList([nn.Flatten(), self.last])

    def blocks(self) -> list[nn.Module]:
        return [self.first, self.attention, self.last]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.attention(self.first(x)))


def own_blocks(rows: int) -> Tensor:
    return torch.randn(rows, 3, 8, generator=torch.Generator().manual_seed(0))


def outputs_of(chain: Chain, inputs: Any) -> Any:
    """The results of all blocks in evaluation."""
    values = chain.arguments(inputs)
    with torch.no_grad():
        for block in materialise(chain, 0, len(chain.blocks), torch.device("cpu")):
            values = as_tuple(block.eval()(*values))
    return chain.results(values)


def hooked(chain: Chain, layer: str, inputs: Any) -> Any:
    """The output of ``layer`` in a forward of the model itself, with the weights of ``chain``."""
    parts = chain.deferred.values().deepcopy_memo(chain.model, chain.dtype, {})
    model = copy.deepcopy(chain.model, parts).eval()
    found: list[Any] = []

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        found.append(transform(output, lambda p: p.clone() if isinstance(p, Tensor) else p))

    model.get_submodule(layer).register_forward_hook(keep)
    with torch.no_grad():
        model(**inputs) if isinstance(inputs, dict) else model(*as_tuple(inputs))
    (output,) = found
    return output


def check(build: Callable[[], nn.Module], sample: Callable[[int], Any], layer: str) -> Chain:
    chain = describe(build, seed=3, sample=sample, layer=layer)
    inputs = sample(ROWS)
    found, wanted = outputs_of(chain, inputs), hooked(chain, layer, inputs)
    rows = [tensor for tensor in flatten(wanted)[0] if len(tensor) == ROWS]
    assert rows
    assert len(flatten(found)[0]) == len(rows)
    assert all(torch.equal(one, other) for one, other in zip(flatten(found)[0], rows))
    return chain


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "layer", "blocks"),
    [
        ("resnet", "relu", 1),  # works in place
        ("resnet", "layer1", 7),  # a sequence of parts
        ("resnet", "layer2.1.conv1", 11),
        ("resnet", "pool", 13),  # without parameters
        ("unet", "middle", 8),  # skips jump over it
        ("towers", "item", 4),
        ("mixture", "layers.1.router", 3),  # inside a part that branches on values
        ("mixture", "layers.2", 4),
    ],
)
def test_outputs_are_those_of_a_hook(name: str, layer: str, blocks: int) -> None:
    entry = ZOO[name]
    chain = check(entry.build, entry.sample, layer)
    assert len(chain.blocks) == blocks < len(chain.whole.blocks)
    held = {id(p) for block in chain.blocks for p in block.module.parameters()}
    assert len(held) < len(list(chain.model.parameters()))


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("bert_classes", "bert.encoder.layer.0"),
        ("bert_classes", "bert"),  # a dataclass of two tensors
        ("llama", "model.layers.1.self_attn"),  # a tuple with None
        ("t5", "encoder.block.0"),  # a tuple with biases that have no rows
        ("vit", "vit.layernorm"),
    ],
)
@pytest.mark.slow
def test_outputs_are_those_of_a_hook_in_transformers(name: str, layer: str) -> None:
    pytest.importorskip("transformers")
    entry = FAMILIES[name]
    chain = check(entry.build, entry.sample, layer)
    assert len(chain.blocks) < len(chain.whole.blocks)


@pytest.mark.parametrize(
    ("layer", "blocks"),
    [("first", 1), ("first.0", 1), ("attention", 2), ("attention.norm1", 2), ("last.0", 3)],
)
def test_blocks_of_ones_own(layer: str, blocks: int) -> None:
    """Torch's own encoder layer runs other code while one of its parts has a hook."""
    assert len(check(Blocks, own_blocks, layer).blocks) == blocks


def test_a_module_with_two_names() -> None:
    assert len(check(Blocks, own_blocks, "pooled.1.0").blocks) == 3


@pytest.mark.parametrize(
    ("name", "layer", "message"),
    [
        ("resnet", "layer3", "no module of that name (did you mean 'layer2'?); it has conv1, bn1"),
        ("resnet", "layer1.0.relu", "a forward calls it 2 times"),
        ("towers", "trunk.1", "a forward calls it 2 times"),
        ("towers", "branches", "no forward calls it"),
        ("blocks", "pooled.0", "it is in no block of Blocks, which are first, attention, last"),
        ("blocks", "pooled", "it is in no block of Blocks"),
    ],
)
def test_others_are_refused(name: str, layer: str, message: str) -> None:
    build, sample = (
        (Blocks, own_blocks) if name == "blocks" else (ZOO[name].build, ZOO[name].sample)
    )
    with pytest.raises(ConfigError) as found:
        describe(build, seed=3, sample=sample, layer=layer)
    assert f"--layer {layer}: " in str(found.value)
    assert message in str(found.value)
    assert "\n" not in str(found.value)


class RowsSecond(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(self.embed(x).transpose(0, 1)).transpose(0, 1))


def test_rows_elsewhere_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"its output has shape \[3, 4, 8\] for 4 rows"):
        describe(RowsSecond, seed=3, sample=own_blocks, layer="mix")
