"""Names and addresses that a server listens on or is asked by: which are of this machine, and how they are written."""

import re
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

__all__ = ["canonical_host", "check_host_pattern", "is_address", "is_loopback"]

#: A name, and "*." before it for those below it. Clients take one that ends in a number for an IPv4 address.
_NAME_PATTERN: Final = re.compile(r"(\*\.)?([a-z0-9_-]+\.)*(?![0-9]+$)[a-z0-9_-]+")


def is_loopback(host: str) -> bool:
    """Return whether a name or an IP address, without brackets or port, means this machine only.

    The case of names does not count. No name is looked up.
    """
    name = host.lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = _address(host)
    return address is not None and address.is_loopback


def is_address(host: str) -> bool:
    """Return whether a host, without brackets or port, is an IP address and no name."""
    return _address(host) is not None


def canonical_host(host: str) -> str:
    """Return the one spelling of a host: a name in lower case without its last dot, an address in its shortest form.

    An IPv6 address that stands for an IPv4 one becomes that; a zone (`%eth0`) is left out, as clients do in `Host`.
    """
    name = host.lower().removesuffix(".")
    address = _address(name)
    return name if address is None else str(address).partition("%")[0]


def check_host_pattern(pattern: str) -> str:
    """Return the canonical form of a name, an address, "*." and a name, or "*"; an address may be in brackets.

    Raises:
        ValueError: no `Host` matches it; the message has the nearest pattern that is right.
    """
    in_brackets = re.fullmatch(r"\[(.*:.*)\]", pattern)
    bare = canonical_host(in_brackets[1] if in_brackets else pattern)
    if pattern == "*" or _is_pattern(bare):
        return bare
    nearest = _nearest_pattern(pattern)
    hint = f", such as {nearest!r}" if _is_pattern(nearest) else ""
    raise ValueError(f"must be a name without scheme, port and path, `*.` and a name, an address, or `*`{hint}")


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _is_pattern(text: str) -> bool:
    return is_address(text) or _NAME_PATTERN.fullmatch(text) is not None


def _nearest_pattern(text: str) -> str:
    """Return what may be meant: the host of an address in a browser, or of one with a port; names below a name."""
    authority = re.split("[/?#]", text.strip().rpartition("://")[2])[0].rpartition("@")[2]
    host = authority[1:].partition("]")[0] if authority.startswith("[") else re.sub(r":[0-9*]*$", "", authority)
    if host.startswith((".", "*")):
        host = "*." + host.lstrip(".*")
    try:
        return canonical_host(host.encode("idna").decode())
    except UnicodeError:
        return ""
