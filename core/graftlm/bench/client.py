"""The client of the load generator, which sends requests and records the times of their answers."""

import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import aiohttp
import msgspec

from graftlm.bench.answer import Answer
from graftlm.bench.apis import Api, error_text
from graftlm.bench.events import EventSplitter
from graftlm.bench.prompts import WorkItem
from graftlm.bench.records import Failure, RequestRecord

__all__ = ["Client", "PreparedRequest", "open_session"]

_DONE: Final = b"[DONE]"
_MAX_MESSAGE_CHARS: Final = 500
#: Time in seconds after which an idle connection is closed. It is shorter than most servers' limit, because a request
#: on a connection that the server has just closed would fail.
_KEEPALIVE_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that is ready to be sent.

    Attributes:
        index: index among the requests.
        body: the body as JSON, encoded before the measurement.
        asked_tokens: maximum number of output tokens in the request.
    """

    index: int
    body: bytes
    asked_tokens: int


class _RequestFailedError(Exception):
    """A request failed; the exception contains the `Failure` for the record."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(kind, message[:_MAX_MESSAGE_CHARS])


def open_session(api_key: str | None, timeout_s: float) -> aiohttp.ClientSession:
    """Return a session without a limit on connections. Must be called in an event loop; the caller closes it.

    Args:
        api_key: sent as a bearer token; None: no token is sent.
        timeout_s: time limit of a request in seconds.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
    )


class Client:
    """A client of one server that uses one HTTP interface."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, api: Api, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._session = session
        self._url = url + api.path
        self._api = api
        self._clock = clock

    def prepare(self, index: int, item: WorkItem) -> PreparedRequest:
        """Return a workload item as a request with an encoded body."""
        return PreparedRequest(index, self._api.body(item), item.output_tokens)

    async def send(self, request: PreparedRequest, start_s: float, scheduled_s: float | None) -> RequestRecord:
        """Send a request, read its answer to the end, and return a record. A failure is recorded and not raised.

        Args:
            start_s: start of the measurement, on this client's clock.
            scheduled_s: the request's due time in seconds after `start_s`; None: it has no due time.
        """
        answer = Answer()
        sent_s = self._clock()
        failure = await self._exchange(request.body, answer)
        end_s = self._clock()
        moments_s = answer.moments_s
        return RequestRecord(
            index=request.index,
            asked_tokens=request.asked_tokens,
            scheduled_s=scheduled_s,
            sent_s=sent_s - start_s,
            end_s=end_s - start_s,
            ttft_s=moments_s[0] - sent_s if moments_s else None,
            last_token_s=moments_s[-1] - sent_s if moments_s else None,
            e2e_s=end_s - sent_s if failure is None else None,
            tpot_s=answer.tpot_s,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            output_tokens=answer.output_tokens,
            num_chunks=len(moments_s),
            gaps_s=answer.gaps_s,
            chunk_tokens=answer.chunk_tokens,
            finish_reason=answer.finish_reason,
            failure=failure,
        )

    async def _exchange(self, body: bytes, answer: Answer) -> Failure | None:
        """Send a request and record its answer. Return the failure; None if the answer is complete."""
        try:
            headers = {"Content-Type": "application/json"}
            async with self._session.post(self._url, data=body, headers=headers) as response:
                if response.status != 200:
                    raise _RequestFailedError(f"http {response.status}", error_text(await response.read()))
                await self._read(response.content, answer)
        except _RequestFailedError as error:
            return error.failure
        except TimeoutError:
            return Failure("timeout", f"not complete after {self._session.timeout.total} s")
        except (aiohttp.ClientConnectorError, ssl.SSLError) as error:
            return Failure("connect", str(error))
        except (aiohttp.ClientError, OSError) as error:
            return Failure("disconnect", str(error) or type(error).__name__)
        return None

    async def _read(self, stream: aiohttp.StreamReader, answer: Answer) -> None:
        """Read a stream to its end.

        Raises:
            _RequestFailedError: the stream contains an error or an invalid event, or ends too early.
        """
        splitter = EventSplitter()
        is_done = False
        while received := await stream.readany():
            now_s = self._clock()
            events = splitter.feed(received)
            is_done = is_done or _DONE in events
            try:
                answer.add([self._api.read(data) for data in events if data != _DONE], now_s)
            except msgspec.MsgspecError as error:
                raise _RequestFailedError("stream", f"an event cannot be read: {error}") from error
            if answer.error is not None:
                raise _RequestFailedError("stream", answer.error)
        if not is_done and answer.finish_reason is None:
            raise _RequestFailedError("stream", "the stream ended before the answer was complete")
