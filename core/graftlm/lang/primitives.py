"""The functions of the language that make expressions: `gen`, `select`, roles."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NoReturn

from graftlm.errors import RequestError, SamplingParamsError, UnsupportedFeatureError
from graftlm.lang.choices import CHOICES_METHODS, CallableMethod, ChoicesMethod, token_length_normalized
from graftlm.lang.expressions import Expr, Gen, Image, RoleBegin, RoleEnd, Select, as_expr
from graftlm.lang.expressions import Sequence as ExprSequence
from graftlm.lang.placeholder import Placeholder
from graftlm.lang.reasoning import check_model_type
from graftlm.lang.sampling import make_sampling
from graftlm.output_types import as_specification, is_output_type

__all__ = [
    "assistant",
    "assistant_begin",
    "assistant_end",
    "gen",
    "gen_int",
    "gen_string",
    "image",
    "select",
    "separate_reasoning",
    "system",
    "system_begin",
    "system_end",
    "user",
    "user_begin",
    "user_end",
    "video",
]

#: The arguments of `gen` that constrain its text.
_SPECIFICATIONS: Final = ("regex", "json_schema", "ebnf")


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesMethod | Callable[..., Any] | str | None = None,
    regex: str | Any | None = None,
    json_schema: str | Mapping[str, Any] | type[Any] | Any | None = None,
    ebnf: str | Any | None = None,
) -> Expr:
    """Generate text with the model.

    A parameter that is not set here has the run's value (`program.run(temperature=0)`), else the backend's default.

    Args:
        name: name of the variable that stores the text.
        n: number of completions. The variable is then a list of the completions, and the first completion is appended
            to the text.
        stop: strings that end the text; they are not part of it.
        stop_regex: regular expressions that end the text, if the backend supports them.
        top_k: keep the k most likely tokens; -1 keeps all.
        return_logprob, logprob_start_len, top_logprobs_num, return_text_in_logprobs: report log-probabilities in
            `s.get_meta_info(name)`, in the form of SGLang's /generate.
        dtype: int, float, str or bool: the text has the form of such a value; a str includes its quotes.
        choices: see `select`. Sampling parameters are then ignored; `dtype` and the constraints below are refused.
        regex, json_schema, ebnf: a constraint that the text must match: a regular expression; a schema as a dict, as
            JSON text or as a pydantic model class; a grammar. Each also accepts output types, as in `SamplingParams`.

    Raises:
        SamplingParamsError: an argument has a wrong type or form. The backend checks ranges later.
        RequestError: the name is no string.
    """
    arguments = dict(locals())
    name, choices, method = (arguments.pop(key) for key in ("name", "choices", "choices_method"))
    _check_name("gen", name)
    if choices is not None:
        _check_only_choices(arguments)
        return select(name, choices, choices_method=method or token_length_normalized)
    return Gen(name, make_sampling(_with_specifications(arguments)))


def gen_int(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    **sampling: Any,
) -> Expr:
    """Generate a whole number; the same as `gen(..., dtype=int)`."""
    return gen(name, max_tokens, n=n, stop=stop, dtype=int, **sampling)


def gen_string(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    **sampling: Any,
) -> Expr:
    """Generate a string in quotes; the same as `gen(..., dtype=str)`."""
    return gen(name, max_tokens, n=n, stop=stop, dtype=str, **sampling)


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesMethod | Callable[..., Any] | str = token_length_normalized,
) -> Expr:
    """Append the most likely of some choices.

    Args:
        name: name of the variable that stores the choice.
        temperature: must be 0, because the most likely choice is selected.
        choices_method: how choices of several tokens are compared: `token_length_normalized`,
            `greedy_token_selection`, `unconditional_likelihood_normalized`, your own ChoicesMethod, or a callable with
            the arguments of SGLang's choices methods.

    Raises:
        RequestError: there are no choices, or the method is unknown.
    """
    _check_name("select", name)
    if not choices or isinstance(choices, str) or not all(_is_choice(c) for c in choices):
        raise RequestError(f"select needs choices: a list of non-empty strings, got {choices!r}")
    if temperature != 0.0:
        raise SamplingParamsError(f"select picks the most likely choice: temperature must be 0, got {temperature}")
    if isinstance(choices_method, str):
        if choices_method not in CHOICES_METHODS:
            raise RequestError(f"choices_method must be one of {', '.join(CHOICES_METHODS)}, got {choices_method!r}")
        choices_method = CHOICES_METHODS[choices_method]
    if not callable(choices_method) or isinstance(choices_method, type):
        raise RequestError(
            f"choices_method must be a ChoicesMethod, the name of one, or an object to call, got {choices_method!r}"
        )
    method = choices_method if isinstance(choices_method, ChoicesMethod) else CallableMethod(choices_method)
    return Select(name, tuple(choices), method)


def separate_reasoning(expr: Expr, model_type: str) -> Expr:
    """Separate a model's reasoning from its answer.

    For each `gen` of the expression, the state's text and the variable contain only the answer. The variable
    `<name>_reasoning_content` contains the reasoning; it is "" if there is none.

    Args:
        model_type: `deepseek-r1`, `deepseek-v3`, `glm45`, `qwen3` or `qwen3-thinking`, or the name of a reasoning
            format.

    Raises:
        RequestError: the model type is unknown, or the expression has no `gen`.
    """
    check_model_type(model_type)
    parts = expr.parts if isinstance(expr, ExprSequence) else (as_expr(expr),)
    if not any(isinstance(part, Gen) for part in parts):
        raise RequestError("separate_reasoning needs an expression with a gen(...) in it")
    return ExprSequence(
        tuple([replace(part, reasoning=model_type) if isinstance(part, Gen) else part for part in parts])
    )


def system(expr: Expr | str | None = None) -> Expr:
    """Append a system message; without text, only open it."""
    return _message("system", expr)


def user(expr: Expr | str | None = None) -> Expr:
    """Append a user message; without text, only open it."""
    return _message("user", expr)


def assistant(expr: Expr | str | None = None) -> Expr:
    """Append an assistant message; without text, only open it."""
    return _message("assistant", expr)


def system_begin() -> Expr:
    """Open a system message."""
    return RoleBegin("system")


def system_end() -> Expr:
    """Close the system message."""
    return RoleEnd("system")


def user_begin() -> Expr:
    """Open a user message."""
    return RoleBegin("user")


def user_end() -> Expr:
    """Close the user message."""
    return RoleEnd("user")


def assistant_begin() -> Expr:
    """Open an assistant message; text that is generated next is the model's answer."""
    return RoleBegin("assistant")


def assistant_end() -> Expr:
    """Close the assistant message."""
    return RoleEnd("assistant")


def image(expr: str | bytes | os.PathLike[str]) -> Expr:
    """Append a picture, for models with a tower on an `EngineBackend` or a `RuntimeEndpoint`.

    Args:
        expr: the path of a file, or the content of one. The file is read when the program appends the picture.

    Raises:
        RequestError: the value is neither a path nor bytes.
    """
    if not isinstance(expr, str | bytes | os.PathLike):
        raise RequestError(f"image takes the path or the bytes of a file, got {type(expr).__name__}")
    return Image(expr)


def video(path: object, num_frames: int = 0) -> NoReturn:
    """Refuse a video.

    Raises:
        UnsupportedFeatureError: always: no backend accepts videos.
    """
    raise UnsupportedFeatureError("video: no backend of graftlm.lang takes videos; describe it in text")


def _check_only_choices(arguments: Mapping[str, Any]) -> None:
    forms = [name for name in ("dtype", *_SPECIFICATIONS) if arguments[name] is not None]
    if forms:
        raise SamplingParamsError(f"gen takes choices or {', '.join(forms)}, got both; leave one of them out")


def _check_name(word: str, name: object) -> None:
    if name is not None and not isinstance(name, str | Placeholder):
        raise RequestError(
            f"{word}: name must be a string, the name of the variable that stores the text, or None, got {name!r}"
        )


def _is_choice(choice: object) -> bool:
    # A traced program passes placeholders: they are not str, but str() returns a text.
    return isinstance(choice, str | Placeholder) and str(choice) != ""


def _message(role: str, expr: Expr | str | None) -> Expr:
    if expr is None:
        return RoleBegin(role)
    return RoleBegin(role) + as_expr(expr) + RoleEnd(role)


def _with_specifications(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `gen` in which specifications replace output types, and in which a schema is JSON text.

    An output type is a class, a type hint or a term of Outlines. It is replaced by a `json_schema`, a `regex` or an
    `ebnf`, in whichever of these arguments it was passed.
    """
    converted = dict(arguments)
    for name in _SPECIFICATIONS:
        if is_output_type(arguments[name]):
            field_name, specification = as_specification(name, arguments[name])
            if field_name != name and arguments[field_name] is not None:
                raise SamplingParamsError(f"{name}: the type is a specification for {field_name}, which is also given")
            converted |= {name: None, field_name: specification}
    return converted | {"json_schema": _schema_text(converted["json_schema"])}


def _schema_text(schema: str | Mapping[str, Any] | None) -> str | None:
    if schema is None or isinstance(schema, str):
        return schema
    if not isinstance(schema, Mapping | Placeholder):
        raise SamplingParamsError(f"json_schema must be a dict, its text or a pydantic model class, got {schema!r}")
    return json.dumps(schema)
