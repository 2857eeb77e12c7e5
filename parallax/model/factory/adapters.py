"""Add peft adapters to any model. The base model is frozen, and only the adapters are trained.

The adapters are injected into the model's own modules (``peft.inject_adapter_in_model``), so the model keeps its class,
forward and loss. This happens in the model's constructor. So initial values are peft's own and equal under every plan,
and each stage computes the values of its own tensors. The weight files of the base model are read in the constructor,
too, because some adapters start from these weights (DoRA's magnitudes are norms of the base's weights).
"""

from __future__ import annotations

import abc
import copy
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from parallax.errors import CheckpointError, ConfigError, nearest, printable
from parallax.model.pretrained import read_weights, tied_names
from parallax.model.source import ModelConfig

ADAPTER = "default"
"""The name that peft gives to a model's only adapter. Peft's files omit this name."""

PREFIX = "base_model.model."
"""The prefix of tensor names in peft's files."""

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

_REFUSED = {
    "ADALORA": "it reallocates ranks between steps, in calls of the training loop",
    "ADAPTION_PROMPT": "it prepends prompts to the rows, and adds its own attention to the model",
    "OSF": "it decomposes the base, which checkpoints of adapters do not hold",
    "POLY": "each row needs a task number",
    "PSOFT": "parts of it are computed from the base, and differ between processes",
    "SHADOW": "it is a separate network beside the model",
    "SHIRA": "it changes the base at random indices, which no checkpoint would hold",
    "XLORA": "it mixes adapters that are already trained",
}
"""{unsupported method: reason}. These methods need more than modules with parameters of their own."""

_CHANGING = ("corda", "eva", "loftq", "lora_ga", "olora", "pissa")
"""LoRA initializations that need data or change the base's weights.

A checkpoint of the adapters alone would lose the change.
"""

_MODULES = "target_modules", "modules_to_save", "feedforward_modules"
_NAMES = 8  # names of modules in an error


class AdaptableModelConfig(ModelConfig):
    """Base class for the settings of a model that may have files of initial weights, and adapters to train.

    ``adapter``: the settings of the adapters, with peft's own keys; empty: no adapters.
    """

    adapter: dict[str, Any]

    @property
    @abc.abstractmethod
    def weights(self) -> str:
        """The file or folder of the initial weights; empty if they are random."""

    @property
    @abc.abstractmethod
    def built_of(self) -> str:
        """The name of the class or function that builds the model."""

    @property
    def reads_weights(self) -> bool:
        """Whether :meth:`create` reads the weights. If not, each stage reads its own part later."""
        return False

    @abc.abstractmethod
    def create(self) -> nn.Module:
        """Return the model without adapters."""

    def build(self) -> nn.Module:
        model = self.create()
        if not self.adapter:
            return model
        unread = "" if self.reads_weights else self.weights
        return adapted(model, self.adapter, unread, incomplete=self.partial_weights)

    @property
    def stage_weights(self) -> str:
        return "" if self.reads_weights or self.adapter else self.weights

    def base(self, seed: int) -> str:
        if not self.adapter:
            return ""
        return f"weights {self.weights}" if self.weights else f"{self.built_of} with seed {seed}"


def adapted(
    model: nn.Module, settings: Mapping[str, Any], weights: str, *, incomplete: bool = False
) -> nn.Module:
    """Return ``model`` with initial weights and with adapters.

    ``settings`` configure the adapters, with peft's own keys. ``weights``: a file or folder; empty: the weights are
    unchanged. ``incomplete``: the files may lack parts such as a new head. Raises :class:`ConfigError` for settings
    that peft rejects.
    """
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
            f"model.adapter={_shown(settings)}: it leaves nothing in the model to train; name modules of the model"
        )
    return found


def peft_config(settings: Mapping[str, Any]) -> Any:
    """Return peft's configuration object for ``settings``.

    Raises :class:`ConfigError` for unknown keys and values, and for unsupported methods, which need more than modules
    with parameters of their own.
    """
    peft, given = _peft(), dict(settings)
    for key in {*_MODULES} & {*given}:
        if isinstance(given[key], Sequence) and not isinstance(given[key], str):
            given[key] = [str(name) for name in given[key]]  # those of nn.Sequential are numbers
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
            f"model.adapter.init_lora_weights={printable(beginning)}: it needs data or changes the base, which "
            "checkpoints of adapters do not hold; accepted are true, gaussian, orthogonal"
        )
    try:
        return kind(**copy.deepcopy(given))
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(f"model.adapter={_shown(settings)}: {_first_line(error)}") from error


def _refusal(method: str, tuner: Any) -> str:
    """Return the reason why an adapter method is unsupported, or '' if it is supported.

    ``method``: peft's name of the adapter method. ``tuner``: peft's class for this method.
    """
    from peft.tuners.tuners_utils import BaseTuner

    if method in _REFUSED:
        return _REFUSED[method]
    if not issubclass(tuner, BaseTuner):
        return "it prepends vectors to the rows of the model's inputs"
    return (
        "its modules share tensors that belong to none of them" if tuner.uses_shared_state else ""
    )


def has_adapters(model: nn.Module) -> bool:
    """Return whether ``model`` has adapters that :func:`adapted` added."""
    return ADAPTER in getattr(model, "peft_config", {})


def save_adapter(
    model: nn.Module, tensors: Mapping[str, Tensor], directory: Path, *, base: str = ""
) -> list[str]:
    """Write the adapters of ``model`` in peft's format (``adapter_config.json`` and ``adapter_model.safetensors``).

    ``PeftModel.from_pretrained(base, directory)`` loads them. ``tensors``: {name in the model: value}, with at least
    all trained parameters; ``model`` itself need not have values. ``base``: the location of the base's weights.

    Returns the names in ``tensors`` that peft's files cannot hold, such as BatchNorm statistics of the base. A loaded
    adapter uses the base's own values for these. Raises :class:`CheckpointError` if the files cannot be written.
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


def adapted_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return {path: module} for the modules of ``model`` that peft has put in place of others.

    A module inside another such module is left out.
    """
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        ours = hasattr(module, "unload_and_optionally_merge_module") or hasattr(
            module, "base_layer"
        )
        if ours and not any(path.startswith(f"{outer}.") for outer in found):
            found[path] = module
    return found


def merged(module: nn.Module) -> nn.Module:
    """Merge the adapter in ``module`` into the weights of the base's module, and return the base's module.

    ``module`` is one of :func:`adapted_modules`, with values. Raises :class:`ConfigError` if peft cannot merge this
    kind of adapter.
    """
    adapting = cast(Any, module)
    try:
        if hasattr(module, "unload_and_optionally_merge_module"):
            whole: nn.Module = adapting.unload_and_optionally_merge_module(
                merge=True, safe_merge=False, adapter_names=None
            )
            return whole
        adapting.merge(safe_merge=False, adapter_names=None)
        base: nn.Module = adapting.get_base_layer()
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        kind = type(module).__name__
        raise ConfigError(
            f"--merge: peft cannot merge its {kind} ({_first_line(error)}); use --to peft"
        ) from error
    return base


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
    """Raise :class:`ConfigError` if ``config`` names a target module that ``model`` lacks.

    peft itself accepts a list of target modules as soon as one of them exists.
    """
    names = [name for name, _ in model.named_modules() if name]
    for key in _MODULES:
        wanted = getattr(config, key, None)
        if isinstance(wanted, str) or not isinstance(wanted, Collection):
            continue
        for target in wanted:
            if not any(name == target or name.endswith(f".{target}") for name in names):
                ends = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
                there = [end for end in ends if not end.isdecimal()] or ends
                raise ConfigError(
                    f"model.adapter.{key}: {printable(str(target))} is no module of {type(model).__name__}; accepted "
                    f"are {', '.join(there[:_NAMES])}{' and others' if len(there) > _NAMES else ''}"
                    f"{nearest(str(target), there)}"
                )


def _check_base(model: nn.Module, before: Iterable[tuple[nn.Parameter, int]], config: Any) -> None:
    """Raise :class:`ConfigError` if adding adapters has replaced a parameter of the base, or a parameter's memory.

    ``before``: the base's parameters, each with the address of its storage before adapters were added.
    """
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
