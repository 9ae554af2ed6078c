"""JSON schemas as EBNF: whatever the grammar accepts is valid under the schema.

xgrammar has a reading of JSON schemas of its own, of which 0.2.8 enforces a part and passes over the rest in silence:
`required` names without a property, bounds beside `multipleOf`, keys spelt with escapes, ... Here a keyword is either
translated or refused, by its name and path.

The grammar may accept less than the schema does. Properties come in the order in which the schema lists them, and only
those, unless it speaks of `additionalProperties`; a `pattern` matches the whole string; strings with a length or a
pattern, and names, hold no escapes; numbers with bounds have no exponent; a keyword of one type implies the type.
"""

import json
from collections.abc import Iterable
from math import ceil, floor
from typing import Any, Final, NoReturn

from graftlm.errors import GrammarError
from graftlm_grammar.char_set import IN_JSON_STRING
from graftlm_grammar.disjoint import are_disjoint, json_type, resolve, types_of
from graftlm_grammar.formats import FORMATS
from graftlm_grammar.json_ebnf import JsonRules, literal, repeated
from graftlm_grammar.number_ranges import Bound, integers_between, multiples_of, numbers_between
from graftlm_grammar.regex import regex_to_ebnf

__all__ = ["ANNOTATIONS", "COMBINED", "ENFORCED", "schema_to_ebnf"]

#: Keywords that assert nothing.
ANNOTATIONS: Final = frozenset(
    {
        "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "discriminator",
        "example", "examples", "readOnly", "title", "writeOnly",
    }
)  # fmt: skip

#: Type -> the keywords that are enforced for values of it.
ENFORCED: Final[dict[str, frozenset[str]]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "boolean": frozenset(),
    "null": frozenset(),
    "object": frozenset(
        {
            "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
            "maxProperties",
        }
    ),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
}  # fmt: skip

#: Keywords that are enforced alone, or beside annotations; `type` may stand beside `enum` and `const`.
COMBINED: Final = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")

_KNOWN: Final = frozenset[str]().union(*ENFORCED.values())
_MAX_DEPTH: Final = 48
_MAX_BOUND: Final = 2**63
_MAX_MULTIPLE: Final = 256  # a rule for each remainder
_MAX_LEAST: Final = 1000  # what a matcher keeps of a least count grows with its square
_MAX_MOST: Final = 10_000


def schema_to_ebnf(text: str, max_whitespace: int) -> str:
    """Translate a schema.

    Args:
        text: a JSON schema, draft 2020-12 in the main.
        max_whitespace: blanks and line ends in a row, at most, between the parts of the JSON.

    Returns: a grammar whose root rule is `root`.

    Raises:
        GrammarError: it is not a schema, or asks for what is not enforced; the message names keyword and path.
    """
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
        translation = _Translation(schema, max_whitespace)
        translation.rules.add("root", translation.write(schema, "$"))
        return translation.rules.text()
    except RecursionError:
        raise GrammarError(f"json_schema: nested more than {_MAX_DEPTH} levels deep") from None
    except GrammarError as error:
        raise GrammarError(f"json_schema: {error}") from None
    except ValueError as error:
        raise GrammarError(f"json_schema: not JSON: {error}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise GrammarError(f"{name} is not JSON")


def _refuse(path: str, message: str) -> NoReturn:
    raise GrammarError(f"{path}: {message}")


def _show(value: object) -> str:
    return json.dumps(value)[:80]


class _Translation:
    """Walks a schema, and what it refers to, once; each schema becomes a rule."""

    def __init__(self, root: Any, max_whitespace: int) -> None:
        self.rules = JsonRules(max_whitespace)
        self._root = root
        self._names: dict[
            int, str
        ] = {}  # id of a schema -> its rule, perhaps not written yet: schemas may be recursive

    def write(self, schema: Any, path: str, depth: int = 0) -> str:
        """Write the rule of a schema and of all below it; returns its name."""
        if schema is True:
            return self.rules.any()
        if schema is False:
            _refuse(path, "false allows no value")
        if not isinstance(schema, dict):
            _refuse(path, f"a schema is an object or true, got {json_type(schema)}")
        if id(schema) in self._names:
            return self._names[id(schema)]
        if depth > _MAX_DEPTH:
            _refuse(path, f"nested more than {_MAX_DEPTH} levels deep")
        if depth and "$id" in schema:
            _refuse(path, "$id below the root changes what $ref means, which is not enforced")
        name = self._names[id(schema)] = f"s{len(self._names)}"
        self.rules.add(name, self._expression(schema, path, depth))
        return name

    def _expression(self, schema: dict[str, Any], path: str, depth: int) -> str:
        asserted = [key for key in schema if key not in ANNOTATIONS and not key.startswith("x-")]
        form = next((key for key in COMBINED if key in schema), None)
        if form is None:
            return self._typed(schema, asserted, path, depth)
        for key in asserted:
            if key != form and not (key == "type" and form in ("enum", "const")):
                _refuse(f"{path}.{key}", f"not enforced beside {form}; move it into the schemas there")
        path = f"{path}.{form}"
        if form == "$ref":
            return self.write(resolve(self._root, schema[form], path), f"{path}({schema[form]})", depth + 1)
        if form in ("enum", "const"):
            return _values(schema[form] if form == "enum" else [schema[form]], schema.get("type"), path)
        branches = self._branches(schema[form], path, depth)
        if form == "oneOf":
            self._check_disjoint(schema[form], path)
        elif form == "allOf" and len(branches) > 1:
            _refuse(path, "not enforced for more than one schema; write one that says it all")
        return " | ".join(branches)

    def _branches(self, branches: Any, path: str, depth: int) -> list[str]:
        if not isinstance(branches, list) or not branches:
            _refuse(path, "expected a non-empty list of schemas")
        return [self.write(branch, f"{path}[{i}]", depth + 1) for i, branch in enumerate(branches)]

    def _check_disjoint(self, branches: list[Any], path: str) -> None:
        for i in range(len(branches)):
            for j in range(i):
                if not are_disjoint(self._root, branches[j], branches[i]):
                    _refuse(path, f"not enforced: a value might match both [{j}] and [{i}]; use anyOf")

    def _typed(self, schema: dict[str, Any], asserted: list[str], path: str, depth: int) -> str:
        if schema.get("uniqueItems") is False:
            asserted = [key for key in asserted if key != "uniqueItems"]
        keywords = [key for key in asserted if key != "type"]
        for key in keywords:
            if key not in _KNOWN:
                _refuse(f"{path}.{key}", "this keyword is not enforced; leave it out")
        if not asserted:
            return self.rules.any()
        types = _type_names(schema["type"], path) if "type" in schema else [_implied_type(keywords, path)]
        for key in keywords:
            if not any(key in ENFORCED[name] for name in types):
                _refuse(f"{path}.{key}", f"not enforced for type {' or '.join(types)}")
        return " | ".join([self._of_type(name, schema, path, depth) for name in types])

    def _of_type(self, name: str, schema: dict[str, Any], path: str, depth: int) -> str:
        if name == "string":
            return _string(schema, path) or self.rules.string()
        if name == "integer":
            return self._integer(schema, path)
        if name == "number":
            return _number(schema, path) or self.rules.number()
        if name == "boolean":
            return '"true" | "false"'
        if name == "null":
            return '"null"'
        return self._object(schema, path, depth) if name == "object" else self._array(schema, path, depth)

    def _integer(self, schema: dict[str, Any], path: str) -> str:
        low, high = _bounds(schema, path)
        if "multipleOf" in schema:
            step = schema["multipleOf"]
            if low or high or "number" in _type_names(schema.get("type", "integer"), path):
                _refuse(f"{path}.multipleOf", "enforced for type integer only, and without bounds")
            if json_type(step) != "integer" or not 1 <= step <= _MAX_MULTIPLE:
                _refuse(f"{path}.multipleOf", f"expected a whole number from 1 to {_MAX_MULTIPLE}, got {_show(step)}")
            name = f"m{int(step)}"
            for rule, body in multiples_of(int(step), name).items():
                self.rules.add(rule, body)
            return name
        first = None if low is None else floor(low.value) + 1 if not low.inclusive else ceil(low.value)
        last = None if high is None else ceil(high.value) - 1 if not high.inclusive else floor(high.value)
        return integers_between(first, last) or _refuse(path, "no integer lies between these bounds")

    # -- objects -------------------------------------------------------------------------------------------------------

    def _object(self, schema: dict[str, Any], path: str, depth: int) -> str:
        named = {
            name: self.write(below, f"{path}.properties.{name}", depth + 1)
            for name, below in _mapping(schema, "properties", path).items()
        }
        additional = schema.get("additionalProperties")
        self._require(schema, named, additional, path, depth)
        if named:
            for key in ("patternProperties", "propertyNames", "minProperties", "maxProperties"):
                if key in schema:
                    _refuse(f"{path}.{key}", "not enforced beside properties or required")
            value = None if additional in (None, False) else self._additional(additional, path, depth)
            return self.rules.record(named, frozenset(schema.get("required", ())), value)
        least, most = _counts(schema, ("minProperties", "maxProperties"), path)
        if least > 1:
            _refuse(f"{path}.minProperties", "enforced up to 1: free names may come twice")
        if "patternProperties" in schema:
            return self._by_pattern(schema, least, most, path, depth)
        if additional is False:
            return self.rules.items("{", None, least, most, "}") or _refuse(path, "no property is allowed")
        value = self.rules.any() if additional is None else self._additional(additional, path, depth)
        key = self._property_name(schema.get("propertyNames", True), f"{path}.propertyNames", depth)
        return self.rules.items("{", self.rules.pair(key, value), least, most, "}") or _refuse(path, "no count fits")

    def _additional(self, schema: Any, path: str, depth: int) -> str:
        return self.write(schema, f"{path}.additionalProperties", depth + 1)

    def _require(self, schema: dict[str, Any], named: dict[str, str], additional: Any, path: str, depth: int) -> None:
        """Check `required`; names that `properties` leaves out become properties that may be anything."""
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            _refuse(f"{path}.required", "expected a list of names")
        for name in required:
            if name in named:
                continue
            if additional is False or "patternProperties" in schema:
                _refuse(f"{path}.required", f"{_show(name)} is enforced only if properties describes it")
            named[name] = self.rules.any() if additional is None else self._additional(additional, path, depth)

    def _by_pattern(self, schema: dict[str, Any], least: int, most: int | None, path: str, depth: int) -> str:
        patterns = _mapping(schema, "patternProperties", path)
        path = f"{path}.patternProperties"
        if len(patterns) != 1 or schema.get("additionalProperties", False) is not False or "propertyNames" in schema:
            _refuse(path, "enforced for one pattern, with no other names: a name might match both")
        ((pattern, below),) = patterns.items()
        pair = self.rules.pair(_quoted(_pattern(pattern, path)), self.write(below, f"{path}.{pattern}", depth + 1))
        return self.rules.items("{", pair, least, most, "}") or _refuse(path, "no count fits")

    def _property_name(self, names: Any, path: str, depth: int) -> str:
        if names is True or names == {}:
            return self.rules.string()
        if isinstance(names, dict) and not any(key in names for key in ("type", *COMBINED)):
            names["type"] = "string"
        rule = self.write(names, path, depth + 1)
        if types_of(self._root, names) != {"string"}:
            _refuse(path, "enforced for schemas of type string only")
        return rule

    # -- arrays --------------------------------------------------------------------------------------------------------

    def _array(self, schema: dict[str, Any], path: str, depth: int) -> str:
        least, most = _counts(schema, ("minItems", "maxItems"), path)
        first = []
        if "prefixItems" in schema:
            first = self._branches(schema["prefixItems"], f"{path}.prefixItems", depth)
        rest = schema.get("items", not first)
        item = None if rest is False else self.write(rest, f"{path}.items", depth + 1)
        return self.rules.sequence(first, item, least, most) or _refuse(path, "no array can have that many items")


def _values(values: Any, wanted: Any, path: str) -> str:
    if not isinstance(values, list) or not values:
        _refuse(path, "expected a non-empty list of values")
    types = None if wanted is None else _type_names(wanted, path)
    for value in values:
        name = json_type(value)
        if types is not None and name not in types and not (name == "integer" and "number" in types):
            _refuse(path, f"{_show(value)} is not of type {' or '.join(types)}")
    return " | ".join([literal(json.dumps(value, ensure_ascii=False)) for value in values])


def _type_names(wanted: Any, path: str) -> list[str]:
    names = [wanted] if isinstance(wanted, str) else wanted
    if not isinstance(names, list) or not names or not all(isinstance(n, str) and n in ENFORCED for n in names):
        _refuse(f"{path}.type", f"expected one or some of {', '.join(ENFORCED)}, got {_show(wanted)}")
    return list(dict.fromkeys(names))


def _implied_type(keywords: Iterable[str], path: str) -> str:
    """Return the type that keywords speak of."""
    names = {next(name for name in reversed(ENFORCED) if key in ENFORCED[name]) for key in keywords}
    if names == {"integer", "number"}:
        return "number"
    if len(names) > 1:
        _refuse(path, f"say which type: the keywords are of {' and '.join(sorted(names))}")
    return names.pop()


def _mapping(schema: dict[str, Any], key: str, path: str) -> dict[str, Any]:
    value = schema.get(key, {})
    if not isinstance(value, dict):
        _refuse(f"{path}.{key}", f"expected an object, got {json_type(value)}")
    return value


def _counts(schema: dict[str, Any], keys: tuple[str, str], path: str) -> tuple[int, int | None]:
    """Return the least and the most of something, None for any number."""
    for key, limit in zip(keys, (_MAX_LEAST, _MAX_MOST), strict=True):
        value = schema.get(key, 0)
        if json_type(value) != "integer" or not 0 <= value <= limit:
            _refuse(f"{path}.{key}", f"expected a whole number from 0 to {limit}, got {_show(value)}")
    least, most = int(schema.get(keys[0], 0)), schema.get(keys[1])
    if most is not None and most < least:
        _refuse(f"{path}.{keys[1]}", f"{most} is less than {keys[0]}, {least}")
    return least, None if most is None else int(most)


def _quoted(expression: str) -> str:
    return f'"\\"" ({expression}) "\\""'


def _pattern(pattern: Any, path: str) -> str:
    if not isinstance(pattern, str):
        _refuse(path, f"expected a string, got {json_type(pattern)}")
    try:
        return regex_to_ebnf(pattern, IN_JSON_STRING)
    except GrammarError as error:
        _refuse(path, str(error))


def _string(schema: dict[str, Any], path: str) -> str | None:
    """Return the expression of a string with a pattern, format or length, None if it has none."""
    least, most = _counts(schema, ("minLength", "maxLength"), path)
    has_length = "minLength" in schema or "maxLength" in schema
    if has_length + ("pattern" in schema) + ("format" in schema) > 1:
        _refuse(path, "pattern, format, and minLength or maxLength are enforced one at a time; say it in the pattern")
    if "pattern" in schema:
        return _quoted(_pattern(schema["pattern"], f"{path}.pattern"))
    if "format" in schema:
        name = schema["format"]
        if not isinstance(name, str) or name not in FORMATS:
            _refuse(f"{path}.format", f"{_show(name)} is not enforced. Enforced are: {', '.join(sorted(FORMATS))}.")
        return _quoted(regex_to_ebnf(FORMATS[name], IN_JSON_STRING))
    return _quoted(repeated(JsonRules.PLAIN_CHAR, least, most)) if has_length else None


def _number(schema: dict[str, Any], path: str) -> str | None:
    """Return the expression of a number with bounds, None if it has none."""
    low, high = _bounds(schema, path)
    if low is None and high is None:
        return None
    return numbers_between(low, high) or _refuse(path, "no number lies between these bounds")


def _bounds(schema: dict[str, Any], path: str) -> tuple[Bound | None, Bound | None]:
    """Return the tightest bounds that a schema names."""
    found: dict[str, Bound] = {}
    for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if key not in schema:
            continue
        value = schema[key]
        if json_type(value) not in ("integer", "number") or abs(value) > _MAX_BOUND:
            _refuse(f"{path}.{key}", f"expected a number up to 2**63, got {_show(value)}")
        found[key] = Bound.of(value, inclusive=not key.startswith("exclusive"))
    lows = [found[key] for key in ("minimum", "exclusiveMinimum") if key in found]
    highs = [found[key] for key in ("maximum", "exclusiveMaximum") if key in found]
    low = max(lows, key=lambda bound: (bound.value, not bound.inclusive), default=None)
    return low, min(highs, key=lambda bound: (bound.value, bound.inclusive), default=None)
