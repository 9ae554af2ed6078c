"""The grammar of lists of Python calls."""

import json
import keyword
from collections.abc import Mapping, Sequence
from typing import Any, Final

from graftlm.contracts import CallGrammar, GrammarKind, GrammarSpec, Tool
from graftlm.errors import GrammarError

__all__ = ["is_argument", "python_calls", "python_name"]

#: Grammar rules of the literals of each JSON type. The rule `value` matches a literal of any type.
_LITERALS: Final = r"""
value ::= string | number | "True" | "False" | "None" | array | object
boolean ::= "True" | "False"
null ::= "None"
integer ::= "-"? ("0" | [1-9] [0-9]{0,15})
number ::= integer ("." [0-9]{1,16})? ([eE] [+-]? [0-9]{1,2})?
string ::= "\"" ([^"\\\x00-\x1f] | "\\" ["\\nrt])* "\""
array ::= "[" (value (", " value)*)? "]"
object ::= "{" (string ": " value (", " string ": " value)*)? "}"
"""
_TYPES: Final = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
#: Keywords that do not constrain the value.
_SILENT: Final = frozenset(
    {
        "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "example",
        "examples", "readOnly", "title", "writeOnly",
    }
)  # fmt: skip


def python_name(name: str) -> str:
    """Return a tool's name as a Python name, with `_` in place of `-`."""
    return name.replace("-", "_")


def is_argument(name: str) -> bool:
    """Return whether a name can be the name of a keyword argument in Python."""
    return name.isidentifier() and name.isascii() and not keyword.iskeyword(name)


def python_calls(tools: Sequence[Tool], *, parallel: bool) -> CallGrammar:
    """Return an EBNF of a list of calls. Unless `parallel`, the list has exactly one call.

    Arguments are in the order of the schema. The grammar enforces their types and enumerations, and types of items.

    Raises:
        GrammarError: a tool or an argument cannot be named in Python, a schema allows no value, or the schema of a
            strict tool has keywords that the grammar cannot enforce.
    """
    _check_tool_names(tools)
    more = ' (", " call)*' if parallel else ""
    rules = [f'root ::= "[" call{more} "]"', "call ::= " + " | ".join(f"call{i}" for i in range(len(tools)))]
    unenforced: list[tuple[int, str]] = []
    for i, tool in enumerate(tools):
        writer = _CallRules(tool)
        rules += writer.rules(f"call{i}")
        unenforced += [(i, path) for path in writer.unenforced]
    spec = GrammarSpec(GrammarKind.EBNF, "\n".join(rules) + _LITERALS, strict=all(tool.strict for tool in tools))
    return CallGrammar(spec, unenforced=tuple(unenforced))


class _CallRules:
    """Writes the rules of one tool's calls.

    Attributes:
        unenforced: paths of the keywords that the rules do not enforce; empty if the tool is strict.
    """

    def __init__(self, tool: Tool) -> None:
        self.unenforced: list[str] = []
        self._tool = tool

    def rules(self, rule: str) -> list[str]:
        """Return the rules, two for each argument.

        `rule`_i matches the call from argument i on, if no earlier argument is given. `rule`_i_more matches the call
        from argument i on after an earlier argument, so it starts with a comma.

        Raises:
            GrammarError: an argument cannot be named in Python, or the tool is strict and a keyword cannot be enforced.
        """
        schema = self._tool.parameters
        # `additionalProperties` is always satisfied, because the grammar allows no additional arguments.
        self._check_keywords(schema, {"type", "properties", "required", "additionalProperties"}, "$")
        required = set(schema.get("required") or ())
        arguments = [
            (name, self._value(below, f"$.properties.{name}"))
            for name, below in (schema.get("properties") or {}).items()
            if below is not False
        ]
        self._check_names([name for name, _ in arguments], required)
        rules = [f"{rule} ::= {json.dumps(python_name(self._tool.name) + '(')} {rule}_0"]
        for i, (name, value) in enumerate(arguments):
            for state, comma in ((f"{rule}_{i}", ""), (f"{rule}_{i}_more", ", ")):
                given = f"{json.dumps(f'{comma}{name}=')} {value} {rule}_{i + 1}_more"
                after = f"{rule}_{i + 1}_more" if comma else f"{rule}_{i + 1}"
                rules.append(f"{state} ::= {given}" + ("" if name in required else f" | {after}"))
        return [*rules, f'{rule}_{len(arguments)} ::= ")"', f'{rule}_{len(arguments)}_more ::= ")"']

    def _check_names(self, names: list[str], required: set[str]) -> None:
        for name in [*names, *sorted(required - set(names))]:
            if not is_argument(name) or name not in names:
                raise GrammarError(f"tool {self._tool.name!r}: pythonic calls cannot name the argument {name!r}")

    def _value(self, schema: Any, path: str) -> str:
        """Return the grammar expression for the values of a schema."""
        if not isinstance(schema, Mapping):
            return "value"
        types = schema.get("type")
        kinds = [types] if isinstance(types, str) else types if isinstance(types, list) else []
        form = next((key for key in ("enum", "const") if key in schema), None)
        if form is not None:
            self._check_keywords(schema, {form, "type"}, path)
            return self._enumeration(schema[form] if form == "enum" else [schema[form]], kinds, f"{path}.{form}")
        if not kinds or not _TYPES.issuperset(kinds):
            self._check_keywords(schema, set(), path)
            return "value"
        self._check_keywords(schema, {"type", "items"} if "array" in kinds else {"type"}, path)
        return f"({' | '.join(self._array(schema, path) if kind == 'array' else kind for kind in kinds)})"

    def _array(self, schema: Mapping[str, Any], path: str) -> str:
        items = schema.get("items", True)
        if items is False:
            return '"[]"'
        item = self._value(items, f"{path}.items")
        return f'("[" ({item} (", " {item})*)? "]")'

    def _enumeration(self, values: Any, kinds: Sequence[str], path: str) -> str:
        """Return an expression that matches the Python literals of JSON values.

        Args:
            values: the values.
            kinds: JSON types of the values to include; empty: all values.
            path: location of the enumeration, for errors.
        """
        if not isinstance(values, list):
            raise GrammarError(f"tool {self._tool.name!r}: {path}: expected a list of values, got {values!r}")
        possible = [value for value in values if not kinds or not _types_of(value).isdisjoint(kinds)]
        if not possible:
            raise GrammarError(f"tool {self._tool.name!r}: {path}: no value is possible, got {values!r}")
        return "(" + " | ".join(json.dumps(repr(value)) for value in possible) + ")"

    def _check_keywords(self, schema: Mapping[str, Any], known: set[str], path: str) -> None:
        """Record the keywords of a schema that the grammar does not enforce, which are all except `known`.

        Raises:
            GrammarError: the schema has such a keyword, and the tool is strict.
        """
        for key in schema:
            if key in known or key in _SILENT or key.startswith("x-") or (key, schema[key]) == ("uniqueItems", False):
                continue
            if self._tool.strict:
                raise GrammarError(f"tool {self._tool.name!r}: pythonic calls cannot enforce {path}.{key}")
            self.unenforced.append(f"{path}.{key}")


def _check_tool_names(tools: Sequence[Tool]) -> None:
    """Check that each tool's name is a Python name, and that all names are different.

    Raises:
        GrammarError: a name is not a Python name, or two names are equal in Python.
    """
    written: dict[str, str] = {}
    for tool in tools:
        name = python_name(tool.name)
        if not all(is_argument(part) for part in name.split(".")):
            raise GrammarError(f"tool {tool.name!r}: its name must be a Python name for pythonic calls")
        if name in written:
            raise GrammarError(f"tools {written[name]!r} and {tool.name!r} have the same name in Python, {name}")
        written[name] = tool.name


def _types_of(value: Any) -> set[str]:
    """Return the JSON types of a value. A whole number has two types, `integer` and `number`."""
    if isinstance(value, bool) or value is None:
        return {"null" if value is None else "boolean"}
    if isinstance(value, int | float):
        return {"integer", "number"} if float(value).is_integer() else {"number"}
    return {"string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"}
