"""The configuration of a run: from overrides to one validated, typed object, and back to text.

Hydra composes files and overrides well, but reports mistakes badly: it silently accepts ``+modle.layers=3``, and prints
a page of text for other mistakes. So Hydra only merges here. Every key and value of the merged result is then read into
the component dataclasses, which check the values. The ``config.yaml`` of a run is read in the same way. Ranks read only
that file, so Hydra is not imported before it is used.

:mod:`.options` finds the option files. :mod:`.multirun` handles several runs from one command line.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import yaml

from parallax.common.documents import (
    leaf_values,
    leaves,
    plain_yaml,
    shown,
    take_keys,
    take_options,
)
from parallax.common.registered import dataclasses_of
from parallax.common.typed import (
    Mistakes,
    build,
    checked,
    defaults,
    field_types,
    in_one_line,
    refuse,
    unknown,
)
from parallax.config.options import OptionFolders
from parallax.config.session import Nodes, opened
from parallax.config.synonyms import counterpart, remark
from parallax.errors import ConfigError, UnknownKeyError, check_choice, nearest, printable
from parallax.machine.local import ClusterConfig
from parallax.model.loss_kinds import LossConfig
from parallax.model.precision import PrecisionConfig
from parallax.model.source import ModelConfig
from parallax.plan.analytic.catalog import CatalogClusterConfig
from parallax.plan.config import PlanConfig
from parallax.plan.task import PlanTask
from parallax.plan.updates import Updates
from parallax.report.scaling.beside import ReportConfig
from parallax.runtime.checkpoint.config import CheckpointConfig
from parallax.runtime.metrics.config import MetricsConfig
from parallax.runtime.optim.config import OptimizerConfig
from parallax.runtime.optim.ema import EmaConfig
from parallax.runtime.optim.schedule import ScheduleConfig
from parallax.runtime.replicas.config import ReplicasConfig
from parallax.serve.config import ServeConfig
from parallax.swap.config import SwapConfig
from parallax.train.callbacks import callback_configs
from parallax.train.data.source import DataConfig
from parallax.train.debug import DebugConfig
from parallax.train.loop import TrainerConfig
from parallax.train.monitor import LoggerConfig

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The settings of a run.

    ``name``: the run's directory is ``runs/<name>``.
    ``seed``: the seed of initial weights, dropout and the order of rows.
    ``task``: what `parallax plan` plans for. The tasks are training; evaluation, which runs forwards and computes the
        loss; and inference, which runs forwards and keeps the outputs of a batch.
    ``compile``: compile the forward of each block with torch.compile, which makes the first step slow.
    ``metrics``: metrics of torchmetrics. They are computed on the held-out rows. A metric that needs only sums is also
        computed on the rows of each step. An entry of the list is a name, such as accuracy, top5, f1, auroc or
        perplexity, or {name: NAME, kwargs: {KEY: VALUE}, target: package.module:Class}.
    ``callbacks``: your own code in the training loop. An entry of the list is ``package.module:factory`` or ``{target:
        package.module:factory, kwargs: {...}, on_error: note}``. An error of a callback ends the run unless
        ``on_error`` is note.
    """

    name: str = "auto"
    seed: int = 1
    task: str = PlanTask.TRAINING.value
    model: ModelConfig
    data: DataConfig
    cluster: ClusterConfig | CatalogClusterConfig
    plan: PlanConfig
    swap: SwapConfig
    loss: LossConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    ema: EmaConfig
    replicas: ReplicasConfig
    precision: PrecisionConfig
    compile: bool = False
    metrics: list[Any] = dataclasses.field(default_factory=list)
    trainer: TrainerConfig
    checkpoint: CheckpointConfig
    logger: LoggerConfig
    debug: DebugConfig
    serve: ServeConfig
    report: ReportConfig
    callbacks: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not is_name(self.name):
            shown = self.name if len(self.name) <= 100 else f"{self.name[:97]}..."
            raise ConfigError(
                f"name={shown}: accepted is a folder name of up to 100 letters, digits, '.', '_' and '-' that begins "
                "with a letter, a digit or '_'; SWEEP/POINT for a point of a sweep"
            )
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed={self.seed}: accepted are whole numbers from 0 to {2**63 - 1}")
        check_choice("task", self.task, list(map(str, PlanTask)))
        if self.trainer.steps:
            self.ema.check(self.trainer.steps)
        self.replicas.check_beside(
            gather_loss=self.trainer.gather_loss,
            delays=self.trainer.updates == Updates.DELAYED,
            scales=self.precision.scales,
        )
        if self.optimizer.delay_correction and self.trainer.updates != Updates.DELAYED:
            raise ConfigError(
                f"optimizer.delay_correction=true: with trainer.updates={self.trainer.updates} there is no delay; use "
                "trainer.updates=delayed, or leave it out"
            )
        self.metrics_config.check_key("checkpoint.metric", self.checkpoint.metric)
        self.trainer.check_metric(self.checkpoint.metric)
        callback_configs(self.callbacks)

    @property
    def metrics_config(self) -> MetricsConfig:
        """The configured metrics, with the properties of the loss that tell them how to read targets and outputs."""
        return MetricsConfig(
            metrics=MetricsConfig.read(self.metrics),
            ignored=self.loss.ignore_index,
            probabilities=self.loss.takes_probabilities,
            mixed=self.loss.takes_mixed_classes,
        )


def is_name(text: str) -> bool:
    """Whether ``text`` can be the name of a run, which is also the name of its folder."""
    folder = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}"
    return re.fullmatch(f"{folder}(/{folder})?", text) is not None


def compose(overrides: Sequence[str], base: RunConfig | None = None) -> RunConfig:
    """Return the default configuration, or ``base``, changed by ``overrides``.

    ``overrides`` are in Hydra's grammar: ``model=mlp trainer.steps=80 swap=off``. No Hydra state, folder or logging is
    left in the process. A mistake raises :class:`ConfigError` with a message of one line: the key, the value, the
    accepted values and the most similar name.
    """
    mistakes = Mistakes()
    requested = _Requested.read(overrides, mistakes)
    if not all(isinstance(each, UnknownKeyError) for each in mistakes.collected):
        mistakes.raise_collected()  # an option that is not known has keys that are not known either
    try:
        tree = requested.merge() if base is None else _onto(base, requested)
    except ConfigError:
        mistakes.raise_collected()
        raise
    for key in requested.removed:
        with mistakes.collecting():
            _remove(tree, key)
    return _read_run(tree, mistakes)


def composed_tree(overrides: Sequence[str], *, resolve: bool) -> dict[str, Any]:
    """Return the settings that :func:`compose` would read, as plain data.

    ``resolve``: replace each interpolation ``${...}`` by its value; otherwise interpolations stay as written.
    """
    mistakes = Mistakes()
    requested = _Requested.read(overrides, mistakes)
    mistakes.raise_collected()
    tree = requested.merge(resolve=resolve)
    for key in requested.removed:
        _remove(tree, key)
    return tree


def override_value(overrides: Sequence[str], key: str) -> str:
    """Return the value that ``overrides`` set for ``key``, as text; "" if none sets the key.

    The last override counts.
    """
    options, others = OptionFolders.of(overrides)
    parsed = [parse(word, options) for word in others]
    found = [override for override in parsed if override.key_or_group == key]
    return "" if not found or found[-1].is_delete() else str(found[-1].value())


def dump(config: RunConfig) -> str:
    """Return ``config`` as YAML with every key, in ASCII and plain data only; :func:`load` returns an equal object."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def load(text: str, added: list[str] | None = None) -> RunConfig:
    """Return the configuration that :func:`dump` wrote as ``text``, validated as :func:`compose` does.

    An older version of Parallax writes a text without the settings that are new. If ``added`` is a list, missing
    settings get their defaults and are appended to ``added``. If ``text`` lacks the first or the last setting, it may
    be truncated, so missing settings raise :class:`ConfigError` all the same.

    A user's schedule is imported, so first check that the user trusts the file (:mod:`parallax.common.trust`).
    """
    tree = plain_yaml(text)
    first, *_, last = field_types(RunConfig)
    whole = isinstance(tree, dict) and {first, last} <= tree.keys()
    try:
        return _read_run(tree, Mistakes(), added if whole else None)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"the stored configuration is not plain YAML: {_one_line(error)}"
        ) from None


def fingerprint(config: RunConfig) -> str:
    """Return sixteen hexadecimal digits, a hash by which ranks check that their configurations are equal."""
    text = yaml.safe_dump(dataclasses.asdict(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(a: RunConfig, b: RunConfig) -> list[str]:
    """Return one line for each key whose values in ``a`` and ``b`` differ: ``trainer.steps: 60 != 80``."""
    return [f"{key}: {old} != {new}" for key, (old, new) in changes(a, b).items()]


def changes(a: RunConfig, b: RunConfig) -> dict[str, tuple[str, str]]:
    """Return {key: (value in ``a``, value in ``b``)} for the keys whose values differ.

    Each value is one line of text.
    """
    left, right = leaves(dataclasses.asdict(a)), leaves(dataclasses.asdict(b))
    return {
        printable(key): (left.get(key, "absent"), right.get(key, "absent"))
        for key in left | right
        if left.get(key) != right.get(key)
    }


# ---- Overrides: checks before anything is merged -------------------------------------------------


def parse(text: str, options: OptionFolders, *, sweeps: bool = False) -> Override:
    """Return the parsed override ``text``. Raises :class:`ConfigError` with the reason if ``text`` is invalid.

    ``options``: the folders of option files, which define the keys that select options. ``sweeps``: accept several
    values for one key.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, groups = text.lstrip("+~").partition("=")[0], options.groups
    root = re.split(r"[./@:\[]", key)[0]
    roots = list(dict.fromkeys([*field_types(RunConfig), *groups]))
    # Checked before the grammar: "modle" says more than "no viable alternative".
    if root not in roots:
        of_hydra = "; settings of Hydra's own go with `parallax train -m`"
        hint = of_hydra if root == "hydra" else elsewhere(key) or nearest(root, roots)
        unknown(text.lstrip("+") or repr(text), f"groups and keys are {', '.join(roots)}", hint)
    usage = f"{root}=OPTION of {', '.join(groups[root])}" if key in groups else f"{key}=VALUE"
    if "=" not in text and not text.startswith("~"):
        refuse(text, f"no value; accepted is {usage}")
    try:
        override = OverridesParser.create().parse_override(text)
    except (HydraException, ValueError, RecursionError):
        refuse(
            text,
            f"cannot be read; accepted is {usage}, text with signs in quotes: \"{root}.key='a (b)'\"",
        )
    if override.is_sweep_override() and not sweeps:
        listed = "" if key in groups else f", a list is quoted: '{key}=[1,2]'"
        several = "; `parallax train -m` runs one for each"
        refuse(text, f"a sweep, but one run takes one value; accepted is {usage}{listed}{several}")
    if override.package is not None or "/" in str(override.key_or_group):
        refuse(text, f"accepted is {root}=OPTION or {root}.KEY=VALUE")
    if override.is_delete() and ("=" in text or key in groups):
        refuse(
            text, f"cannot be removed; accepted is {usage}, or ~GROUP.kwargs.KEY without a value"
        )
    if key == f"{root}.name" and len(_kinds(root)) > 1:
        hint = nearest(str(override.value()), groups[root])
        refuse(
            text,
            f"the option sets it; accepted is {root}=OPTION of {', '.join(groups[root])}{hint}",
        )
    return override


# Words that people type for an option, and the option.
_OPTIONS = {
    ("cluster", "gpu"): "local",
    ("cluster", "cuda"): "local",
    ("optimizer", "adam"): "adamw",
}


def _option(text: str, override: Override, options: OptionFolders) -> str:
    """Return the option that ``override``, of the form ``group=option``, selects; "" for ``experiment=null``.

    Raises :class:`ConfigError` for an unknown option. ``text``: the override as it was typed, for the message.
    """
    group, value = str(override.key_or_group), override.value()
    if group == "experiment" and value is None:
        return ""
    accepted = options.groups[group]
    if value not in accepted:
        hint = nearest(_OPTIONS.get((group, str(value)), str(value)), accepted)
        refuse(text.lstrip("+"), f"unknown option; accepted are {', '.join(accepted)}{hint}")
    return str(value)


def elsewhere(key: str, accepted: Collection[str] = ()) -> str:
    """Return a hint for the unknown key ``key``, or "" if there is none.

    A hint is found for a key without its group, such as ``steps=80``; a key in the wrong group, such as ``trainer.lr``;
    a key of another option, such as ``model.target`` of model=custom; a key of another trainer, such as
    ``batch_size=8``; and an argument of the user's factory. ``accepted``: the keys of the group to which ``key``
    belongs.
    """
    group, _, leaf = key.rpartition(".")
    groups = field_types(RunConfig)
    if group and group not in groups:
        return ""  # the group's name is wrong, not the key
    having = [defaults(kind)["name"] for kind in _kinds(group) if leaf in field_types(kind)]
    if accepted and "kwargs" not in accepted and having:
        options = " or ".join(f"{group}={name}" for name in having)
        return f"; add {options}, which ha{'s' if len(having) == 1 else 've'} it"
    usual, others = (
        [
            f"{home}.{leaf}"
            for home in groups
            for kind in _kinds(home)[part]
            if leaf in field_types(kind) and leaf != "name" and home != group
        ]
        for part in (slice(1), slice(1, None))
    )
    found = next(filter(None, [*usual, counterpart(leaf), *others]), "")
    absent = (
        bool(group) and found.startswith(f"{group}.") and found.partition(".")[2] not in accepted
    )
    if found and not absent:
        return f" (did you mean '{found}'?)"
    if not found and remark(leaf):
        return f"; {remark(leaf)}"
    # An argument of the user's factory, such as model.depth for model.kwargs.depth, and no mistyped key.
    argument = "kwargs" in accepted and not get_close_matches(leaf, accepted, n=1, cutoff=0.7)
    return f" (did you mean '{group}.kwargs.{leaf}'?)" if argument else ""


def _kinds(group: str) -> list[type[Any]]:
    """Return the dataclasses of the options of ``group``; an empty list if ``group`` is not a group."""
    return dataclasses_of(field_types(RunConfig).get(group))


# ---- Merging: the only part that Hydra does ------------------------------------------------------


@dataclass(frozen=True)
class _Requested:
    """Parsed overrides.

    ``groups``: {group: chosen option}; "" if no option is chosen. ``values``: {key: override that sets it}.
    ``removed``: the keys to remove.
    """

    options: OptionFolders
    groups: dict[str, str]
    values: dict[str, Override]
    removed: list[str]

    @classmethod
    def read(cls, overrides: Sequence[str], mistakes: Mistakes) -> _Requested:
        """Return the parsed ``overrides``.

        The last override of a key counts. Errors about invalid overrides are added to ``mistakes``.
        """
        options, others = OptionFolders.of(overrides)
        requested = cls(options, {}, {}, [])
        for text in others:
            with mistakes.collecting():
                override = parse(text, options)
                key = str(override.key_or_group)
                if override.is_delete():
                    requested.removed.append(key)
                elif key in options.groups:
                    requested.groups[key] = _option(text, override, options)
                else:
                    requested.values[key] = override
        return requested

    @property
    def chosen(self) -> tuple[str, ...]:
        """The overrides that choose options, in Hydra's syntax."""
        return self._chosen()

    def _chosen(self, without: str = "") -> tuple[str, ...]:
        """Return ``chosen``, except the option of the group ``without``."""
        return tuple(
            self.options.chosen(group, name)
            for group, name in self.groups.items()
            if name and group != without
        )

    def _leave_out(self, merged: DictConfig) -> None:
        """Remove settings of the experiment from ``merged`` that are for another kind of cluster or of data than the
        chosen one.

        Devices and budgets of another cluster do not apply at all, and of settings for other data those that the chosen
        data have remain. Settings of a model all remain: a missing adapter would train another model.
        """
        from omegaconf import open_dict

        experiment = self.groups.get("experiment")
        typed = [group for group in ("cluster", "data") if self.groups.get(group)]
        if not (experiment and typed):
            return
        own = _composed(self.options, (self.options.chosen("experiment", experiment),))
        for group in (one for one in typed if merged[one].name != own[one].name):
            if group == "cluster":
                merged[group] = _composed(self.options, self._chosen(without="experiment"))[group]
                continue
            (kind,) = (k for k in _kinds(group) if defaults(k)["name"] == merged[group].name)
            with open_dict(merged[group]):
                for key in set(merged[group]) - field_types(kind).keys():
                    del merged[group][key]

    def merge(
        self, numbers: Mapping[str, float] = MappingProxyType({}), *, resolve: bool = True
    ) -> dict[str, Any]:
        """Return the merged files of the chosen options as plain data, changed first by ``numbers``, then by the
        overrides.

        ``numbers``: {key: value}, to which interpolations in the overrides may refer. ``resolve``: replace each
        interpolation ``${...}`` by its value. The prefixes ``+`` and ``++`` of overrides are ignored, because keys are
        checked afterwards.
        """
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        merged = _merged(self.options, self.chosen)
        self._leave_out(merged)
        for key, number in numbers.items():
            OmegaConf.update(merged, key, number, force_add=True)
        for key, override in self.values.items():
            try:
                OmegaConf.update(merged, key, override.value(), merge=True, force_add=True)
            except _broken():
                refuse(
                    str(override.input_line).lstrip("+"),
                    "cannot be merged; accepted are whole lists such as [1,2], and ${group.key}",
                )
        try:
            return typing.cast(dict[str, Any], OmegaConf.to_container(merged, resolve=resolve))
        except (OmegaConfBaseException, RecursionError) as error:
            _unresolved(merged, error)


def _broken() -> tuple[type[Exception], ...]:
    """Return the types of the exceptions that a failed merge raises.

    Keys and options are checked before a merge, so the cause is a value of the wrong structure or a broken file.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    return HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError


def _merged(options: OptionFolders, chosen: tuple[str, ...]) -> DictConfig:
    """Return a new copy of the merged files of the ``chosen`` options."""
    try:
        return copy.deepcopy(_composed(options, chosen))
    except _broken() as error:
        refuse(" ".join(chosen), f"cannot be merged; {_one_line(error)}")


@functools.cache
def _composed(options: OptionFolders, chosen: tuple[str, ...]) -> DictConfig:
    """Return the merged files of the ``chosen`` options.

    The result is cached, because Hydra takes a tenth of a second.
    """
    import hydra

    with opened(options, nodes()):
        return hydra.compose("config", [*options.overrides, *chosen])


def nodes() -> Nodes:
    """Return {(group, name): default values} for each dataclass, by the group and name under which Hydra finds them.

    Hydra's path is ``/parallax/<group>``, or ``/parallax/<group>/<name>`` if the group has several dataclasses.
    """
    found: Nodes = {("parallax", "run"): defaults(RunConfig)}
    for group in field_types(RunConfig):
        several = len(_kinds(group)) > 1
        for node in map(defaults, _kinds(group)):
            name, folder = (node["name"], f"parallax/{group}") if several else (group, "parallax")
            found[folder, name] = node
    return found


def _onto(base: RunConfig, requested: _Requested) -> dict[str, Any]:
    """Return ``base`` as plain data, changed by the options and values in ``requested``.

    Interpolations in the values may refer to numbers in ``base``, so Hydra gets these numbers. Hydra does not get the
    texts in ``base``, because they may come from an untrusted file.
    """
    tree: dict[str, Any] = yaml.safe_load(dump(base))
    interpolated: list[str] = []
    if requested.chosen:
        without, options = (
            dataclasses.replace(requested, values={}, groups=groups)
            for groups in ({}, requested.groups)
        )
        take_options(tree, list(requested.groups), without.merge(), options.merge())
        interpolated = _interpolated(options, without)
    if requested.values:
        take_keys(tree, list(requested.values), requested.merge(_numbers(tree)))
    if again := [key for key in interpolated if key not in requested.values]:
        known = {key: number for key, number in _numbers(tree).items() if key not in again}
        take_keys(tree, again, requested.merge(known))
    return tree


def _numbers(tree: dict[str, Any]) -> dict[str, float]:
    """Return {dotted key: number} for the numbers in ``tree``, except those in kwargs."""
    return {
        ".".join(path): value
        for path, value in leaf_values(tree).items()
        if isinstance(value, int | float) and "kwargs" not in path
    }


def _interpolated(options: _Requested, without: _Requested) -> list[str]:
    """Return the dotted keys that the files of ``options`` set to an interpolation ``${...}``, and those of
    ``without`` do not."""
    before = leaf_values(without.merge(resolve=False))
    return [
        ".".join(path)
        for path, value in leaf_values(options.merge(resolve=False)).items()
        if "${" in str(value) and before.get(path) != value
    ]


def _unresolved(merged: DictConfig, error: Exception) -> NoReturn:
    """Raise :class:`ConfigError` that names the key in ``merged`` whose interpolation ``${...}`` cannot be resolved.

    ``error``: what OmegaConf raised for this interpolation.
    """
    from omegaconf import OmegaConf

    raw = leaves(typing.cast(dict[str, Any], OmegaConf.to_container(merged)))
    key = str(
        getattr(error, "full_key", None) or next((k for k, v in raw.items() if "${" in v), "")
    )
    missing = re.search(r"key '(.*?)' not found", str(error))
    hint = f"accepted are existing keys{nearest(missing[1], raw)}" if missing else _one_line(error)
    refuse(f"{key}={raw.get(key, '')}", f"the interpolation has no value; {hint}")


def _remove(tree: dict[str, Any], key: str) -> None:
    """Remove ``key`` from ``tree``.

    Raises :class:`ConfigError` unless ``key`` is in a dictionary whose keys the user chooses freely, as in
    ``model.kwargs``.
    """
    *parents, leaf = key.split(".")
    node: Any = tree
    for part in parents:
        node = node.get(part) if isinstance(node, dict) else None
    held = sorted(map(str, node)) if isinstance(node, dict) else []
    if leaf not in held:
        unknown(
            f"~{key}",
            f"{'.'.join(parents)} holds {', '.join(held) or 'no keys'}",
            nearest(leaf, held),
        )
    if parents[1:2] not in (["kwargs"], ["config"], ["adapter"]):
        refuse(f"~{key}", f"every key is needed; accepted is a value: {key}={shown(node[leaf])}")
    del node[leaf]


# ---- Reading: plain data into dataclasses --------------------------------------------------------


def _read_run(tree: Any, mistakes: Mistakes, added: list[str] | None = None) -> RunConfig:
    """Return the configuration in ``tree``, with each group read into the dataclass that the group's ``name`` selects.

    Keys are checked first: one error lists all wrong keys together with ``mistakes``. If there are none, values are
    checked, and one error lists all wrong values. If ``added`` is a list, missing keys get their defaults and are
    appended to it.
    """
    groups = [key for key in field_types(RunConfig) if _kinds(key)]
    if added is not None and (new := set(groups) - {"model", "data", "cluster"} - set(tree)):
        usual = plain_yaml(dump(compose([])))
        tree = {**tree, **{group: usual[group] for group in new}}
        options = {group: usual[group].get("name") for group in sorted(new)}
        added += [f"{group}={name}" if name else group for group, name in options.items()]
    parts = checked(RunConfig, tree, "", elsewhere=elsewhere, added=added)
    kinds: dict[str, type[Any]] = {}
    for group in groups:
        named = {defaults(kind).get("name", group): kind for kind in _kinds(group)}
        chosen, label = _kinds(group)[0], group
        with mistakes.collecting():
            if len(named) > 1 and isinstance(parts[group], dict):
                name = parts[group].get("name", "")
                check_choice(f"{group}.name", name, sorted(named))
                chosen, label = named[name], f"{group}={name}"
            kinds[group] = chosen
            hint = functools.partial(elsewhere, accepted=field_types(chosen))
            parts[group] = checked(chosen, parts[group], group, label, hint, added)
    mistakes.raise_collected()
    for group, kind in kinds.items():
        with mistakes.collecting():
            parts[group] = build(kind, parts[group], f"{group}.")
    mistakes.raise_collected()
    run = typing.cast(RunConfig, build(RunConfig, parts, ""))
    with in_one_line():
        run.plan.load_schedule()
    return run


def _one_line(error: Exception) -> str:
    """Return the first line of the error's message. Hydra and OmegaConf append pages of context to it."""
    return printable((str(error).splitlines() or [type(error).__name__])[0])
