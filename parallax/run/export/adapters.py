"""Export the adapters of a run in the format of peft."""

from __future__ import annotations

from pathlib import Path

from parallax.errors import ConfigError
from parallax.model.factory.adapters import has_adapters, save_adapter
from parallax.run.export.form import Contents, Trained


class PeftForm:
    """A folder with only the adapters, which ``PeftModel.from_pretrained(base, folder)`` loads."""

    name, takes_adapters, takes_merged = "peft", True, False

    def contents(self, trained: Trained) -> Contents:
        """Return the files to write for ``trained``, as :class:`Contents`."""
        model, reader = trained.model, trained.reader
        if not has_adapters(model):
            raise ConfigError(
                f"--to peft: the run's {type(model).__name__} has no adapters; use --to huggingface or --to safetensors"
            )
        held = reader.model_tensors()
        base: str = getattr(trained.config, "weights", "")

        def write(folder: Path) -> list[str]:
            tensors = {name: trained.read(name) for name in held}
            left = save_adapter(model, tensors, folder, base=base)
            return [f"files of peft have no place for {', '.join(left)}"] if left else []

        return Contents(sum(tensor.nbytes for tensor in held.values()), write)
