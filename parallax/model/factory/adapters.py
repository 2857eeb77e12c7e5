"""Adapters of peft in any model: the base stays as it is, and what is added to it is trained.

The adapters are put into the model's own modules (``peft.inject_adapter_in_model``), so the model keeps its class, its
forward and its loss. That is done in the constructor, as everything that makes a model is: initial values are peft's
own, the same under every plan, and each stage makes those of its own tensors. So is reading the base's weights from
files, because some adapters begin with what they find there (DoRA's magnitudes are norms of the base's weights).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from parallax.errors import CheckpointError, ConfigError, nearest, printable
from parallax.model.pretrained import read_weights, tied_names

ADAPTER = "default"
"""What peft calls the only adapter of a model; its files leave the name out."""

PREFIX = "base_model.model."
"""What the names of tensors begin with in peft's files."""

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

_REFUSED = {
    "ADALORA": "ranks are dealt out anew between steps, by calls that a training loop makes",
    "ADAPTION_PROMPT": "it puts prompts before the rows, and attention of its own into the model",
    "OSF": "it takes the base apart, which checkpoints of adapters do not hold",
    "POLY": "each row says which task it is of",
    "PSOFT": "parts of it are made of the base, and are not the same wherever they are made",
    "SHADOW": "it is a network of its own beside the model",
    "SHIRA": "where it changes the base is drawn, and no checkpoint would hold that",
    "XLORA": "it mixes adapters that were trained before",
}
"""Methods that are more than modules with parameters of their own, and why."""

_CHANGING = ("corda", "eva", "loftq", "lora_ga", "olora", "pissa")
"""Initialisations of LoRA that need data, or change the base: a checkpoint without the base would not hold that."""

_NAMES = 8  # of modules, in an error


def adapted(
    model: nn.Module, settings: Mapping[str, Any], weights: str, *, incomplete: bool = False
) -> nn.Module:
    """``model`` with the weights of a file or folder (empty: as it is), which may lack parts such as a new head where
    they are ``incomplete``, and the adapters that ``settings`` say: those of peft, by its own names. Raises
    :class:`ConfigError` for what peft does not take."""
    config = peft_config(settings)
    _check_targets(model, config)
    if weights:
        read_weights(model, Path(weights).expanduser(), incomplete=incomplete)
    base = dict(model.named_parameters())
    before = {
        name: (parameter, parameter.untyped_storage()._cdata) for name, parameter in base.items()
    }
    try:
        found: nn.Module = _peft().inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    except (ValueError, TypeError, NotImplementedError, KeyError) as error:
        raise ConfigError(f"model.adapter={_shown(settings)}: {_first_line(error)}") from error
    _check_base(found, before.values(), config)
    if not any(parameter.requires_grad for parameter in found.parameters()):
        raise ConfigError(
            f"model.adapter={_shown(settings)}: nothing in the model would be trained"
        )
    return found


def peft_config(settings: Mapping[str, Any]) -> Any:
    """The configuration of peft that ``settings`` say. Raises :class:`ConfigError` for keys and values that it does not
    take, and for methods that are more than modules with parameters."""
    peft, given = _peft(), dict(settings)
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING

    tuners = {kind.value: tuner for kind, tuner in PEFT_TYPE_TO_TUNER_MAPPING.items()}
    methods = sorted(method for method, tuner in tuners.items() if not _refusal(method, tuner))
    method = str(given.pop("peft_type", "")).upper()
    known = {kind.value: kind for kind in PEFT_TYPE_TO_CONFIG_MAPPING}
    if method not in known:
        raise ConfigError(
            f"model.adapter.peft_type={method or '(empty)'}: accepted are {', '.join(methods)}"
            f"{nearest(method, methods)}"
        )
    kind = PEFT_TYPE_TO_CONFIG_MAPPING[known[method]]
    if method not in methods:
        why = _refusal(method, tuners.get(method, object))
        raise ConfigError(
            f"model.adapter.peft_type={method}: {why}; accepted are {', '.join(methods)}"
        )
    accepted = [each.name for each in fields(kind) if each.init]
    for key in given:
        if key not in accepted:
            raise ConfigError(
                f"model.adapter.{printable(str(key))}: {kind.__name__} of peft {peft.__version__} has no such setting"
                f"{nearest(str(key), accepted)}"
            )
    beginning = str(given.get("init_lora_weights", "")).lower()
    if beginning.startswith(_CHANGING):
        raise ConfigError(
            f"model.adapter.init_lora_weights={printable(beginning)}: it needs data, or changes the base, which "
            "checkpoints of adapters do not hold; accepted are true, gaussian, orthogonal"
        )
    try:
        return kind(**copy.deepcopy(given))
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(f"model.adapter={_shown(settings)}: {_first_line(error)}") from error


def _refusal(method: str, tuner: Any) -> str:
    """Why a method cannot be had; nothing where it can."""
    from peft.tuners.tuners_utils import BaseTuner

    if method in _REFUSED:
        return _REFUSED[method]
    if not issubclass(tuner, BaseTuner):
        return "it puts vectors before the rows of the model's inputs"
    return "its modules share what is in none of them" if tuner.uses_shared_state else ""


def has_adapters(model: nn.Module) -> bool:
    """Whether ``model`` has adapters of :func:`adapted`."""
    return ADAPTER in getattr(model, "peft_config", {})


def save_adapter(
    model: nn.Module, tensors: Mapping[str, Tensor], directory: Path, *, base: str = ""
) -> list[str]:
    """Write the adapters of ``model``, which may be without values, in the format of peft, so that
    ``PeftModel.from_pretrained(base, directory)`` loads them: ``adapter_config.json`` and
    ``adapter_model.safetensors``.

    ``tensors`` are values by the model's names, at least of all that is trained; ``base`` is where the base's weights
    are. Returns the names among ``tensors`` that peft's files have no place for, such as statistics of a BatchNorm of
    the base: who loads the adapters has the base's own. Raises :class:`CheckpointError` where nothing can be written.
    """
    peft, adapters = _peft(), cast(Any, model)
    given = dict(tensors)
    for first, others in tied_names(model).items():
        given |= {other: given[first] for other in others if first in given}
    config = copy.deepcopy(adapters.peft_config[ADAPTER])
    config.inference_mode, config.base_model_name_or_path = True, base or None
    saved = peft.get_peft_model_state_dict(
        model, state_dict=given, adapter_name=ADAPTER, save_embedding_layers=False
    )
    held = {id(tensor) for tensor in saved.values()}
    named = {f"{PREFIX}{name}": _alone(tensor) for name, tensor in saved.items()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(named, directory / WEIGHTS_FILE, metadata={"format": "pt"})
        config.save_pretrained(str(directory))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {directory}: {_first_line(error)}") from error
    return [name for name, tensor in tensors.items() if id(tensor) not in held]


def _alone(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu").contiguous().clone()


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"model.adapter: it needs peft ({error}); install it with pip install 'parallax-train[peft]'"
        ) from error
    return peft


def _check_targets(model: nn.Module, config: Any) -> None:
    """Each module that is named is there: peft is content with one of them."""
    names = [name for name, _ in model.named_modules() if name]
    for key in ("target_modules", "modules_to_save", "feedforward_modules"):
        wanted = getattr(config, key, None)
        if isinstance(wanted, str) or not isinstance(wanted, Collection):
            continue
        for target in wanted:
            if not any(name == target or name.endswith(f".{target}") for name in names):
                ends = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
                there = [end for end in ends if not end.isdecimal()]
                raise ConfigError(
                    f"model.adapter.{key}: {printable(str(target))} is no module of {type(model).__name__}, which has "
                    f"{', '.join(there[:_NAMES])}{' and others' if len(there) > _NAMES else ''}"
                    f"{nearest(str(target), there)}"
                )


def _check_base(model: nn.Module, before: Iterable[tuple[nn.Parameter, int]], config: Any) -> None:
    """The base has its parameters, with the memory that they had: whoever puts others there changes it."""
    held = {id(parameter) for parameter in model.parameters()}
    for parameter, memory in before:
        if id(parameter) not in held or parameter.untyped_storage()._cdata != memory:
            raise ConfigError(
                f"model.adapter.peft_type={config.peft_type.value}: with these settings it changes the base, which "
                "checkpoints of adapters do not hold; choose another initialisation"
            )


def _shown(settings: Mapping[str, Any]) -> str:
    return printable(json.dumps(dict(settings), default=str))


def _first_line(error: Exception) -> str:
    return printable((str(error).splitlines() or [type(error).__name__])[0])
