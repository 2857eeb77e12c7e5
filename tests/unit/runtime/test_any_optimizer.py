"""Optimizer classes of torch and of another library, wherever their states are, against their own loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from parallax.common.targets import load_target
from parallax.errors import ConfigError
from parallax.runtime.optim.builder import OptimizerBuilder
from parallax.runtime.optim.kinds.custom import CustomOptimizerConfig
from tests.unit.runtime.test_optimizer_kinds import BY_ELEMENTS
from tests.unit.runtime.test_stage_optimizer import PLACES, Opener, backward, make_net, opener

__all__ = ["opener"]  # a fixture

STEPS = 4
LIBRARY = "pytorch_optimizer"
OF_TORCH = [f"torch.optim:{name}" for name in (*BY_ELEMENTS, "Adafactor")]
OF_LIBRARY = [
    f"{LIBRARY}:{name}"
    for name in [
        "AdaBelief",
        "Adan",
        "AdEMAMix",
        "CAME",
        "Lamb",
        "LARS",
        "Lion",
        "NovoGrad",
        "StableAdamW",
        "Tiger",
        "Yogi",
    ]
]
REFUSED = {
    f"{LIBRARY}:Prodigy": "does not step each parameter by itself",
    f"{LIBRARY}:SOAP": "keeps something outside of the states of its parameters",
    f"{LIBRARY}:ScheduleFreeAdamW": "trains with other weights than those of its eval",
}


@pytest.fixture(autouse=True)
def _library(request: pytest.FixtureRequest) -> None:
    if LIBRARY in request.node.name:
        pytest.importorskip(LIBRARY, reason="pytorch_optimizer is not installed (make installs it)")


def trained_by_itself(target: str) -> list[torch.Tensor]:
    net = make_net()
    optimizer: Any = load_target("optimizer.target", target)(net.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(net, step)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 / (1 + step))
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


@pytest.mark.parametrize("target", [*OF_TORCH, *OF_LIBRARY])
def test_each_place_of_states_gives_the_same_weights(opener: Opener, target: str) -> None:
    expected = trained_by_itself(target)
    for place in PLACES:
        net: nn.Module = make_net()
        config = CustomOptimizerConfig(target=target, lr=1e-2, clip_norm=0.0)
        optimizer = opener(net, config, place)
        for step in range(STEPS):
            optimizer.ready(net.parameters())
            optimizer.zero_grad()
            for parameter in reversed(backward(net, step)):
                optimizer.reduced(parameter)
            optimizer.step(torch.tensor(1.0), 1 / (1 + step))
        optimizer.finish()
        for found, value in zip(net.parameters(), expected, strict=True):
            assert torch.equal(found, value), place


@pytest.mark.parametrize("target", REFUSED)
def test_the_others_are_refused_with_the_reason(target: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[target]):
        _ = OptimizerBuilder.of(CustomOptimizerConfig(target=target), make_net()).nature
