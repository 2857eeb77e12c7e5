"""Questions and answers about Python's standard library, from its docstrings, and a tokenizer trained on them.

::

    python -m parallax.workloads.conversations conversations

writes ``conversations/chats.jsonl`` for ``data=chat`` and the folder ``conversations/tokenizer`` with a chat template.
"""

from __future__ import annotations

import argparse
import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def conversations() -> Iterator[list[dict[str, str]]]:
    """Yield the messages of a conversation for each documented public function, method or class in the modules of the
    standard library that are single files."""
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            if answer := ast.get_docstring(node):
                question = f"What does {node.name} of the module {file.stem} do?"
                yield [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ]


def write(folder: Path, vocabulary: int = 4096) -> None:
    """Write the conversations, and a tokenizer of ``vocabulary`` tokens, into the new folder ``folder``."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True)
    found = list(conversations())
    lines = (json.dumps({"messages": messages}) + "\n" for messages in found)
    (folder / "chats.jsonl").write_text("".join(lines))
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator((m["content"] for messages in found for m in messages), trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=SPECIAL[0], pad_token=SPECIAL[0], chat_template=TEMPLATE
    ).save_pretrained(folder / "tokenizer")


def main() -> None:
    """Write conversations about the standard library, and a tokenizer trained on them."""
    parser = argparse.ArgumentParser(
        prog="python -m parallax.workloads.conversations", description=main.__doc__
    )
    parser.add_argument("folder", type=Path, help="a folder that does not exist yet")
    write(parser.parse_args().folder)


if __name__ == "__main__":
    main()
