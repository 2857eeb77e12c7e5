"""Print settings as YAML, as Hydra programs do with ``--cfg``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from parallax.config import compose, composed_tree
from parallax.config.multirun import hydra_tree, of_hydra
from parallax.config.options import adds_folders
from parallax.errors import ConfigError, nearest, printable

CFG = ("job", "hydra", "all")


def settings_text(overrides: Sequence[str], cfg: str, *, resolve: bool, package: str | None) -> str:
    """Return the settings of a run under ``overrides`` as YAML.

    ``cfg``: job for the run's settings, hydra for Hydra's own, all for both. ``package``: the key of a part, to return
    only this part. ``resolve``: replace each interpolation ``${...}`` by its value. Invalid overrides raise the same
    errors as for a run.
    """
    tree: Any = {}
    job = [word for word in overrides if not of_hydra(word) or adds_folders(word)]
    compose(job)
    if cfg in ("hydra", "all"):
        tree["hydra"] = hydra_tree(overrides, resolve=resolve)
    if cfg in ("job", "all"):
        tree |= composed_tree(job, resolve=resolve)
    if package in (None, "_global_"):
        return yaml.safe_dump(tree, sort_keys=False)
    found = _selected(tree, str(package))
    if not isinstance(found, dict | list):
        return f"{found}\n"
    return f"# @package {package}\n{yaml.safe_dump(found, sort_keys=False)}"


def _selected(tree: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            held = list(tree) if isinstance(tree, dict) else []
            raise ConfigError(f"--package {printable(key)}: no such key{nearest(part, held)}")
        tree = tree[part]
    return tree
