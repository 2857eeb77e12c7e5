"""Run several runs from one command line, with Hydra's lists, ranges, sweepers and launchers.

A sweep has one run for each combination of values; a combination is called a point. Hydra's sweeper chooses the points,
and Hydra's launcher the processes that run them. The caller provides ``job``, the function that runs one point:

::

    train -m model=gpt,mlp cluster.devices=1,2  ──sweeper──>  4 lists of overrides  ──launcher──>  4 × job(overrides)

Hydra's basic sweeper takes all combinations of the values, so all points are known, and can be checked, before the
first run starts. A searching sweeper, such as Optuna's, chooses each point from the results of earlier ones. A launcher
calls the job in this process, or pickles the job and calls it in another process, on this machine or elsewhere.
"""

from __future__ import annotations

import contextlib
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallax import config as configuration
from parallax.common.typed import Mistakes, refuse
from parallax.config.options import OptionFolders, quoted
from parallax.config.session import opened
from parallax.errors import ConfigError, ParallaxError, nearest, printable

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra
    from omegaconf import DictConfig

Job = Callable[[list[str]], float]
"""A function that runs one point, given by the point's overrides, and returns the number that a searching sweeper
minimises.
"""

_FOLDERS = ("hydra.sweep.", "hydra.run.", "hydra.output_subdir", "hydra.job.chdir")
_LONGEST = 300  # characters of Hydra's message
# Its message about an option that a group does not have: the group, the option, the options that exist.
_NO_OPTION = re.compile(
    r"In .*: Could not find '(\w+)/([^'/]*)' Available options in '[^']*': ([\w ]+?)(?: Config search path.*)?$"
)
_BASIC = "BasicSweeper"
_IN_TURN = "BasicLauncher"


def wants_sweep(overrides: Sequence[str]) -> bool:
    """Return whether the overrides request a sweep, by ``hydra.mode=MULTIRUN``."""
    return any(word.lstrip("+").upper() == "HYDRA.MODE=MULTIRUN" for word in overrides)


@dataclass(frozen=True)
class Multirun:
    """A requested sweep.

    ``name``       the value of ``name=``, or auto
    ``hydra``      overrides of Hydra's own settings
    ``overrides``  all other overrides, in Hydra's syntax
    ``points``     the overrides of each point; None for a searching sweeper
    ``alike``      the keys that have one value in all points
    ``in_turn``    whether points run one after another in this process
    """

    name: str
    options: OptionFolders
    hydra: tuple[str, ...]
    overrides: tuple[str, ...]
    points: tuple[tuple[str, ...], ...] | None
    alike: frozenset[str]
    in_turn: bool

    @classmethod
    def read(cls, overrides: Sequence[str]) -> Multirun:
        """Return the sweep that ``overrides`` request.

        Raises :class:`ConfigError` with a message of one line if they are invalid.
        """
        options, others = OptionFolders.of(overrides)
        hydra = tuple(_own(word) for word in others if of_hydra(word))
        name, typed = _typed([word for word in others if not of_hydra(word)], options)
        unswept = cls(name, options, hydra, tuple(typed.values()), None, frozenset(), False)
        with unswept._opened() as (hydra_, config):
            in_turn = str(config.hydra.launcher._target_).endswith(f".{_IN_TURN}")
            points, alike = _product(hydra_, config, typed, options)
        return cls(name, options, hydra, unswept.overrides, points, alike, in_turn)

    def check(self, points: Sequence[Sequence[str]]) -> None:
        """Raise :class:`ConfigError` if Hydra cannot compose the configuration of one of the ``points``.

        Hydra's launcher composes them in the same way, so this check finds its errors before the first point runs.
        """
        with self._opened() as (hydra, config), _errors_in_one_line(()):
            for point in points:
                hydra.config_loader.load_sweep_config(config, list(point))

    def launch(self, folder: Path, job: Job, points: Sequence[Sequence[str]]) -> None:
        """Run ``job`` for each of ``points`` through Hydra's launcher. A searching sweeper chooses its own points
        instead.

        The launcher writes its own files to ``folder``. An error of the launcher is raised again with a message of one
        line.
        """
        from hydra._internal.callbacks import Callbacks
        from hydra.core.plugins import Plugins
        from hydra.types import HydraContext

        with self._opened(folder) as (hydra, config), _errors_in_one_line(self.hydra):
            task = _Task(job)
            if self.points is None:
                hydra.multirun("config", task, self._overrides(folder), False)
                return
            callbacks = Callbacks(config)
            callbacks.on_multirun_start(config=config, config_name="config")
            launcher = Plugins.instance().instantiate_launcher(
                hydra_context=HydraContext(config_loader=hydra.config_loader, callbacks=callbacks),
                task_function=task,
                config=config,
            )
            first = 0
            for batch in _batches(points, config.hydra.sweeper.get("max_batch_size")):
                for result in launcher.launch(batch, initial_job_idx=first):
                    _ = result.return_value  # raises what the job has raised
                first += len(batch)
            callbacks.on_multirun_end(config=config, config_name="config")

    @contextlib.contextmanager
    def _opened(self, folder: Path = Path()) -> Iterator[tuple[Hydra, DictConfig]]:
        """A context in which Hydra is open. It yields Hydra, and the sweep's configuration as Hydra composed it.

        ``folder``: the folder for the launcher's own files.
        """
        from hydra.types import RunMode

        with opened(self.options, configuration.nodes()) as hydra:
            with _errors_in_one_line(self.hydra):
                config = hydra.compose_config(
                    config_name="config",
                    overrides=self._overrides(folder),
                    run_mode=RunMode.MULTIRUN,
                    with_log_configuration=False,
                )
            yield hydra, config

    def _overrides(self, folder: Path) -> list[str]:
        return [*self.options.overrides, *_settings(folder, self.hydra), *self.overrides]


def _settings(folder: Path, typed: Sequence[str]) -> list[str]:
    """Return the overrides that set Hydra's own settings, such as ``hydra.sweep.dir``.

    They are the overrides that the user has ``typed``, and others by Parallax. Those of Parallax stop Hydra from
    creating folders and logs, because each run creates its own. ``folder``: the folder for the files of Hydra's
    launcher.
    """
    ours = {
        "hydra.sweep.dir": quoted(str(folder)),
        "hydra.sweep.subdir": "'.'",
        "hydra.output_subdir": "null",
        "hydra.mode": "MULTIRUN",
        "hydra.job.name": quoted(folder.name or "parallax"),
        "hydra/hydra_logging": "none",
        "hydra/job_logging": "none",
    }
    for word in typed:
        ours.pop(word.lstrip("+~").partition("=")[0], None)
    return [*(f"{key}={value}" for key, value in ours.items()), *typed]


def of_hydra(word: str) -> bool:
    """Return whether the override ``word`` sets one of Hydra's own settings."""
    return word.lstrip("+~").startswith(("hydra.", "hydra/"))


def plain(word: str) -> str:
    """Return ``word``, an override of a point in Hydra's syntax, as a user would type it: ``++seed=1`` becomes
    ``seed=1``."""
    word = word.lstrip("+")
    return word.removesuffix("=null") if word.startswith("~") else word


def hydra_tree(overrides: Sequence[str], *, resolve: bool = False) -> dict[str, Any]:
    """Return Hydra's own settings under ``overrides``, as plain data.

    ``resolve``: replace each interpolation ``${...}`` by its value; otherwise interpolations stay as written.
    """
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    options, others = OptionFolders.of(overrides)
    typed = [_own(word) for word in others if of_hydra(word)]
    with opened(options, configuration.nodes()) as hydra, _errors_in_one_line(tuple(typed)):
        config = hydra.compose_config(
            config_name="config",
            overrides=[*options.overrides, *_settings(Path("runs/SWEEP"), typed)],
            run_mode=RunMode.RUN,
            with_log_configuration=False,
        )
        kept = [key for key in config.hydra if key not in ("help", "hydra_help")]
        tree = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
        if resolve:
            with _hydra_config(config):
                shown = OmegaConf.masked_copy(config.hydra, kept)
                shown._set_parent(config)
                tree = {"hydra": OmegaConf.to_container(shown, resolve=True, enum_to_str=True)}
    found: dict[str, Any] = typing.cast(dict[str, Any], tree)["hydra"]
    return {key: found[key] for key in kept}


@contextlib.contextmanager
def _hydra_config(config: DictConfig) -> Iterator[None]:
    """A context in which ``${hydra:...}`` resolves to the values of ``config``."""
    from hydra.core.hydra_config import HydraConfig

    known = HydraConfig.instance()
    before = known.cfg
    known.set_config(config)
    try:
        yield
    finally:
        known.cfg = before


@dataclass(frozen=True)
class _Task:
    """The function that Hydra calls for each point.

    It ignores the configuration that Hydra passes, because the run composes its own from the point's overrides.
    """

    job: Job

    def __call__(self, config: DictConfig) -> float:
        from hydra.core.hydra_config import HydraConfig

        del config
        return self.job([plain(word) for word in HydraConfig.get().overrides.task])


def _own(word: str) -> str:
    """Return ``word``, an override of one of Hydra's own settings.

    Raises :class:`ConfigError` if users must not change this setting.
    """
    if word.lstrip("+~").startswith(_FOLDERS):
        refuse(word, "a point is a run of its own, in runs/SWEEP/POINT; accepted is name=SWEEP")
    return word


def _typed(others: Sequence[str], options: OptionFolders) -> tuple[str, dict[str, str]]:
    """Return the name of the sweep, and {key: override in Hydra's syntax} for all other overrides.

    The last override of a key counts. An override that sets a value gets the prefix ``++``, because Hydra may not know
    the key, as in ``model.kwargs``.
    """
    name, typed, mistakes = "auto", {}, Mistakes()
    for word in others:
        with mistakes.collecting():
            override = configuration.parse(word, options, sweeps=True)
            key = str(override.key_or_group)
            if key == "name":
                name = _name(word, override)
            elif key in options.groups:
                _, sign, value = word.partition("=")
                typed[key] = options.chosen(key, value) if sign else word
            else:
                typed.pop(key, None)
                typed[key] = word if override.is_delete() else f"++{word.lstrip('+')}"
    mistakes.raise_collected()
    return name, typed


def _name(word: str, override: Any) -> str:
    if override.is_sweep_override() or not configuration.is_name(str(override.value())):
        refuse(
            word, "accepted is one folder name for the sweep; its points are named by what differs"
        )
    if "/" in (name := str(override.value())):
        refuse(
            word, "the name of a point is made of the settings that differ; name= names the sweep"
        )
    return name


def _product(
    hydra: Hydra, config: DictConfig, typed: dict[str, str], options: OptionFolders
) -> tuple[tuple[tuple[str, ...], ...] | None, frozenset[str]]:
    """Return the points of the sweep, and the keys that have one value in all points.

    If the sweeper is not Hydra's basic one, it chooses points while the sweep runs, so None is returned for the points.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    basic = str(config.hydra.sweeper._target_).endswith(f".{_BASIC}")
    if basic:
        params = (config.hydra.sweeper.params or {}).items()
        typed = _typed([f"{key}={value}" for key, value in params], options)[1] | typed
    with _errors_in_one_line(()):
        parser = OverridesParser.create(config_loader=hydra.config_loader)
        found = parser.parse_overrides(list(typed.values()))
        several = {key for key, each in zip(typed, found) if each.is_sweep_override()}
        alike = frozenset(typed.keys() - several)
        if not basic:
            return None, alike
        points = [tuple(point) for point in BasicSweeper.split_arguments(found, None)[0]]
    return tuple(dict.fromkeys(points)), alike


def _batches(points: Sequence[Sequence[str]], most: int | None) -> Iterator[list[list[str]]]:
    size = most if most is not None and most > 0 else max(1, len(points))
    for first in range(0, len(points), size):
        yield [list(point) for point in points[first : first + size]]


@contextlib.contextmanager
def _errors_in_one_line(typed: tuple[str, ...]) -> Iterator[None]:
    """A context that replaces errors of Hydra and its plug-ins by a :class:`ParallaxError` with a message of one line.

    Invalid settings raise :class:`ConfigError`. ``typed`` are the user's overrides of Hydra's settings, for the
    message.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except ParallaxError:
        raise
    except Exception as error:
        shown, command = _shown(error), printable(" ".join(typed))
        if "submitit" in command and "submitit" in shown:
            shown += "; is it installed? pip install 'parallax-train[slurm]'"
        known = isinstance(error, HydraException | OmegaConfBaseException)
        text = f"{command}: {shown}" if command else shown
        raise (ConfigError if known else ParallaxError)(text) from None


def _shown(error: Exception) -> str:
    """Return the text of a Hydra error, without the parts that are meant for Hydra's developers."""
    message = " ".join(str(error).split()) or type(error).__name__
    if found := _NO_OPTION.match(message):
        accepted = found[3].split()
        return printable(
            f"{found[1]}={found[2]}: unknown option; accepted are {', '.join(accepted)}"
            f"{nearest(found[2], accepted)}"
        )
    if message.startswith("Error merging override") and error.__cause__ is not None:
        message = f"{message}: {' '.join(str(error.__cause__).split())}"
    for rest in (" Config search path:", " full_key:", " To append to your config"):
        message = message.partition(rest)[0]
    return printable(message if len(message) <= _LONGEST else f"{message[: _LONGEST - 3]}...")
