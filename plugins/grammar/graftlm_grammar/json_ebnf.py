"""The rules of JSON itself, from which those of a schema are put together."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from graftlm_grammar.char_set import IN_JSON_STRING, CharSet, ebnf_class, minus
from graftlm_grammar.options import JsonOptions

__all__ = ["JsonRules", "RegularJsonRules", "literal", "repeated"]


_QUOTE: Final = r'"\""'
#: Characters by which other names are told from those that a schema lists: each is a group within the one before.
_MAX_NAME_LEN: Final = 64


def literal(text: str) -> str:
    """Return the expression of a text, which holds no control characters."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def repeated(item: str, least: int, most: int | None) -> str:
    """Return an expression for so many of an item, which is one element."""
    return f"{item}{{{least},{'' if most is None else most}}}"


class JsonRules:
    """Rules by name. Those of JSON are added when they are first asked for."""

    #: A character of a string that stands for itself.
    PLAIN_CHAR: ClassVar = ebnf_class(IN_JSON_STRING)
    #: Whether rules may refer to themselves, beside those of any value.
    MAY_REPEAT: ClassVar = True

    # A star over one class costs a matcher a thousandth of what a star over alternatives does.
    _STRING: ClassVar = {
        "string": f'"\\"" {PLAIN_CHAR}* ("\\\\" escape {PLAIN_CHAR}*)* "\\""',
        "escape": '[\\u0022\\u005c\\u002fbfnrt] | "u" code',
        "code": "[0-9A-CE-Fa-ce-f] hex hex hex | [Dd] [0-7] hex hex",  # no halves of surrogate pairs
        "hex": "[0-9A-Fa-f]",
    }
    _NUMBER: ClassVar = {
        "integer": '"-"? ("0" | [1-9] [0-9]*)',
        # Two digits of exponent: no number that double precision cannot hold.
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
        """Add a rule; a name is added once, or with the same body."""
        self._bodies[name] = body

    def text(self) -> str:
        """Return the grammar."""
        return "\n".join([f"{name} ::= {body}" for name, body in self._bodies.items()])

    def string(self) -> str:
        """Return the rule of any string."""
        self._bodies.update(self._STRING)
        return "string"

    def number(self) -> str:
        """Return the rule of any number."""
        self._bodies.update(self._NUMBER)
        return "number"

    def any(self) -> str:
        """Return the rule of any value."""
        if "any" not in self._bodies:
            self._bodies.update(self._ANY)
            self.number()
            pair = self.pair(self.string(), "any")
            self.add("object", str(self.items("{", pair, 0, None, "}")))
            self.add("array", str(self.items("[", "any", 0, None, "]")))
        return "any"

    def is_any(self, name: str) -> bool:
        """Tell whether a rule, if it is written already, is that of any value."""
        passed: set[str] = set()
        while name in self._bodies and name != "any" and name not in passed:
            passed.add(name)
            name = self._bodies[name]
        return name == "any"

    def pair(self, key: str, value: str) -> str:
        """Return the expression of a name and its value."""
        return f"{key} {self._colon} {value}"

    def value(self, value: Any) -> str:
        """Return the expression of one value, spelt as json.dumps does where whitespace is free."""
        separators = (",", ":") if self._is_compact else None
        return literal(json.dumps(value, ensure_ascii=False, separators=separators))

    def items(self, start: str, item: str | None, least: int, most: int | None, end: str) -> str | None:
        """Return the expression of items between brackets, None where there are none that fit.

        Args:
            item: None where there is no item.
        """
        empty = f'"{start}" {self._gap} "{end}"'
        if item is None or most == 0:
            return empty if least == 0 else None
        more = repeated(f"({self._comma} {item})", max(0, least - 1), None if most is None else most - 1)
        filled = f"{self._gap} {item} {more}"
        return f'"{start}" {f"({filled})?" if least == 0 else filled} {self._gap} "{end}"'

    def sequence(self, first: list[str], item: str | None, least: int, most: int | None) -> str | None:
        """Return the expression of an array that begins with some items and goes on with others, None if none fits."""
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
        """Return the expression of an object with some properties, in this order.

        Args:
            named: name -> rule of its value.
            additional: rule of the values of other properties, which follow; None where there are none.
        """
        # next_i: what follows the properties before i. member_i: one of those from i on, without its first quote, and
        # what follows it. Comma and quote come before the choice of a name: few rules are open where a value may end.
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
    """Rules for automata: they do not refer to themselves, and stay small when they are put into each other."""

    MAY_REPEAT: ClassVar = False

    def record(self, named: Mapping[str, str], required: frozenset[str], additional: str | None) -> str:
        """Return the expression of an object with some properties, as JsonRules does."""
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
        # first_i: what may follow the brace when the properties before i were left out; next_i: what follows others.
        for i, (name, value) in reversed(list(enumerate(named.items()))):
            pair = f"{self.pair(literal(json.dumps(name, ensure_ascii=False)), value)} {prefix}next{i + 1}"
            optional = name not in required
            self.add(f"{prefix}next{i}", f"{comma} {pair}" + (f" | {prefix}next{i + 1}" if optional else ""))
            self.add(f"{prefix}first{i}", f"{gap} {pair}" + (f" | {prefix}first{i + 1}" if optional else ""))
        return f'"{{" {prefix}first0'


def _either(*branches: str) -> str:
    """Return the expression of any of some branches; those that are empty are left out."""
    return " | ".join(filter(None, branches))


def _other_than(names: frozenset[str], num_before: int = 0) -> str:
    """Return an expression for plain strings that are none of some names.

    It leaves out all that begin as a name does for `_MAX_NAME_LEN` characters.

    Args:
        num_before: characters that the names had in common.
    """
    next_chars = sorted({name[0] for name in names if name})
    taken: CharSet = tuple((ord(char), ord(char)) for char in next_chars)
    others = f"{ebnf_class(minus(IN_JSON_STRING, taken))} {JsonRules.PLAIN_CHAR}*"
    branches = [] if "" in names else ['""']
    branches.append(others)
    for char in next_chars if num_before < _MAX_NAME_LEN else ():
        if minus(((ord(char), ord(char)),), IN_JSON_STRING):
            continue  # it is spelt with an escape, which these strings do not have
        longer = frozenset(name[1:] for name in names if name[:1] == char)
        branches.append(f"{literal(char)} ({_other_than(longer, num_before + 1)})")
    return " | ".join(branches)
