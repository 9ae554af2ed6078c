"""The sampling parameters of one `gen`, as set by the program and by its run."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Self

from graftlm.errors import SamplingParamsError

__all__ = ["DTYPE_PATTERNS", "Sampling", "make_sampling"]

#: dtype -> regular expression of its text.
DTYPE_PATTERNS: Final[Mapping[str, str]] = {
    "int": r"[-+]?[0-9]+[ \n]*",
    "float": r"[-+]?[0-9]*\.?[0-9]+[ \n]*",
    "str": r"\"[\w\d\s]*\"",
    "bool": "(True|False)",
}

#: A number's pattern allows any number of digits, so these stop strings end the number.
_NUMBER_STOPS: Final = (" ", "\n")
_NUMBERS: Final = frozenset({"int", "float"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters. A field that is None has the run's default, else the backend's default.

    Attributes:
        dtype: "int", "float", "str" or "bool": the text is constrained to this form.
        logprob_start_len: with `return_logprob`, also report the prompt's tokens from this position on.
        top_logprobs_num: with `return_logprob`, number of most likely tokens to report at each position.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    stop_regex: tuple[str, ...] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    ignore_eos: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    dtype: str | None = None
    regex: str | None = None
    json_schema: str | None = None
    ebnf: str | None = None

    def over(self, defaults: Self) -> Self:
        """Return a copy in which each field that is None has its value in `defaults`."""
        return type(self)(**(defaults.given() | self.given()))

    def given(self) -> dict[str, Any]:
        """Return the fields that are not None."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def resolved(self) -> Self:
        """Return the same parameters with `dtype` replaced by its regular expression.

        Raises:
            SamplingParamsError: `dtype` is combined with `regex`, `json_schema` or `ebnf`.
        """
        if self.dtype is None:
            return self
        if any(specification is not None for specification in (self.regex, self.json_schema, self.ebnf)):
            raise SamplingParamsError(
                f"dtype {self.dtype!r} cannot be combined with regex, json_schema or ebnf; leave one of them out"
            )
        stop = (self.stop or ()) + (_NUMBER_STOPS if self.dtype in _NUMBERS else ())
        return type(self)(**(self.given() | {"dtype": None, "regex": DTYPE_PATTERNS[self.dtype], "stop": stop or None}))


def make_sampling(values: Mapping[str, Any]) -> Sampling:
    """Return a Sampling from a user's arguments: `stop` may be one string, `dtype` a type, `top_k` -1 as in SGLang.

    Raises:
        SamplingParamsError: a value has a wrong type or form. The backend checks ranges later.
    """
    values = dict(values)
    for name in ("stop", "stop_regex"):
        values[name] = _strings(name, values.get(name))
    for pattern in values["stop_regex"] or ():
        _check_regex("stop_regex", pattern)
    if values.get("stop_token_ids") is not None:
        values["stop_token_ids"] = _tuple("stop_token_ids", values["stop_token_ids"], "a list of token ids")
    values["dtype"] = _dtype_name(values.get("dtype"))
    _check_regex("regex", values.get("regex"))
    return Sampling(**values)


def _strings(name: str, value: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    expected = "a string or a list of strings"
    strings = (value,) if isinstance(value, str) else _tuple(name, value, expected)
    if not all(isinstance(string, str) for string in strings):
        raise SamplingParamsError(f"{name} must be {expected}, got {value!r}")
    return strings


def _tuple(name: str, value: Any, expected: str) -> tuple[Any, ...]:
    try:
        return tuple(value)
    except TypeError:
        raise SamplingParamsError(f"{name} must be {expected}, got {value!r}") from None


def _dtype_name(dtype: type | str | None) -> str | None:
    if dtype is None:
        return None
    name = dtype.__name__ if isinstance(dtype, type) else dtype
    name = "str" if name == "string" else name
    if not isinstance(name, str) or name not in DTYPE_PATTERNS:
        raise SamplingParamsError(f"dtype must be one of {', '.join(DTYPE_PATTERNS)}, got {name!r}")
    return name


def _check_regex(name: str, regex: str | None) -> None:
    if regex is None:
        return
    try:
        re.compile(regex)
    except TypeError:
        raise SamplingParamsError(f"{name} must be a string, got {regex!r}") from None
    except re.error as error:
        raise SamplingParamsError(f"{name} {regex!r} is not a regular expression: {error}") from None
