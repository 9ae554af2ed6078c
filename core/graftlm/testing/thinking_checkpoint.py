"""Writes a checkpoint of the bundled model in which two tokens are the tags around reasoning."""

import json
import shutil
from pathlib import Path
from typing import Final

from graftlm.demo import demo_checkpoint

__all__ = ["THINK_END_ID", "THINK_ID", "write_thinking_checkpoint"]

THINK_ID: Final = 2046
THINK_END_ID: Final = 2047


def write_thinking_checkpoint(folder: Path) -> None:
    """Write a copy of the bundled model whose last two tokens are `<think>` and `</think>`.

    The copy's chat template opens the reasoning if the variable `opens` or `enable_thinking` is true.
    """
    shutil.copytree(demo_checkpoint(), folder)
    file = folder / "tokenizer.json"
    parts = json.loads(file.read_text())
    vocab, merges = parts["model"]["vocab"], parts["model"]["merges"]
    for token_id, text in ((THINK_ID, "<think>"), (THINK_END_ID, "</think>")):
        old = next(token for token, number in vocab.items() if number == token_id)
        del vocab[old]
        merges[:] = [merge for merge in merges if "".join(merge) != old and old not in merge]
        vocab[text] = token_id
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        parts["added_tokens"].append({"id": token_id, "content": text, **flags})
    file.write_text(json.dumps(parts))
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings["chat_template"] += "{% if opens or enable_thinking %}{{ '<think>\n' }}{% endif %}"
    file.write_text(json.dumps(settings))
