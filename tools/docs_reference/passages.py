"""Generated passages of hand-written pages, between two markers.

<!-- providers cache -->        or `contract` for `providers`
generated text
<!-- end of providers cache -->
"""

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
    """Replace the text between each pair of markers of a page by the generated text.

    Raises:
        ValueError: a marker names no family, or has no end marker.
    """
    expanded, num_passages = _PASSAGE.subn(_expanded, markdown)
    if num_passages != len(_MARKER.findall(markdown)):
        raise ValueError("a page's marker has no end: expected <!-- end of NAME KEY --> after <!-- NAME KEY -->")
    return expanded


def _expanded(match: re.Match[str]) -> str:
    name, key = match.groups()
    text = _PASSAGES[name](_checked(key)).strip("\n")
    return f"<!-- {name} {key} -->\n\n{text}\n\n<!-- end of {name} {key} -->"


def _checked(key: str) -> str:
    if key not in FAMILIES:
        raise ValueError(f"a page's marker names family '{key}', expected one of {', '.join(FAMILIES)}")
    return key


def _providers(key: str) -> str:
    """Return the built-in providers of a family, and their options."""
    providers = builtin_providers(key)
    if not providers:
        return "This family has no built-in providers."
    rows = [[code(provider.name), plain(provider.summary)] for provider in providers]
    parts = [table(["Name", "What it does"], rows)]
    for provider in providers:
        if options := option_table(list_options(provider.options)):
            parts += [f"Options of {code(provider.name)}:\n", options]
    return "\n".join(parts)


def _contract(key: str) -> str:
    """Return a contract's source code, whose docstrings are the documentation."""
    contract = FAMILIES[key].contract
    return f"`{contract.__module__}.{contract.__name__}`:\n\n```py\n{inspect.getsource(contract)}```"


_PASSAGES: Mapping[str, Callable[[str], str]] = MappingProxyType({"providers": _providers, "contract": _contract})
_MARKER = re.compile(rf"<!-- ({'|'.join(_PASSAGES)}) (\w+) -->")
_PASSAGE = re.compile(rf"{_MARKER.pattern}.*?<!-- end of \1 \2 -->", re.DOTALL)
