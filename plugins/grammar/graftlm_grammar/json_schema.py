"""JSON schemas as EBNF: whatever the grammar accepts is valid under the schema.

xgrammar has a reading of JSON schemas of its own, of which 0.2.8 enforces a part and passes over the rest in silence:
`required` names without a property, bounds beside `multipleOf`, keys spelt with escapes, ... Here a keyword is either
translated or refused, by its name and path; or, where that is asked for, left out and named.

The grammar may accept less than the schema does. Properties come in the order in which the schema lists them, and only
those, unless it speaks of `additionalProperties`; a `pattern` matches the whole string; strings with a length or a
pattern, and names, hold no escapes; numbers with bounds have no exponent; a keyword of one type implies the type.
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


#: Properties of all objects together.
_MAX_NAMED: Final = 3000
#: Properties of one object that it need not have.
_MAX_OPTIONAL: Final = 800


@dataclass(frozen=True, slots=True)
class SchemaGrammar:
    """A schema as a grammar.

    Attributes:
        ebnf: rules in xgrammar's notation, of which the first asked for is `root`.
        unenforced: keywords that were left out, each with its path; empty where the schema is enforced in full.
    """

    ebnf: str
    unenforced: tuple[str, ...]


def translate_schema(
    text: str, options: JsonOptions, strict: bool = True, path: str = "$", rules: type[JsonRules] = JsonRules
) -> SchemaGrammar:
    """Translate a schema.

    Args:
        text: a JSON schema, draft 2020-12 in the main.
        options: how the JSON is written.
        strict: refuse what cannot be enforced; otherwise leave it out.
        path: what to call the root.
        rules: those of JSON itself.

    Raises:
        GrammarError: it is not a schema, or no value fits, or it is strict and asks for what is not enforced; the
            message names keyword and path.
    """
    with reading_schema(text) as schema:
        translation = _Translation(schema, path, rules(options), Enforcement(strict))
        translation.rules.add("root", translation.write(schema, path))
        ebnf = translation.rules.text()
        if translation.is_recursive:
            translation.check_finite(ebnf)
        return SchemaGrammar(ebnf, translation.enforcement.unenforced)


class _Translation:
    """Walks a schema, and what it refers to, once; each schema becomes a rule."""

    def __init__(self, root: Any, root_path: str, rules: JsonRules, enforcement: Enforcement) -> None:
        self.rules = rules
        self.enforcement = enforcement
        self._root = root
        self._root_path = root_path
        # id of a schema -> its rule, perhaps not written yet: schemas may be recursive
        self._names: dict[int, str] = {}
        self._paths: dict[str, str] = {}  # of the rules
        self._is_written: set[str] = set()
        self.is_recursive = False
        self._num_named = self._num_followed = 0

    def check_finite(self, ebnf: str) -> None:
        """Refuse schemas that only endless values meet.

        Raises:
            GrammarError: naming the first.
        """
        endless = [name for name in endless_rules(read_ebnf(ebnf, MAX_COUNT)) if name in self._paths]
        if endless:
            refuse(self._paths[endless[0]], "no finite value meets this: it requires itself")

    def write(self, schema: Any, path: str, depth: int = 0) -> str:
        """Write the rule of a schema and of all below it; returns its name."""
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
            self.enforcement.leave_out(f"{path}.$id", "below the root it changes what $ref means: not enforced")
            return self.rules.any()
        name = self._names[id(schema)] = f"s{len(self._names)}"
        self._paths[name] = path
        self.rules.add(name, self._expression(schema, path, depth))
        self._is_written.add(name)
        return name

    def _expression(self, schema: dict[str, Any], path: str, depth: int) -> str:
        said = asserted(schema)
        form = next((key for key in COMBINED if key in schema), None)
        own = next((key for key in said if key in _KNOWN), None)
        if own is not None and form in ("anyOf", "oneOf", "allOf"):
            # Where one of the two has to go, what the schema says itself is worth more.
            said = self._without(said, lambda key: key in COMBINED, schema, path, own)
            form = None
        if form is None:
            return self._typed(schema, said, path, depth)
        kept = (form, "type") if form in ("enum", "const") else (form,)
        self._without(said, lambda key: key not in kept, schema, path, form)
        expression = self._combined(form, schema, f"{path}.{form}", depth)
        if expression is not None:
            return expression
        return self._typed(schema, [key for key in said if key not in COMBINED], path, depth)

    def _without(
        self, said: list[str], goes: Callable[[str], bool], schema: dict[str, Any], path: str, beside: str
    ) -> list[str]:
        """Leave out keywords that are not enforced beside another; returns those that stay."""
        for key in filter(goes, said):
            if key in (*COMBINED, "type") or key in _KNOWN:
                message = f"not enforced beside {beside}; move it into the schemas there"
                leave_out(self.enforcement, schema, key, path, message)
            else:
                leave_out_unknown(self.enforcement, schema, key, path)
        return [key for key in said if not goes(key)]

    def _combined(self, form: str, schema: dict[str, Any], path: str, depth: int) -> str | None:
        """Return the expression of a combining keyword, None if it is left out."""
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
        """Return the rule of the one schema of several that is enforced."""
        telling = [i for i, rule in enumerate(rules) if not self.rules.is_any(rule)]
        for i in telling[1:]:
            message = f"not enforced beside [{telling[0]}]; write one schema that says it all"
            self.enforcement.leave_out(f"{path}[{i}]", message)
        return rules[telling[0]] if telling else self.rules.any()

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

    def _typed(self, schema: dict[str, Any], said: list[str], path: str, depth: int) -> str:
        for key in said:
            if key not in _KNOWN and key != "type":
                leave_out_unknown(self.enforcement, schema, key, path)
        keywords = [key for key in said if key in _KNOWN]
        if "type" not in schema and not keywords:
            return self.rules.any()
        types = type_names(schema["type"], f"{path}.type") if "type" in schema else _implied_types(keywords)
        for key in keywords:
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
                    leave_out(self.enforcement, schema, key, path, "not enforced beside properties or required")
            value = None if additional in (None, False) else self._additional(additional, path, depth)
            return self.rules.record(named, frozenset(schema.get("required", ())), value)
        least, most = counts(schema, ("minProperties", "maxProperties"), path, self.enforcement)
        if least > 1:
            self.enforcement.leave_out(f"{path}.minProperties", "enforced up to 1: free names may come twice")
            least = 1
        pair = self._pair(schema, additional, path, depth)
        return self.rules.items("{", pair, least, most, "}") or refuse(path, "no property is allowed, or no count fits")

    def _limit(self, num_named: int, num_optional: int, path: str) -> None:
        """Refuse more properties than compile in a few seconds: any of the optional ones may follow any other."""
        self._num_named += num_named
        self._num_followed += num_optional**2
        if self._num_named > _MAX_NAMED:
            refuse(f"{path}.properties", f"more than {_MAX_NAMED:,} properties altogether")
        if self._num_followed > _MAX_OPTIONAL**2:
            refuse(
                f"{path}.properties",
                f"{num_optional} may be left out, expected {_MAX_OPTIONAL} at most, and fewer where several objects "
                "have many; name them in required",
            )

    def _pair(self, schema: dict[str, Any], additional: Any, path: str, depth: int) -> str | None:
        """Return the expression of a property whose name is free, None where there is none."""
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
        """Check `required`; names that `properties` leaves out become properties that may be anything."""
        required, path_here = schema.get("required", []), f"{path}.required"
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            refuse(path_here, "expected a list of names")
        for name in required:
            if name in named:
                continue
            said = f"{show(name)} is enforced only if properties describes it"
            if "patternProperties" in schema:
                self.enforcement.leave_out(f"{path}.patternProperties", said)
            elif additional is False:
                refuse(path_here, said)
            is_free = additional is None or additional is False
            named[name] = self.rules.any() if is_free else self._additional(additional, path, depth)

    def _by_pattern(self, schema: dict[str, Any], path: str, depth: int) -> str | None:
        """Return the expression of a property whose name matches a pattern, None if that is left out."""
        patterns = _mapping(schema, "patternProperties", path)
        path = f"{path}.patternProperties"
        if len(patterns) != 1 or schema.get("additionalProperties", False) is not False or "propertyNames" in schema:
            message = "enforced for one pattern, with no other names: a name might match both"
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
        self.enforcement.leave_out(path, "enforced for schemas of type string only")
        return self.rules.string()

    def _types_of(self, schema: Any) -> set[str] | None:
        try:
            return types_of(self._root, schema)
        except NotEnforcedError:  # a reference that was left out before
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
        return self.rules.sequence(first, item, least, most) or refuse(path, "no array can have that many items")


def _implied_types(keywords: Iterable[str]) -> list[str]:
    """Return the types that keywords speak of, integers for numbers where a keyword is only of integers."""
    names = {next(name for name in reversed(ENFORCED) if key in ENFORCED[name]) for key in keywords}
    if {"integer", "number"} <= names:
        names.remove("integer")
    return sorted(names)


def _mapping(schema: dict[str, Any], key: str, path: str) -> dict[str, Any]:
    value = schema.get(key, {})
    if not isinstance(value, dict):
        refuse(f"{path}.{key}", f"expected an object, got {json_type(value)}")
    return value
