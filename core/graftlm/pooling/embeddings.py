"""Converts a call's embedding parameters to a `Pooling`, and pooled hidden states to embeddings."""

import numpy as np
from numpy.typing import NDArray

from graftlm.errors import RequestError, RequestFailedError, UnsupportedFeatureError
from graftlm.pooling.pooling import LAST, MEAN, Pooling
from graftlm.pooling.sentence_embedding import EmbeddingDefaults
from graftlm.types import RequestOutput, SamplingParams

__all__ = ["POOLED", "EmbeddingForm", "embedding_form", "normalized", "pooled_vector"]

#: Sampling parameters of pooling requests, which sample no tokens.
POOLED = SamplingParams(max_tokens=1, temperature=0.0)


class EmbeddingForm:
    """The form of a call's embeddings.

    `embedding_form` derives it from the call's arguments and the checkpoint's defaults.

    Attributes:
        pooling: how the hidden states are pooled.
    """

    def __init__(self, pooling: Pooling, normalize: bool, dimensions: int | None) -> None:
        """Store parameters that `embedding_form` has checked."""
        self.pooling = pooling
        self._normalize = normalize
        self._dimensions = dimensions

    def finish(self, vector: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the embedding of a pooled vector, float32 [hidden]: its first dimensions, normalized if requested.

        Raises:
            RequestError: the vector has fewer dimensions than requested.
        """
        if self._dimensions is not None and self._dimensions > len(vector):
            raise RequestError(
                f"dimensions must be at most {len(vector)} for this model, got {self._dimensions}", param="dimensions"
            )
        vector = vector[: self._dimensions]
        return normalized(vector) if self._normalize else vector


def embedding_form(
    defaults: EmbeddingDefaults,
    pooling: object = None,
    normalize: bool | None = None,
    dimensions: object = None,
) -> EmbeddingForm:
    """Return the checked embedding parameters of a call. None selects the checkpoint's default.

    Raises:
        RequestError: `pooling` is not supported, or `dimensions` is not an integer above 0.
        UnsupportedFeatureError: the checkpoint's default pooling was selected and is not supported.
    """
    if pooling is None and defaults.obstacle is not None:
        raise UnsupportedFeatureError(
            f"this checkpoint's own way of pooling is not supported: {defaults.obstacle}. Set pooling to 'mean' or "
            "'last' to get its pooled hidden states."
        )
    way = defaults.pooling if pooling is None else pooling
    if way not in ("mean", "last"):
        hint = ": in a causal model, the first token attends to no other token" if way == "cls" else ""
        raise RequestError(f"pooling must be 'mean' or 'last', got {way!r}{hint}", param="pooling")
    is_whole = isinstance(dimensions, int) and not isinstance(dimensions, bool)
    if dimensions is not None and (not isinstance(dimensions, int) or not is_whole or dimensions < 1):
        raise RequestError(f"dimensions must be an integer above 0, got {dimensions!r}", param="dimensions")
    return EmbeddingForm(
        MEAN if way == "mean" else LAST, defaults.normalize if normalize is None else normalize, dimensions
    )


def normalized(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a vector, float32 [n], scaled to unit length; a zero vector is unchanged."""
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return vector if length == 0.0 else (vector / length).astype(np.float32)


def pooled_vector(output: RequestOutput, vector: bytes | None) -> NDArray[np.float32]:
    """Return a prompt's vector, float32 [n].

    Raises:
        RequestFailedError: the request ended without a vector.
    """
    if vector is None:
        reason = output.error or (output.finish_reason and output.finish_reason.value) or "it is not finished"
        raise RequestFailedError(f"request {output.request_id} has no vector: {reason}")
    return np.frombuffer(vector, dtype=np.float32)
