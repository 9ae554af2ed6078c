"""The health probe that generates one token."""

import asyncio
import time
import uuid
from collections.abc import Callable
from typing import Final

from graftlm.errors import QueueFullError, RequestTimeoutError, UnavailableError
from graftlm.pooling.pooling import LAST
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.request_options import RequestOptions
from graftlm.types import SamplingParams

__all__ = ["GenerationProbe"]

#: Time limit for generating the token, in seconds.
_TIMEOUT_S: Final = 10.0
#: Number of seconds for which a result is reused.
_REUSE_S: Final = 1.0


class GenerationProbe:
    """Generates at most one token at a time, regardless of the number of callers.

    All prompts of the probe share a separate cache namespace. Therefore they match no prefix of other requests, and
    leave only one token in the cache.

    Args:
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, manager: TokenizerManager, clock: Callable[[], float] = time.monotonic) -> None:
        self._manager = manager
        self._clock = clock
        self._namespace = f"health-{uuid.uuid4().hex}"
        self._params = SamplingParams(max_tokens=1, temperature=0.0)
        self._latest: asyncio.Task[str | None] | None = None
        self._ended_s = 0.0

    async def problem(self) -> str | None:
        """Return the reason why no token was generated; None if one was generated or the server is overloaded.

        Callers share the result of a running probe, or of a probe that ended within the last second. If one caller is
        cancelled, the probe continues for the other callers.
        """
        health = self._manager.health
        if health.sleeping:
            return "; ".join(health.problems)
        if health.paused:
            return "generation is paused"
        latest = self._latest
        if latest is None or (latest.done() and self._clock() - self._ended_s >= _REUSE_S):
            latest = self._latest = asyncio.create_task(self._probe())
        return await asyncio.shield(latest)

    async def _probe(self) -> str | None:
        generated = self._num_generated()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._generate()
        except QueueFullError:
            return None  # the server works, but its queue is full
        except (TimeoutError, RequestTimeoutError):
            # The probe may have waited in a long queue. If other requests got tokens meanwhile, the server works.
            if self._num_generated() > generated:
                return None
            return f"no token was generated within {_TIMEOUT_S:.0f} s"
        except UnavailableError as error:
            return str(error)
        finally:
            self._ended_s = self._clock()
        return None

    async def _generate(self) -> None:
        pooling = None if self._manager.model.generates else LAST
        options = RequestOptions(timeout_s=_TIMEOUT_S, cache_salt=self._namespace, pooling=pooling)
        request = await self._manager.prepare([0], self._params, options)
        generation = await self._manager.start(request)
        try:
            await generation.ended()
        finally:
            generation.abort()

    def _num_generated(self) -> int:
        loads = [replica.load for replica in self._manager.replicas.replicas]
        return sum(load.stats.generated_tokens for load in loads if load is not None)
