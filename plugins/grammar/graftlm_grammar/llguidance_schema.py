"""Prepares JSON schemas for llguidance: keeps the keywords that it enforces, and refuses or leaves out the rest.

llguidance 1.9.1 intersects the keywords of a schema, including `$ref`, `allOf` and `anyOf` next to other keywords, and
refuses most unknown keywords. This module handles cases that the library does not detect: some unknown keywords,
names that are written with escapes or occur twice, and schemas with endless recursion.
"""

import json
from dataclasses import dataclass
from math import lcm
from typing import Any, Final

import llguidance

from graftlm.errors import GrammarError
from graftlm_grammar.char_set import CharSet, complement
from graftlm_grammar.disjoint import check_disjoint, json_type, resolve
from graftlm_grammar.ebnf_regex import rust_regex
from graftlm_grammar.enforcement import Enforcement, NotEnforcedError, refuse, show
from graftlm_grammar.formats import FORMATS
from graftlm_grammar.json_scalars import counts
from graftlm_grammar.options import JsonOptions
from graftlm_grammar.schema_keywords import (
    ENFORCED,
    asserted,
    bound_hint,
    check_decimals,
    check_items,
    leave_out_unknown,
    type_names,
)
from graftlm_grammar.schema_reader import MAX_DEPTH, reading_schema
from graftlm_grammar.schema_references import applied_in_place, is_finite, reachable, without_endless

__all__ = ["LLGuidanceSchema", "prepare_schema"]

_MAX_BOUND: Final = 2**53
#: Maximum of `multipleOf`. The library needs a state for each remainder; 16 million states need 10 GB.
_MAX_MULTIPLE: Final = 4096
#: Maximum number of optional properties of an object. The library's parser needs an item for each at one place of the
#: text, and can have 2,000 items there.
_MAX_OPTIONAL: Final = 400
_LOWER: Final[tuple[str, ...]] = ("minimum", "exclusiveMinimum")
_UPPER: Final[tuple[str, ...]] = ("maximum", "exclusiveMaximum")
_BOUNDS: Final[tuple[str, ...]] = (*_LOWER, *_UPPER)
_COUNTS: Final = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"))
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE: Final = ("items", "additionalProperties")
_APPLIED: Final = ("$ref", "anyOf", "oneOf", "allOf")
_ENFORCED: Final = frozenset({"type", "enum", "const", *_APPLIED}).union(*ENFORCED.values()) - {"propertyNames"}

#: Characters that llguidance can generate in strings, with \u escapes switched off. Excluded are the control characters
#: that JSON can write only with \u, and U+007F, which llguidance writes only with \u. These escapes are switched off
#: because llguidance compares texts, not values: it would treat `"\u0061"` as a property name other than `"a"`.
_ALPHABET: Final[CharSet] = complement(((0x00, 0x07), (0x0B, 0x0B), (0x0E, 0x1F), (0x7F, 0x7F)))


@dataclass(frozen=True, slots=True)
class LLGuidanceSchema:
    """A schema that llguidance enforces completely.

    Attributes:
        text: the schema as JSON, with the library's options.
        unenforced: paths of the keywords that were left out.
    """

    text: str
    unenforced: tuple[str, ...]


def prepare_schema(text: str, options: JsonOptions, strict: bool = True, path: str = "$") -> LLGuidanceSchema:
    """Prepare a schema.

    Args:
        text: a JSON schema, mostly as in draft 2020-12.
        options: white space in the output.
        strict: whether keywords that cannot be enforced are refused; otherwise they are left out.
        path: name of the root in paths.

    Raises:
        GrammarError: the text is not a schema, no value is valid under it, or it is strict and has a keyword that
            cannot be enforced; the message names the keyword and its path.
    """
    with reading_schema(text) as schema:
        preparation = _Preparation(schema, path, Enforcement(strict))
        prepared = {**preparation.prepare(), "x-guidance": _library_options(options)}
        return LLGuidanceSchema(json.dumps(prepared), preparation.enforcement.unenforced)


def _library_options(options: JsonOptions) -> dict[str, Any]:
    """Return the library's options for white space and escapes."""
    escapes = {"json_allowed_escapes": 'nrbtf\\"'}
    if options.whitespace == "flexible":
        return {**escapes, "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{options.max_whitespace}}}"}
    blank = " " if options.whitespace == "spaced" else ""
    return {**escapes, "whitespace_flexible": False, "item_separator": f",{blank}", "key_separator": f":{blank}"}


class _Preparation:
    """Visits a schema and the targets of its references once; each target becomes a definition."""

    def __init__(self, root: Any, root_path: str, enforcement: Enforcement) -> None:
        self.enforcement = enforcement
        self._root = root
        self._root_path = root_path
        self._names: dict[tuple[int, bool], str] = {}
        self._definitions: dict[str, Any] = {}
        # divisors and bounds of numbers to which more than one schema may apply
        self._common_multiple = 1
        self._open_bounds: list[dict[str, Any]] = []
        # path -> reference in the result; only references whose value must also be valid under other schemas
        self._mixed: dict[str, dict[str, Any]] = {}

    def prepare(self) -> dict[str, Any]:
        """Return the schema with its definitions."""
        prepared = self._schema(self._root, self._root_path, 0, closed=True)
        self._check_in_place()
        finite = self._finite()
        if not is_finite(prepared, finite):
            refuse(self._root_path, "no finite value is valid: the schema allows no value, or its recursion never ends")
        kept = {name: schema for name, schema in self._definitions.items() if name in finite}
        whole: dict[str, Any] = without_endless({"$defs": kept, "allOf": [prepared]}, finite)
        if self._mixed and "circular references" in _library_error(whole):
            self._leave_out_circular()
        return whole

    def _leave_out_circular(self) -> None:
        for path, reference in self._mixed.items():
            name = reference["$ref"].removeprefix("#/$defs/")
            if name in reachable(self._definitions[name], self._definitions):
                self.enforcement.leave_out(path, "not enforced together with other keywords, because it is recursive")
                reference.clear()

    def _check_in_place(self) -> None:
        """Refuse schemas that refer to themselves for the same value.

        The meaning of such a reference is undefined, and validators do not terminate.

        Raises:
            GrammarError: a schema refers to itself without a property or an item in between.
        """
        waiting = {name: applied_in_place(schema) for name, schema in self._definitions.items()}
        while waiting:
            ready = [name for name, targets in waiting.items() if targets.isdisjoint(waiting)]
            if not ready:
                refuse(self._root_path, "a $ref refers to itself without a property or an item in between")
            for name in ready:
                del waiting[name]

    def _finite(self) -> set[str]:
        """Return the names of the definitions that a finite value can match."""
        finite: set[str] = set()
        num_before = -1
        while num_before < len(finite):
            num_before = len(finite)
            finite |= {name for name, schema in self._definitions.items() if is_finite(schema, finite)}
        return finite

    def _schema(self, schema: Any, path: str, depth: int, closed: bool) -> Any:
        """Return a schema with only the keywords that are enforced.

        Args:
            schema: the schema.
            path: location of the schema.
            depth: number of enclosing schemas.
            closed: whether only this schema applies to the value, so that `properties` can list all properties.
        """
        if schema is True or schema is False:
            return schema
        if not isinstance(schema, dict):
            refuse(path, f"a schema is an object or true, got {json_type(schema)}")
        if depth > MAX_DEPTH:
            refuse(path, f"nested more than {MAX_DEPTH} levels deep")
        if depth and "$id" in schema:
            self.enforcement.leave_out(f"{path}.$id", "not enforced below the root, where it changes references")
            return True
        self._check_keywords(schema, path)
        applied = [key for key in _APPLIED if key in schema]
        is_alone = len(applied) == 1 and len(asserted(schema)) == 1
        kept = self._scalars(schema, path, closed and not applied)
        self._arrays_and_objects(schema, kept, path, depth, closed and not applied)
        for key in applied:
            self._apply(key, schema[key], kept, f"{path}.{key}", depth, closed and is_alone)
        return kept

    def _check_keywords(self, schema: dict[str, Any], path: str) -> None:
        for key in asserted(schema):
            if key not in _ENFORCED:
                leave_out_unknown(self.enforcement, schema, key, path)

    # -- combinations --------------------------------------------------------------------------------------------------

    def _apply(self, key: str, value: Any, kept: dict[str, Any], path: str, depth: int, closed: bool) -> None:
        if key == "$ref":
            name = self._definition(value, path, depth, closed)
            if name is not None:
                reference = {"$ref": f"#/$defs/{name}"}
                kept.setdefault("allOf", []).append(reference)
                if not closed:
                    self._mixed[path] = reference
            return
        branches = self._branches(value, path, depth, closed and (key != "allOf" or len(value) == 1))
        if key == "allOf":
            kept.setdefault("allOf", []).extend(branches)
        else:
            if key == "oneOf":
                check_disjoint(self._root, value, path, self.enforcement)
            kept.setdefault("allOf", []).append({"anyOf": branches})

    def _branches(self, branches: Any, path: str, depth: int, closed: bool) -> list[Any]:
        if not isinstance(branches, list) or not branches:
            refuse(path, "expected a non-empty list of schemas")
        return [self._schema(branch, f"{path}[{i}]", depth + 1, closed) for i, branch in enumerate(branches)]

    def _definition(self, ref: Any, path: str, depth: int, closed: bool) -> str | None:
        """Return the name of the definition that a reference refers to; None if the reference is left out."""
        try:
            target = resolve(self._root, ref, path)
        except NotEnforcedError as error:
            self.enforcement.leave_out(path, str(error).removeprefix(f"{path}: "))
            return None
        key = (id(target), closed)
        if key not in self._names:
            self._names[key] = name = f"d{len(self._names)}"
            where = self._root_path + ref[1:].replace("/", ".")
            self._definitions[name] = self._schema(target, where, depth + 1, closed)
        return self._names[key]

    # -- scalars -------------------------------------------------------------------------------------------------------

    def _scalars(self, schema: dict[str, Any], path: str, closed: bool) -> dict[str, Any]:
        """Return the enforced keywords whose values contain no schemas."""
        kept: dict[str, Any] = {}
        if "type" in schema:
            kept["type"] = type_names(schema["type"], f"{path}.type")
        if "const" in schema or "enum" in schema:
            self._values(schema, kept, path)
        for keys in _COUNTS:
            limits = counts(schema, keys, path, self.enforcement)
            kept |= {key: limit for key, limit in zip(keys, limits, strict=True) if key in schema and limit is not None}
        named = [key for key in _BOUNDS if key in schema and self._is_bound(schema[key], f"{path}.{key}")]
        bounds = {key: _whole(schema[key]) for key in named}
        if self._are_apart(bounds, path, closed):
            kept |= bounds
        if "multipleOf" in schema and self._is_multiple(schema["multipleOf"], f"{path}.multipleOf", closed):
            kept["multipleOf"] = int(schema["multipleOf"])
        for key in ("pattern", "format"):
            regex = self._regex(key, schema[key], f"{path}.{key}") if key in schema else None
            if regex is not None:
                kept.setdefault("allOf", []).append({"pattern": f"^(?:{regex})$"})
        return kept

    def _values(self, schema: dict[str, Any], kept: dict[str, Any], path: str) -> None:
        for key in ("const", "enum"):
            values = [schema[key]] if key == "const" and key in schema else schema.get(key, [None])
            if not isinstance(values, list) or not values:
                refuse(f"{path}.{key}", "expected a non-empty list of values")
            if not all(_is_writable(value) for value in values):
                self.enforcement.leave_out(f"{path}.{key}", "not enforced for texts with control characters")
            elif not all(_is_exact(value) for value in values):
                self.enforcement.leave_out(f"{path}.{key}", "not enforced for numbers outside -2**53 to 2**53")
            elif key in schema:
                # The values are a separate branch, which llguidance intersects with the other keywords.
                kept.setdefault("allOf", []).append({"enum": values})

    def _is_bound(self, bound: Any, path: str) -> bool:
        if json_type(bound) not in ("integer", "number"):
            refuse(path, f"expected a number, got {show(bound)}{bound_hint(bound)}")
        if abs(bound) <= _MAX_BOUND:
            return check_decimals(self.enforcement, bound, path)
        self.enforcement.leave_out(path, f"enforced only from -2**53 to 2**53, got {show(bound)}")
        return False

    def _are_apart(self, bounds: dict[str, Any], path: str, closed: bool) -> bool:
        """Return whether llguidance enforces the bounds.

        The bounds are not enforced if one bound excludes a whole number that differs by less than 1 from the opposite
        bound.
        """
        if not closed:
            self._open_bounds.append(bounds)
        together = [bounds] if closed else self._open_bounds
        for sign, exclusive, opposite in ((1, "exclusiveMinimum", _UPPER), (-1, "exclusiveMaximum", _LOWER)):
            wholes = [b[exclusive] for b in together if exclusive in b and b[exclusive] == int(b[exclusive])]
            others = [b[key] for b in together for key in opposite if key in b]
            near = next(((w, o) for w in wholes for o in others if 0 < sign * (o - w) < 1), None)
            if near is not None:
                message = (
                    f"not enforced: {exclusive} {show(near[0])} and the bound {show(near[1])} differ by less than 1"
                )
                self.enforcement.leave_out(path, message)
                return False
        return True

    def _is_multiple(self, divisor: Any, path: str, closed: bool) -> bool:
        if json_type(divisor) not in ("integer", "number") or divisor <= 0:
            refuse(path, f"expected a number above 0, got {show(divisor)}")
        if json_type(divisor) != "integer" or divisor > _MAX_MULTIPLE:
            self.enforcement.leave_out(
                path, f"enforced only for whole numbers up to {_MAX_MULTIPLE}, got {show(divisor)}"
            )
            return False
        common = int(divisor) if closed else lcm(self._common_multiple, int(divisor))
        if common > _MAX_MULTIPLE:
            self.enforcement.leave_out(
                path,
                f"not enforced: the common multiple with others that may apply to the same number is {common}, "
                f"expected at most {_MAX_MULTIPLE}",
            )
            return False
        if not closed:
            self._common_multiple = common
        return True

    def _regex(self, key: str, value: Any, path: str) -> str | None:
        """Return the regular expression of a `pattern` or `format` for the whole string; None if it is left out."""
        if not isinstance(value, str):
            refuse(path, f"expected a string, got {json_type(value)}")
        if key == "format" and value not in FORMATS:
            self.enforcement.leave_out(path, f"expected one of {', '.join(FORMATS)}, got {show(value)}")
            return None
        return self._translated(value if key == "pattern" else FORMATS[value], path, search=False)

    def _translated(self, regex: str, path: str, search: bool) -> str | None:
        try:
            return rust_regex(regex, _ALPHABET, search)
        except NotEnforcedError as error:
            self.enforcement.leave_out(path, str(error))
            return None
        except GrammarError as error:
            raise GrammarError(f"{path}: {error}") from None

    # -- arrays and objects --------------------------------------------------------------------------------------------

    def _arrays_and_objects(
        self, schema: dict[str, Any], kept: dict[str, Any], path: str, depth: int, closed: bool
    ) -> None:
        check_items(schema, path)
        if "prefixItems" in schema:
            kept["prefixItems"] = self._branches(schema["prefixItems"], f"{path}.prefixItems", depth, closed=True)
        for key in _SINGLE:
            if key in schema:
                kept[key] = self._schema(schema[key], f"{path}.{key}", depth + 1, closed)
        for key in ("properties", "patternProperties"):
            if key in schema:
                self._named(key, schema[key], kept, path, depth, closed)
        if "required" in schema:
            kept["required"] = _names(schema["required"], f"{path}.required")
        self._limit_counts(kept, path)
        if (
            closed
            and ("properties" in schema or "patternProperties" in schema)
            and "additionalProperties" not in schema
        ):
            self._close(kept)

    def _named(self, key: str, schemas: Any, kept: dict[str, Any], path: str, depth: int, closed: bool) -> None:
        path = f"{path}.{key}"
        if not isinstance(schemas, dict):
            refuse(path, f"expected an object, got {json_type(schemas)}")
        below = {name: self._schema(one, f"{path}.{name}", depth + 1, closed) for name, one in schemas.items()}
        if key == "patternProperties":
            regexes = {name: self._translated(name, f"{path}.{name}", search=True) for name in below}
            below = {f"^(?:{regexes[name]})$": one for name, one in below.items() if regexes[name] is not None}
            if len(below) > 1 and "not disjoint" in _library_error({"type": "object", key: dict.fromkeys(below, True)}):
                self.enforcement.leave_out(path, "enforced only if no name matches two patterns")
                return
        kept[key] = below

    def _close(self, kept: dict[str, Any]) -> None:
        """Allow only properties that the schema names, in `properties` or in `required`."""
        named = kept.setdefault("properties", {})
        if "patternProperties" not in kept:
            kept["properties"] = named | {name: True for name in kept.get("required", ()) if name not in named}
        kept["additionalProperties"] = False

    def _limit_counts(self, kept: dict[str, Any], path: str) -> None:
        """Leave out limits on the number of properties if llguidance refuses them or counts repeated names."""
        required = kept.get("required", ())
        optional = kept.get("properties", {}).keys() - set(required)
        if len(optional) > _MAX_OPTIONAL:
            refuse(f"{path}.properties", f"{len(optional)} properties are optional, expected at most {_MAX_OPTIONAL}")
        least = kept.get("minProperties", 0)
        if least > 1 and (optional or least > len(required) + 1):
            self.enforcement.leave_out(
                f"{path}.minProperties",
                "enforced only if `required` lists all of `properties`, up to one more than `required` lists",
            )
            del kept["minProperties"]
        if "maxProperties" in kept and optional:
            self.enforcement.leave_out(f"{path}.maxProperties", "enforced only if `required` lists all of `properties`")
            del kept["maxProperties"]


def _names(names: Any, path: str) -> list[str]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        refuse(path, "expected a list of names")
    return list(dict.fromkeys(names))


def _is_writable(value: Any) -> bool:
    """Return whether llguidance can generate each string in a value."""
    if isinstance(value, dict):
        return all(_is_writable(key) and _is_writable(value[key]) for key in value)
    if isinstance(value, list):
        return all(map(_is_writable, value))
    return not isinstance(value, str) or all(
        any(first <= ord(char) <= last for first, last in _ALPHABET) for char in value
    )


def _is_exact(value: Any) -> bool:
    """Return whether all numbers in a value are exact in double precision, which llguidance uses."""
    if isinstance(value, dict):
        return all(map(_is_exact, value.values()))
    if isinstance(value, list):
        return all(map(_is_exact, value))
    return not isinstance(value, int | float) or abs(value) <= _MAX_BOUND


def _whole(bound: int | float) -> int | float:
    """Return a bound as an int if it is a whole number, because llguidance rounds large floats."""
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound


def _library_error(schema: dict[str, Any]) -> str:
    """Return llguidance's error for a schema; "" if there is none."""
    grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
    return str(llguidance.LLMatcher.validate_grammar(grammar))
