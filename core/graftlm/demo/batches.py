"""Training batches: rows of whole texts, with a loss weight for each token."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Final

import torch
from transformers import PreTrainedTokenizerFast

from graftlm.demo.corpus import Message, training_texts
from graftlm.demo.tokenizer import BOS, END, EOS, PAD

PLAIN_TEXT_WEIGHT: Final = 0.3
"""Loss weight of a token in a plain document. In conversations, tokens of answers have weight 1, all others 0."""

_POOL_SIZE: Final = 128
_ROWS: Final = (*[(8, 256)] * 6, (4, 512), (2, 1024))
"""Possible shapes of a batch, (rows, tokens per row). All have the same number of tokens."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of one training step: B rows of T tokens."""

    input_ids: torch.Tensor  # [B, T] int64
    weights: torch.Tensor  # [B, T] float32: weight of each token's prediction in the loss


@dataclass(frozen=True, slots=True)
class EncodedText:
    """A training text as token ids, with a loss weight for each token."""

    ids: list[int]
    weights: list[float]


def batches(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[Batch]:
    """Yield an infinite sequence of batches. The same seed yields the same batches."""
    rng = Random(f"batches {seed}")
    source = encoded_texts(tokenizer, seed)
    pool = list(islice(source, _POOL_SIZE))
    while True:
        num_rows, row_len = rng.choice(_ROWS)
        rows = [_pack_row(pool, source, rng, row_len, tokenizer) for _ in range(num_rows)]
        yield Batch(
            torch.tensor([row.ids for row in rows]),
            torch.tensor([row.weights for row in rows]),
        )


def encoded_texts(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[EncodedText]:
    """Yield an infinite sequence of encoded training texts. Texts are encoded in groups, which is faster."""
    source = training_texts(seed)
    while True:
        group = list(islice(source, 256))
        rendered = [render(tokenizer, text) for text in group]
        encoded = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        for text, ids in zip(group, encoded, strict=True):
            plain = isinstance(text, str)
            yield EncodedText(ids, [PLAIN_TEXT_WEIGHT] * len(ids) if plain else answer_weights(tokenizer, ids))


def render(tokenizer: PreTrainedTokenizerFast, text: str | list[Message]) -> str:
    """Return a training text with its special tokens."""
    if isinstance(text, str):
        return f"{BOS}{text}{EOS}"
    return str(tokenizer.apply_chat_template(text, tokenize=False))


def answer_weights(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[float]:
    """Return a loss weight for each token of a conversation: 1 for answers including `<|end|>`, else 0."""
    assistant, end = tokenizer.convert_tokens_to_ids(["<|assistant|>", END])
    weights, answering = [0.0] * len(ids), False
    for position, token in enumerate(ids):
        # The line break after <|assistant|> is part of the prompt.
        weights[position] = float(answering and ids[position - 1] != assistant)
        answering = (answering or token == assistant) and token != end
    return weights


def _pack_row(
    pool: list[EncodedText],
    source: Iterator[EncodedText],
    rng: Random,
    row_len: int,
    tokenizer: PreTrainedTokenizerFast,
) -> EncodedText:
    """Move texts from the pool into a row until no text fits, and pad the row. A new text replaces each moved one."""
    ids: list[int] = []
    weights: list[float] = []
    while True:
        room = row_len - len(ids)
        fitting = [index for index, text in enumerate(pool) if len(text.ids) <= room]
        if not fitting:
            break
        # The first half of a row has random texts, to keep the mix of lengths; long texts then leave little padding.
        index = max(fitting, key=lambda i: len(pool[i].ids)) if room < row_len // 2 else rng.choice(fitting)
        ids += pool[index].ids
        weights += pool[index].weights
        pool[index] = next(source)
    padding = row_len - len(ids)
    pad = int(tokenizer.convert_tokens_to_ids(PAD))
    return EncodedText(ids + [pad] * padding, weights + [0.0] * padding)
