"""The probe that generates one token to find out whether the server can."""

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

#: How long the one token may take.
_TIMEOUT_S: Final = 10.0
#: A result answers all who ask within this time.
_REUSE_S: Final = 1.0


class GenerationProbe:
    """Generates one token at a time, however many ask.

    Its prompt has a namespace of its own, the same each time: it finds nobody's prefixes, and leaves one token behind.

    Args:
        clock: seconds; never goes back.
    """

    def __init__(self, manager: TokenizerManager, clock: Callable[[], float] = time.monotonic) -> None:
        self._manager = manager
        self._clock = clock
        self._namespace = f"health-{uuid.uuid4().hex}"
        self._params = SamplingParams(max_tokens=1, temperature=0.0)
        self._latest: asyncio.Task[str | None] | None = None
        self._ended_s = 0.0

    async def problem(self) -> str | None:
        """Return why no token came; None when all is well.

        Those who ask while a token is generated, or within a second after it, share the result. A caller that is
        cancelled does not end it for the others.
        """
        if self._manager.health.paused:
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
            return None  # it works, and has plenty to do
        except (TimeoutError, RequestTimeoutError):
            # Behind a long queue a token takes its time; that others come is as good.
            return None if self._num_generated() > generated else f"no token came within {_TIMEOUT_S:.0f} s"
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
