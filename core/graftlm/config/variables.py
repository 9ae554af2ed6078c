"""Expansion of environment variables in strings: `${VAR}` and `${VAR:-default}`. `$$` is a dollar sign."""

import re
from collections.abc import Mapping
from typing import Final

__all__ = ["VariableError", "expand_variables", "names_only_a_variable", "references"]

_REFERENCE = re.compile(r"\$\$|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^{}]*))?\}|(?P<malformed>\$\{)")


#: Maximum number of characters of a value.
_MAX_CHARS: Final = 1 << 20


class VariableError(Exception):
    """The error of a reference that cannot be expanded. The message has the reason and the correct form."""


def references(text: str) -> list[str]:
    """Return the names of the variables in a text."""
    return [match["name"] for match in _REFERENCE.finditer(text) if match["name"]]


def names_only_a_variable(text: str) -> bool:
    """Return whether a text is exactly one reference."""
    match = _REFERENCE.fullmatch(text)
    return match is not None and match["name"] is not None


def expand_variables(text: str, environment: Mapping[str, str]) -> str:
    """Replace all references. As in a shell, a default also replaces an empty variable.

    Raises:
        VariableError: a variable is unset or empty and has no default, a reference is malformed, or the result is too
            long.
    """
    num_chars = len(text)

    def replacement(match: re.Match[str]) -> str:
        nonlocal num_chars
        value = _replacement(match, environment)
        num_chars += len(value)
        if num_chars > _MAX_CHARS:
            raise VariableError(f"with its environment variables, the value is longer than {_MAX_CHARS:,} characters")
        return value

    return _REFERENCE.sub(replacement, text)


def _replacement(match: re.Match[str], environment: Mapping[str, str]) -> str:
    if match[0] == "$$":
        return "$"
    name = match["name"]
    if name is None:
        raise VariableError(
            "'${' is not followed by a variable; write ${NAME}, ${NAME:-default}, or $$ for a dollar sign"
        )
    value = environment.get(name) or match["default"]
    if value is None:
        state = "empty" if name in environment else "not set"
        raise VariableError(f"environment variable {name} is {state}; set it, or write ${{{name}:-default}}")
    return value
