"""Prompts that are answered by one vector each: prepared and run for every route that wants such."""

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

#: Prompts of one call that wait or run.
_MAX_AT_ONCE: Final = 256


async def prepare_pooled(
    manager: TokenizerManager,
    prompts: Sequence[Prompt | TextPair],
    options: RequestOptions,
    request_ids: Sequence[str | None] | None = None,
) -> list[PreparedRequest]:
    """Tokenise and check prompts.

    Args:
        options: of every prompt; they have a pooling.
        request_ids: one for each prompt; None draws it.

    Raises:
        RequestError: something is wrong with one of them.
    """
    ids = [None] * len(prompts) if request_ids is None else request_ids
    preparing = [
        manager.prepare(prompt, POOLED, options, request_id=request_id)
        for prompt, request_id in zip(prompts, ids, strict=True)
    ]
    return list(await asyncio.gather(*preparing))


async def pooled_vectors(manager: TokenizerManager, prepared: Sequence[PreparedRequest]) -> list[NDArray[np.float32]]:
    """Return a vector, float32 [n], for each prompt; one that fails ends the others.

    Clients send thousands of texts in one call: no more of them wait at a time than leaves room for other clients.

    Raises:
        GraftlmError: what ended the first that failed.
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
        raise RequestFailedError("the request was aborted before it had a vector")
    return np.frombuffer(generation.embedding, dtype=np.float32)
