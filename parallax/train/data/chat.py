"""Rows of conversations, with the assistant's tokens as the only targets of the loss.

All conversations are rendered with the tokenizer's chat template and tokenized once, into a file that all ranks map. So
all errors appear before the first step, and no parsing or tokenizing happens during training.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parallax.common.documents import SMALL_BYTES, read_text
from parallax.errors import ConfigError, DataError, check_choice, printable
from parallax.model.source import ModelConfig
from parallax.plan.tier import AUTO
from parallax.train.data.indexed import IndexedDataConfig
from parallax.train.data.paths import check_sets, data_path, files_below
from parallax.train.data.progress import progress
from parallax.train.data.source import Shapes
from parallax.train.data.table import Table
from parallax.train.data.token_file import (
    NO_TARGET,
    DocumentRows,
    TokenFile,
    TokenTable,
    TokenWriter,
    check_vocabulary,
    open_token_file,
)
from parallax.train.data.tokenizer import (
    digest_of_tokenizer,
    load_pretrained,
    needs_library,
    parallel_encoding,
    plain,
    version_of,
)

logger = logging.getLogger("parallax")

TOO_LONG = ("truncate", "drop")
PAIRS = (
    ("prompt", "completion"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("prompt", "response"),
    ("query", "response"),
    ("input", "output"),
)
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "ai", "bot", "bing"), "assistant"),
    "function_call": "assistant",
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
"""Names of roles, in lower case, and the role that the template knows."""
_SUFFIXES = (".jsonl", ".parquet")
_READ = (*_SUFFIXES, ".ndjson", ".json")  # as a file by name
_LARGEST_JSON = 2**31  # bytes
_LONGEST_LINE = 2**26  # bytes
_BATCH = 512  # conversations that are tokenized at once
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Messages = list[dict[str, Any]]
Spans = list[tuple[int, int]]
Advance = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class ChatDataConfig(IndexedDataConfig):
    """Conversations. Only the assistant's tokens are targets of the loss.

    ``path``: a ``.jsonl`` or ``.parquet`` file, a folder with such files, or a ``.json`` file with one list.
    ``tokenizer``: a folder written by ``save_pretrained`` of transformers.
    ``template``: a file with a chat template; auto uses the tokenizer's template.
    ``too_long``: truncate shortens a conversation to its first ``model.sequence`` tokens, and skips it if none of them
        is the assistant's; drop skips every longer conversation.
    """

    name: str = "chat"
    path: str = ""
    tokenizer: str = ""
    template: str = AUTO
    too_long: str = TOO_LONG[0]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("data.too_long", self.too_long, TOO_LONG)

    @property
    def pads_rows(self) -> bool:
        return True

    def table(self, model: ModelConfig, *, quiet: bool = True) -> Table:
        """Return the conversations as rows. For a model of transformers, the inputs include the labels."""
        labelled = model.name == "huggingface"
        length = model.sequence if labelled else model.sequence + 1
        found = self._tokenized(model, quiet=quiet)
        rows = self._rows(found, length, quiet=quiet)
        fingerprint = (
            f"{found.digest[:16]}/{self.too_long}/{length}{' labelled' if labelled else ''}"
        )
        vocabulary, padding = found.notes["vocabulary"], found.notes["padding"]
        return TokenTable(rows, fingerprint, vocabulary, padding=padding, labelled=labelled)

    def shapes(self, model: ModelConfig) -> Shapes | None:
        if model.name == "huggingface":
            return None

        def conversations(rows: int) -> tuple[tuple[Tensor, ...], Tensor]:
            tokens = torch.empty(rows, model.sequence, dtype=torch.int64, device="meta")
            return (tokens,), tokens

        return conversations

    def tokens_per_row(self, model: ModelConfig) -> int:
        return model.sequence

    def _tokenized(self, model: ModelConfig, *, quiet: bool) -> TokenFile:
        """Return the tokens of all conversations, mapped from their cache file. The tokenizer is loaded only if there
        is no cache file yet."""
        files = _find(data_path("data.path", self.path), self.path)
        stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        named = f"data.tokenizer={printable(self.tokenizer)}"

        def write(writer: TokenWriter) -> None:
            template = ChatTemplate.open(folder, text, named)
            check_vocabulary(model, template.vocabulary, named)
            writer.begin(np.uint32, vocabulary=template.vocabulary, padding=template.padding)
            with progress(
                "tokenizing", sum(size for _, size, _ in stats), quiet=quiet, in_bytes=True
            ) as advance:
                _write(_examples(files, advance), template, writer)

        folder, text = self._template()
        known = [stats, digest_of_tokenizer(folder), text, version_of("transformers")]
        found = open_token_file("chat", known, write)
        check_vocabulary(model, found.notes["vocabulary"], named)
        return found

    def _template(self) -> tuple[Path, str]:
        """Return the folder of the tokenizer, and the text of the file ``template``, or "" for the tokenizer's own
        template."""
        folder = data_path("data.tokenizer", self.tokenizer) if self.tokenizer else None
        if folder is None or not folder.is_dir():
            raise ConfigError(
                f"data.tokenizer={printable(self.tokenizer)}: data=chat needs a folder that save_pretrained of "
                "transformers wrote, for the special tokens"
            )
        if self.template == AUTO:
            return folder, ""
        try:
            return folder, read_text(data_path("data.template", self.template), SMALL_BYTES)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"data.template={printable(self.template)}: it cannot be read ({error}); name a text file"
            ) from error

    def _rows(self, found: TokenFile, length: int, *, quiet: bool) -> DocumentRows:
        """Return one row for each conversation that has a target among its first ``length`` tokens."""
        starts = np.concatenate([np.zeros(1, dtype=np.int64), found.ends[:-1]])
        sizes = found.ends - starts
        long = sizes > length
        kept = ~long if self.too_long == "drop" else found.firsts < np.minimum(sizes, length)
        if not kept.any():
            raise DataError(
                f"{self.label}: no conversation has an answer within model.sequence tokens; the shortest has "
                f"{sizes.min():,}: set a longer model.sequence"
            )
        if long.any() and not quiet:
            logger.warning(
                "data.path=%s: of %d conversations, %d are longer than %d tokens: %d are truncated, %d left out "
                "(data.too_long=%s)",
                printable(self.path),
                len(sizes),
                long.sum(),
                length,
                (long & kept).sum(),
                (~kept).sum(),
                self.too_long,
            )
        starts, stops = starts[kept], np.minimum(found.ends, starts + length)[kept]
        return DocumentRows(found.tokens, starts, stops, length)


# ------------------------------------------------------------------------------------------ template


class ChatTemplate:
    """A chat template and its tokenizer."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        import tokenizers

        self._special, self._template = tokenizer.special_tokens_map, template
        self._marked = _GENERATION.search(template) is not None
        self._backend = plain(tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()))
        self.vocabulary = max(tokenizer.get_vocab().values(), default=-1) + 1
        ids = tokenizer.pad_token_id, tokenizer.eos_token_id, 0
        self.padding = next(each for each in ids if each is not None)

    @classmethod
    def open(cls, folder: Path, template: str, named: str) -> ChatTemplate:
        """Return the template whose text is ``template``, or the tokenizer's own template if ``template`` is "".
        ``folder``: the tokenizer's folder. ``named``: the setting that error messages name."""
        tokenizer = load_pretrained(folder)
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ConfigError(
                f"{named}: a {type(tokenizer).__name__} does not say which characters a token has; save the tokenizer "
                "with a tokenizer.json"
            )
        try:
            template = template or tokenizer.get_chat_template()
        except ValueError as error:
            raise ConfigError(
                f"{named}: it has no chat template; give a file with one (data.template=FILE)"
            ) from error
        return cls(tokenizer, template)

    def render(self, messages: Messages, tools: Any, where: str) -> tuple[str, Spans]:
        """Return the text of a conversation with these ``messages`` and ``tools``, and the character range (start, end)
        of each answer in it. Errors name the place ``where``.

        If the template has ``{% generation %}`` blocks, these are the answers. Otherwise the conversation is rendered
        twice for each answer: once up to the prompt for the answer, and once up to the end of the answer. The answer is
        the difference.
        """
        if "tool_calls" not in self._template and any(each.get("tool_calls") for each in messages):
            raise DataError(
                f"{where}: it has tool calls, which the chat template does not write; give a template that does "
                "(data.template=FILE), or remove them"
            )
        if self._marked:
            text, spans = self._rendered(messages, tools, where)
            return text, _weighted(messages, spans, where)
        (text, _), spans = self._rendered(messages, tools, where), Spans()
        for place, message in enumerate(messages):
            if message["role"] != "assistant" or message.get("weight") == 0:
                continue
            before, _ = self._rendered(messages[:place], tools, where, prompts=True)
            through, _ = self._rendered(messages[: place + 1], tools, where)
            if not (text.startswith(through) and through.startswith(before)):
                raise DataError(
                    f"{where}: the chat template writes message {place + 1} in another way when it is the last one, so "
                    "the assistant's tokens cannot be found; give a template that marks them with {% generation %} "
                    "(data.template=FILE)"
                )
            spans.append((len(before), len(through)))
        return text, spans

    def _rendered(
        self, messages: Messages, tools: Any, where: str, *, prompts: bool = False
    ) -> tuple[str, Spans]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            (text,), spans = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=self._template,
                return_assistant_tokens_mask=self._marked,
                add_generation_prompt=prompts,
                **self._special,
            )
            text.encode()
        except Exception as error:  # templates raise whatever they find wrong
            said = " ".join(str(error).split())
            raise DataError(
                f"{where}: the chat template does not accept it ({printable(f'{type(error).__name__}: {said:.200}')})"
            ) from error
        return text, spans[0] if spans else []

    def encode(self, texts: list[str]) -> list[tuple[list[int], Spans]]:
        """Return the ids of each text, and the character range (start, end) of each token."""
        found = self._backend.encode_batch(texts, add_special_tokens=False)
        return [(each.ids, each.offsets) for each in found]


def _weighted(messages: Messages, spans: Spans, where: str) -> Spans:
    """Return the ``spans`` of the answers, except answers whose message has weight 0."""
    weights = [each.get("weight") for each in messages if each["role"] == "assistant"]
    if 0 not in weights:
        return spans
    if len(weights) != len(spans):
        raise DataError(
            f"{where}: it has answers of weight 0, and the template marks {len(spans)} parts of {len(weights)} "
            "answers; give a template that marks each answer once (data.template=FILE), or remove the weights"
        )
    return [span for span, weight in zip(spans, weights) if weight != 0]


def marked(ids: list[int], offsets: Spans, spans: Spans) -> NDArray[np.int64]:
    """Return ``ids``, with ``NO_TARGET`` added to the ids of tokens that lie outside of all ``spans``. ``offsets``: the
    character range (start, end) of each token."""
    found = np.asarray(ids, dtype=np.int64) + NO_TARGET
    places = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    for start, stop in spans:
        inside = np.flatnonzero((places[:, 1] > start) & (places[:, 0] < stop))
        if len(inside):
            found[inside[0] : inside[-1] + 1] &= NO_TARGET - 1
    return found


# ------------------------------------------------------------------------------------------ files


def _find(path: Path, text: str) -> list[Path]:
    """Return the conversation files: ``path`` itself, or the files in this folder, sorted."""
    if path.is_dir():
        label = f"data.path={printable(text)}"
        names = files_below(path, _SUFFIXES, label)
        check_sets(path, names, label)
        found = sorted(path / each for each in names)
    else:
        found = [path] if path.suffix.lower() in _READ else []
    if not found:
        raise DataError(
            f"data.path={printable(text)}: no conversations there; accepted are {' and '.join(_SUFFIXES)} files, a "
            "folder of them, and one .json file with a list; decompress other files, or convert them"
        )
    return found


def _write(
    examples: Iterator[tuple[str, Any]], template: ChatTemplate, writer: TokenWriter
) -> None:
    with parallel_encoding(template.encode) as encode:
        for batch in _batches(examples):
            rendered = [
                template.render(conversation(example, where), _tools(example, where), where)
                for where, example in batch
            ]
            encoded = encode([text for text, _ in rendered])
            for (where, _), (_, spans), (ids, offsets) in zip(batch, rendered, encoded):
                tokens = marked(ids, offsets, spans)
                targets = np.flatnonzero(tokens[1:] < NO_TARGET)
                if not len(targets):
                    raise DataError(f"{where}: it has no answer of the assistant; remove it")
                writer.add(tokens)
                writer.end_document(int(targets[0]) + 1)


def _batches(examples: Iterator[tuple[str, Any]]) -> Iterator[list[tuple[str, Any]]]:
    found = []
    for each in examples:
        found.append(each)
        if len(found) == _BATCH:
            yield found
            found = []
    yield found


def _examples(files: list[Path], advance: Advance) -> Iterator[tuple[str, Any]]:
    """Yield (place, example) pairs, where place names the file and line for error messages."""
    for file in files:
        kinds = {".parquet": _of_parquet, ".json": _of_list}
        read = kinds.get(file.suffix.lower(), _of_lines)
        for where, example in read(file, advance):
            if not isinstance(example, Mapping):
                raise DataError(f"{where}: it is a {type(example).__name__}, and must be a mapping")
            yield where, example


def _of_lines(path: Path, advance: Advance) -> Iterator[tuple[str, Any]]:
    name, number = printable(str(path)), 0
    with path.open("rb") as file:
        while line := file.readline(_LONGEST_LINE):
            number += 1
            advance(len(line))
            if len(line) == _LONGEST_LINE:
                raise DataError(f"{name}, line {number}: it is longer than {_LONGEST_LINE:,} bytes")
            if not line.strip():
                continue
            try:
                yield f"{name}, line {number}", json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{name}, line {number}: it is no JSON ({printable(str(error)):.200}); correct or remove the line"
                ) from error


def _of_list(path: Path, advance: Advance) -> Iterator[tuple[str, Any]]:
    name = printable(str(path))
    try:
        found = json.loads(read_text(path, _LARGEST_JSON))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{name}: it is no JSON ({printable(str(error)):.200}); a file with an object in each line is named .jsonl"
        ) from error
    if not isinstance(found, list):
        raise DataError(f"{name}: it is a {type(found).__name__}, and must be a list of examples")
    advance(path.stat().st_size)
    for number, example in enumerate(found):
        yield f"{name}, example {number + 1}", example


def _of_parquet(path: Path, advance: Advance) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise needs_library("pyarrow", "parquet") from error
    name, number, size = printable(str(path)), 0, path.stat().st_size
    try:
        with parquet.ParquetFile(path) as file:
            rows = max(1, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=_BATCH):
                for example in batch.to_pylist():
                    number += 1
                    yield f"{name}, row {number}", example
                advance(size * len(batch) // rows)
    except (OSError, UnicodeError, pyarrow.ArrowException) as error:
        raise DataError(
            f"{name}, row {number + 1}: it cannot be read ({printable(str(error)):.200})"
        ) from error


def conversation(example: Mapping[str, Any], where: str) -> Messages:
    """Return the messages of an example.

    They are in the example's ``messages``, in its ``conversations`` (as ShareGPT writes them), or in a pair of question
    and answer. The example's ``system`` text, if any, becomes the first message. Raises :class:`DataError`, naming
    ``where``, for any other example.
    """
    lists = (example.get(key) for key in ("messages", "conversations"))
    if (found := next((each for each in lists if each is not None), None)) is None:
        found = _of_pair(example, where)
    found = _parsed(found, "messages", where)
    if not isinstance(found, list) or not found or not all(isinstance(m, Mapping) for m in found):
        raise DataError(f"{where}: its messages must be a list of mappings with role and content")
    messages = [_message(each, where) for each in found]
    system = example.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _tools(example: Mapping[str, Any], where: str) -> Any:
    return _parsed(example.get("tools"), "tools", where) or None


def _parsed(value: Any, key: str, where: str) -> Any:
    """Return ``value``; a JSON text is parsed."""
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where}: its {key} are a text that is no JSON ({printable(str(error)):.200})"
        ) from error


def _of_pair(example: Mapping[str, Any], where: str) -> Any:
    for asked, answered in PAIRS:
        question, answer = example.get(asked), example.get(answered)
        if isinstance(question, list) and isinstance(answer, list):
            return question + answer
        if isinstance(question, str) and isinstance(answer, str):
            more = example.get("input") or example.get("context")
            if asked == "instruction" and isinstance(more, str) and more:
                question = f"{question}\n\n{more}"
            return [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
    pairs = ", ".join("/".join(pair) for pair in PAIRS)
    raise DataError(
        f"{where}: its keys are {printable(', '.join(map(str, example)))}; accepted are messages, conversations, and "
        f"pairs of texts: {pairs}"
    )


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return ``message`` with role and content. ShareGPT's keys are renamed, a list of text parts is joined, and null
    keys, which Parquet files give to every message, are dropped. Raises :class:`DataError` for a message without role
    or content."""
    found = {key: value for key, value in message.items() if value is not None or key == "content"}
    if "role" not in found and "from" in found:
        name = str(found["from"])
        if name.lower() not in ROLES:
            raise DataError(
                f"{where}: a message is from {printable(name)}; accepted are {', '.join(ROLES)}"
            )
        found["content"] = found.get("value", found.get("content"))
        found = {"role": ROLES[name.lower()]} | {
            key: found[key] for key in ("content", "weight") if key in found
        }
    role = found.get("role")
    if not isinstance(role, str):
        raise DataError(
            f"{where}: a message has no role; accepted are mappings of role and content"
        )
    if (known := ROLES.get(role.lower())) in ("user", "assistant"):
        found["role"] = known
    if isinstance(parts := found.get("content"), list):
        texts = [
            each["text"]
            for each in parts
            if isinstance(each, Mapping) and each.get("type") == "text" and "text" in each
        ]
        found["content"] = "".join(map(str, texts)) if len(texts) == len(parts) else None
    if not isinstance(found.get("content"), str | int | float) and not found.get("tool_calls"):
        raise DataError(
            f"{where}: a message of {printable(role)} has no content, but the keys {printable(', '.join(found))}; "
            "accepted is a text, or a list of parts that are texts"
        )
    return found
