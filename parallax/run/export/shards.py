"""Write weights as safetensors files: a single one, or shards with an index."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from parallax.model.construction.weights import INDEX, SINGLE, FileLayout
from parallax.model.files.tensors import Read, Recipe, write_tensors
from parallax.run.export.form import Trained

SHARD_BYTES = 5 * 10**9
"""The maximum bytes of a file, unless tensors that are converted together have more."""


class Shards:
    """Safetensors files with the tensors of ``trained``. ``layout`` converts the model's tensors to those of the
    files."""

    def __init__(self, trained: Trained, layout: FileLayout) -> None:
        tensors = trained.tensors()
        self._trained = trained
        self._sources = {layout.kept_name(names): names[0] for names in trained.names()}
        self.held = {name: tensors[source] for name, source in self._sources.items()}
        self._shards = split_into_shards(layout.saved(self.held), self.held)

    @property
    def size(self) -> int:
        """Return the bytes of all files."""
        return sum(shard.size for shard in self._shards)

    def write(self, folder: Path) -> None:
        write_shards(folder, self._shards, lambda name: self._trained.read(self._sources[name]))


@dataclass
class Shard:
    """One file: its source tensors (without values), the recipes that compute the tensors of the file from them, and
    its bytes."""

    held: dict[str, Tensor] = field(default_factory=dict)
    recipes: list[Recipe] = field(default_factory=list)
    size: int = 0


def split_into_shards(recipes: Sequence[Recipe], held: Mapping[str, Tensor]) -> list[Shard]:
    """Return the files, of about :data:`SHARD_BYTES` each, for the tensors that ``recipes`` compute from the tensors
    ``held``.

    Tensors with larger elements come first, so that every tensor is aligned to the size of its elements.
    """
    made = [(recipe, recipe.make(held.__getitem__)) for recipe in recipes]
    made.sort(key=lambda pair: -max(tensor.itemsize for tensor in pair[1].values()))
    shards = [Shard()]
    for recipe, tensors in made:
        size = sum(tensor.nbytes for tensor in tensors.values())
        if shards[-1].held and shards[-1].size + size > SHARD_BYTES:
            shards.append(Shard())
        shards[-1].held.update(tensors)
        shards[-1].recipes.append(recipe)
        shards[-1].size += size
    return shards


def write_shards(folder: Path, shards: Sequence[Shard], read: Read) -> None:
    """Write ``shards``, and an index if there are several. ``read(name)`` returns a source tensor of the recipes."""
    count = len(shards)
    stem = SINGLE.removesuffix(".safetensors")
    names = [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    for shard, name in zip(shards, names if count > 1 else [SINGLE], strict=True):
        write_tensors(folder / name, shard.held, shard.recipes, read)
    if count > 1:
        total = sum(shard.size for shard in shards)
        places = {held: name for shard, name in zip(shards, names) for held in shard.held}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
