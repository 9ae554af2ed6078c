"""Passages of hand-written pages that the code writes: `<!-- providers KEY -->` and `<!-- contract KEY -->`."""

import inspect
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from docs_reference.families import builtin_providers
from docs_reference.markdown import code, plain, table
from docs_reference.options import list_options, option_table
from graftlm.registry import FAMILIES

__all__ = ["expand_passages"]


def expand_passages(markdown: str) -> str:
    """Write what each marker of a page stands for in its place.

    Raises:
        ValueError: a marker names no family.
    """
    return _MARKER.sub(lambda match: _PASSAGES[match[1]](_checked(match[2])), markdown)


def _checked(key: str) -> str:
    if key not in FAMILIES:
        raise ValueError(f"a page's marker names family '{key}', expected one of {', '.join(FAMILIES)}")
    return key


def _providers(key: str) -> str:
    """Return what comes along in a family, and its options."""
    providers = builtin_providers(key)
    if not providers:
        return "None comes along: this family is for yours."
    rows = [[code(provider.name), plain(provider.summary)] for provider in providers]
    parts = [table(["Name", "What it does"], rows)]
    for provider in providers:
        if options := option_table(list_options(provider.options)):
            parts += [f"Options of {code(provider.name)}:\n", options]
    return "\n".join(parts)


def _contract(key: str) -> str:
    """Return a contract's source: its sentences are the documentation."""
    contract = FAMILIES[key].contract
    return f"`{contract.__module__}.{contract.__name__}`, as it stands:\n\n```py\n{inspect.getsource(contract)}```"


_PASSAGES: Mapping[str, Callable[[str], str]] = MappingProxyType({"providers": _providers, "contract": _contract})
_MARKER = re.compile(rf"<!-- ({'|'.join(_PASSAGES)}) (\w+) -->")
