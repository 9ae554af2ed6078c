"""How one `gen` samples, as far as it has been said: by the program, and by its run."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Self

from graftlm.errors import SamplingParamsError

__all__ = ["DTYPE_PATTERNS", "Sampling", "make_sampling"]

#: dtype -> the regular expression that its text matches.
DTYPE_PATTERNS: Final[Mapping[str, str]] = {
    "int": r"[-+]?[0-9]+[ \n]*",
    "float": r"[-+]?[0-9]*\.?[0-9]+[ \n]*",
    "str": r"\"[\w\d\s]*\"",
    "bool": "(True|False)",
}

#: Numbers could go on for ever; these end them.
_NUMBER_STOPS: Final = (" ", "\n")
_NUMBERS: Final = frozenset({"int", "float"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample; None leaves a field to the run's defaults, and then to the backend's.

    Attributes:
        dtype: "int", "float", "str" or "bool": the text is constrained to look like one.
        logprob_start_len: with `return_logprob`, also report the prompt's tokens from here on.
        top_logprobs_num: with `return_logprob`, also report this many most likely tokens for each place.
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

    def over(self, defaults: Self) -> Self:
        """Return these fields where they are given, and those of `defaults` elsewhere."""
        return type(self)(**(defaults.given() | self.given()))

    def given(self) -> dict[str, Any]:
        """Return the fields that are not None."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def resolved(self) -> Self:
        """Return the same with `dtype` written as the constraint that it stands for.

        Raises:
            SamplingParamsError: `dtype` is given beside `regex` or `json_schema`.
        """
        if self.dtype is None:
            return self
        if self.regex is not None or self.json_schema is not None:
            raise SamplingParamsError(
                f"dtype {self.dtype!r} is a constraint of its own; leave out regex and json_schema"
            )
        stop = (self.stop or ()) + (_NUMBER_STOPS if self.dtype in _NUMBERS else ())
        return type(self)(**(self.given() | {"dtype": None, "regex": DTYPE_PATTERNS[self.dtype], "stop": stop or None}))


def make_sampling(values: Mapping[str, Any]) -> Sampling:
    """Return a Sampling of what a user wrote: one stop string or several, types for `dtype`, SGLang's -1 for `top_k`.

    Raises:
        SamplingParamsError: a value cannot be meant; ranges are the backend's to check.
    """
    values = dict(values)
    for name in ("stop", "stop_regex"):
        values[name] = _strings(name, values.get(name))
    if values.get("stop_token_ids") is not None:
        values["stop_token_ids"] = _tuple("stop_token_ids", values["stop_token_ids"], "a list of token ids")
    values["dtype"] = _dtype_name(values.get("dtype"))
    _check_regex(values.get("regex"))
    return Sampling(**values)


def _strings(name: str, value: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    wanted = "a string or a list of strings"
    strings = (value,) if isinstance(value, str) else _tuple(name, value, wanted)
    if not all(isinstance(string, str) for string in strings):
        raise SamplingParamsError(f"{name} must be {wanted}, got {value!r}")
    return strings


def _tuple(name: str, value: Any, wanted: str) -> tuple[Any, ...]:
    try:
        return tuple(value)
    except TypeError:
        raise SamplingParamsError(f"{name} must be {wanted}, got {value!r}") from None


def _dtype_name(dtype: type | str | None) -> str | None:
    if dtype is None:
        return None
    name = dtype.__name__ if isinstance(dtype, type) else dtype
    name = "str" if name == "string" else name
    if not isinstance(name, str) or name not in DTYPE_PATTERNS:
        raise SamplingParamsError(f"dtype must be one of {', '.join(DTYPE_PATTERNS)}, got {name!r}")
    return name


def _check_regex(regex: str | None) -> None:
    if regex is None:
        return
    try:
        re.compile(regex)
    except TypeError:
        raise SamplingParamsError(f"regex must be a string, got {regex!r}") from None
    except re.error as error:
        raise SamplingParamsError(f"regex {regex!r} is not a regular expression: {error}") from None
