"""Scores of texts and of pairs of texts: what is asked of the model, and what its numbers become."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from graftlm.errors import InvalidPromptError, RequestError
from graftlm.pooling.pooling import SCORES, Pooling

__all__ = [
    "Items",
    "Piece",
    "check_labels",
    "joined",
    "listed",
    "relevance",
    "relevance_pooling",
    "scores_of",
    "scoring_pooling",
    "sigmoid",
]

#: A query, an item or a document: text or token ids.
Piece: TypeAlias = str | Sequence[int]

#: What is scored beside a query: one piece or several.
Items: TypeAlias = Piece | Sequence[Piece]


def scoring_pooling(label_token_ids: Sequence[int] | None) -> Pooling:
    """Return what is asked of the model: the log-probabilities of labels as the next token, or its head's scores.

    Raises:
        RequestError: `label_token_ids` is not a list of token ids.
    """
    return SCORES if label_token_ids is None else Pooling("labels", check_labels(label_token_ids))


def relevance_pooling(label_token_ids: Sequence[int] | None) -> Pooling:
    """Return what is asked of the model for `relevance`.

    Raises:
        RequestError: there is one label, whose share among the labels says nothing.
    """
    pooling = scoring_pooling(label_token_ids)
    if len(pooling.token_ids) == 1:
        message = "label_token_ids: give the token of a relevant document first, and that of others after it"
        raise RequestError(message, param="label_token_ids")
    return pooling


def check_labels(label_token_ids: object) -> tuple[int, ...]:
    """Return labels as a tuple.

    Raises:
        RequestError: they are not a list of at least one token id.
    """
    is_list = isinstance(label_token_ids, list | tuple) and bool(label_token_ids)
    if not is_list or not isinstance(label_token_ids, list | tuple):
        raise RequestError(
            f"label_token_ids must be a list of at least one token id, got {label_token_ids!r}", param="label_token_ids"
        )
    wrong = [label for label in label_token_ids if isinstance(label, bool) or not isinstance(label, Integral)]
    if wrong:
        raise RequestError(f"label_token_ids must hold token ids, got {wrong[0]!r}", param="label_token_ids")
    return tuple(int(label) for label in label_token_ids)  # a tokenizer's are numpy's


def listed(items: Items) -> list[Piece]:
    """Return items as a list; a text, or a flat list of token ids, is one item."""
    if isinstance(items, str):
        return [items]
    pieces: list[Any] = list(items)
    return [pieces] if pieces and isinstance(pieces[0], Integral) else pieces


def joined(query: Piece, item: Piece, *, item_first: bool) -> str | list[int]:
    """Return a query and an item as one prompt, one right after the other.

    Raises:
        InvalidPromptError: one is text and the other is not.
    """
    first, second = (item, query) if item_first else (query, item)
    if isinstance(first, str) and isinstance(second, str):
        return first + second
    if isinstance(first, str) or isinstance(second, str):
        raise InvalidPromptError("query and items must be all text, or all token ids")
    return [*first, *second]


def scores_of(vector: NDArray[np.float32], pooling: Pooling, *, apply_softmax: bool) -> list[float]:
    """Return the scores of one text.

    Args:
        vector: float32 [labels], what `pooling` gave: log-probabilities, or numbers of a head.
        apply_softmax: have the scores add up to 1.

    Returns: one number for each label: probabilities, or what the head gives.

    Raises:
        RequestError: one number is to add up to 1.
    """
    if apply_softmax and len(vector) == 1:
        raise RequestError(
            "apply_softmax has the scores of an item add up to 1, and here an item has one score, which would always "
            "be 1. Leave it out; /v1/rerank, and /v1/score with text_1 and text_2, bring the one number of a head "
            "between 0 and 1",
            param="apply_softmax",
        )
    numbers = vector.astype(np.float64)
    if apply_softmax:
        powers = np.exp(numbers - numbers.max())
        return [float(share) for share in powers / powers.sum()]
    return [float(number) for number in (np.exp(numbers) if pooling.way == "labels" else numbers)]


def relevance(vector: NDArray[np.float32], pooling: Pooling, *, use_activation: bool = True) -> float:
    """Return how well a document fits a query, from 0 to 1: what rerankers say by one number, or by a first label.

    Args:
        use_activation: False gives the one number of a head as it is.

    Raises:
        RequestError: the head gives several numbers, of which none is the relevance.
    """
    if pooling.way == "labels":
        return scores_of(vector, pooling, apply_softmax=True)[0]
    if len(vector) != 1:
        raise RequestError(
            f"this model's score head gives {len(vector)} numbers for a text, not the one of a reranker; /classify and "
            "Engine.classify return all of them"
        )
    return sigmoid(float(vector[0])) if use_activation else float(vector[0])


def sigmoid(x: float) -> float:
    """Return 1 / (1 + e^-x)."""
    return float(np.exp(-np.logaddexp(0.0, -x)))
