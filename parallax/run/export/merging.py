"""The weights of a base model with the adapters of a checkpoint merged into them.

The checkpoint holds only the adapters, so the values of the base model are created as at the start of the run: by the
model's constructor, or from its weight files. Each tensor of the base is compared with its checksum in the checkpoint.
Peft merges the adapters module by module, so that only one module is in memory at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from parallax.errors import CheckpointError
from parallax.model.block import in_dtype
from parallax.model.construction.deferred import DeferredModel
from parallax.model.construction.log import like
from parallax.model.factory.adapters import adapted_modules, merged
from parallax.model.pretrained import tied_names
from parallax.runtime.checkpoint import CheckpointReader, mark


class MergedTensors:
    """The tensors of ``base``, a model on the meta device, with a run's adapters merged into them.

    ``adapted``   the same model with adapters
    ``reader``    reads the checkpoint with the adapters' values
    ``identity``  the name of the base in error messages
    ``dtype``     the number format of the run's parameters
    """

    def __init__(
        self,
        base: nn.Module,
        adapted: DeferredModel,
        reader: CheckpointReader,
        identity: str,
        dtype: torch.dtype,
    ) -> None:
        self._base, self._aliases = base, tied_names(base)
        self._reader, self._identity, self._dtype = reader, identity, dtype
        model = adapted.model
        self._values = adapted.values()
        self._saved = reader.model_tensors()
        self._tensors = model.state_dict(keep_vars=True)
        self._names: dict[int, str] = {}
        for name, tensor in self._tensors.items():
            self._names.setdefault(id(tensor), name)
        self._modules = adapted_modules(model)
        self._last: tuple[str, dict[str, Tensor]] = ("", {})

    def held(self) -> dict[str, Tensor]:
        """Return a mapping from name to meta tensor (without values), for the tensors of the base model."""
        again = {name for names in self._aliases.values() for name in names}
        known = self._base.state_dict(keep_vars=True)
        return {
            name: tensor.detach().to(in_dtype(tensor.dtype, self._dtype))
            for name, tensor in known.items()
            if name not in again
        }

    def read(self, name: str) -> Tensor:
        """Return one tensor of the base model with the adapters merged into it. Raises :class:`CheckpointError` if
        tensors that share memory in the base have different values after merging."""
        found = self._read(name)
        for other in self._aliases.get(name, ()):
            if self._inside(other) != self._inside(name) and not torch.equal(
                self._read(other), found
            ):
                raise CheckpointError(
                    f"--merge: {name} and {other} are one tensor of the base, and the adapters change only one of "
                    "them; use --to peft"
                )
        return found

    def _inside(self, name: str) -> str:
        """Return the path of the adapted module that holds the base's tensor ``name``; "" if no adapted module does."""
        parts = name.split(".")
        paths = (".".join(parts[:count]) for count in range(len(parts)))
        return next((path for path in paths if path and path in self._modules), "")

    def _read(self, name: str) -> Tensor:
        path = self._inside(name)
        if not path:
            tensor = self._tensors[name]
            holder = nn.Module()
            holder.register_buffer("tensor", tensor)
            found: Tensor = self._memo(holder, {"tensor": tensor})[id(tensor)]
            return found.detach()
        if self._last[0] != path:
            module = self._modules[path]
            held = {n: t for n, t in self._tensors.items() if n.startswith(f"{path}.")}
            whole = copy.deepcopy(module, self._memo(module, held))
            with torch.no_grad():
                made = merged(whole).state_dict()
            self._last = path, {f"{path}.{inner}": tensor for inner, tensor in made.items()}
        return self._last[1][name]

    def _memo(self, module: nn.Module, held: Mapping[str, Tensor]) -> dict[int, Any]:
        """Return a ``memo`` for deepcopy, by which the copy of ``module`` gets real values. Tensors in ``held`` that
        are in the checkpoint get the checkpoint's values. All other tensors get the values that they had at the start
        of the run."""
        names = {id(tensor): self._names[id(tensor)] for tensor in held.values()}
        filled = {key for key, name in names.items() if name in self._saved}
        made = self._values.deepcopy_memo(module, self._dtype, {}, filled)
        # Copies: a constructor that cannot be recorded gives the tensors of its own model.
        parts: dict[int, Any] = {
            key: like(value, value.detach().clone())
            for key, value in made.items()
            if isinstance(value, Tensor)
        }
        for key, name in names.items():
            if key in filled:
                parts[key] = like(
                    parts[key], self._reader.read(f"model/{name}").to(parts[key].dtype)
                )
            elif name in self._reader.marks:
                marks = {name: mark(parts[key])}
                self._reader.check_base(self._identity, marks, str(self._dtype))
        return parts
