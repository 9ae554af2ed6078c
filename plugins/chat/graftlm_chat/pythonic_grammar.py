"""The grammar of lists of Python calls."""

import json
import keyword
from collections.abc import Mapping, Sequence
from typing import Any, Final

from graftlm.contracts import GrammarKind, GrammarSpec, Tool
from graftlm.errors import GrammarError

__all__ = ["is_argument", "python_calls", "python_name"]

#: Literals of each type; `value` is any of them.
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
#: Keywords that say nothing about the value.
_SILENT: Final = frozenset({"title", "description", "default", "examples", "$comment", "deprecated"})


def python_name(name: str) -> str:
    """Return a tool's name as Python can write it."""
    return name.replace("-", "_")


def is_argument(name: str) -> bool:
    """Whether Python can write a name before the = of an argument."""
    return name.isidentifier() and name.isascii() and not keyword.iskeyword(name)


def python_calls(tools: Sequence[Tool], *, parallel: bool) -> GrammarSpec:
    """Return an EBNF of a list of calls, of one unless `parallel`: arguments in the schema's order, by type.

    Raises:
        GrammarError: a strict tool's schema says more than types, enumerations and items of arguments.
    """
    _check_tool_names(tools)
    more = ' (", " call)*' if parallel else ""
    rules = [f'root ::= "[" call{more} "]"', "call ::= " + " | ".join(f"call{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        rules += _call_rules(f"call{i}", tool)
    return GrammarSpec(GrammarKind.EBNF, "\n".join(rules) + _LITERALS)


def _call_rules(rule: str, tool: Tool) -> list[str]:
    """Return the rules of a tool's calls: one for each argument that may come next.

    `rule`_i is the rest of the call from argument i on, and `rule`_i_more the same with an argument before it.
    """
    schema = tool.parameters
    _refuse_more(tool, schema, {"type", "properties", "required", "additionalProperties"}, "$")
    properties = schema.get("properties") or {}
    required = set(schema.get("required") or ())
    arguments = [(name, _value(tool, sub, f"$.properties.{name}")) for name, sub in properties.items()]
    names = [name for name, _ in arguments]
    for name in [*names, *sorted(required - set(names))]:
        if not is_argument(name) or name not in names:
            raise GrammarError(f"tool {tool.name!r}: pythonic calls cannot name the argument {name!r}")
    rules = [f"{rule} ::= {json.dumps(python_name(tool.name) + '(')} {rule}_0"]
    for i, (name, value) in enumerate(arguments):
        for state, comma in ((f"{rule}_{i}", ""), (f"{rule}_{i}_more", ", ")):
            given = f"{json.dumps(f'{comma}{name}=')} {value} {rule}_{i + 1}_more"
            after = f"{rule}_{i + 1}_more" if comma else f"{rule}_{i + 1}"
            rules.append(f"{state} ::= {given}" + ("" if name in required else f" | {after}"))
    return [*rules, f'{rule}_{len(arguments)} ::= ")"', f'{rule}_{len(arguments)}_more ::= ")"']


def _check_tool_names(tools: Sequence[Tool]) -> None:
    """Refuse tools that Python could not call, or not tell apart."""
    written: dict[str, str] = {}
    for tool in tools:
        name = python_name(tool.name)
        if not all(is_argument(part) for part in name.split(".")):
            raise GrammarError(f"tool {tool.name!r}: pythonic calls cannot name it; its name must be a Python name")
        if name in written:
            raise GrammarError(f"tools {written[name]!r} and {tool.name!r} are both called {name} in Python")
        written[name] = tool.name


def _value(tool: Tool, schema: Any, path: str) -> str:
    """Return the expression of a value."""
    if not isinstance(schema, Mapping):
        return "value"
    if "enum" in schema or "const" in schema:
        _refuse_more(tool, schema, {"enum", "const", "type"}, path)
        return _enumeration(schema["enum"] if "enum" in schema else [schema["const"]])
    types = schema.get("type")
    kinds = [types] if isinstance(types, str) else types if isinstance(types, list) else []
    if not kinds or not _TYPES.issuperset(kinds):
        _refuse_more(tool, schema, set(), path)
        return "value"
    _refuse_more(tool, schema, {"type", "items"}, path)
    if kinds == ["array"] and isinstance(schema.get("items"), Mapping):
        item = _value(tool, schema["items"], f"{path}.items")
        return f'("[" ({item} (", " {item})*)? "]")'
    return f"({' | '.join(kinds)})"


def _enumeration(values: Any) -> str:
    """Return the literals of some JSON values."""
    if not isinstance(values, list) or not values:
        raise GrammarError(f"enum must be a list of values, got {values!r}")
    return "(" + " | ".join(json.dumps(repr(value)) for value in values) + ")"


def _refuse_more(tool: Tool, schema: Mapping[str, Any], known: set[str], path: str) -> None:
    unknown = sorted(schema.keys() - known - _SILENT)
    if unknown and tool.strict:
        raise GrammarError(f"tool {tool.name!r}: pythonic calls cannot enforce {path}.{unknown[0]}")
