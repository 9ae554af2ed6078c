"""Prompts that are answered by one vector each: prepared and run for every route that wants such."""

import asyncio
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from graftlm.errors import RequestFailedError
from graftlm.pooling.embeddings import POOLED
from graftlm.pooling.pooling import Pooling
from graftlm.processes.generation import Generation, PreparedRequest
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.prompts import Prompt

__all__ = ["pooled_vectors", "prepare_pooled"]

#: Prompts of one call that wait or run.
_MAX_AT_ONCE: Final = 256


async def prepare_pooled(
    manager: TokenizerManager,
    prompts: Sequence[Prompt],
    pooling: Pooling,
    *,
    cache_salt: str | None = None,
    priority: int | None = None,
    adapter: str | None = None,
    request_ids: Sequence[str | None] | None = None,
) -> list[PreparedRequest]:
    """Tokenise and check prompts.

    Args:
        adapter: the name of a loaded adapter; None: the model alone.
        request_ids: one for each prompt; None draws it.

    Raises:
        RequestError: something is wrong with one of them.
    """
    ids = [None] * len(prompts) if request_ids is None else request_ids
    wanted = [
        manager.prepare(
            prompt,
            POOLED,
            request_id=id_,
            priority=priority or 0,
            cache_salt=cache_salt or "",
            pooling=pooling,
            adapter=adapter,
        )
        for prompt, id_ in zip(prompts, ids, strict=True)
    ]
    return list(await asyncio.gather(*wanted))


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
        await generation.result()
    finally:
        generation.abort()
    if generation.embedding is None:
        raise RequestFailedError("the request was aborted before it had a vector")
    return np.frombuffer(generation.embedding, dtype=np.float32)
