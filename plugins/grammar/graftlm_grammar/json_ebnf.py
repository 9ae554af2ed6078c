"""The EBNF rules of JSON, from which the rules of a schema are built."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from graftlm_grammar.char_set import IN_JSON_STRING, CharSet, ebnf_class, minus
from graftlm_grammar.options import JsonOptions

__all__ = ["JsonRules", "RegularJsonRules", "literal", "repeated"]


_QUOTE: Final = r'"\""'
#: Maximum number of leading characters that distinguish other names from the schema's names. Each character needs a
#: nested group.
_MAX_NAME_LEN: Final = 64


def literal(text: str) -> str:
    """Return an EBNF literal of a text without control characters."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def repeated(item: str, least: int, most: int | None) -> str:
    """Return the expression of `least` to `most` repetitions of an item.

    Args:
        item: an expression that needs no parentheses.
        least: minimum number of repetitions.
        most: maximum number of repetitions; None: no maximum.
    """
    return f"{item}{{{least},{'' if most is None else most}}}"


class JsonRules:
    """The rules of a grammar by name. Rules of JSON itself are added at their first use.

    Args:
        options: white space in the output.
    """

    #: A character of a JSON string that is written without an escape.
    PLAIN_CHAR: ClassVar = ebnf_class(IN_JSON_STRING)
    #: Whether rules may be recursive. The rules for "any value" are always recursive.
    MAY_REPEAT: ClassVar = True

    # For a matcher, a repetition of one class is a thousand times cheaper than a repetition of alternatives.
    _STRING: ClassVar = {
        "string": f'"\\"" {PLAIN_CHAR}* ("\\\\" escape {PLAIN_CHAR}*)* "\\""',
        "escape": '[\\u0022\\u005c\\u002fbfnrt] | "u" code',
        "code": "[0-9A-CE-Fa-ce-f] hex hex hex | [Dd] [0-7] hex hex",  # excludes surrogates
        "hex": "[0-9A-Fa-f]",
    }
    _NUMBER: ClassVar = {
        "integer": '"-"? ("0" | [1-9] [0-9]*)',
        # The exponent has at most two digits, so that numbers are within the range of double precision.
        "number": 'integer ("." [0-9]+)? ([eE] [+\\u002d]? [0-9]{1,2})?',
    }
    _ANY: ClassVar = {"any": 'object | array | string | number | "true" | "false" | "null"'}

    def __init__(self, options: JsonOptions) -> None:
        self._bodies: dict[str, str] = {}
        self._is_compact = options.whitespace == "compact"
        self._gap, self._comma, self._colon = "", '", "', '": "'
        if self._is_compact:
            self._comma, self._colon = '","', '":"'
        elif options.whitespace == "flexible":
            self._gap, self._comma, self._colon = "ws", 'ws "," ws', 'ws ":" ws'
            self.add("ws", repeated("[ \\n\\r\\t]", 0, options.max_whitespace))

    def add(self, name: str, body: str) -> None:
        """Add a rule. A name must not be added again with another body."""
        self._bodies[name] = body

    def text(self) -> str:
        """Return the grammar, one line per rule."""
        return "\n".join([f"{name} ::= {body}" for name, body in self._bodies.items()])

    def string(self) -> str:
        """Return the name of the rule that matches any string."""
        self._bodies.update(self._STRING)
        return "string"

    def number(self) -> str:
        """Return the name of the rule that matches any number."""
        self._bodies.update(self._NUMBER)
        return "number"

    def any(self) -> str:
        """Return the name of the rule that matches any value."""
        if "any" not in self._bodies:
            self._bodies.update(self._ANY)
            self.number()
            pair = self.pair(self.string(), "any")
            self.add("object", str(self.items("{", pair, 0, None, "}")))
            self.add("array", str(self.items("[", "any", 0, None, "]")))
        return "any"

    def is_any(self, name: str) -> bool:
        """Return whether an added rule is the rule that matches any value, or leads to it by references only."""
        visited: set[str] = set()
        while name in self._bodies and name != "any" and name not in visited:
            visited.add(name)
            name = self._bodies[name]
        return name == "any"

    def pair(self, key: str, value: str) -> str:
        """Return the expression of a property: name, colon and value."""
        return f"{key} {self._colon} {value}"

    def value(self, value: Any) -> str:
        """Return the expression of one given value, as json.dumps writes it (without spaces if `compact`)."""
        separators = (",", ":") if self._is_compact else None
        return literal(json.dumps(value, ensure_ascii=False, separators=separators))

    def items(self, start: str, item: str | None, least: int, most: int | None, end: str) -> str | None:
        """Return the expression of `least` to `most` items between brackets; None if no such list is possible.

        Args:
            start: the opening bracket.
            item: expression of an item; None if no item is allowed.
            least: minimum number of items.
            most: maximum number of items, or None.
            end: the closing bracket.
        """
        empty = f'"{start}" {self._gap} "{end}"'
        if item is None or most == 0:
            return empty if least == 0 else None
        more = repeated(f"({self._comma} {item})", max(0, least - 1), None if most is None else most - 1)
        filled = f"{self._gap} {item} {more}"
        return f'"{start}" {f"({filled})?" if least == 0 else filled} {self._gap} "{end}"'

    def sequence(self, first: list[str], item: str | None, least: int, most: int | None) -> str | None:
        """Return the expression of an array; None if no array can have `least` to `most` items.

        Args:
            first: expressions of the first items.
            item: expression of an item after those in `first`; None if no more items are allowed.
            least: minimum number of items.
            most: maximum number of items, or None.
        """
        if not first:
            return self.items("[", item, least, most, "]")
        if item is None and least > len(first):
            return None
        first = first if most is None else first[:most]
        tail = ""
        if item is not None and (most is None or most > len(first)):
            rest = None if most is None else most - len(first)
            tail = repeated(f"({self._comma} {item})", max(0, least - len(first)), rest)
        for i in reversed(range(len(first))):
            before = self._gap if i == 0 else self._comma
            tail = f"{before} {first[i]} {tail}"
            if i >= least:
                tail = f"({tail})?"
        return f'"[" {tail} {self._gap} "]"'

    def record(self, named: Mapping[str, str], required: frozenset[str], additional: str | None) -> str:
        """Return the expression of an object with the given properties, in this order.

        Args:
            named: name -> rule of its value.
            required: names that cannot be omitted.
            additional: rule of the values of other properties, which come last; None if none are allowed.
        """
        # next_i: the rest of the object after the properties before i. member_i: one of the properties from i on,
        # without its opening quote, and the rest of the object. The comma and the quote are matched before the name
        # is chosen, so that few rules are open at positions where a value can end.
        prefix = f"o{len(self._bodies)}"
        end, member, num = f'{self._gap} "}}"', "", len(named)
        if additional is not None:
            member = f"{prefix}member{num}"
            self.add(
                member, f"{self.pair(f'({_other_than(frozenset(named))}) {_QUOTE}', additional)} {prefix}next{num}"
            )
        self.add(f"{prefix}next{num}", _either(member and f"{self._comma} {_QUOTE} {member}", end))
        for i, (name, value) in reversed(list(enumerate(named.items()))):
            pair = self.pair(literal(json.dumps(name, ensure_ascii=False)[1:]), value)
            if name in required:
                member, end = "", ""
            self.add(f"{prefix}member{i}", _either(f"{pair} {prefix}next{i + 1}", member))
            member = f"{prefix}member{i}"
            self.add(f"{prefix}next{i}", _either(f"{self._comma} {_QUOTE} {member}", end))
        return f'"{{" ({_either(member and f"{self._gap} {_QUOTE} {member}", end)})'


class RegularJsonRules(JsonRules):
    """Rules for automata: they are not recursive, and remain small when references are expanded."""

    MAY_REPEAT: ClassVar = False

    def record(self, named: Mapping[str, str], required: frozenset[str], additional: str | None) -> str:
        """Return the expression of an object; see `JsonRules.record`."""
        prefix = f"o{len(self._bodies)}"
        gap, comma = self._gap, self._comma
        end = first_end = f'{gap} "}}"'
        if additional is not None:
            other = self.pair(f'"\\"" ({_other_than(frozenset(named))}) "\\""', additional)
            self.add(f"{prefix}other", other)
            end = f'({comma} {prefix}other)* {gap} "}}"'
            first_end = f'({gap} {prefix}other ({comma} {prefix}other)*)? {gap} "}}"'
        self.add(f"{prefix}next{len(named)}", end)
        self.add(f"{prefix}first{len(named)}", first_end)
        # first_i: the rest of the object after the brace, if all properties before i are omitted. next_i: the rest of
        # the object if at least one property before i is present.
        for i, (name, value) in reversed(list(enumerate(named.items()))):
            pair = f"{self.pair(literal(json.dumps(name, ensure_ascii=False)), value)} {prefix}next{i + 1}"
            optional = name not in required
            self.add(f"{prefix}next{i}", f"{comma} {pair}" + (f" | {prefix}next{i + 1}" if optional else ""))
            self.add(f"{prefix}first{i}", f"{gap} {pair}" + (f" | {prefix}first{i + 1}" if optional else ""))
        return f'"{{" {prefix}first0'


def _either(*branches: str) -> str:
    """Return the branches that are not empty as alternatives."""
    return " | ".join(filter(None, branches))


def _other_than(names: frozenset[str], num_before: int = 0) -> str:
    """Return an expression for strings without escapes that are not equal to any of the names.

    It does not match strings whose first `_MAX_NAME_LEN` characters are equal to those of a name.

    Args:
        names: the names, without their first `num_before` characters.
        num_before: number of leading characters that were compared already.
    """
    next_chars = sorted({name[0] for name in names if name})
    taken: CharSet = tuple((ord(char), ord(char)) for char in next_chars)
    others = f"{ebnf_class(minus(IN_JSON_STRING, taken))} {JsonRules.PLAIN_CHAR}*"
    branches = [] if "" in names else ['""']
    branches.append(others)
    for char in next_chars if num_before < _MAX_NAME_LEN else ():
        if minus(((ord(char), ord(char)),), IN_JSON_STRING):
            continue  # the character needs an escape, and these strings have no escapes
        longer = frozenset(name[1:] for name in names if name[:1] == char)
        branches.append(f"{literal(char)} ({_other_than(longer, num_before + 1)})")
    return " | ".join(branches)
