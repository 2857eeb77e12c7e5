"""Rows of tar files in WebDataset's format, in which the members of a sample are adjacent and share a name."""

from __future__ import annotations

import copy
import io
import tarfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import IO

import numpy as np

from parallax.errors import ConfigError, DataError, printable
from parallax.model.source import ModelConfig
from parallax.train.data.archives import Archives, check_head, find_archives
from parallax.train.data.checking import sound_items
from parallax.train.data.decoding import SKIP, ImageDataConfig, ImageDecoder
from parallax.train.data.fields import Choice, SampleField
from parallax.train.data.index import Index, NameList, Names, cached, integers
from parallax.train.data.order import Numbers, Seeds
from parallax.train.data.progress import progress
from parallax.train.data.source import Shapes
from parallax.train.data.stored import Encoded, EncodedStore, InMemory
from parallax.train.data.table import INPUTS, TARGETS, Values, timed

_BLOCK = 512  # bytes, of tar
_READ_AT_ONCE = 64  # members whose headers are checked


@dataclass(frozen=True, kw_only=True)
class ShardsDataConfig(ImageDataConfig):
    """Samples in tar files of WebDataset's format.

    ``path``: a folder of tar files, a glob, a name with a range (``'data.path="train-{000..099}.tar"'``), or a URL that
        fsspec reads. Adjacent members with the same name up to the first dot form a sample, and the rest of a name is
        the field.
    ``inputs``: the field of the inputs: image suffixes, ``npy`` or ``json:KEY``; each sample must have one of the
        fields listed.
    ``targets``: the field of the targets: ``cls`` (an integer as text), ``json:KEY`` or ``npy``.
    """

    name: str = "shards"
    path: str = ""
    inputs: list[str] | str = field(default_factory=lambda: ["jpg", "jpeg", "png", "webp"])
    targets: list[str] | str = "cls"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.choice(INPUTS)
        if self.choice(TARGETS).kind == "image":
            raise ConfigError(
                f"data.targets={self.targets}: images are no targets; accepted are cls, json:KEY and npy"
            )

    @property
    def label(self) -> str:
        return f"data.path={printable(self.path)}"

    def choice(self, part: str) -> Choice:
        """Return the fields that the setting ``part`` (inputs or targets) lists."""
        given = getattr(self, part)
        return Choice.of(f"data.{part}", given.split(",") if isinstance(given, str) else given)

    def shapes(self, model: ModelConfig) -> Shapes | None:
        kinds = self.choice(INPUTS).kind, self.choice(TARGETS).kind
        return super().shapes(model) if kinds == ("image", "number") else None

    def table(self, model: ModelConfig, *, quiet: bool = True) -> ShardTable:  # noqa: ARG002
        archives = find_archives(self.path, self.label)
        index = cached(
            "shards", archives.identity, partial(index_archives, archives, self.label, quiet=quiet)
        )
        members = Members(archives, index)
        choices = {part: self.choice(part) for part in (INPUTS, TARGETS)}
        chosen = {part: members.chosen(choice.names) for part, choice in choices.items()}
        rows = self._complete(members, chosen)
        decoder = None
        if choices[INPUTS].kind == "image":
            decoder = ImageDecoder(self)
            items, _ = sound_items(
                self, decoder, members, index.digest, chosen[INPUTS][rows], quiet=quiet
            )
            rows = rows[np.isin(chosen[INPUTS][rows], items)]
        store: EncodedStore = members
        found = {part: each[rows] for part, each in chosen.items()}
        if self.in_memory:
            items = np.concatenate(list(found.values()))
            store = InMemory(members, items, self.label, quiet=quiet)
        fields = {part: choice.field(decoder) for part, choice in choices.items()}
        return ShardTable(store, found, fields, members.fingerprint(rows))

    def _complete(self, members: Members, chosen: dict[str, Numbers]) -> Numbers:
        """Return the numbers of the samples that have both inputs and targets. ``chosen``: part (inputs, targets) → the
        member that each sample has for this part, or -1 if the sample has none. With ``broken=skip`` an incomplete
        sample is left out; otherwise it raises :class:`DataError`."""
        missing = {part: np.flatnonzero(each < 0) for part, each in chosen.items()}
        for part, samples in missing.items():
            if len(samples) and self.broken != SKIP:
                names = " or ".join(self.choice(part).names)
                held = ", ".join(members.fields_of(int(samples[0])))
                more = f", as {len(samples) - 1} more have not" if len(samples) > 1 else ""
                raise DataError(
                    f"{members.where_sample(int(samples[0]))} has no field {printable(names)} but {printable(held)}"
                    f"{more}: set data.{part}, write the fields of a sample one after another, or leave them out "
                    "(data.broken=skip)"
                )
        samples = np.arange(len(chosen[INPUTS]))
        return samples[(chosen[INPUTS] >= 0) & (chosen[TARGETS] >= 0)]


# ------------------------------------------------------------------------------------------------ index


def index_archives(archives: Archives, label: str, *, quiet: bool) -> Index:
    """Return an index with the archive, offset and size of each member of ``archives``."""
    found = _Samples()
    with progress("indexing shards", sum(archives.sizes), quiet=quiet) as advance:
        for number, size in enumerate(archives.sizes):
            with archives.opened(number) as file:
                for member in _members(file, size, archives.where(number)):
                    found.add(number, member, archives.where(number))
            advance(size)
    if not found.starts:
        raise DataError(
            f"{label}: no member of its {len(archives.sizes)} tar file(s) has a name NAME.FIELD"
        )
    return found.index()


class _Samples:
    """Collects the members of archives, grouped into samples."""

    def __init__(self) -> None:
        self.starts, self._names = array("q"), NameList()
        self._archives, self._offsets, self._sizes = array("q"), array("q"), array("q")
        self._numbers, self._fields = dict[str, int](), array("q")
        self._last: tuple[int, str] = -1, ""
        self._held = set[str]()

    def add(self, archive: int, member: tarfile.TarInfo, where: str) -> None:
        folder, _, base = member.name.rpartition("/")
        stem, _, name = base.partition(".")
        if not stem or not name:
            return
        name = name.lower()
        if (archive, key := f"{folder}/{stem}") != self._last:
            self._last, self._held = (archive, key), set()
            self.starts.append(len(self._offsets))
            self._names.append(key.lstrip("/").encode("utf-8", "surrogateescape"))
        if name in self._held:
            raise DataError(
                f"{where}: the member {printable(member.name)} at offset {member.offset} is there twice in its sample"
            )
        self._held.add(name)
        self._archives.append(archive)
        self._offsets.append(member.offset_data)
        self._sizes.append(member.size)
        self._fields.append(self._numbers.setdefault(name, len(self._numbers)))

    def index(self) -> Index:
        arrays = {
            "starts": self.starts,
            "archives": self._archives,
            "offsets": self._offsets,
            "sizes": self._sizes,
            "fields": self._fields,
        }
        names = [each.encode("utf-8", "surrogateescape").hex() for each in self._numbers]
        return Index(
            {key: integers(values) for key, values in arrays.items()} | self._names.arrays("names"),
            {"fields": names},
        )


def _members(file: IO[bytes], size: int, where: str) -> Iterator[tarfile.TarInfo]:
    """Yield the regular members of a tar file of ``size`` bytes. Raises :class:`DataError` for a damaged file."""
    check_head(file.read(8), where)
    file.seek(0)
    offset = 0
    try:
        with tarfile.open(fileobj=file, mode="r:", encoding="utf-8") as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # it would keep them all
                offset = member.offset
                if member.size < 0 or member.offset_data + member.size > size:
                    raise DataError(
                        f"{where}: the member {printable(member.name)} at offset {offset} has {member.size:,} bytes, "
                        f"more than follow: the file is cut off or damaged; copy it again"
                    )
                if member.isreg():
                    if member.issparse():
                        raise DataError(
                            f"{where}: the member {printable(member.name)} at offset {offset} is stored sparse; "
                            "write the tar file without sparse members"
                        )
                    yield member
            offset = archive.offset
            file.seek(offset)
            # The library takes a damaged header for the end.
            rest = file.read(_BLOCK)
            if rest.strip(b"\0") or len(rest) not in (0, _BLOCK):
                raise tarfile.ReadError("no header of a member")
    except (tarfile.TarError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        raise DataError(
            f"{where}: it is no tar file, or it is damaged at offset {offset} ({printable(str(error))}); copy it again"
        ) from error


# ------------------------------------------------------------------------------------------------- rows


class Members:
    """The members of the archives in an index."""

    def __init__(self, archives: Archives, index: Index) -> None:
        self._archives, self._index = archives, index
        self._places = index.arrays["archives"], index.arrays["offsets"], index.arrays["sizes"]
        self.sizes = index.arrays["sizes"]
        self._names = Names(index.arrays["names"], index.arrays["names_ends"])
        self._fields = [
            bytes.fromhex(each).decode("utf-8", "surrogateescape") for each in index.notes["fields"]
        ]

    def chosen(self, names: Sequence[str]) -> Numbers:
        """Return the index of one member for each sample: the member whose field comes first in ``names``, or -1 if the
        sample has none of these fields."""
        starts = self._index.arrays["starts"]
        found = np.full(len(starts), -1)
        for name in reversed(names):
            if name in self._fields:
                items = np.flatnonzero(self._index.arrays["fields"] == self._fields.index(name))
                found[np.searchsorted(starts, items, side="right") - 1] = items
        return found

    def read(self, items: Numbers) -> list[Encoded]:
        archives, offsets, sizes = (each[items] for each in self._places)
        return list(self._archives.read(archives, offsets, sizes))

    def files(self, items: Numbers) -> Iterator[IO[bytes]]:
        """Yield an open file for each of ``items``."""
        for first in range(0, len(items), _READ_AT_ONCE):
            for data in self.read(items[first : first + _READ_AT_ONCE]):
                yield io.BytesIO(data)

    def where(self, item: int) -> str:
        sample = int(np.searchsorted(self._index.arrays["starts"], item, side="right")) - 1
        archive, offset, _ = (int(each[item]) for each in self._places)
        name = f"{self._name(sample)}.{self._fields[self._index.arrays['fields'][item]]}"
        return f"{self._archives.where(archive)}: {printable(name)} at offset {offset}"

    def where_sample(self, sample: int) -> str:
        """Return the name of a sample, for error messages."""
        archive = int(self._index.arrays["archives"][self._index.arrays["starts"][sample]])
        return f"{self._archives.where(archive)}: the sample {printable(self._name(sample))}"

    def fields_of(self, sample: int) -> list[str]:
        starts = [*self._index.arrays["starts"], len(self.sizes)]
        items = self._index.arrays["fields"][starts[sample] : starts[sample + 1]]
        return [self._fields[each] for each in items]

    def fingerprint(self, rows: Numbers) -> str:
        """Return a digest of the names and sizes of all members, and of the selected ``rows``."""
        names = ("names", "names_ends", "starts", "fields", "sizes")
        arrays = {key: self._index.arrays[key] for key in names} | {"rows": rows}
        return f"{Index(arrays, self._index.notes).digest()[:16]}/{len(rows)}"

    def _name(self, sample: int) -> str:
        return self._names[sample].decode("utf-8", "surrogateescape")


class ShardTable:
    """A table of rows read from tar files. ``store``: the encoded members. ``items``: part (inputs, targets) → the
    index in ``store`` of each row's member. ``fields``: part → the decoder of its members."""

    whole = False

    def __init__(
        self,
        store: EncodedStore,
        items: dict[str, Numbers],
        fields: dict[str, SampleField],
        fingerprint: str,
    ) -> None:
        self._store, self._items, self._fields = store, items, fields
        self.fingerprint = fingerprint
        self.in_memory = isinstance(store, InMemory)

    def __len__(self) -> int:
        return len(self._items[INPUTS])

    def read(self, rows: Numbers, seeds: Seeds, parts: frozenset[str]) -> Values:
        return {part: self._read(part, self._items[part][rows], seeds) for part in parts}

    def _read(self, part: str, items: Numbers, seeds: Seeds) -> object:
        with timed("read"):
            encoded = self._store.read(items)
        return self._fields[part](
            encoded, seeds, lambda place: self._store.where(int(items[place]))
        )

    def plain(self) -> ShardTable:
        """Return the table for evaluation, without random augmentation."""
        found = copy.copy(self)
        found._fields = {part: each.plain() for part, each in self._fields.items()}
        return found
