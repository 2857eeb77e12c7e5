"""Return the output of an inner module in place of the model's own outputs.

A chain that ends at an inner module has no later blocks. A forward hook reads the module's output inside its block.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from parallax.errors import ConfigError, nearest, printable
from parallax.model.block import tensors_in

WAY_OUT = "name another module, as model.named_modules() does"


class LayerOutput(nn.Module):
    """Runs ``module``, and returns the output of its submodule ``inner`` (empty: the output of ``module``).

    ``flat``: return the output as a tuple of tensors, as blocks do. ``layer``: the submodule's name in the model, for
    messages.
    """

    def __init__(self, module: nn.Module, inner: str, layer: str, *, flat: bool) -> None:
        super().__init__()
        self.module, self._inner, self._layer, self._flat = module, inner, layer, flat

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found: list[Any] = []
        part = self.module.get_submodule(self._inner)
        hook = part.register_forward_hook(lambda _, __, output: found.append(output))
        try:
            self.module(*args, **kwargs)
        finally:
            hook.remove()
        check_called(self._layer, len(found))
        return tuple(tensors_in(found[0])) if self._flat else found[0]

    def extra_repr(self) -> str:
        return f"output of {self._inner!r}"


def layer_named(model: nn.Module, layer: str) -> str:
    """Return the name under which ``model.named_modules()`` lists the module ``layer``. A module may have several
    names.

    Raises :class:`ConfigError` if the model has no such module.
    """
    names = dict(model.named_modules(remove_duplicate=False))
    if layer not in names:
        parts, hint = ", ".join(name for name, _ in model.named_children()), nearest(layer, names)
        raise ConfigError(
            f"--layer {printable(layer)}: {type(model).__name__} has no module of that name{hint}; it has {parts}"
        )
    return next(name for name, module in model.named_modules() if module is names[layer])


def check_called(layer: str, count: int) -> None:
    """Raise :class:`ConfigError` unless ``count`` is 1, because the module ``layer`` must have one output.

    ``count``: how often a forward has called the module.
    """
    if count != 1:
        how_often = f"a forward calls it {count} times" if count else "no forward calls it"
        raise ConfigError(f"--layer {printable(layer)}: {how_often}; {WAY_OUT}")
