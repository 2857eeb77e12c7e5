"""Find broken images before the first step, by their sizes and headers.

All ranks and all epochs must have the same rows, so images with a broken header are skipped before rows are numbered.
An image with a valid header that cannot be decoded ends the run later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import IO, Protocol

import numpy as np

from parallax.common.units import parse_bytes
from parallax.errors import DataError
from parallax.train.data.decoding import SKIP, ImageDataConfig, ImageDecoder
from parallax.train.data.index import Index, cached, integers
from parallax.train.data.order import Numbers
from parallax.train.data.progress import progress
from parallax.train.data.stored import EncodedStore

logger = logging.getLogger("parallax")


class FileStore(EncodedStore, Protocol):
    """Encoded images that can also be opened as files."""

    def files(self, items: Numbers) -> Iterator[IO[bytes]]:
        """Yield an open file for each of ``items``. Each file is closed when the next is opened."""


def sound_items(
    config: ImageDataConfig,
    decoder: ImageDecoder,
    store: FileStore,
    digest: Callable[[], str],
    items: Numbers | None = None,
    *,
    quiet: bool = True,
) -> tuple[Numbers, list[int]]:
    """Return the numbers of the valid images among ``items`` of ``store`` (by default all), and those of the broken
    ones. With ``broken=skip``, headers are checked, and the result is cached for the images that ``digest()``
    identifies. Otherwise only sizes are checked, and a broken image raises :class:`DataError`."""
    items = np.arange(len(store.sizes)) if items is None else items
    limit = parse_bytes(config.max_file, "data.max_file")
    sizes = store.sizes[items]
    if config.broken != SKIP:
        wrong = np.flatnonzero((sizes == 0) | (sizes > limit))
        if len(wrong):
            first = int(items[wrong[0]])
            size = int(store.sizes[first])
            what = (
                f"has {size:,} bytes, more than data.max_file={config.max_file}"
                if size
                else "is empty"
            )
            more = f", as {len(wrong) - 1} more are" if len(wrong) > 1 else ""
            raise DataError(
                f"{store.where(first)}: it {what}{more}; remove it, or use data.broken=skip"
            )
        return items, []

    def check() -> Index:
        faults = dict[int, str]()
        with progress("checking images", len(items), quiet=quiet) as advance:
            for item, file in zip(items.tolist(), store.files(items)):
                try:
                    fault = decoder.fault(file, int(store.sizes[item]))
                except OSError as error:
                    raise DataError(
                        f"{store.where(item)}: it cannot be read ({error.strerror})"
                    ) from error
                if fault:
                    faults[item] = fault
                advance(1)
        return Index({"items": integers(faults)}, {"faults": list(faults.values())})

    key = [digest(), Index({"items": items}, {}).digest(), limit, config.max_pixels]
    found = cached("images-checked", key, check)
    broken = found.arrays["items"]
    if len(broken) and not quiet:
        logger.warning(
            "data.broken=skip: %d of %d images are broken and left out, the first of them %s: %s",
            len(broken),
            len(items),
            store.where(int(broken[0])),
            found.notes["faults"][0],
        )
    return items[~np.isin(items, broken)], broken.tolist()
