"""Find option files in Parallax's own folder and in the user's folders.

``--config-dir DIR`` adds a folder with the layout of ``configs/``, and so does Hydra's ``hydra.searchpath=[DIR]``. If
both have an option of the same name, Parallax's own file is used.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallax.common.typed import refuse
from parallax.errors import ConfigError, printable

SEARCHPATH = "hydra.searchpath"


@dataclass(frozen=True)
class OptionFolders:
    """The folders of option files, Parallax's own first.

    ``versions``: the modification times of all option files. Results are cached by them, so a changed file is read
    again.
    """

    folders: tuple[Path, ...]
    versions: tuple[int, ...]

    @classmethod
    def of(cls, overrides: Sequence[str] = ()) -> tuple[OptionFolders, list[str]]:
        """Return two results: the folders of option files, which are Parallax's own and those that ``overrides`` add,
        and the list of all other overrides."""
        added = [word for word in overrides if adds_folders(word)]
        folders = (_folder(), *(folder for word in added for folder in _folders(word)))
        return cls(folders, _versions(folders)), [
            word for word in overrides if not adds_folders(word)
        ]

    @functools.cached_property
    def groups(self) -> dict[str, list[str]]:
        """A dict from the name of each configuration group to the names of its option files."""
        found: dict[str, set[str]] = {}
        for folder in self.folders:
            for group in sorted(path for path in folder.iterdir() if path.is_dir()):
                names = {str(file.relative_to(group))[:-5] for file in group.rglob("*.yaml")}
                if names and group.name != "hydra":
                    found.setdefault(group.name, set()).update(names)
        return {group: sorted(names) for group, names in found.items()}

    def chosen(self, group: str, option: str) -> str:
        """Return the override that selects ``option`` in ``group``, in Hydra's syntax.

        A group that only the user's folders have needs the prefix ``+``.
        """
        ours = (self.folders[0] / group).is_dir()
        return f"{group}={option}" if ours else f"+{group}={option}"

    @property
    def overrides(self) -> list[str]:
        """A list with the override that adds the user's folders to Hydra's search path; empty if there are no such
        folders.
        """
        return [searchpath(*self.folders[1:])] if self.folders[1:] else []


def searchpath(*folders: Path) -> str:
    """Return the override that adds ``folders`` to Hydra's search path."""
    return f"{SEARCHPATH}=[{','.join(quoted(f'file://{folder.absolute()}') for folder in folders)}]"


def quoted(text: str) -> str:
    """Return ``text`` as a quoted value in Hydra's grammar."""
    return "'" + text.replace("\\'", "\\\\'").replace("'", "\\'") + "'"


def adds_folders(word: str) -> bool:
    """Return whether the override ``word`` adds folders of options."""
    return word.lstrip("+").partition("=")[0] == SEARCHPATH


def _folders(word: str) -> Iterator[Path]:
    """Yield the folders that the override ``word`` adds."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    accepted = f"accepted is a list of folders, {SEARCHPATH}=[FOLDER], or --config-dir FOLDER"
    try:
        value = OverridesParser.create().parse_override(word).value()
    except (HydraException, ValueError, RecursionError):
        refuse(word, f"cannot be read; {accepted}")
    for text in value if isinstance(value, list) else [value]:
        if not isinstance(text, str) or "://" in text.removeprefix("file://"):
            refuse(word, accepted)
        yield folder_of_options(SEARCHPATH, text.removeprefix("file://"))


def folder_of_options(what: str, text: str) -> Path:
    """Return the folder at the path ``text``. Raises :class:`ConfigError` if there is no such folder.

    ``what``: the setting or option with this path, for the message.
    """
    try:
        folder = Path(text).expanduser()
        if folder.is_dir():
            return folder
    except (OSError, ValueError, RuntimeError):
        pass
    refuse(f"{what} {text}", "there is no such folder; it holds options as ours: GROUP/OPTION.yaml")


def _versions(folders: Sequence[Path]) -> tuple[int, ...]:
    files = (file for folder in folders for file in sorted(folder.rglob("*.yaml")))
    return tuple(file.stat().st_mtime_ns for file in files)


def _folder() -> Path:
    """Return the folder of Parallax's own options.

    It is ``configs`` in the installed package or, in a checkout of the source, ``configs`` beside the package.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(
        f"configs/config.yaml is neither in {printable(str(package))} nor in "
        f"{printable(str(package.parent))}: reinstall parallax"
    )
