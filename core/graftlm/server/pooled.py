"""Requests for embedding, scoring and classification, which return one vector per prompt."""

import asyncio
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from graftlm.errors import RequestFailedError
from graftlm.pooling.embeddings import POOLED
from graftlm.processes.generation import Generation, PreparedRequest
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.prompts import Prompt, TextPair
from graftlm.request_options import RequestOptions

__all__ = ["pooled_vectors", "prepare_pooled"]

#: Maximum number of prompts of one call that wait or run at the same time.
_MAX_AT_ONCE: Final = 256


async def prepare_pooled(
    manager: TokenizerManager,
    prompts: Sequence[Prompt | TextPair],
    options: RequestOptions,
    request_ids: Sequence[str | None] | None = None,
    *,
    keep_last: int | None = None,
) -> list[PreparedRequest]:
    """Tokenize and check prompts.

    Args:
        options: options of every prompt, with `pooling` set.
        request_ids: one id per prompt; None for an id that the server creates.
        keep_last: passed to `RequestPreparer.prepare`.

    Raises:
        RequestError: a prompt or an option is not valid.
    """
    ids = [None] * len(prompts) if request_ids is None else request_ids
    preparing = [
        manager.prepare(prompt, POOLED, options, request_id=request_id, keep_last=keep_last)
        for prompt, request_id in zip(prompts, ids, strict=True)
    ]
    return list(await asyncio.gather(*preparing))


async def pooled_vectors(manager: TokenizerManager, prepared: Sequence[PreparedRequest]) -> list[NDArray[np.float32]]:
    """Return one vector, float32 [n], per prompt. If one prompt fails, the remaining prompts are aborted.

    Clients may send thousands of texts in one call. Only a limited number of them wait or run at the same time, so that
    other clients are not delayed.

    Raises:
        GraftlmError: the error of the first prompt that failed.
    """
    room = asyncio.Semaphore(min(_MAX_AT_ONCE, manager.config.scheduling.max_queued_requests))

    async def vector(request: PreparedRequest) -> NDArray[np.float32]:
        async with room:
            return await _vector(await manager.start(request))

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(vector(request)) for request in prepared]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _vector(generation: Generation) -> NDArray[np.float32]:
    try:
        await generation.ended()
    finally:
        generation.abort()
    if generation.embedding is None:
        raise RequestFailedError("the request was aborted before its vector was computed")
    return np.frombuffer(generation.embedding, dtype=np.float32)
