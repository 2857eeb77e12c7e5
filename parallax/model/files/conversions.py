"""Convert names and tensors between weight files of transformers and the model.

Files may use other names than the model, or other tensors, such as the separate experts of a layer. For each kind of
model, transformers has the conversion steps from files to model, and the reverse steps
(:mod:`transformers.conversion_mapping`). Here these steps are applied to the requested tensors only.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from parallax.errors import CheckpointError
from parallax.model.files.tensors import Read, Recipe


def is_pretrained(model: nn.Module) -> bool:
    """Return whether ``model`` is an instance of a transformers class. A wrapper around such a model does not count."""
    return class_of_transformers(model) is not None


def class_of_transformers(model: nn.Module) -> Any:
    """Return the transformers class that ``model`` is an instance of, or None."""
    kinds = [
        kind
        for kind in type(model).__mro__
        if kind.__module__.startswith("transformers.") and hasattr(kind, "base_model_prefix")
    ]
    return kinds[0] if kinds else None


class PretrainedLayout:
    """The layout of the weight files of ``model``, a transformers model. The model's tensors need no values."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._unmissed = _pattern(getattr(model, "_keys_to_ignore_on_load_missing", None))
        unread = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
        buffers = [name for name, _ in model.named_buffers()]
        # Older releases saved these buffers.
        for end, pattern in (
            ("rotary_emb.inv_freq", r"rotary_emb\.inv_freq"),
            ("position_ids", r"(^|\.)position_ids$"),
        ):
            if any(name.endswith(end) for name in buffers):
                unread.add(pattern)
        self._unread = _pattern(unread)

    def may_lack(self, name: str) -> bool:
        """Return whether files usually lack the model's tensor ``name``, so that no message reports it as missing.

        The constructor creates such a tensor.
        """
        return self._unmissed(name)

    def may_hold(self, name: str) -> bool:
        """Return whether the tensor ``name`` in the files may be ignored if the model has no use for it."""
        return self._unread(name)

    def recipes(self, held: Mapping[str, Tensor]) -> dict[str, Recipe]:
        """Return {name: recipe} for each tensor of the model.

        ``held``: {name in the files: meta tensor}. Raises :class:`CheckpointError` for files that do not fit the model.
        """
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import dot_natural_key, rename_source_key

        known = self._model.state_dict(keep_vars=True)
        steps = get_model_conversion_mapping(self._model)
        renamings, converters, by_pattern = _by_kind(steps)
        prefix = self._model.base_model_prefix or None
        found: dict[str, Recipe] = {}
        groups: dict[str, list[tuple[str, str]]] = {}
        for name in sorted(held, key=dot_natural_key):
            renamed, pattern = rename_source_key(name, renamings, converters, prefix, known)
            if renamed not in known and name in known:
                renamed, pattern = name, None
            if renamed not in known:
                continue
            if pattern is None:
                found.setdefault(renamed, Recipe.same(name, renamed))
            else:
                groups.setdefault(renamed, []).append((name, pattern))
        for first, parts in groups.items():
            recipe = _converting(self._model, by_pattern[parts[0][1]], first, parts)
            for name in _made(recipe, held):
                found[name] = recipe
        return found

    def saved(self, names: Iterable[str]) -> list[Recipe]:
        """Return recipes that compute the tensors to write to files, as ``save_pretrained`` does.

        ``names``: the model's tensors from which the tensors in the files are computed.
        """
        from transformers import core_model_loading
        from transformers.conversion_mapping import get_model_conversion_mapping

        # Prefix changes depend on the files that were read. Older releases lack the class.
        prefixes: Any = getattr(core_model_loading, "PrefixChange", ())
        steps = [
            step.reverse_transform()
            for step in reversed(get_model_conversion_mapping(self._model, add_legacy=False))
            if not isinstance(step, prefixes)
        ]
        renamings, converters, by_pattern = _by_kind(steps)
        unsaved = set(getattr(self._model, "_keys_to_ignore_on_save", None) or ())
        found: list[Recipe] = []
        groups: dict[str, list[tuple[str, str]]] = {}
        for name in sorted(set(names) - unsaved, key=core_model_loading.dot_natural_key):
            renamed, pattern = _first_match(name, converters)
            if pattern is None:
                found.append(Recipe.same(name, _renamed(name, renamings)))
            else:
                groups.setdefault(renamed, []).append((name, pattern))
        for first, parts in groups.items():
            recipe = _converting(self._model, by_pattern[parts[0][1]], first, parts)
            found.append(_renaming(recipe, partial(_renamed, renamings=renamings)))
        return found

    def kept_name(self, names: Sequence[str]) -> str:
        """Return the one of ``names``, which are all names of one tensor, that :meth:`saved` expects.

        It is the name to which transformers ties the others.
        """
        tied = getattr(self._model, "all_tied_weights_keys", None) or {}
        return next((name for name in names if name not in tied), names[0])


def _by_kind(steps: Iterable[Any]) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Sort the conversion steps of transformers in ``steps``.

    Return the steps that rename tensors, the steps that compute tensors, and {source pattern: step that computes}.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    steps = list(steps)
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    return renamings, converters, {p: step for step in converters for p in step.source_patterns}


def _first_match(name: str, converters: Iterable[Any]) -> tuple[str, str | None]:
    for step in converters:
        renamed, pattern = step.rename_source_key(name)
        if pattern is not None:
            return renamed, pattern
    return name, None


def _renamed(name: str, renamings: Iterable[Any]) -> str:
    for step in renamings:
        name, _ = step.rename_source_key(name)
    return name


def _converting(model: Any, step: Any, first: str, parts: list[tuple[str, str]]) -> Recipe:
    """Return a recipe that applies ``step``, a conversion of transformers that computes tensors from other tensors.

    ``parts``: for each source tensor, its name and the pattern that the name matched. ``first``: the name of the first
    tensor that the conversion computes.
    """

    def make(read: Read) -> dict[str, Tensor]:
        fresh = copy.deepcopy(step)  # it stores its inputs
        for name, pattern in parts:
            fresh.add_tensor(first, name, pattern, partial(read, name))
        made = fresh.convert(first, model=model, config=model.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }

    return Recipe(tuple(name for name, _ in parts), make)


def _renaming(recipe: Recipe, rename: Callable[[str], str]) -> Recipe:
    return Recipe(
        recipe.sources,
        lambda read: {rename(name): value for name, value in recipe.make(read).items()},
    )


def _made(recipe: Recipe, held: Mapping[str, Tensor]) -> list[str]:
    try:
        return list(recipe.make(held.__getitem__))
    except Exception as error:  # transformers raises various errors for tensors that do not fit
        first, *more = recipe.sources
        others = f" and {len(more)} more" if more else ""
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{first}{others} cannot be converted as transformers does ({reason:.200}): give the whole "
            "folder that save_pretrained wrote, with its config.json"
        ) from error


def _pattern(patterns: Iterable[str] | None) -> Callable[[str], bool]:
    """Return a function that returns whether a name matches any of ``patterns``."""
    joined = "|".join(f"(?:{pattern})" for pattern in patterns or ())
    matcher = re.compile(joined) if joined else None
    return lambda name: matcher is not None and matcher.search(name) is not None
