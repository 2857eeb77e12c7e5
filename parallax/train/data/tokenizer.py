"""Tokenizers from local files, and tokenized text files.

The library ``tokenizers`` reads a ``tokenizer.json``, and ``transformers`` reads any other folder. Neither downloads
anything or runs code from the folder. The only special token that is added is the end-of-text token after each
document.

A file longer than ``PIECE_BYTES`` is tokenized in pieces, with the same result as for the whole file. A piece ends
after a line if the next line does not start with a space, and if tokenizing both lines together gives the same tokens
as tokenizing them separately. Some tokenizers mark the beginning of a text, so each piece is tokenized together with
the line before it, whose tokens are then removed.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from parallax.common.documents import DOCUMENT_BYTES, read_json
from parallax.errors import ConfigError, DataError, printable
from parallax.train.data.paths import data_path
from parallax.train.data.token_file import TokenWriter

logger = logging.getLogger("parallax")

PIECE_BYTES = 2**18
LONGEST_PIECE = 2**24  # characters between two places where a file can be divided
_CONTEXT = 64  # characters of whole lines before a piece, at least
_TRIES = 16  # line ends at which to try to divide a piece, beginning with the last
_BATCH_TEXTS = 1024
_SETTINGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
_SUFFIXES = frozenset({".json", ".model", ".txt", ".tiktoken", ".jinja"})
_OF_MODELS = frozenset({"config.json", "generation_config.json", "model.safetensors.index.json"})
# Usual names of the end-of-text token, for tokenizers without settings; the most usual first.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")

Encoded = TypeVar("Encoded")
Encode = Callable[[list[str]], list[list[int]]]


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """A tokenizer.

    ``encode``      returns the ids of each text
    ``vocabulary``  the number of ids
    ``end``         the id of the end-of-text token; None if there is none
    ``digest``      a digest of the tokenizer's files and the library's version
    """

    encode: Encode
    vocabulary: int
    end: int | None
    digest: str


def open_tokenizer(text: str) -> TextTokenizer:
    """Return the tokenizer that the setting ``data.tokenizer`` names."""
    path = data_path("data.tokenizer", text)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        return _of_folder(path)
    found, settings = read_backend(file), path / "tokenizer_config.json"
    end = _end_of(settings, text) if settings.is_file() else None
    known = [end] if end else _ENDS
    ends = [token for token in map(found.token_to_id, known) if token is not None]
    return TextTokenizer(
        encoder(found),
        max(found.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        ends[0] if ends else None,
        digest_of_tokenizer(path),
    )


def read_backend(file: Path) -> Any:
    """Return the tokenizer of a ``tokenizer.json``, without truncation and padding."""
    try:
        import tokenizers
    except ImportError as error:
        raise needs_library("tokenizers") from error
    try:
        return plain(tokenizers.Tokenizer.from_file(str(file)))
    except Exception as error:  # the library has no class of its own
        raise DataError(
            f"data.tokenizer: {printable(str(file))} is no tokenizer.json ({_line(error)}); name the file or a folder "
            "that save_pretrained of transformers wrote"
        ) from error


def plain(backend: Any) -> Any:
    """Return ``backend``, a tokenizer of the library ``tokenizers``, without truncation, padding and additional special
    tokens."""
    backend.no_truncation()
    backend.no_padding()
    backend.post_processor = None
    return backend


def encoder(backend: Any) -> Encode:
    """Return the encoding function of ``backend``, a tokenizer of the library ``tokenizers``."""

    def encode(texts: list[str]) -> list[list[int]]:
        found = backend.encode_batch_fast(texts, add_special_tokens=False)
        return [each.ids for each in found]

    return encode


def load_pretrained(path: Path) -> Any:
    """Return the tokenizer in a folder written by ``save_pretrained`` of transformers."""
    try:
        import transformers
    except ImportError as error:
        raise needs_library("transformers") from error
    try:
        return transformers.AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # classes of transformers may raise anything
        raise DataError(
            f"data.tokenizer={printable(str(path))}: transformers cannot read it ({_line(error)}); name a "
            "tokenizer.json or a folder that save_pretrained wrote"
        ) from error


def needs_library(name: str, extra: str = "hf") -> ConfigError:
    """Return the error for the library ``name``, which is not installed. ``extra``: the optional part of Parallax's
    package with which the user can install the library."""
    return ConfigError(
        f"these data need {name}; install it with pip install 'parallax-train[{extra}]'"
    )


def digest_of_tokenizer(path: Path) -> str:
    """Return a digest of the tokenizer's files and the library's version."""
    if path.is_file():
        files = [path]
    elif (path / "tokenizer.json").is_file():
        names = ("tokenizer.json", *_SETTINGS)
        files = [path / name for name in names if (path / name).is_file()]
    else:
        files = [
            each
            for each in sorted(path.iterdir())
            if each.suffix in _SUFFIXES and each.name not in _OF_MODELS and each.is_file()
        ]
    found = hashlib.sha256(version_of("tokenizers").encode())
    for file in files:
        content = file.read_bytes()
        found.update(f"{file.name if path.is_dir() else ''} {len(content)} ".encode() + content)
    return found.hexdigest()


def version_of(library: str) -> str:
    """Return the version of a library; "" if it is not installed."""
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


def _of_folder(path: Path) -> TextTokenizer:
    """Return the tokenizer of a folder without ``tokenizer.json``."""
    found = load_pretrained(path)
    backend = getattr(found, "backend_tokenizer", None)

    def encode(texts: list[str]) -> list[list[int]]:
        return [found.encode(text, add_special_tokens=False) for text in texts]

    return TextTokenizer(
        encode if backend is None else encoder(plain(backend)),
        max(found.get_vocab().values(), default=-1) + 1,
        found.eos_token_id,
        digest_of_tokenizer(path),
    )


def _end_of(settings: Path, text: str) -> str | None:
    """Return the end-of-text token that the file ``settings`` (``tokenizer_config.json``) names; None if it names
    none."""
    try:
        found = read_json(settings, DOCUMENT_BYTES).get("eos_token")
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(
            f"data.tokenizer={printable(text)}: {settings.name} cannot be read ({_line(error)})"
        ) from error
    return found.get("content") if isinstance(found, dict) else found


def _line(error: Exception) -> str:
    return printable(f"{type(error).__name__}: {' '.join(str(error).split()):.200}")


# ------------------------------------------------------------------------------------------ files


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A piece of a document. ``before``: the preceding lines, which are tokenized with the piece as context.
    ``skipped``: the number of tokens of the preceding lines, which are removed from the result. ``ends``: whether this
    is the document's last piece."""

    text: str
    before: str = ""
    skipped: int = 0
    ends: bool = True


def write_tokens(
    tokenizer: TextTokenizer,
    files: Iterable[tuple[Path, int, bool]],
    writer: TokenWriter,
    advance: Callable[[int], None],
    *,
    lines: bool = False,
    field: str = "",
) -> None:
    """Write to ``writer`` the tokens of each file as one document. With ``lines``, write each non-empty line as a
    document instead. With ``field``, write the text at this key of each line's JSON object as a document. ``files``:
    (path, bytes to read, whether this is the whole file)."""
    reader = _Reader(tokenizer, advance, lines=lines, field=field)
    with parallel_encoding(tokenizer.encode) as encode:
        for pieces in _batches(reader.pieces(files)):
            for piece, ids in zip(pieces, encode([each.before + each.text for each in pieces])):
                writer.add(ids[piece.skipped :])
                if piece.ends:
                    writer.add([] if tokenizer.end is None else [tokenizer.end])
                    writer.end_document()
    if reader.not_utf8:
        logger.warning(
            "%d file(s) are not UTF-8, %s first: their other bytes became U+FFFD",
            len(reader.not_utf8),
            printable(str(reader.not_utf8[0])),
        )


class _Reader:
    """Reads text files in pieces that are tokenized separately."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        advance: Callable[[int], None],
        *,
        lines: bool,
        field: str = "",
    ) -> None:
        self._tokenizer, self._advance, self._lines = tokenizer, advance, lines
        self._field = field
        self.not_utf8: list[Path] = []

    def pieces(self, files: Iterable[tuple[Path, int, bool]]) -> Iterator[TextPiece]:
        for path, size, whole in files:
            texts = self._texts(path, size, whole=whole)
            if self._field:
                yield from self._of_objects(path, texts, whole=whole)
            else:
                yield from (
                    self._of_lines(path, texts) if self._lines else self._of_file(path, texts)
                )

    def _texts(self, path: Path, size: int, *, whole: bool) -> Iterator[str]:
        """Yield the text of a file in blocks. ``whole``: whether the file is read to its end. If not, an incomplete
        last character is dropped."""
        decoder, left = codecs.getincrementaldecoder("utf-8")("replace"), size
        with path.open("rb") as file:
            while left:
                if not (data := file.read(min(left, PIECE_BYTES))):
                    raise DataError(
                        f"{printable(str(path))} became shorter while it was read: start again"
                    )
                left -= len(data)
                text = decoder.decode(data, whole and not left)
                if (
                    "\ufffd" in text
                    and b"\xef\xbf\xbd" not in data
                    and path not in self.not_utf8[-1:]
                ):
                    self.not_utf8.append(path)
                yield text
                self._advance(len(data))

    def _of_lines(self, path: Path, texts: Iterator[str]) -> Iterator[TextPiece]:
        rest = ""
        for text in texts:
            *complete, rest = (rest + text).split("\n")
            yield from (TextPiece(line) for line in map(_without_return, complete) if line.strip())
            self._check_length(path, rest)
        if rest.strip():
            yield TextPiece(rest)

    def _of_objects(self, path: Path, texts: Iterator[str], *, whole: bool) -> Iterator[TextPiece]:
        """Yield the text of each line's JSON object. If only a part of the file is read, an incomplete last line is
        dropped."""
        rest, number = "", 0
        for text in itertools.chain(texts, ["\n"] if whole else []):
            *complete, rest = (rest + text).split("\n")
            for line in complete:
                number += 1
                where = f"{printable(str(path))}, line {number}"
                if line.strip() and (found := self._text_at(line, where)):
                    yield TextPiece(found)
            self._check_length(path, rest)

    def _text_at(self, line: str, where: str) -> str:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{where}: it is no JSON ({printable(str(error)):.200}); correct or remove the line"
            ) from error
        if not isinstance(found, dict) or not isinstance(text := found.get(self._field), str):
            held = ", ".join(found) if isinstance(found, dict) else type(found).__name__
            raise DataError(
                f"{where}: it has no text {printable(self._field)}, but {printable(held)}; name another field "
                "(data.field=KEY), or remove the line"
            )
        return text.encode("utf-8", "replace").decode("utf-8")  # half of a pair of surrogates

    def _of_file(self, path: Path, texts: Iterator[str]) -> Iterator[TextPiece]:
        rest, before, skipped = "", "", 0
        for text in texts:
            if len(rest) >= PIECE_BYTES and (place := self._boundary(rest)):
                yield TextPiece(rest[:place], before, skipped, ends=False)
                before, rest = _last_lines(rest[:place]), rest[place:]
                skipped = len(self._tokenizer.encode([before])[0])
            self._check_length(path, rest)
            rest += text
        yield TextPiece(rest, before, skipped)

    def _boundary(self, text: str) -> int:
        """Return a position where ``text`` can be divided without changing its tokens; 0 if there is none."""
        place = len(text)
        for _ in range(_TRIES):
            place = text.rfind("\n", 0, place - 1) + 1
            if place <= 0:
                return 0
            after = text[place : text.find("\n", place) + 1 or None]
            before = _last_lines(text[:place])
            if after[:1].isspace() or not after or not before.strip():
                continue
            one, both = self._tokenizer.encode([before, before + after])
            if both[: len(one)] == one and len(one) < len(both):
                return place
        return 0

    def _check_length(self, path: Path, text: str) -> None:
        if len(text) > LONGEST_PIECE:
            raise DataError(
                f"{printable(str(path))}: in {LONGEST_PIECE:,} characters there is no end of a line at which it can be "
                "divided; divide it into smaller files or shorter lines"
            )


def _without_return(line: str) -> str:
    return line.removesuffix("\r")


def _last_lines(text: str) -> str:
    """Return the end of ``text``: the fewest whole lines with at least ``_CONTEXT`` characters in total."""
    return text[text.rfind("\n", 0, max(0, len(text) - _CONTEXT)) + 1 :]


def _batches(pieces: Iterable[TextPiece]) -> Iterator[list[TextPiece]]:
    """Yield lists of pieces, each large enough to keep all cores busy."""
    found, size, most = list[TextPiece](), 0, 4 * PIECE_BYTES * _cores()
    for piece in pieces:
        found.append(piece)
        size += len(piece.text)
        if size >= most or len(found) >= 16 * _BATCH_TEXTS * _cores():
            yield found
            found, size = [], 0
    yield found


@contextlib.contextmanager
def parallel_encoding(
    encode: Callable[[list[str]], list[Encoded]],
) -> Iterator[Callable[[list[str]], list[Encoded]]]:
    """Yield a parallel version of ``encode`` that uses all cores of the process. Its threads end with the context. The
    library's own threads would not end, and the library would warn about them in each process that is forked later."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def checked(texts: list[str]) -> list[Encoded]:
        try:
            return encode(texts)
        except Exception as error:
            raise DataError(f"data.tokenizer: it cannot encode a text ({_line(error)})") from error

    try:
        with ThreadPoolExecutor(_cores()) as threads:
            yield lambda texts: [
                ids for each in threads.map(checked, _shares(texts)) for ids in each
            ]
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _shares(texts: list[str]) -> Iterator[list[str]]:
    """Yield lists of texts for one thread each, with about :data:`PIECE_BYTES` characters at most."""
    found, size = list[str](), 0
    for text in texts:
        found.append(text)
        size += len(text)
        if size >= PIECE_BYTES or len(found) >= _BATCH_TEXTS:
            yield found
            found, size = [], 0
    yield found


def _cores() -> int:
    return len(os.sched_getaffinity(0))
