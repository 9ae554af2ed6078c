"""Translates JSON schemas to EBNF. Every text that the grammar accepts is valid under the schema.

xgrammar also reads JSON schemas, but version 0.2.8 enforces only some keywords and ignores others without a warning:
`required` names without a property, bounds together with `multipleOf`, keys written with escapes, and more. This module
either translates a keyword, or refuses it with an error that has its name and path. If the schema is not strict, the
keyword is left out and reported instead.

The grammar may accept fewer texts than the schema. Properties are in the order of the schema; other properties are
allowed only if the schema has `additionalProperties`. A `pattern` must match the whole string. Strings with a length or
a pattern, and names, have no escapes. Numbers with bounds have no exponent. A keyword that applies only to one type
implies this type.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from graftlm_grammar.disjoint import check_disjoint, json_type, resolve, types_of
from graftlm_grammar.ebnf import MAX_COUNT, read_ebnf
from graftlm_grammar.endless import endless_rules
from graftlm_grammar.enforcement import Enforcement, NotEnforcedError, refuse, show
from graftlm_grammar.json_ebnf import JsonRules
from graftlm_grammar.json_scalars import counts, pattern_expression, scalar_expression
from graftlm_grammar.options import JsonOptions
from graftlm_grammar.schema_keywords import (
    COMBINED,
    ENFORCED,
    asserted,
    check_items,
    leave_out,
    leave_out_unknown,
    type_names,
)
from graftlm_grammar.schema_reader import MAX_DEPTH, reading_schema

__all__ = ["SchemaGrammar", "translate_schema"]

_KNOWN: Final = frozenset[str]().union(*ENFORCED.values())


#: Maximum number of properties of all objects together.
_MAX_NAMED: Final = 3000
#: Maximum number of optional properties of one object.
_MAX_OPTIONAL: Final = 800


@dataclass(frozen=True, slots=True)
class SchemaGrammar:
    """A schema as a grammar.

    Attributes:
        ebnf: rules in xgrammar's notation; the start rule is `root`.
        unenforced: paths of the keywords that were left out; empty if the schema is enforced completely.
    """

    ebnf: str
    unenforced: tuple[str, ...]


def translate_schema(
    text: str, options: JsonOptions, strict: bool = True, path: str = "$", rules: type[JsonRules] = JsonRules
) -> SchemaGrammar:
    """Translate a schema.

    Args:
        text: a JSON schema, mostly as in draft 2020-12.
        options: white space in the output.
        strict: whether keywords that cannot be enforced are refused; otherwise they are left out.
        path: name of the root in paths.
        rules: the class of the rules of JSON.

    Raises:
        GrammarError: the text is not a schema, no value is valid under it, or it is strict and has a keyword that
            cannot be enforced; the message names the keyword and its path.
    """
    with reading_schema(text) as schema:
        translation = _Translation(schema, path, rules(options), Enforcement(strict))
        translation.rules.add("root", translation.write(schema, path))
        ebnf = translation.rules.text()
        if translation.is_recursive:
            translation.check_finite(ebnf)
        return SchemaGrammar(ebnf, translation.enforcement.unenforced)


class _Translation:
    """Visits a schema and the targets of its references once; each schema becomes a rule."""

    def __init__(self, root: Any, root_path: str, rules: JsonRules, enforcement: Enforcement) -> None:
        self.rules = rules
        self.enforcement = enforcement
        self._root = root
        self._root_path = root_path
        # id of a schema -> name of its rule; schemas may be recursive, so the rule may not be written yet
        self._names: dict[int, str] = {}
        self._paths: dict[str, str] = {}  # rule -> path of its schema
        self._is_written: set[str] = set()
        self.is_recursive = False
        self._num_named = self._num_followed = 0

    def check_finite(self, ebnf: str) -> None:
        """Check that a finite value is valid under each schema.

        Raises:
            GrammarError: the message names the first schema without a finite value.
        """
        endless = [name for name in endless_rules(read_ebnf(ebnf, MAX_COUNT)) if name in self._paths]
        if endless:
            refuse(self._paths[endless[0]], "no finite value is valid, because the schema requires itself")

    def write(self, schema: Any, path: str, depth: int = 0) -> str:
        """Write the rules of a schema and of all schemas within it. Returns the name of its rule."""
        if schema is True:
            return self.rules.any()
        if schema is False:
            refuse(path, "false allows no value")
        if not isinstance(schema, dict):
            refuse(path, f"a schema is an object or true, got {json_type(schema)}")
        if id(schema) in self._names:
            self.is_recursive |= self._names[id(schema)] not in self._is_written
            return self._names[id(schema)]
        if depth > MAX_DEPTH:
            refuse(path, f"nested more than {MAX_DEPTH} levels deep")
        if depth and "$id" in schema:
            self.enforcement.leave_out(f"{path}.$id", "not enforced below the root, where it changes references")
            return self.rules.any()
        name = self._names[id(schema)] = f"s{len(self._names)}"
        self._paths[name] = path
        self.rules.add(name, self._expression(schema, path, depth))
        self._is_written.add(name)
        return name

    def _expression(self, schema: dict[str, Any], path: str, depth: int) -> str:
        keywords = asserted(schema)
        form = next((key for key in COMBINED if key in schema), None)
        own = next((key for key in keywords if key in _KNOWN), None)
        if own is not None and form in ("anyOf", "oneOf", "allOf"):
            # The combining keyword (`anyOf`, ...) cannot be enforced together with keywords such as `minimum`. It is
            # left out, and the keywords such as `minimum` are enforced.
            keywords = self._without(keywords, lambda key: key in COMBINED, schema, path, own)
            form = None
        if form is None:
            return self._typed(schema, keywords, path, depth)
        kept = (form, "type") if form in ("enum", "const") else (form,)
        self._without(keywords, lambda key: key not in kept, schema, path, form)
        expression = self._combined(form, schema, f"{path}.{form}", depth)
        if expression is not None:
            return expression
        return self._typed(schema, [key for key in keywords if key not in COMBINED], path, depth)

    def _without(
        self, keywords: list[str], is_excluded: Callable[[str], bool], schema: dict[str, Any], path: str, kept: str
    ) -> list[str]:
        """Leave out the keywords for which `is_excluded` returns True, and return the remaining keywords.

        Args:
            keywords: keywords of `schema`.
            is_excluded: function that returns whether a keyword cannot be enforced together with `kept`.
            schema: the schema.
            path: path of the schema.
            kept: a remaining keyword, for the error.
        """
        for key in filter(is_excluded, keywords):
            if key in (*COMBINED, "type") or key in _KNOWN:
                message = f"not enforced together with {kept}; move it into the schemas there"
                leave_out(self.enforcement, schema, key, path, message)
            else:
                leave_out_unknown(self.enforcement, schema, key, path)
        return [key for key in keywords if not is_excluded(key)]

    def _combined(self, form: str, schema: dict[str, Any], path: str, depth: int) -> str | None:
        """Return the expression of a combining keyword; None if the keyword is left out."""
        if form == "$ref":
            return self._reference(schema[form], path, depth)
        if form in ("enum", "const"):
            return self._values(schema[form] if form == "enum" else [schema[form]], schema.get("type"), path)
        branches = self._branches(schema[form], path, depth)
        if form == "allOf":
            return self._first_that_asserts(branches, path)
        if form == "oneOf":
            check_disjoint(self._root, schema[form], path, self.enforcement)
        return " | ".join(branches)

    def _first_that_asserts(self, rules: list[str], path: str) -> str:
        """Return the rule of the first schema of an `allOf` that restricts values. Leave out the other schemas."""
        restricting = [i for i, rule in enumerate(rules) if not self.rules.is_any(rule)]
        for i in restricting[1:]:
            message = f"not enforced together with [{restricting[0]}]; combine both in one schema"
            self.enforcement.leave_out(f"{path}[{i}]", message)
        return rules[restricting[0]] if restricting else self.rules.any()

    def _reference(self, ref: Any, path: str, depth: int) -> str | None:
        try:
            target = resolve(self._root, ref, path)
        except NotEnforcedError as error:
            self.enforcement.leave_out(path, str(error).removeprefix(f"{path}: "))
            return None
        return self.write(target, self._root_path + ref[1:].replace("/", "."), depth + 1)

    def _branches(self, branches: Any, path: str, depth: int) -> list[str]:
        if not isinstance(branches, list) or not branches:
            refuse(path, "expected a non-empty list of schemas")
        return [self.write(branch, f"{path}[{i}]", depth + 1) for i, branch in enumerate(branches)]

    def _values(self, values: Any, wanted: Any, path: str) -> str:
        if not isinstance(values, list) or not values:
            refuse(path, "expected a non-empty list of values")
        types = None if wanted is None else type_names(wanted, path)
        for value in values:
            name = json_type(value)
            if types is not None and name not in types and not (name == "integer" and "number" in types):
                refuse(path, f"{show(value)} is not of type {' or '.join(types)}")
        return " | ".join([self.rules.value(value) for value in values])

    def _typed(self, schema: dict[str, Any], keywords: list[str], path: str, depth: int) -> str:
        for key in keywords:
            if key not in _KNOWN and key != "type":
                leave_out_unknown(self.enforcement, schema, key, path)
        known = [key for key in keywords if key in _KNOWN]
        if "type" not in schema and not known:
            return self.rules.any()
        types = type_names(schema["type"], f"{path}.type") if "type" in schema else _implied_types(known)
        for key in known:
            if not any(key in ENFORCED[name] for name in types):
                leave_out(self.enforcement, schema, key, path, f"not enforced for type {' or '.join(types)}")
        return " | ".join([self._of_type(name, schema, path, depth) for name in types])

    def _of_type(self, name: str, schema: dict[str, Any], path: str, depth: int) -> str:
        if name == "object":
            return self._object(schema, path, depth)
        if name == "array":
            return self._array(schema, path, depth)
        return scalar_expression(name, schema, path, self.rules, self.enforcement)

    # -- objects -------------------------------------------------------------------------------------------------------

    def _object(self, schema: dict[str, Any], path: str, depth: int) -> str:
        named = {
            name: self.write(below, f"{path}.properties.{name}", depth + 1)
            for name, below in _mapping(schema, "properties", path).items()
        }
        additional = schema.get("additionalProperties")
        self._require(schema, named, additional, path, depth)
        self._limit(len(named), len(named.keys() - set(schema.get("required", ()))), path)
        if named:
            for key in ("patternProperties", "propertyNames", "minProperties", "maxProperties"):
                if key in schema:
                    leave_out(self.enforcement, schema, key, path, "not enforced together with properties or required")
            value = None if additional in (None, False) else self._additional(additional, path, depth)
            return self.rules.record(named, frozenset(schema.get("required", ())), value)
        least, most = counts(schema, ("minProperties", "maxProperties"), path, self.enforcement)
        if least > 1:
            self.enforcement.leave_out(f"{path}.minProperties", "enforced only up to 1: free names may occur twice")
            least = 1
        pair = self._pair(schema, additional, path, depth)
        return self.rules.items("{", pair, least, most, "}") or refuse(
            path, "no property is allowed, or no number of properties is possible"
        )

    def _limit(self, num_named: int, num_optional: int, path: str) -> None:
        """Refuse a schema with more properties than can be compiled in a few seconds.

        The cost grows with the square of the number of optional properties, because each one may directly follow any
        earlier one.
        """
        self._num_named += num_named
        self._num_followed += num_optional**2
        if self._num_named > _MAX_NAMED:
            refuse(f"{path}.properties", f"the schema has more than {_MAX_NAMED:,} properties in total")
        if self._num_followed > _MAX_OPTIONAL**2:
            refuse(
                f"{path}.properties",
                f"{num_optional} properties are optional, expected at most {_MAX_OPTIONAL}, and fewer if several "
                "objects have many; list them in required",
            )

    def _pair(self, schema: dict[str, Any], additional: Any, path: str, depth: int) -> str | None:
        """Return the expression of a property whose name is not listed; None if no such property is allowed."""
        if "patternProperties" in schema:
            pair = self._by_pattern(schema, path, depth)
            if pair is not None:
                return pair
        if additional is False or (additional is None and "properties" in schema):
            return None
        value = self.rules.any() if additional is None else self._additional(additional, path, depth)
        return self.rules.pair(self._property_name(schema, path, depth), value)

    def _additional(self, schema: Any, path: str, depth: int) -> str:
        return self.write(schema, f"{path}.additionalProperties", depth + 1)

    def _require(self, schema: dict[str, Any], named: dict[str, str], additional: Any, path: str, depth: int) -> None:
        """Check `required`; add names that are not in `properties` to `named`.

        The values of the added names must match `additionalProperties`; without this keyword, any value is allowed.
        """
        required, path_here = schema.get("required", []), f"{path}.required"
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            refuse(path_here, "expected a list of names")
        for name in required:
            if name in named:
                continue
            message = f"{show(name)} is enforced only if properties describes it"
            if "patternProperties" in schema:
                self.enforcement.leave_out(f"{path}.patternProperties", message)
            elif additional is False:
                refuse(path_here, message)
            is_free = additional is None or additional is False
            named[name] = self.rules.any() if is_free else self._additional(additional, path, depth)

    def _by_pattern(self, schema: dict[str, Any], path: str, depth: int) -> str | None:
        """Return the expression of a property whose name matches the pattern of `patternProperties`.

        Returns None if `patternProperties` cannot be enforced in this schema. It is then recorded as not enforced.
        """
        patterns = _mapping(schema, "patternProperties", path)
        path = f"{path}.patternProperties"
        if len(patterns) != 1 or schema.get("additionalProperties", False) is not False or "propertyNames" in schema:
            message = "enforced only for one pattern without other names, because a name might match both"
            self.enforcement.leave_out(path, message)
            return None
        ((pattern, below),) = patterns.items()
        try:
            name = pattern_expression(pattern, path)
        except NotEnforcedError as error:
            self.enforcement.leave_out(path, str(error).removeprefix(f"{path}: "))
            return None
        return self.rules.pair(name, self.write(below, f"{path}.{pattern}", depth + 1))

    def _property_name(self, schema: dict[str, Any], path: str, depth: int) -> str:
        names, path = schema.get("propertyNames", True), f"{path}.propertyNames"
        if names is True or names == {}:
            return self.rules.string()
        if isinstance(names, dict) and not any(key in names for key in ("type", *COMBINED)):
            names["type"] = "string"
        rule = self.write(names, path, depth + 1)
        if self._types_of(names) == {"string"}:
            return rule
        self.enforcement.leave_out(path, "enforced only for schemas of type string")
        return self.rules.string()

    def _types_of(self, schema: Any) -> set[str] | None:
        try:
            return types_of(self._root, schema)
        except NotEnforcedError:  # the reference cannot be enforced
            return None

    # -- arrays --------------------------------------------------------------------------------------------------------

    def _array(self, schema: dict[str, Any], path: str, depth: int) -> str:
        check_items(schema, path)
        least, most = counts(schema, ("minItems", "maxItems"), path, self.enforcement)
        first = []
        if "prefixItems" in schema:
            first = self._branches(schema["prefixItems"], f"{path}.prefixItems", depth)
        rest = schema.get("items", not first)
        item = None if rest is False else self.write(rest, f"{path}.items", depth + 1)
        return self.rules.sequence(first, item, least, most) or refuse(path, "no array has this number of items")


def _implied_types(keywords: Iterable[str]) -> list[str]:
    """Return the types to which keywords apply, with `number` for keywords that apply to `number` and `integer`."""
    names = {next(name for name in reversed(ENFORCED) if key in ENFORCED[name]) for key in keywords}
    if {"integer", "number"} <= names:
        names.remove("integer")
    return sorted(names)


def _mapping(schema: dict[str, Any], key: str, path: str) -> dict[str, Any]:
    value = schema.get(key, {})
    if not isinstance(value, dict):
        refuse(f"{path}.{key}", f"expected an object, got {json_type(value)}")
    return value
