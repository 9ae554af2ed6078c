"""Computes the vectors of pooling requests from a step's hidden states."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from graftlm.contracts import Model
from graftlm.execution.batch import to_device
from graftlm.plan import PoolSpan
from graftlm.pooling.pooling import Pooling

__all__ = ["read_out"]


def read_out(model: Model, spans: Sequence[PoolSpan], hidden: Tensor) -> list[Tensor]:
    """Return the vector of each span, which is added to its request: float32 [n] on the device of `hidden`.

    Args:
        model: the model; it must have a score head if a span's pooling is "scores".
        hidden: [T, hidden], the hidden states of the whole step.
    """
    readings: dict[str, Callable[[Model, Sequence[PoolSpan], Tensor], list[Tensor]]] = {
        "scores": _scores,
        "labels": _label_logprobs,
    }
    found: dict[int, Tensor] = {}
    for way in dict.fromkeys(span.pooling.way for span in spans):
        places = [i for i, span in enumerate(spans) if span.pooling.way == way]
        vectors = readings.get(way, _sums)(model, [spans[i] for i in places], hidden)
        found.update(zip(places, vectors, strict=True))
    return [found[i] for i in range(len(spans))]


def _sums(model: Model, spans: Sequence[PoolSpan], hidden: Tensor) -> list[Tensor]:
    return [hidden[span.start : span.start + span.num_tokens].sum(dim=0, dtype=torch.float32) for span in spans]


def _scores(model: Model, spans: Sequence[PoolSpan], hidden: Tensor) -> list[Tensor]:
    return list(model.score(_last_states(spans, hidden)).float())


def _label_logprobs(model: Model, spans: Sequence[PoolSpan], hidden: Tensor) -> list[Tensor]:
    logprobs = model.logits(_last_states(spans, hidden)).float().log_softmax(dim=-1)
    return [row.index_select(0, _ids(span.pooling, row.device)) for span, row in zip(spans, logprobs, strict=True)]


def _last_states(spans: Sequence[PoolSpan], hidden: Tensor) -> Tensor:
    ends = np.array([span.start + span.num_tokens - 1 for span in spans], dtype=np.int64)
    return hidden.index_select(0, to_device(ends, hidden.device))


def _ids(pooling: Pooling, device: torch.device) -> Tensor:
    return to_device(np.array(pooling.token_ids, dtype=np.int64), device)
