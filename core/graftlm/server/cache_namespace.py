"""The namespace of a request's cached prefixes."""

__all__ = ["namespace_of"]


def namespace_of(cache_salt: str | None, extra_key: str | None) -> str:
    """Return the namespace for a salt and a further key; "" if neither is set."""
    if cache_salt and extra_key:
        return f"{len(cache_salt)}:{cache_salt}{extra_key}"  # because of the length, different pairs do not collide
    return cache_salt or extra_key or ""
