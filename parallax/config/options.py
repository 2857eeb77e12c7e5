"""Find option files: those of Parallax, and those in the user's folders.

``--config-dir DIR`` adds a folder with the layout of ``configs/``. Hydra's own ``hydra.searchpath=[DIR]`` does the
same. Parallax's files come first, so a user's file of the same name cannot hide them.
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
    """The folders of option files, Parallax's first. ``versions``: the latest modification time in each folder, by
    which cached results are recognized as outdated."""

    folders: tuple[Path, ...]
    versions: tuple[int, ...]

    @classmethod
    def of(cls, overrides: Sequence[str] = ()) -> tuple[OptionFolders, list[str]]:
        """Return the folders whose options ``overrides`` may choose, and the overrides without those that add
        folders."""
        added = [word for word in overrides if adds_folders(word)]
        folders = (_folder(), *(folder for word in added for folder in _folders(word)))
        return cls(folders, _versions(folders)), [
            word for word in overrides if not adds_folders(word)
        ]

    @functools.cached_property
    def groups(self) -> dict[str, list[str]]:
        """Return group → names of its option files."""
        found: dict[str, set[str]] = {}
        for folder in self.folders:
            for group in sorted(path for path in folder.iterdir() if path.is_dir()):
                names = {str(file.relative_to(group))[:-5] for file in group.rglob("*.yaml")}
                if names and group.name != "hydra":
                    found.setdefault(group.name, set()).update(names)
        return {group: sorted(names) for group, names in found.items()}

    def chosen(self, group: str, option: str) -> str:
        """Return the override that selects ``option`` in ``group``, in Hydra's syntax, which requires a prefix if only
        the user's folders have the group."""
        ours = (self.folders[0] / group).is_dir()
        return f"{group}={option}" if ours else f"+{group}={option}"

    @property
    def overrides(self) -> list[str]:
        """Return the override that makes Hydra find the user's folders; an empty list without such folders."""
        return [searchpath(*self.folders[1:])] if self.folders[1:] else []


def searchpath(*folders: Path) -> str:
    """Return the override that adds ``folders`` to Hydra's search path."""
    return f"{SEARCHPATH}=[{','.join(quoted(f'file://{folder.absolute()}') for folder in folders)}]"


def quoted(text: str) -> str:
    """Return ``text`` as a value of Hydra's grammar."""
    return "'" + text.replace("\\'", "\\\\'").replace("'", "\\'") + "'"


def adds_folders(word: str) -> bool:
    """Whether an override does nothing but add folders."""
    return word.lstrip("+").partition("=")[0] == SEARCHPATH


def _folders(word: str) -> Iterator[Path]:
    """Return the folders that an override adds."""
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
    """Return the existing folder that ``text`` names. Error messages call the option ``what``."""
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
    """Return the folder of Parallax's own options: ``configs`` in the installed package, or beside the package in a
    checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(
        f"configs/config.yaml is neither in {printable(str(package))} nor in "
        f"{printable(str(package.parent))}: reinstall parallax"
    )
