"""From pooled hidden states to the embeddings that users see."""

import numpy as np
from numpy.typing import NDArray

from graftlm.errors import RequestError, RequestFailedError
from graftlm.types import EmbeddingOutput, RequestOutput, SamplingParams

__all__ = ["POOLED", "check_pooling", "embedding_output", "normalized"]

#: What a request for an embedding has in the place of sampling parameters: it samples nothing.
POOLED = SamplingParams(max_tokens=1, temperature=0.0)


def check_pooling(pooling: object) -> str:
    """Return the name of a way to pool.

    Raises:
        RequestError: it is none.
    """
    if pooling not in ("mean", "last"):
        raise RequestError(f"pooling must be 'mean' or 'last', got {pooling!r}")
    return str(pooling)


def normalized(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a vector, float32 [hidden], scaled to unit length; a zero vector as it is."""
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return vector if length == 0.0 else (vector / length).astype(np.float32)


def embedding_output(output: RequestOutput, embedding: bytes | None, normalize: bool) -> EmbeddingOutput:
    """Return a prompt's embedding.

    Raises:
        RequestFailedError: the request ended without one.
    """
    if embedding is None:
        reason = output.error or (output.finish_reason and output.finish_reason.value) or "it has not ended"
        raise RequestFailedError(f"request {output.request_id} has no embedding: {reason}")
    vector = np.frombuffer(embedding, dtype=np.float32)
    return EmbeddingOutput(output.request_id, normalized(vector) if normalize else vector, output.usage)
