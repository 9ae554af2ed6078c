"""Addresses that a server listens on or is asked by, and whether other machines reach them."""

from ipaddress import IPv6Address, ip_address

__all__ = ["is_loopback"]


def is_loopback(host: str) -> bool:
    """Return whether a name or an IP address, without brackets or port, means this machine only.

    The case of names does not count. No name is looked up.
    """
    name = host.lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback
