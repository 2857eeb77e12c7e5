"""Optimizers that do not load torch's compiler step as torch's own do, to the last bit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from parallax.runtime.optim.algorithms import SGD, AdamW

KINDS: list[tuple[Any, Any, dict[str, Any]]] = [
    (AdamW, torch.optim.AdamW, {"fused": True}),
    (AdamW, torch.optim.AdamW, {"foreach": False, "weight_decay": 0.3}),
    (SGD, torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    (SGD, torch.optim.SGD, {}),
]


def trained(kind: Any, options: dict[str, Any]) -> tuple[nn.Module, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = kind([{"params": list(model.parameters()), "lr": 0.05}], lr=0.1, **options)
    for _ in range(3):
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return model, optimizer


@pytest.mark.parametrize(("kind", "theirs", "options"), KINDS)
def test_they_step_alike(kind: Any, theirs: Any, options: dict[str, Any]) -> None:
    (model, optimizer), (plain, other) = trained(kind, options), trained(theirs, options)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert optimizer.state_dict().keys() == other.state_dict().keys()
    for ours, wanted in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert ours.keys() == wanted.keys()
        assert all(torch.equal(ours[key], wanted[key]) for key in ours if wanted[key] is not None)
    assert all(not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize(("kind", "theirs", "options"), KINDS)
def test_hooks_and_closures_are_heeded_once(
    kind: Any, theirs: Any, options: dict[str, Any]
) -> None:
    """However many of torch's own there were before, whose class then has hooks, too."""
    calls = Counter[str]()
    trained(theirs, options)
    model, optimizer = trained(kind, options)
    optimizer.register_step_pre_hook(lambda *_: calls.update(["before"]))
    optimizer.register_step_post_hook(lambda *_: calls.update(["after"]))

    def loss() -> torch.Tensor:
        calls.update(["loss"])
        found: torch.Tensor = model(torch.ones(3, 4)).square().mean()
        found.backward()
        return found

    assert optimizer.step(loss) > 0
    assert calls == {"before": 1, "loss": 1, "after": 1}
