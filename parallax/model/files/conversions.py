"""What the files of a transformers model hold, where that is not what the model holds: other names, and tensors that
are computed from those of the model, such as the experts of a layer one by one.

transformers keeps, for each kind of model, the steps from files to the model, and their reverse. They are taken from
there (:mod:`transformers.conversion_mapping`), and carried out for the tensors that are asked for.
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
    """Whether ``model`` is one of transformers, and not something around one that passes on its attributes."""
    return class_of_transformers(model) is not None


def class_of_transformers(model: nn.Module) -> Any:
    """The class of transformers that ``model`` is of, or is derived from; None: there is none."""
    kinds = [
        kind
        for kind in type(model).__mro__
        if kind.__module__.startswith("transformers.") and hasattr(kind, "base_model_prefix")
    ]
    return kinds[0] if kinds else None


class PretrainedLayout:
    """The files of ``model``, a model of transformers, for which it may be without values."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._unmissed = _pattern(getattr(model, "_keys_to_ignore_on_load_missing", None))
        unread = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
        buffers = [name for name, _ in model.named_buffers()]
        # Buffers that older releases saved.
        for end, pattern in (
            ("rotary_emb.inv_freq", r"rotary_emb\.inv_freq"),
            ("position_ids", r"(^|\.)position_ids$"),
        ):
            if any(name.endswith(end) for name in buffers):
                unread.add(pattern)
        self._unread = _pattern(unread)

    def may_lack(self, name: str) -> bool:
        """Whether files need not hold the model's tensor ``name``: its constructor makes it."""
        return self._unmissed(name)

    def may_hold(self, name: str) -> bool:
        """Whether the files' tensor ``name`` is known to be of no use."""
        return self._unread(name)

    def recipes(self, held: Mapping[str, Tensor]) -> dict[str, Recipe]:
        """How each tensor of the model is made, by its name, from files that hold ``held`` (without values). Raises
        :class:`CheckpointError` where some of them do not go together."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import dot_natural_key, rename_source_key

        known = self._model.state_dict(keep_vars=True)
        steps = get_model_conversion_mapping(self._model)
        renamings, converters, by_pattern = _sorted_out(steps)
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
        """How the tensors of the files are made from those of the model, ``names``: as ``save_pretrained`` would."""
        from transformers import core_model_loading
        from transformers.conversion_mapping import get_model_conversion_mapping

        # Whether there was such a prefix only files that were read can say. Older releases have none.
        prefixes: Any = getattr(core_model_loading, "PrefixChange", ())
        steps = [
            step.reverse_transform()
            for step in reversed(get_model_conversion_mapping(self._model, add_legacy=False))
            if not isinstance(step, prefixes)
        ]
        renamings, converters, by_pattern = _sorted_out(steps)
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
        """Under which of the ``names`` of one tensor it is saved: the one that transformers ties the others to."""
        tied = getattr(self._model, "all_tied_weights_keys", None) or {}
        return next((name for name in names if name not in tied), names[0])


def _sorted_out(steps: Iterable[Any]) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Steps that rename, steps that compute, and these by what they match."""
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
    """What ``step`` computes from ``parts``, names with the pattern that each matched; ``first`` is what the first of
    its results is called."""

    def make(read: Read) -> dict[str, Tensor]:
        fresh = copy.deepcopy(step)  # it keeps what it is given
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
    except Exception as error:  # whatever transformers says of tensors that do not fit
        first, *more = recipe.sources
        others = f" and {len(more)} more" if more else ""
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{first}{others} cannot be turned into what transformers makes of them ({reason:.200}): give the whole "
            "folder that save_pretrained wrote, with its config.json"
        ) from error


def _pattern(patterns: Iterable[str] | None) -> Callable[[str], bool]:
    """Whether a name has any of ``patterns`` in it."""
    joined = "|".join(f"(?:{pattern})" for pattern in patterns or ())
    matcher = re.compile(joined) if joined else None
    return lambda name: matcher is not None and matcher.search(name) is not None
