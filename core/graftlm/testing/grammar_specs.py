"""Generates random, satisfiable grammar specifications of all kinds. The same seed gives the same specifications."""

import json
import string
from collections.abc import Callable
from random import Random
from typing import Any, Final, TypeAlias

from graftlm.contracts import GrammarKind, GrammarSpec
from graftlm.testing.ebnf_specs import generate_ebnfs

__all__ = ["generate_choices", "generate_regexes", "generate_schemas", "generate_specs", "generate_tags"]

Schema: TypeAlias = dict[str, Any]

_NAMES: Final = ("id", "name", "kind", "größe", "a b", 'quo"te', "back\\slash", "x", "xy", "città", "数", "")
_VALUES: Final = (
    "red",
    "reddish",
    "green",
    "",
    "ja\nnein",
    'say "hi"',
    "C:\\",
    "été",
    "数字",
    "🙂",
    0,
    -7,
    12,
    1.5,
    True,
    None,
)
_PATTERNS: Final = (
    *("^[a-z]{2,5}$", "^[A-Z][a-z]{0,6}$", r"^\d{3}-\d{2}$", "^(ab|cd){1,3}$", "^#[0-9a-f]{6}$", "^[à-ö]{1,3}$"),
    *('^["\\\\/]{1,2}$', "^(yes|no)?$", "^x", "y$", "[0-9]{2}", r"^\w{1,4}$", "^a|b$", "^[^a-z]{1,4}$", "^.{2}$"),
)
_FORMATS: Final = ("date", "time", "date-time", "email", "ipv4", "uuid")

# Type -> keywords that some backends cannot enforce. Schemas with these keywords still have valid values.
_RARE_ON: Final[dict[str, tuple[Schema, ...]]] = {
    "string": ({"not": {"const": "no"}}, {"minLength": 2, "pattern": "^[a-c]*$"}, {"allOf": [{"maxLength": 3}]}),
    "integer": ({"multipleOf": 3}, {"not": {"enum": [0, 1]}}, {"allOf": [{"minimum": 0}, {"maximum": 30}]}),
    "number": ({"exclusiveMaximum": 1e3}, {"multipleOf": 0.5}, {"not": {"type": "integer"}}),
    "array": ({"uniqueItems": True}, {"contains": {}, "minContains": 1}, {"unevaluatedItems": False}),
    "object": (
        {"minProperties": 1},
        {"maxProperties": 2},
        {"dependentRequired": {"id": ["name"]}},
        {"if": {"required": ["id"]}, "then": {"required": ["name"]}},
        {"propertyNames": {"maxLength": 8}},
        {"patternProperties": {"^p[0-9]$": {"type": "boolean"}}},
    ),
}


def generate_schemas(num: int, seed: int = 0, large: bool = False) -> list[Schema]:
    """Return JSON schemas (Draft 2020-12) with mixed features. Most have short valid values.

    About one in ten schemas has a keyword that some backends cannot enforce; a backend must enforce or refuse it. A few
    of these schemas have no valid value. All other schemas have a valid value.

    Args:
        num: number of schemas.
        seed: seed of the random numbers.
        large: whether about half of the strings and some arrays get length limits of up to 1,000.
    """
    schemas = [_SchemaDraw(Random(f"schema {seed} {i}")).schema() for i in range(num)]
    if large:
        for i, schema in enumerate(schemas):
            _enlarge(schema, Random(f"large schema {seed} {i}"))
    return schemas


def generate_regexes(num: int, seed: int = 0, large: bool = False) -> list[str]:
    """Return regular expressions that mean the same in Python and ECMAScript, with few unbounded repeats.

    Args:
        num: number of expressions.
        seed: seed of the random numbers.
        large: whether each expression ends with a character class that is repeated up to 1,000 times.
    """
    regexes = [_regex(Random(f"regex {seed} {i}"), depth=_DEPTH) for i in range(num)]
    if not large:
        return regexes
    draws = [Random(f"large regex {seed} {i}") for i in range(num)]
    return [
        f"(?:{regex.removeprefix('^').removesuffix('$')}){draw.choice(_LARGE_CLASSES)}{draw.choice(_LARGE_REPEATS)}"
        for regex, draw in zip(regexes, draws, strict=True)
    ]


def generate_choices(num: int, seed: int = 0) -> list[list[str]]:
    """Return `num` lists of texts; some texts of a list have a common prefix."""
    return [_choices(Random(f"choice {seed} {i}")) for i in range(num)]


def generate_tags(num: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return `num` structural tags, each with up to three triggers and four structures."""
    return [_tag(Random(f"tag {seed} {i}")) for i in range(num)]


def generate_specs(num: int, seed: int = 0) -> list[GrammarSpec]:
    """Return specifications of all kinds in a fixed order.

    Every 20 specifications contain 8 JSON schemas, 5 regular expressions, 3 EBNF grammars, 3 structural tags and
    1 choice. Half of the schemas and expressions are large; see `generate_schemas` and `generate_regexes`.

    Args:
        num: number of specifications.
        seed: seed of the random numbers.
    """
    kinds = {kind: _texts(kind, num, seed) for kind in GrammarKind}
    pattern = (
        *(GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.EBNF, GrammarKind.JSON_SCHEMA),
        *(GrammarKind.STRUCTURAL_TAG, GrammarKind.REGEX, GrammarKind.JSON_SCHEMA),
    )
    order = (*pattern, *pattern, *pattern[:5], GrammarKind.CHOICE)
    return [GrammarSpec(order[i % len(order)], kinds[order[i % len(order)]].pop()) for i in range(num)]


def _texts(kind: GrammarKind, num: int, seed: int) -> list[str]:
    if kind is GrammarKind.REGEX:
        pairs = zip(generate_regexes(num, seed), generate_regexes(num, seed + 1, large=True), strict=True)
        return [one for pair in pairs for one in pair][:num][::-1]
    if kind is GrammarKind.EBNF:
        return [grammar.text for grammar in generate_ebnfs(num, seed)][::-1]
    if kind is GrammarKind.CHOICE:
        return [json.dumps(choices) for choices in generate_choices(num, seed)][::-1]
    if kind is GrammarKind.STRUCTURAL_TAG:
        return [json.dumps(tag) for tag in generate_tags(num, seed)][::-1]
    both = zip(generate_schemas(num, seed), generate_schemas(num, seed + 1, large=True), strict=True)
    return [json.dumps(schema) for pair in both for schema in pair][:num][::-1]


_LARGE_LENGTHS: Final = (100, 127, 128, 129, 150, 300, 1000)
_LARGE_PATTERNS: Final = (
    "^[^a-z]{1,200}$",
    "^.{150}$",
    "^(?:ab|c){1,60}$",
    "^[a-zé]{0,300}$",
    "^\\w{129,140}$",
    "^\\S{200,}$",
)
_LARGE_CLASSES: Final = (
    *(
        "[a-z]",
        "[^ae]",
        ".",
        "\\S",
        "[a-z\\u00e9]",
        "[\\u4e00-\\u9fff]",
        "[^\\x41-\\x5a\\n]",
        "(?:ab|é)",
        "(?:[a-c][^d])",
    ),
    *("\\W", "[ -~]", "(?:[a-z]|[à-ö])", "[^a-z\\u4e00-\\u9fff]"),
)
_LARGE_REPEATS: Final = ("{64}", "{128}", "{129}", "{10,200}", "{300}", "{0,150}", "{130,}", "{1,1000}", "{140,290}")


def _enlarge(schema: Any, random: Random) -> None:
    """Increase some length limits of a schema and its subschemas, in place."""
    if isinstance(schema, list):
        for item in schema:
            _enlarge(item, random)
    if not isinstance(schema, dict):
        return
    if "minLength" in schema and "pattern" not in schema and random.random() < 0.6:
        schema["minLength"] = random.choice((0, 0, 5, *_LARGE_LENGTHS))
        schema["maxLength"] = schema["minLength"] + random.choice((0, 5, 128, 129, 700))
        if schema["minLength"] and random.random() < 0.5:
            del schema["maxLength"]
    elif "pattern" in schema and random.random() < 0.5:
        schema["pattern"] = random.choice(_LARGE_PATTERNS)
    elif "maxItems" in schema and random.random() < 0.3:
        schema["maxItems"] = schema.get("minItems", 0) + random.choice((20, 129, 200))
    for name in ("properties", "$defs"):
        for below in schema.get(name, {}).values() if isinstance(schema.get(name), dict) else ():
            _enlarge(below, random)
    for name in ("items", "prefixItems", "anyOf", "oneOf", "additionalProperties"):
        _enlarge(schema.get(name), random)


def _choices(random: Random) -> list[str]:
    values = [value for value in _VALUES if isinstance(value, str) and value]
    texts = [
        random.choice(values) + random.choice(("", "ly", " ", '"', "é", "\n")) for _ in range(random.randint(1, 40))
    ]
    return [*dict.fromkeys(texts), "x" * random.randint(1, 200)]


_TRIGGERS: Final = ("<t:", "[w]", "<function=", "§", "{{call", "\n##")
_ENDS: Final = ("</t>", "]", "</function>", "}}", "\n", " §")


def _tag(random: Random) -> dict[str, Any]:
    triggers = random.sample(_TRIGGERS, random.randint(1, 3))
    structures = []
    for i in range(random.randint(len(triggers), 4)):
        trigger = triggers[i % len(triggers)]
        begin = trigger + random.choice(("", f"{i}>", " n='é'>", f"name_{i}:"))
        structure: dict[str, Any] = {"begin": begin, "end": random.choice(_ENDS)}
        seed = random.randrange(10**6)
        if random.random() < 0.6:
            structure["schema"] = generate_schemas(1, seed, large=random.random() < 0.3)[0]
        else:
            structure["regex"] = generate_regexes(1, seed, large=random.random() < 0.3)[0]
        structures.append(structure)
    return {
        "triggers": triggers,
        "structures": structures,
        "at_least_one": random.random() < 0.6,
        "stop_after_first": random.random() < 0.4,
    }


class _SchemaDraw:
    """A generator of one random schema."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._defs: dict[str, Schema] = {}

    def schema(self) -> Schema:
        """Return a random schema, including the `$defs` that it refers to."""
        random = self._random
        if random.random() < 0.2:
            self._defs["leaf"] = self._scalar()
        kind = random.random()
        if kind < 0.12:
            schema = self._recursive()
        elif kind < 0.72:
            schema = self._object(depth=2)
        else:
            schema = self._value(depth=2)
        rare = _RARE_ON.get(str(schema.get("type")))  # None if the type is a list of types
        if random.random() < 0.1 and rare:
            schema |= random.choice(rare)
        return schema | ({"$defs": self._defs} if self._defs else {})

    def _value(self, depth: int) -> Schema:
        random = self._random
        if depth == 0 or random.random() < 0.5:
            return self._scalar()
        draws: tuple[Callable[[int], Schema], ...] = (self._object, self._array, self._tuple, self._any_of)
        return random.choice(draws)(depth - 1)

    def _scalar(self) -> Schema:
        random = self._random
        if "leaf" in self._defs and random.random() < 0.3:
            return {"$ref": "#/$defs/leaf"}
        draws = (self._string, self._string, self._integer, self._number, self._enum, self._const, self._plain)
        return random.choice(draws)()

    def _string(self) -> Schema:
        random = self._random
        kind = random.randrange(4)
        if kind == 0:
            return {"type": "string", "pattern": random.choice(_PATTERNS)}
        if kind == 1:
            return {"type": "string", "format": random.choice(_FORMATS)}
        least = random.randrange(4)
        return {"type": "string", "minLength": least, "maxLength": least + random.randrange(8)}

    def _integer(self) -> Schema:
        random = self._random
        least = random.choice((-(10**6), -250, -9, -1, 0, 1, 5, 18, 99, 1000))
        most = least + random.choice((0, 1, 7, 80, 901, 10**5, 10**9))
        return {"type": "integer"} | self._bounds(least, most, exclusive_fits=most - least > 3)

    def _number(self) -> Schema:
        random = self._random
        least = random.choice((-1000, -2.5, -0.125, 0, 0.001, 1, 3.75, 42))
        most = least + random.choice((0.25, 1, 12.5, 1000))
        return {"type": "number"} | self._bounds(least, most, exclusive_fits=True)

    def _bounds(self, least: float, most: float, exclusive_fits: bool) -> Schema:
        random = self._random
        below, above = ("minimum", "maximum")
        if exclusive_fits and random.random() < 0.3:
            below = "exclusiveMinimum"
        if exclusive_fits and random.random() < 0.3:
            above = "exclusiveMaximum"
        bounds: Schema = {below: least, above: most}
        if random.random() < 0.25:
            bounds.pop(random.choice((below, above)))
        return bounds

    def _enum(self) -> Schema:
        return {"enum": self._random.sample(_VALUES, self._random.randint(1, 5))}

    def _const(self) -> Schema:
        return {"const": self._random.choice((*_VALUES, [1, "a"], {"k": [None, {"é": 2}]}))}

    def _plain(self) -> Schema:
        types = ["boolean", "null", "integer", "string"]
        return {"type": self._random.choice((*types[:2], self._random.sample(types, 2)))}

    def _object(self, depth: int) -> Schema:
        random = self._random
        names = random.sample(_NAMES, random.randint(0, 4))
        schema: Schema = {"type": "object", "properties": {name: self._value(depth) for name in names}}
        required = [name for name in names if random.random() < 0.7]
        if required or random.random() < 0.5:
            schema["required"] = required
        if random.random() < 0.85:
            schema["additionalProperties"] = self._scalar() if random.random() < 0.15 else False
        return schema

    def _array(self, depth: int) -> Schema:
        least = self._random.randrange(3)
        most = least + self._random.randrange(3)
        return {"type": "array", "items": self._value(depth), "minItems": least, "maxItems": most}

    def _tuple(self, depth: int) -> Schema:
        random = self._random
        heads = [self._value(depth) for _ in range(random.randint(1, 3))]
        schema: Schema = {"type": "array", "prefixItems": heads}
        if random.random() < 0.7:
            schema |= {"items": False, "minItems": random.randint(0, len(heads))}
        else:
            schema |= {"items": self._scalar(), "minItems": len(heads), "maxItems": len(heads) + 2}
        return schema

    def _any_of(self, depth: int) -> Schema:
        random = self._random
        keyword = "anyOf" if random.random() < 0.8 else "oneOf"
        return {keyword: [self._value(depth) for _ in range(random.randint(2, 3))]}

    def _recursive(self) -> Schema:
        """Return a recursive schema of a list or a tree, which has finite values."""
        random = self._random
        itself = random.choice(
            (
                {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
                {"type": "object", "properties": {"node": {"$ref": "#/$defs/node"}}, "additionalProperties": False},
            )
        )
        self._defs["node"] = {
            "type": "object",
            "properties": {"value": self._scalar(), "next": itself},
            "required": ["value", *(["next"] if random.random() < 0.6 else [])],
            "additionalProperties": False,
        }
        return {"$ref": "#/$defs/node"}


_DEPTH: Final = 2
_CHARS: Final = (
    *("a", "Z", "7", " ", "-", "_", ",", ":", "é", "ß", "数", "🙂", '"', "'", "/", "~"),
    *(r"\.", r"\*", r"\(", r"\)", r"\[", r"\{", r"\|", r"\\", r"\n", r"\t", r"\?", r"\+", r"\^", r"\$"),
)
_CLASSES: Final = (
    *(
        "[a-z]",
        "[A-Za-z]",
        "[0-9a-f]",
        "[abc]",
        "[a-]",
        "[^a-z]",
        "[^\\n ]",
        "[\\]\\\\]",
        "[à-ö]",
        "[一-十]",
        "[🙂-🙏]",
    ),
    *(r"\d", r"\w", "[\\d.]", "[\\w-]", "[^\\w]", "[^\\d]", "[ -~]", ".", "[+*?.]", "[\\^x]", "[x^]"),
)
_REPEATS: Final = ("?", "{2}", "{0,2}", "{1,3}", "{3,5}", "{0}", "{1}", "??", "{1,2}?", "{12}")
_ENDLESS: Final = ("*", "+", "{2,}", "*?", "+?")


def _regex(random: Random, depth: int) -> str:
    branches = [_sequence(random, depth) for _ in range(random.choice((1, 1, 1, 2, 3)))]
    expression = "|".join(branches)
    return f"^(?:{expression})$" if depth == _DEPTH and random.random() < 0.1 else expression


def _sequence(random: Random, depth: int) -> str:
    return "".join(_piece(random, depth) for _ in range(random.randint(1, 4)))


def _piece(random: Random, depth: int) -> str:
    kind = random.random()
    if depth and kind < 0.2:
        atom = f"{random.choice(('(', '(?:'))}{_regex(random, depth - 1)})"
    elif kind < 0.55:
        atom = random.choice(_CLASSES)
    elif kind < 0.8:
        atom = random.choice(_CHARS)
    else:
        return "".join(random.choices(string.ascii_letters, k=random.randint(2, 6)))
    if random.random() < 0.35:
        atom += random.choice(_REPEATS if random.random() < 0.9 else _ENDLESS)
    return atom
