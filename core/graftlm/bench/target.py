"""The server under test, and the information that it provides."""

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
    """A server or an engine cannot be measured, because it does not answer or refuses a request."""


@dataclass(frozen=True, slots=True)
class Target:
    """The server under test. A field is None if the server does not provide it.

    Attributes:
        url: the server's URL.
        model: the model's name in requests.
        version: version of the server's software.
        vocab_size: number of tokens in the model's vocabulary.
        context_len: maximum number of tokens of prompt and output together.
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
    """Read a server's information. A server must provide the model's name if requests must contain it.

    Raises:
        BenchError: the server does not answer, refuses the API key, or does not provide a required model name.
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
        BenchError: the server does not answer, or answers with an error.
    """
    status, body = await _exchange(session, "POST", url + "/flush_cache")
    if status != 200:
        raise BenchError(f"POST {url}/flush_cache was answered with status {status}: {error_text(body)[:500]}")


async def _first_model(session: aiohttp.ClientSession, url: str) -> str:
    models = await _ask(session, url + "/v1/models", _ModelList)
    if models is None or not models.data:
        raise BenchError(f"GET {url}/v1/models returned no model: set --model, and --api-key if the server needs a key")
    return models.data[0].id


async def _ask(session: aiohttp.ClientSession, url: str, shape: type[T]) -> T | None:
    """Return the JSON at a URL; None if the URL has no JSON with the fields of `shape`.

    Raises:
        BenchError: the server does not answer, or refuses the API key.
    """
    status, body = await _exchange(session, "GET", url)
    if status in (401, 403):
        raise BenchError(f"GET {url} was answered with status {status}: set --api-key or GRAFTLM_API_KEY")
    if status != 200:
        return None
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.MsgspecError:
        return None


async def _exchange(session: aiohttp.ClientSession, method: str, url: str) -> tuple[int, bytes]:
    """Return the status and the body of an answer.

    Raises:
        BenchError: the server does not answer.
    """
    try:
        async with session.request(method, url, timeout=_TIMEOUT) as response:
            return response.status, await response.read()
    except TimeoutError as error:
        raise BenchError(f"{method} {url} was not answered within {_TIMEOUT.total:.0f} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise BenchError(
            f"{method} {url} failed: {error}; check that the server runs and that --url is correct"
        ) from error
