"""Training batches: whole texts packed into rows, with a weight for every token."""

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
"""Weight of a token of a plain document in the loss; a token of an answer weighs 1, any other token nothing."""

_POOL_SIZE: Final = 128
_ROWS: Final = (*[(8, 256)] * 6, (4, 512), (2, 1024))
"""Shapes that a batch may have; all hold the same number of tokens."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One training step's rows: B rows of T tokens."""

    input_ids: torch.Tensor  # [B, T] int64
    weights: torch.Tensor  # [B, T] float32: how much predicting this token counts


@dataclass(frozen=True, slots=True)
class EncodedText:
    """One training text as tokens."""

    ids: list[int]
    weights: list[float]


def batches(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[Batch]:
    """Yield batches without end; the same seed yields the same batches."""
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
    """Yield the training texts, encoded in groups because that is faster."""
    source = training_texts(seed)
    while True:
        group = list(islice(source, 256))
        rendered = [render(tokenizer, text) for text in group]
        encoded = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        for text, ids in zip(group, encoded, strict=True):
            plain = isinstance(text, str)
            yield EncodedText(ids, [PLAIN_TEXT_WEIGHT] * len(ids) if plain else answer_weights(tokenizer, ids))


def render(tokenizer: PreTrainedTokenizerFast, text: str | list[Message]) -> str:
    """Write a training text with its special tokens."""
    if isinstance(text, str):
        return f"{BOS}{text}{EOS}"
    return str(tokenizer.apply_chat_template(text, tokenize=False))


def answer_weights(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[float]:
    """Weigh 1 for what the assistant says, its `<|end|>` included, and 0 for all else."""
    assistant, end = tokenizer.convert_tokens_to_ids(["<|assistant|>", END])
    weights, answering = [0.0] * len(ids), False
    for position, token in enumerate(ids):
        # the line break after <|assistant|> belongs to the prompt
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
    """Take texts out of the pool until none fits, and fill the rest with padding."""
    ids: list[int] = []
    weights: list[float] = []
    while True:
        room = row_len - len(ids)
        fitting = [index for index, text in enumerate(pool) if len(text.ids) <= room]
        if not fitting:
            break
        # the first text at random keeps the mix of lengths; later the longest that fits keeps rows full
        index = max(fitting, key=lambda i: len(pool[i].ids)) if room < row_len // 2 else rng.choice(fitting)
        ids += pool[index].ids
        weights += pool[index].weights
        pool[index] = next(source)
    padding = row_len - len(ids)
    pad = int(tokenizer.convert_tokens_to_ids(PAD))
    return EncodedText(ids + [pad] * padding, weights + [0.0] * padding)
