"""Computes scores of texts and pairs of texts from pooled vectors."""

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

#: Items to score for a query: one piece or several.
Items: TypeAlias = Piece | Sequence[Piece]


def scoring_pooling(label_token_ids: Sequence[int] | None) -> Pooling:
    """Return the pooling for scores: log-probabilities of labels as the next token; without labels, the score head.

    Raises:
        RequestError: `label_token_ids` is not a list of token ids.
    """
    return SCORES if label_token_ids is None else Pooling("labels", check_labels(label_token_ids))


def relevance_pooling(label_token_ids: Sequence[int] | None) -> Pooling:
    """Return the pooling for `relevance`.

    Raises:
        RequestError: there is only one label, whose probability among the labels is always 1.
    """
    pooling = scoring_pooling(label_token_ids)
    if len(pooling.token_ids) == 1:
        message = (
            "label_token_ids must have at least two token ids, got one: the first is the answer for a relevant "
            "document, the others are the answers for other documents"
        )
        raise RequestError(message, param="label_token_ids")
    return pooling


def check_labels(label_token_ids: object) -> tuple[int, ...]:
    """Return checked labels as a tuple.

    Raises:
        RequestError: `label_token_ids` is not a list of at least one token id.
    """
    is_list = isinstance(label_token_ids, list | tuple) and bool(label_token_ids)
    if not is_list or not isinstance(label_token_ids, list | tuple):
        raise RequestError(
            f"label_token_ids must be a list of at least one token id, got {label_token_ids!r}", param="label_token_ids"
        )
    wrong = [label for label in label_token_ids if isinstance(label, bool) or not isinstance(label, Integral)]
    if wrong:
        raise RequestError(f"label_token_ids must have token ids only, got {wrong[0]!r}", param="label_token_ids")
    return tuple(int(label) for label in label_token_ids)  # token ids from a tokenizer may be numpy integers


def listed(items: Items) -> list[Piece]:
    """Return items as a list; a text or a flat list of token ids is one item."""
    if isinstance(items, str):
        return [items]
    pieces: list[Any] = list(items)
    return [pieces] if pieces and isinstance(pieces[0], Integral) else pieces


def joined(query: Piece, item: Piece, *, item_first: bool) -> str | list[int]:
    """Return the concatenation of a query and an item as one prompt.

    Raises:
        InvalidPromptError: one of the two is text, and the other is a list of token ids.
    """
    first, second = (item, query) if item_first else (query, item)
    if isinstance(first, str) and isinstance(second, str):
        return first + second
    if isinstance(first, str) or isinstance(second, str):
        raise InvalidPromptError("query and items must all be text, or all be token ids")
    return [*first, *second]


def scores_of(vector: NDArray[np.float32], pooling: Pooling, *, apply_softmax: bool) -> list[float]:
    """Return the scores of one text.

    Args:
        vector: float32 [labels], log-probabilities of labels or outputs of a score head, depending on `pooling`.
        apply_softmax: whether the scores are normalized to the sum 1.

    Returns: one number per label: probabilities, or outputs of the score head.

    Raises:
        RequestError: softmax is requested for a single score.
    """
    if apply_softmax and len(vector) == 1:
        raise RequestError(
            "apply_softmax needs at least two scores per item, got one: the softmax of one score is always 1. "
            "Remove apply_softmax. To map the single score of a score head to the range 0 to 1, use /v1/rerank, or "
            "/v1/score with text_1 and text_2",
            param="apply_softmax",
        )
    numbers = vector.astype(np.float64)
    if apply_softmax:
        powers = np.exp(numbers - numbers.max())
        return [float(share) for share in powers / powers.sum()]
    return [float(number) for number in (np.exp(numbers) if pooling.way == "labels" else numbers)]


def relevance(vector: NDArray[np.float32], pooling: Pooling, *, use_activation: bool = True) -> float:
    """Return a document's relevance for a query: the first label's share of the probability, or a reranker's score.

    Args:
        use_activation: whether the sigmoid is applied to a score head's output.

    Raises:
        RequestError: the score head has several outputs.
    """
    if pooling.way == "labels":
        return scores_of(vector, pooling, apply_softmax=True)[0]
    if len(vector) != 1:
        raise RequestError(
            f"this model's score head has {len(vector)} outputs per text, expected 1 as in a reranker; to get all "
            "outputs, use /classify or Engine.classify"
        )
    return sigmoid(float(vector[0])) if use_activation else float(vector[0])


def sigmoid(x: float) -> float:
    """Return 1 / (1 + e^-x)."""
    return float(np.exp(-np.logaddexp(0.0, -x)))
