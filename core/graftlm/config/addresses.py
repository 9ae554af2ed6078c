"""Host names and addresses: canonical spelling, patterns, and the check for the loopback interface."""

import re
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

__all__ = ["canonical_host", "check_host_pattern", "is_address", "is_loopback"]

#: A name; the prefix "*." means all names below it. The last label is not a number, because clients read such a name as
#: an IPv4 address.
_NAME_PATTERN: Final = re.compile(r"(\*\.)?([a-z0-9_-]+\.)*(?![0-9]+$)[a-z0-9_-]+")


def is_loopback(host: str) -> bool:
    """Return whether a name or an IP address, without brackets or port, belongs to the loopback interface.

    The case of names is ignored. No name is resolved.
    """
    name = host.lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = _address(host)
    return address is not None and address.is_loopback


def is_address(host: str) -> bool:
    """Return whether a host, without brackets or port, is an IP address and not a name."""
    return _address(host) is not None


def canonical_host(host: str) -> str:
    """Return a host in canonical spelling: a name in lower case without its last dot, or an address in shortest form.

    An IPv4-mapped IPv6 address becomes the IPv4 address. A zone (`%eth0`) is removed, as clients omit it in `Host`.
    """
    name = host.lower().removesuffix(".")
    address = _address(name)
    return name if address is None else str(address).partition("%")[0]


def check_host_pattern(pattern: str) -> str:
    """Return the canonical form of a host pattern.

    A pattern is a name, "*." followed by a name, an address with or without brackets, or "*".

    Raises:
        ValueError: the pattern is invalid. The message contains the nearest valid pattern.
    """
    in_brackets = re.fullmatch(r"\[(.*:.*)\]", pattern)
    bare = canonical_host(in_brackets[1] if in_brackets else pattern)
    if pattern == "*" or _is_pattern(bare):
        return bare
    nearest = _nearest_pattern(pattern)
    hint = f", such as {nearest!r}" if _is_pattern(nearest) else ""
    raise ValueError(
        f"must be a host name without scheme, port and path, `*.` followed by a host name, an IP address, or `*`{hint}"
    )


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
    """Return the host pattern that was probably meant by a URL, a host with port, or a wildcard."""
    authority = re.split("[/?#]", text.strip().rpartition("://")[2])[0].rpartition("@")[2]
    host = authority[1:].partition("]")[0] if authority.startswith("[") else re.sub(r":[0-9*]*$", "", authority)
    if host.startswith((".", "*")):
        host = "*." + host.lstrip(".*")
    try:
        return canonical_host(host.encode("idna").decode())
    except UnicodeError:
        return ""
