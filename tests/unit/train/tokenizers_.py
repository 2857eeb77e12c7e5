"""Tokenizers of several kinds, trained on the spot, and folders of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

END = "<|endoftext|>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}[{{ m['role'] }}]\n{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}\n{% endfor %}"
)
THINKING = (  # as of models that write reasoning into the last answer only
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and loop.last %}<think>"
    "{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
)
SPECIAL = [END, "<|im_start|>", "<|im_end|>", "<unk>"]
TEXT = [
    "def loss(self, outputs):\n    return outputs.mean()\n\n\n",
    "Rows have numbers, and the order is a permutation of them.\n",
    "  indented text\n\twith tabs, ünïcödé – and 数字\n",
    "one two three four five six seven eight nine ten\n\n",
]


@cache
def byte_bpe(size: int = 400) -> Tokenizer:
    """As of GPT-2."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    found.train_from_iterator(TEXT * 3, trainer)
    return found


@cache
def whole_bpe() -> Tokenizer:
    """As of Llama 2: no words are separated before merging, and each text gets a mark before its first word."""
    found = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    found.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    found.train_from_iterator([line for text in TEXT for line in text.splitlines()], trainer)
    return found


@cache
def unigram() -> Tokenizer:
    """As of T5."""
    found = Tokenizer(models.Unigram())
    found.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    found.train_from_iterator(TEXT * 3, trainer)
    return found


@cache
def wordpiece() -> Tokenizer:
    """As of BERT, with truncation and padding that data must not apply."""
    found = Tokenizer(models.WordPiece(unk_token="<unk>"))
    found.normalizer = normalizers.BertNormalizer()
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    found.train_from_iterator(TEXT * 3, trainer)
    found.post_processor = processors.TemplateProcessing(
        single=f"{END} $A <unk>", special_tokens=[(END, 0), ("<unk>", 3)]
    )
    return found


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte BPE": byte_bpe,
    "whole BPE": whole_bpe,
    "unigram": unigram,
    "WordPiece": wordpiece,
}


def save(folder: Path, tokenizer: Tokenizer | None = None, template: str = "") -> Path:
    """Write a folder as ``save_pretrained`` does, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_bpe()).save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "unk_token": "<unk>",
        "model_max_length": 8,
    }
    if template:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
