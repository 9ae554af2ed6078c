"""Judges that decide, without any grammar backend, whether a text meets a specification."""

import ipaddress
import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from typing import Any, Final, TypeAlias

import jsonschema
import referencing
import referencing.jsonschema

__all__ = ["FORMATS", "REMOTE", "Judge", "choice_judge", "regex_judge", "schema_judge", "tag_judge"]

Judge: TypeAlias = Callable[[str], bool]

#: URI of a document that schemas refer to -> schema in this document.
REMOTE: Final = {"https://example.com/count": {"type": "integer", "minimum": 0}}

_TIME: Final = r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([zZ]|[+-]([01]\d|2[0-3]):[0-5]\d)"
_DATE: Final = r"\d{4}-\d{2}-\d{2}"
_DURATION_TIME: Final = r"T(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S)"
_LABEL: Final = r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)"
_ESCAPED: Final = r"%[0-9A-Fa-f]{2}"
_SCHEME: Final = r"[A-Za-z][A-Za-z0-9+.-]*:"
_URI_CHAR: Final = rf"([A-Za-z0-9._~:/?@!$&'()*+,;=\[\]-]|{_ESCAPED})"
_IRI_CHAR: Final = rf"({_URI_CHAR}|[^\x00-\xa0])"
_POINTER: Final = r"(/([^~/]|~[01])*)*"

_PATTERNS: Final[Mapping[str, str]] = {
    "duration": rf"P(\d+W|(\d+D|\d+M(\d+D)?|\d+Y(\d+M(\d+D)?)?)({_DURATION_TIME})?|{_DURATION_TIME})",
    "email": rf"[A-Za-z0-9!#$%&'*+/=?^_`{{|}}~-]+(\.[A-Za-z0-9!#$%&'*+/=?^_`{{|}}~-]+)*@{_LABEL}(\.{_LABEL})*",
    "hostname": rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*",
    "idn-email": r"[^@\s]+@[^@\s]+",
    "idn-hostname": r"(?!-)[^\s.@/]+(\.[^\s.@/]+)*",
    "iri": rf"{_SCHEME}{_IRI_CHAR}*(\#{_IRI_CHAR}*)?",
    "iri-reference": rf"{_IRI_CHAR}*(\#{_IRI_CHAR}*)?",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(0|[1-9]\d*)(\#|{_POINTER})",
    "time": _TIME,
    "uri": rf"{_SCHEME}{_URI_CHAR}*(\#{_URI_CHAR}*)?",
    "uri-reference": rf"{_URI_CHAR}*(\#{_URI_CHAR}*)?",
    "uri-template": r"([^{}\s]|\{[+#./;?&]?[\w.,:*]+\})*",
}


def _is_date(text: str) -> bool:
    date.fromisoformat(text)
    return re.fullmatch(_DATE, text, re.ASCII) is not None


def _is_date_time(text: str) -> bool:
    return _is_date(text[:10]) and re.fullmatch(rf"{_DATE}[tT]{_TIME}", text, re.ASCII) is not None


def _matching(pattern: str) -> Judge:
    return lambda text: re.fullmatch(pattern, text, re.ASCII) is not None


#: `format` -> function that returns whether a string has this format; ValueError counts as False.
FORMATS: Final[Mapping[str, Judge]] = {
    **{name: _matching(pattern) for name, pattern in _PATTERNS.items()},
    "date": _is_date,
    "date-time": _is_date_time,
    "ipv4": lambda text: bool(ipaddress.IPv4Address(text)) or text == "0.0.0.0",
    "ipv6": lambda text: "%" not in text and ipaddress.IPv6Address(text) is not None,
    "regex": lambda text: re.compile(text) is not None,
    "uuid": lambda text: len(text) == 36 and text.count("-") == 4 and str(uuid.UUID(text)) == text.lower(),
}


def schema_judge(schema: Any) -> Judge:
    """Return a judge that uses jsonschema and checks formats; the default draft is 2020-12."""
    checker = jsonschema.FormatChecker(formats=())
    for name, has_format in FORMATS.items():
        checker.checks(name, raises=(ValueError, re.error))(_of_strings(has_format))
    dialect = referencing.jsonschema.DRAFT202012
    remote = [(uri, referencing.Resource(contents, dialect)) for uri, contents in REMOTE.items()]
    registry: Any = referencing.Registry().with_resources(remote)
    validator_class: Any = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    validator = validator_class(schema, format_checker=checker, registry=registry)

    def judge(text: str) -> bool:
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
        except ValueError:
            return False
        return bool(validator.is_valid(value))

    return judge


def _of_strings(has_format: Judge) -> Callable[[object], bool]:
    return lambda value: not isinstance(value, str) or has_format(value)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def regex_judge(pattern: str) -> Judge:
    """Return a judge that uses Python's re on the whole text. The pattern must mean the same in ECMAScript."""
    return _matching(pattern)


def choice_judge(choices: list[str]) -> Judge:
    """Return a judge that compares a text with the choices."""
    return choices.__contains__


def tag_judge(tag: Mapping[str, Any]) -> Judge:
    """Return a judge for structural tags, which reads a text from trigger to trigger."""
    contents = [
        schema_judge(one["schema"]) if "schema" in one else regex_judge(one["regex"]) for one in tag["structures"]
    ]

    def ends_of_structure(text: str, start: int) -> Iterator[int]:
        for one, is_valid in zip(tag["structures"], contents, strict=True):
            if not text.startswith(one["begin"], start):
                continue
            content_start = start + len(one["begin"])
            for i in range(content_start, len(text) + 1):
                if text.startswith(one["end"], i) and is_valid(text[content_start:i]):
                    yield i + len(one["end"])

    def judge(text: str) -> bool:
        waiting, seen = [(0, False)], set[int]()  # (length of a valid prefix, whether it has a structure)
        while waiting:
            at, has_structure = waiting.pop()
            if at in seen:
                continue
            seen.add(at)
            if has_structure and tag.get("stop_after_first"):
                if at == len(text):
                    return True
                continue
            starts = [start for trigger in tag["triggers"] if (start := text.find(trigger, at)) >= 0]
            is_late = tag.get("at_least_one") and not has_structure and (not starts or min(starts) > 0)
            if not starts and not is_late:
                return True
            if starts and not is_late:
                waiting += [(end, True) for end in ends_of_structure(text, min(starts))]
        return False

    return judge
