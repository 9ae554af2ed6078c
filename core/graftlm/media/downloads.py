"""Downloads pictures from allowed hosts, and from no address of this machine or its network."""

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, urljoin, urlsplit

from graftlm.errors import MediaError
from graftlm.media.limits import MediaLimits
from graftlm.shortening import shortened

__all__ = ["Downloads", "is_public", "resolve"]

_MAX_REDIRECTS: Final = 3
_CHUNK_BYTES: Final = 2**16
_PORTS: Final = {"http": 80, "https": 443}
_FORBIDDEN: Final = frozenset("\\<>\"'^`{}| ")


def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def is_public(address: str) -> bool:
    """Return whether an address belongs to the public internet."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    parsed = parsed if mapped is None else mapped
    return parsed.is_global and not parsed.is_multicast


@dataclass(frozen=True, slots=True)
class _Target:
    url: str
    scheme: str
    host: str
    port: int
    path: str


class Downloads:
    """Downloads files. A URL is parsed once, its host is resolved once, and the connection uses the checked address.

    The same checks apply to each redirect. Proxies of the environment are not used.

    Args:
        limits: allowed hosts, maximum size and maximum time.
        resolve: function from host and port to addresses.
        is_allowed: function that returns whether an address may be used.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self,
        limits: MediaLimits,
        resolve: Callable[[str, int], Sequence[str]] = resolve,
        is_allowed: Callable[[str], bool] = is_public,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._hosts = {host.lower() for host in limits.allowed_hosts}
        self._resolve = resolve
        self._is_allowed = is_allowed
        self._clock = clock

    def __call__(self, url: str) -> bytes:
        """Return the content of an http or https URL.

        Raises:
            MediaError: the host or its address is not allowed, the content is too large, or the download fails.
        """
        end_s = self._clock() + self._limits.download_timeout_s
        for _ in range(_MAX_REDIRECTS + 1):
            target = self._target(url)
            try:
                content, location = self._get(target, end_s)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise MediaError(f"cannot download {_short(url)}: {type(error).__name__}: {error}") from error
            if location is None:
                return content
            url = urljoin(target.url, location)
        raise MediaError(f"the download has more than {_MAX_REDIRECTS} redirects; the last one is to {_short(url)}")

    def _target(self, url: str) -> _Target:
        if not url.isascii() or not url.isprintable() or not _FORBIDDEN.isdisjoint(url):
            raise MediaError(f"the URL contains characters that must be percent-encoded: {_short(url)}")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise MediaError(f"the URL {_short(url)} is malformed: {error}") from error
        host = (parts.hostname or "").lower()
        if parts.scheme not in _PORTS or not host or parts.username is not None or parts.password is not None:
            raise MediaError(f"a picture's URL has the form https://host/path, got {_short(url)}")
        used = _PORTS[parts.scheme] if port is None else port
        names = {f"{host}:{used}"} | ({host} if used == _PORTS[parts.scheme] else set())
        if self._hosts.isdisjoint(names):
            allowed = ", ".join(sorted(self._hosts)) or "none"
            raise MediaError(
                f"pictures may not be downloaded from {shortened(host, 100)}; hosts allowed by media.allowed_hosts: "
                f"{allowed}. Send the picture as a data URL."
            )
        return _Target(url, parts.scheme, host, used, _path_of(parts))

    def _get(self, target: _Target, end_s: float) -> tuple[bytes, str | None]:
        """Return the content, or the location to which the host redirects."""
        addresses = self._resolve(target.host, target.port)
        refused = [address for address in addresses if not self._is_allowed(address)]
        if refused or not addresses:
            raise MediaError(
                f"pictures may not be downloaded from {target.host}: its address {refused[0] if refused else '?'} is "
                "not public"
            )
        connection = self._connection(target, addresses[0], end_s)
        try:
            connection.request("GET", target.path, headers={"Host": _host_header(target), "Accept": "image/*"})
            response = connection.getresponse()
            location = response.getheader("Location")
            if response.status in (301, 302, 303, 307, 308) and location:
                return b"", location
            if response.status != 200:
                raise MediaError(f"cannot download {_short(target.url)}: the host answered {response.status}")
            return self._read(response, end_s), None
        finally:
            connection.close()

    def _connection(self, target: _Target, address: str, end_s: float) -> http.client.HTTPConnection:
        left_s = max(0.01, end_s - self._clock())
        connection = http.client.HTTPConnection(address, target.port, timeout=left_s)
        connection.connect()
        if target.scheme == "https":
            connection.sock = ssl.create_default_context().wrap_socket(connection.sock, server_hostname=target.host)
        return connection

    def _read(self, response: http.client.HTTPResponse, end_s: float) -> bytes:
        chunks, size = [], 0
        while chunk := response.read1(_CHUNK_BYTES):
            chunks.append(chunk)
            size += len(chunk)
            if size > self._limits.max_bytes:
                raise MediaError(
                    f"the picture is larger than the maximum of {self._limits.max_bytes:,} bytes set by media.max_bytes"
                )
            if self._clock() > end_s:
                raise MediaError(f"the download took longer than {self._limits.download_timeout_s:g} s")
        return b"".join(chunks)


def _path_of(parts: SplitResult) -> str:
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def _host_header(target: _Target) -> str:
    host = f"[{target.host}]" if ":" in target.host else target.host
    return host if target.port == _PORTS[target.scheme] else f"{host}:{target.port}"


def _short(url: str) -> str:
    return repr(shortened(url, 100))
