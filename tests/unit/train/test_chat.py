"""Conversations as rows: which tokens count, which are left out, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parallax.errors import ConfigError, DataError
from parallax.model.factory.gpt import GPTConfig
from parallax.model.factory.huggingface import HuggingFaceConfig
from parallax.train.data.chat import ChatDataConfig, ChatTemplate, conversation, marked
from parallax.train.data.indexed import IndexedSource
from parallax.train.data.token_file import NO_TARGET
from tests.unit.train.tokenizers_ import CHATML, KINDS, MARKED, THINKING, byte_bpe, save

pytest.importorskip("transformers")

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "one two"},
    {"role": "assistant", "content": "three  four"},
    {"role": "user", "content": "five\n"},
    {"role": "assistant", "content": "\nsix ünï\n\n"},
]
ANSWERS = ["three  four<|im_end|>\n", "\nsix ünï\n\n<|im_end|>\n"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "parallax"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return save(tmp_path / "tokenizer", template=CHATML)


def write(path: Path, *examples: Any) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in examples), encoding="utf-8")
    return path


def source(path: Path, tokenizer: Path, sequence: int = 200, **options: Any) -> IndexedSource:
    options = {"validation": 0, "shuffle": False} | options
    quiet = options.pop("quiet", True)
    model = options.pop("model", None) or GPTConfig(vocabulary=1000, sequence=sequence)
    config = ChatDataConfig(path=str(path), tokenizer=str(tokenizer), **options)
    found: IndexedSource = config.open(model, 0, quiet=quiet)
    return found


def text_of(ids: Any) -> str:
    return byte_bpe().decode([each for each in ids if each >= 0], skip_special_tokens=False)


def answers_of(targets: Any) -> list[str]:
    """The texts of the runs of targets that count."""
    runs, before = list[list[int]](), -100
    for each in targets:
        if each != -100:
            if before == -100:
                runs.append([])
            runs[-1].append(each)
        before = each
    return [text_of(run) for run in runs]


def rows_of(found: IndexedSource) -> tuple[list[list[int]], list[list[int]]]:
    batch, n = found.batch(len(found)), len(found)
    return batch.inputs(0, n).tolist(), batch.targets(0, n).tolist()


def test_the_answers_alone_count(tmp_path: Path, tokenizer: Path) -> None:
    found = source(write(tmp_path / "chat.jsonl", {"messages": CHAT}), tokenizer)
    (inputs,), (targets,) = rows_of(found)
    assert answers_of(targets) == ANSWERS
    whole = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CHAT)
    ids = byte_bpe().encode(whole, add_special_tokens=False).ids
    assert inputs[: len(ids)] == ids
    assert set(inputs[len(ids) :]) == {0}  # the end of text pads
    for place, target in enumerate(targets[: len(ids) - 1]):
        assert target in (-100, ids[place + 1])
    assert set(targets[len(ids) - 1 :]) == {-100}


def test_answers_that_the_template_marks(tmp_path: Path) -> None:
    tokenizer = save(tmp_path / "tokenizer", template=MARKED)
    found = source(write(tmp_path / "chat.jsonl", {"messages": CHAT}), tokenizer)
    (_,), (targets,) = rows_of(found)
    assert answers_of(targets) == ["three  four<|endoftext|>", "\nsix ünï\n\n<|endoftext|>"]


def test_the_mask_is_that_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = save(tmp_path / "tokenizer", template=MARKED)
    expected = AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(
        CHAT, return_dict=True, return_assistant_tokens_mask=True
    )
    found = source(write(tmp_path / "chat.jsonl", {"messages": CHAT}), folder)
    (inputs,), (targets,) = rows_of(found)
    ids, mask = expected["input_ids"], expected["assistant_masks"]
    assert inputs[: len(ids)] == list(ids)
    assert [target != -100 for target in targets[: len(ids) - 1]] == [bool(m) for m in mask[1:]]


@pytest.mark.parametrize("kind", KINDS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(
    chat=st.lists(
        st.tuples(st.text(" \nabc ün", max_size=12), st.text(" \nabc ün", max_size=12)),
        min_size=1,
        max_size=4,
    )
)
def test_spans_hold_exactly_the_answers(
    tmp_path: Path, kind: str, chat: list[tuple[str, str]]
) -> None:
    """Each counted token has a character of an answer, and each token with one counts."""
    folder = tmp_path / "tokenizer"
    if not folder.exists():
        save(folder, KINDS[kind](), CHATML)
    template = ChatTemplate.open(folder, "", "data.tokenizer")
    messages = [
        {"role": role, "content": content}
        for pair in chat
        for role, content in zip(("user", "assistant"), pair)
    ]
    text, spans = template.render(messages, None, "here")
    assert [text[a:b] for a, b in spans] == [f"{answer}<|im_end|>\n" for _, answer in chat]
    ((ids, offsets),) = template.encode([text])
    assert ids == KINDS[kind]().encode(text, add_special_tokens=False).ids
    tokens = marked(ids, offsets, spans)
    assert (tokens & (NO_TARGET - 1)).tolist() == ids
    inside = {place for a, b in spans for place in range(a, b)}
    for token, (a, b) in zip(tokens.tolist(), offsets):
        if a < b:
            assert (token < NO_TARGET) == bool(inside & set(range(a, b)))


def test_a_template_that_writes_the_last_answer_in_another_way_is_refused(tmp_path: Path) -> None:
    tokenizer = save(tmp_path / "tokenizer", template=THINKING)
    path = write(tmp_path / "chat.jsonl", {"messages": CHAT[:3]}, {"messages": CHAT})
    with pytest.raises(DataError, match=r"chat.jsonl, line 2: .* message 3 .*data.template=FILE"):
        source(path, tokenizer)
    (tmp_path / "marked.jinja").write_text(MARKED)
    assert len(source(path, tokenizer, template=str(tmp_path / "marked.jinja"))) == 2


PAIR = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]


@pytest.mark.parametrize(
    ("example", "messages"),
    [
        ({"messages": PAIR}, PAIR),
        ({"messages": None, "conversations": PAIR}, PAIR),
        (
            {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]},
            PAIR,
        ),
        ({"prompt": "one", "completion": "two"}, PAIR),
        ({"prompt": PAIR[:1], "completion": PAIR[1:]}, PAIR),
        ({"instruction": "one", "output": "two"}, PAIR),
        ({"instruction": "one", "input": "", "output": "two"}, PAIR),
        (
            {"instruction": "one", "input": "more", "output": "two"},
            [{"role": "user", "content": "one\n\nmore"}, PAIR[1]],
        ),
        ({"question": "one", "answer": "two", "id": 7}, PAIR),
        (
            {"instruction": "one", "context": "more", "response": "two"},
            [{"role": "user", "content": "one\n\nmore"}, PAIR[1]],
        ),
        ({"prompt": "one", "response": "two"}, PAIR),
        ({"query": "one", "response": "two"}, PAIR),
        ({"input": "one", "output": "two"}, PAIR),
        ({"messages": json.dumps(PAIR)}, PAIR),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "on"}, {"type": "text", "text": "e"}],
                    },
                    PAIR[1],
                ]
            },
            PAIR,
        ),
        ({"messages": [{**each, "role": each["role"].title()} for each in PAIR]}, PAIR),
        (
            {
                "messages": [
                    {"role": "human", "content": "one"},
                    {"role": "model", "content": "two"},
                ]
            },
            PAIR,
        ),
        (
            {
                "conversations": [
                    {"from": "Human", "value": "one", "text": None},
                    {"from": "GPT", "value": "two", "weight": 0},
                ]
            },
            [PAIR[0], {**PAIR[1], "weight": 0}],
        ),
        (
            {"system": "be brief", "question": "one", "answer": "two"},
            [{"role": "system", "content": "be brief"}, *PAIR],
        ),
    ],
    ids=str,
)
def test_examples_of_all_kinds(example: dict[str, Any], messages: Any) -> None:
    assert conversation(example, "here") == messages


@pytest.mark.parametrize(
    ("line", "expected_message"),
    [
        ('{"messages": [', "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ("[1, 2]", "it is a list, and must be a mapping"),
        ('{"text": "one"}', "its keys are text; accepted are messages, conversations, and pairs"),
        ('{"messages": []}', "its messages must be a list of mappings"),
        ('{"messages": "one"}', "its messages are a text that is no JSON"),
        (
            '{"messages": [{"role": "user", "text": "one"}]}',
            "user has no content, but the keys role, text",
        ),
        ('{"messages": [{"role": "user", "content": null}]}', "a message of user has no content"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
            "a message of user has no content, .* a list of parts that are texts",
        ),
        (
            '{"messages": [{"role": "assistant", "content": null, "tool_calls": [{}]}]}',
            "it has tool calls, which the chat template does not write",
        ),
        (
            '{"conversations": [{"from": "human", "text": "one"}]}',
            "a message of user has no content",
        ),
        ('{"messages": ["one"]}', "its messages must be a list of mappings"),
        ('{"messages": [{"content": "one"}]}', "a message has no role"),
        (
            '{"conversations": [{"from": "moderator", "value": "one"}]}',
            "a message is from moderator",
        ),
        ('{"messages": [{"role": "user", "content": "one"}]}', "no answer of the assistant"),
        ('{"question": "one", "answer": "\\ud800"}', "the chat template does not accept it"),
        ('{"question": "one", "answer": null}', "its keys are question, answer"),
        ('{"prompt": [], "completion": "two"}', "its keys are prompt, completion"),
    ],
    ids=str,
)
def test_a_corrupt_line_is_named_with_file_and_number(
    tmp_path: Path, tokenizer: Path, line: str, expected_message: str
) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(f"{json.dumps({'messages': PAIR})}\n\n{line}\n")
    with pytest.raises(DataError, match=expected_message) as error:
        source(path, tokenizer)
    assert str(error.value).startswith(f"{path}, line 3: ")
    assert "\n" not in str(error.value)


def test_answers_of_weight_0_are_no_targets(tmp_path: Path, tokenizer: Path) -> None:
    told = [*PAIR, PAIR[0], {"role": "assistant", "content": "three"}]
    weighted = [each | {"weight": int(place != 1)} for place, each in enumerate(told)]
    path = write(tmp_path / "chat.jsonl", {"messages": told}, {"messages": weighted})
    save(tmp_path / "marking", template=MARKED)
    for folder in (tokenizer, tmp_path / "marking"):
        batch = source(path, folder, shuffle=False).batch(2)
        assert torch.equal(*batch.inputs(0, 2))
        one, other = (batch.targets(0, 2) != -100).tolist()
        first = one.index(True)
        assert other.index(True) > one.index(False, first)
        assert [a for a, b in zip(one, other) if b] == [True] * sum(other)
    blocks = MARKED.replace(
        "{% generation %}", "{% generation %}{% endgeneration %}{% generation %}"
    )
    save(tmp_path / "twice", template=blocks)
    with pytest.raises(DataError, match=r"line 2: it has answers of weight 0"):
        source(path, tmp_path / "twice")


def test_a_json_file_holds_one_list(tmp_path: Path, tokenizer: Path) -> None:
    pair = {"messages": PAIR}
    lines = write(tmp_path / "chat.jsonl", pair, pair, {"messages": CHAT})
    (tmp_path / "chat.json").write_text(json.dumps([pair, pair, {"messages": CHAT}], indent=1))
    expected = rows_of(source(lines, tokenizer))
    assert rows_of(source(tmp_path / "chat.json", tokenizer)) == expected
    lines.rename(tmp_path / "chat.JSONL")
    assert rows_of(source(tmp_path / "chat.JSONL", tokenizer)) == expected
    for content, message in (
        ('{"messages": []}', "it is a dict, and must be a list of examples"),
        ('[{"text": "x"}]', "chat.json, example 1: its keys are text"),
        ("[1,", r"chat.json: it is no JSON .* in each line is named .jsonl"),
    ):
        (tmp_path / "chat.json").write_text(content)
        with pytest.raises(DataError, match=message):
            source(tmp_path / "chat.json", tokenizer)


def test_tools_may_be_a_text(tmp_path: Path, tokenizer: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    texts = [None, "", "[]", json.dumps(tools), tools]
    path = write(tmp_path / "chat.jsonl", *({"messages": PAIR, "tools": each} for each in texts))
    assert len(source(path, tokenizer)) == 5


def test_bytes_that_are_no_utf8_are_named_with_line(tmp_path: Path, tokenizer: Path) -> None:
    path = write(tmp_path / "chat.jsonl", {"messages": PAIR})
    path.write_bytes(path.read_bytes() + b'{"question": "\xff", "answer": "x"}')
    with pytest.raises(DataError, match=r"line 2: it is no JSON"):
        source(path, tokenizer)


def test_parquet_has_the_rows_of_lines(tmp_path: Path, tokenizer: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    examples = [{"messages": CHAT}, {"messages": PAIR}]
    parquet.write_table(pyarrow.Table.from_pylist(examples), tmp_path / "chat.parquet")
    found = source(tmp_path / "chat.parquet", tokenizer)
    assert rows_of(found) == rows_of(source(write(tmp_path / "chat.jsonl", *examples), tokenizer))
    (tmp_path / "chat.parquet").write_bytes(b"PAR1" + bytes(50) + b"PAR1")
    with pytest.raises(DataError, match=r"chat.parquet, row 1: it cannot be read") as error:
        source(tmp_path / "chat.parquet", tokenizer)
    assert "\n" not in str(error.value)
    parquet.write_table(pyarrow.Table.from_pylist([{"a": 1}]), tmp_path / "chat.parquet")
    with pytest.raises(DataError, match=r"chat.parquet, row 1: its keys are a"):
        source(tmp_path / "chat.parquet", tokenizer)
    (tmp_path / "folder").mkdir()
    (tmp_path / "chat.parquet").rename(os.fsdecode(bytes(tmp_path / "folder") + b"/\xff.parquet"))
    with pytest.raises(DataError, match=r"\\udcff.parquet, row 1: it cannot be read"):
        source(tmp_path / "folder", tokenizer)


def test_long_conversations_are_truncated_or_left_out_and_counted_once(
    tmp_path: Path, tokenizer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hidden = {"question": "x y " * 100, "answer": "never reached"}
    long = {"question": "one", "answer": "x y " * 100}
    path = write(tmp_path / "chat.jsonl", {"messages": PAIR}, hidden, long)
    found = source(path, tokenizer, 40, quiet=False)
    _, targets = rows_of(found)
    assert len(found) == 2
    assert answers_of(targets[0]) == ["two<|im_end|>\n"]
    assert targets[1][-1] != -100
    (message,) = caplog.messages
    assert "of 3 conversations, 2 are longer than 41 tokens: 1 are truncated, 1 left out" in message
    caplog.clear()
    assert len(source(path, tokenizer, 40, too_long="drop")) == 1
    assert len(source(path, tokenizer, 2000, quiet=False)) == 3
    assert not caplog.messages  # the ranks are quiet, and nothing is longer
    with pytest.raises(DataError, match=r"no conversation has an answer within model.sequence"):
        source(path, tokenizer, 4)


def test_models_of_transformers_get_labels(tmp_path: Path, tokenizer: Path) -> None:
    """Not shifted, which such a model does itself; so the loss is that of shifted targets."""
    path = write(tmp_path / "chat.jsonl", {"messages": CHAT}, {"messages": PAIR})
    config = {"vocab_size": 400, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = HuggingFaceConfig(architecture="LlamaForCausalLM", config=config, sequence=100)
    found = source(path, tokenizer, model=model).batch(2)
    inputs, targets = found.inputs(0, 2), found.targets(0, 2)
    assert list(inputs) == ["input_ids", "attention_mask", "labels"]
    assert torch.equal(inputs["labels"], targets)
    assert all(each.shape == (2, 100) and each.dtype == torch.int64 for each in inputs.values())
    plain = source(path, tokenizer, 99).batch(2)
    assert torch.equal(inputs["input_ids"][:, :-1], plain.inputs(0, 2))
    assert torch.equal(inputs["labels"][:, 1:], plain.targets(0, 2))
    lengths = inputs["attention_mask"].sum(1)
    assert lengths[0] > lengths[1] > 10
    torch.manual_seed(0)
    outputs = model.build()(**inputs)
    expected = torch.nn.functional.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), plain.targets(0, 2).flatten()
    )
    assert outputs.loss.item() == pytest.approx(expected.item())


def test_ranks_load_no_tokenizer(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command that starts them has tokenized all."""
    path = write(tmp_path / "chat.jsonl", {"messages": CHAT}, {"messages": PAIR})
    expected = rows_of(source(path, tokenizer))
    monkeypatch.delattr(ChatTemplate, "open")
    assert rows_of(source(path, tokenizer)) == expected


def test_tokenized_once_for_all_lengths(tmp_path: Path, tokenizer: Path, cache: Path) -> None:
    path = write(tmp_path / "chat.jsonl", {"messages": CHAT}, {"messages": PAIR})
    first = source(path, tokenizer)
    (written,) = cache.iterdir()
    stamp = written.stat().st_mtime_ns
    other = source(path, tokenizer, 20)
    assert written.stat().st_mtime_ns == stamp
    assert first.fingerprint != other.fingerprint
    path.rename(tmp_path / "moved.jsonl")
    assert source(tmp_path / "moved.jsonl", tokenizer).fingerprint == first.fingerprint
    assert first.unigram_entropy > 0


def test_files_of_a_folder_and_held_out_rows(tmp_path: Path, tokenizer: Path) -> None:
    folder = tmp_path / "chats"
    folder.mkdir()
    pairs = [{"question": f"q{i}", "answer": f"answer {i}"} for i in range(40)]
    write(folder / "b.jsonl", *pairs[20:])
    write(folder / "a.jsonl", *pairs[:20])
    (folder / "readme.md").write_text("about")
    found = source(folder, tokenizer)
    answers = [answers_of(each)[0] for each in rows_of(found)[1]]
    assert answers == [f"answer {i}<|im_end|>\n" for i in range(40)]
    assert source(folder, tokenizer, validation=0.1).validation_rows == 4


def test_wrong_settings_are_refused_in_one_line(tmp_path: Path, tokenizer: Path) -> None:
    path = write(tmp_path / "chat.jsonl", {"messages": PAIR})
    bare = save(tmp_path / "bare")
    for options, expected_message in (
        ({"path": bare}, "no conversations there; accepted are .jsonl and .parquet files"),
        ({"tokenizer": tokenizer / "tokenizer.json"}, "needs a folder that save_pretrained"),
        ({"tokenizer": bare}, r"bare: it has no chat template; .* \(data.template=FILE\)"),
        ({"template": tmp_path / "none"}, "data.template=.*none: No such file"),
        ({"too_long": "wrap"}, "data.too_long=wrap: accepted are truncate, drop"),
        ({"path": ""}, "data.path=: it is empty"),
        ({"tokenizer": ""}, "data.tokenizer=: data=chat needs a folder that save_pretrained"),
    ):
        given_options = {"path": path, "tokenizer": tokenizer} | options
        with pytest.raises((ConfigError, DataError), match=expected_message) as error:
            source(**{key: str(value) for key, value in given_options.items()})  # type: ignore[arg-type]
        assert "\n" not in str(error.value)
    with pytest.raises(
        ConfigError, match=r"model.vocabulary=300: data.tokenizer=.* has 3.. tokens"
    ):
        source(path, tokenizer, model=GPTConfig(vocabulary=300, sequence=9))


def test_a_template_runs_no_code_of_the_folder(tmp_path: Path) -> None:
    evil = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    tokenizer = save(tmp_path / "tokenizer", template=evil)
    with pytest.raises(DataError, match=r"line 1: the chat template does not accept it \(Security"):
        source(write(tmp_path / "chat.jsonl", {"messages": PAIR}), tokenizer)
