"""Checks whether a configuration allows access by other machines without a key."""

import re

from graftlm.config.addresses import is_loopback
from graftlm.config.engine_config import EngineConfig
from graftlm.config.layers import KeyPath, Problem, origin_of

__all__ = ["exposure_errors", "exposure_warnings"]


def exposure_errors(config: EngineConfig) -> list[str]:
    """Return the reasons why a server must not start with a configuration; [] if it may start."""
    server = config.server
    if is_loopback(server.host) or server.api_key is not None or server.allow_anonymous:
        return []
    message = (
        f"{server.host!r} is reachable from other machines, and no key is set. Set server.api_key, or set "
        "server.allow_anonymous: true to serve every client that can reach this address"
    )
    return [_located(config, ("server", "host"), message)]


def exposure_warnings(config: EngineConfig) -> list[str]:
    """Return warnings about data and routes that other machines can read or use without a key."""
    server, found = config.server, []
    if not is_loopback(server.host) and server.api_key is None and server.allow_anonymous:
        message = f"every client that reaches {server.host!r} is served without a key"
        found.append(_located(config, ("server", "allow_anonymous"), message))
    for field in ("endpoint", "replay_endpoint"):
        address = getattr(server.kv_events, field)
        if address is not None and not _is_local_zmq(address):
            message = (
                f"{address} is reachable from other machines, needs no key and publishes the token ids of all "
                "prompts. Use tcp://127.0.0.1:PORT or ipc://PATH, or restrict the port with a firewall"
            )
            found.append(_located(config, ("server", "kv_events", field), message))
    return found


def _is_local_zmq(address: str) -> bool:
    match = re.fullmatch(r"tcp://\[?([^\]]+)\]?:\d+", address)
    return match is None or is_loopback(match[1])


def _located(config: EngineConfig, path: KeyPath, message: str) -> str:
    return str(Problem(path, message, origin_of(path, config.origins)))
