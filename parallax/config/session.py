"""Open Hydra temporarily, with the folders of options and the defaults of Parallax's dataclasses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from parallax.config.options import OptionFolders

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra

Nodes = dict[tuple[str, str], dict[str, Any]]
"""{(group, name): default values of a dataclass}."""


@contextlib.contextmanager
def opened(options: OptionFolders, nodes: Nodes) -> Iterator[Hydra]:
    """Yield a Hydra object that knows the option files ``options`` and the default values ``nodes``.

    Hydra's global state is restored afterwards, because the caller may itself be a Hydra program. ``nodes`` are plain
    data: OmegaConf's typed nodes support neither frozen dataclasses nor ``int | str | list[int]``, and would raise
    their own errors in place of Parallax's.
    """
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.singleton import Singleton
    from hydra.core.utils import JobRuntime
    from hydra.version import VersionBase

    store = ConfigStore.instance()
    for (group, name), node in nodes.items():
        store.store(name=name, group=group, node=node)
    globals_: tuple[type, ...] = (GlobalHydra, JobRuntime, VersionBase)
    instances = Singleton._instances
    before = {kind: instances.pop(kind) for kind in globals_ if kind in instances}
    try:
        with hydra.initialize_config_dir(
            str(options.folders[0]), job_name="parallax", version_base="1.3"
        ):
            found = GlobalHydra.instance().hydra
            assert found is not None
            yield found
    finally:
        for kind in globals_:
            instances.pop(kind, None)
        instances.update(before)
        store.repo.pop("parallax", None)
