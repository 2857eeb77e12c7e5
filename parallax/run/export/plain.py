"""Export the weights alone, as safetensors files."""

from __future__ import annotations

from pathlib import Path

from parallax.model.construction.weights import OwnLayout
from parallax.run.export.form import Contents, Trained
from parallax.run.export.shards import Shards


class SafetensorsForm:
    """The weights alone, under the model's own names. ``model=custom model.weights=`` reads such files."""

    name, takes_adapters, takes_merged = "safetensors", False, True

    def contents(self, trained: Trained) -> Contents:
        """Return the files to write for ``trained``, as :class:`Contents`."""
        shards = Shards(trained, OwnLayout())

        def write(folder: Path) -> list[str]:
            shards.write(folder)
            return []

        return Contents(shards.size, write)
