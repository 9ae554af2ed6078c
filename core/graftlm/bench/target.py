"""The server under test: what it says of itself."""

from dataclasses import dataclass
from typing import Final, TypeVar

import aiohttp
import msgspec

from graftlm.bench.apis import error_text
from graftlm.bench.settings import BenchSettings
from graftlm.errors import GraftlmError

__all__ = ["BenchError", "Target", "flush_cache", "probe"]

T = TypeVar("T")

_TIMEOUT: Final = aiohttp.ClientTimeout(total=30)


class BenchError(GraftlmError):
    """A server cannot be measured: it does not answer, or refuses what the run needs."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server; None where it does not say.

    Attributes:
        model: the name that requests give.
        version: of the server's software.
        context_len: tokens of prompt and output together at most.
    """

    url: str
    model: str | None
    version: str | None
    vocab_size: int | None
    context_len: int | None


class _ModelInfo(msgspec.Struct):
    served_model_name: str | None = None
    model_path: str | None = None
    vocab_size: int | None = None
    context_len: int | None = None


class _ServerInfo(msgspec.Struct):
    version: str | None = None


class _ModelName(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_ModelName] = []


async def probe(session: aiohttp.ClientSession, settings: BenchSettings) -> Target:
    """Ask a server what it is; only the model's name has to be answered, when requests must give it.

    Raises:
        BenchError: it does not answer; or tells no model's name, and none is given.
    """
    info = await _ask(session, settings.url + "/get_model_info", _ModelInfo) or _ModelInfo()
    server = await _ask(session, settings.url + "/server_info", _ServerInfo) or _ServerInfo()
    model = settings.model or info.served_model_name
    if model is None and settings.api != "native":
        model = await _first_model(session, settings.url)
    return Target(
        url=settings.url,
        model=model or info.model_path,
        version=server.version,
        vocab_size=settings.vocab_size or info.vocab_size,
        context_len=info.context_len,
    )


async def flush_cache(session: aiohttp.ClientSession, url: str) -> None:
    """Empty a server's prefix cache.

    Raises:
        BenchError: it does not.
    """
    status, body = await _exchange(session, "POST", url + "/flush_cache")
    if status != 200:
        raise BenchError(f"POST {url}/flush_cache was answered by status {status}: {error_text(body)[:500]}")


async def _first_model(session: aiohttp.ClientSession, url: str) -> str:
    models = await _ask(session, url + "/v1/models", _ModelList)
    if models is None or not models.data:
        raise BenchError(f"GET {url}/v1/models names no model: give --model, and --api-key where one is needed")
    return models.data[0].id


async def _ask(session: aiohttp.ClientSession, url: str, shape: type[T]) -> T | None:
    """Return what a server says at a URL; None when it has nothing of that shape there for us."""
    status, body = await _exchange(session, "GET", url)
    if status in (401, 403):
        raise BenchError(f"GET {url} was answered by status {status}: give --api-key, or set GRAFTLM_API_KEY")
    if status != 200:
        return None
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.MsgspecError:
        return None


async def _exchange(session: aiohttp.ClientSession, method: str, url: str) -> tuple[int, bytes]:
    """Return the status and the body of an answer.

    Raises:
        BenchError: there is none.
    """
    try:
        async with session.request(method, url, timeout=_TIMEOUT) as response:
            return response.status, await response.read()
    except TimeoutError as error:
        raise BenchError(f"{method} {url} was not answered within {_TIMEOUT.total:.0f} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise BenchError(f"{method} {url} failed: {error}; is the server running, and --url right?") from error
