"""What an engine holds of its model."""

from __future__ import annotations

from torch import Tensor

from parallax.runtime.engine import Engine


def held(engine: Engine) -> dict[str, Tensor]:
    """Copies of the weights of this rank, and of what is known of them, on the host."""
    found = {f"weight {name}": weight for name, weight in engine.parameters.items()}
    for name, tensor in engine._stage.named_tensors().items():
        states = engine._optimizer.states(tensor)
        found |= {f"{key} {name}": value for key, value in states.items()}
    return {name: value.detach().cpu().clone().contiguous() for name, value in found.items()}
