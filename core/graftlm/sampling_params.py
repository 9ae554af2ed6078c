"""The sampling parameters of a request."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from graftlm.errors import SamplingParamsError
from graftlm.output_types import as_specification, is_output_type
from graftlm.stop_patterns import MAX_STATES, PatternError, compile_pattern

__all__ = ["GRAMMAR_FIELDS", "MAX_LOGPROBS", "MAX_LOGPROB_IDS", "MAX_TAG_CHARS", "SamplingParams", "changed_fields"]

#: Maximum number of most likely tokens that are reported per token.
MAX_LOGPROBS: Final = 20
#: Maximum number of `logprob_token_ids`.
MAX_LOGPROB_IDS: Final = 256
_MAX_SEED: Final = 2**63 - 1
_MAX_COUNT: Final = 2**31 - 1
#: Maximum length of the tags around reasoning.
MAX_TAG_CHARS: Final = 32


#: The fields that constrain the output; a request may set one of them. `GrammarKind` has the same names.
GRAMMAR_FIELDS: Final = ("json_schema", "regex", "ebnf", "choice", "structural_tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters that determine how tokens are sampled, and when the output ends. They are validated on creation.

    Logits are processed in this order: logits processors, logit_bias, min_tokens, the grammar's mask, repetition,
    frequency and presence penalties, temperature, top_k, top_p, min_p. The grammar has precedence: if the stages before
    the mask set all tokens that the grammar allows to -inf, the mask is applied to the unchanged logits.

    Attributes:
        max_tokens: maximum number of tokens to generate; None: until the context or the KV memory is full.
        min_tokens: minimum number of tokens to generate. Before this number is reached, no end-of-sequence or stop
            token is sampled, and no stop string ends the request.
        temperature: number by which logits are divided; 0 selects the most likely token (greedy).
        top_k: number of most likely tokens that are kept; None keeps all.
        top_p: probability p; the smallest set of tokens whose probability reaches p is kept.
        min_p: factor from 0 to 1; tokens are kept if their probability is at least min_p times the highest probability.
        presence_penalty: number that is subtracted once from the logit of each token in the output.
        frequency_penalty: number that is subtracted from a token's logit once per occurrence in the output.
        repetition_penalty: number that divides positive logits and multiplies negative logits, for tokens that occur in
            prompt or output (CTRL, arXiv:1909.05858).
        logit_bias: token id -> number that is added to its logit.
        stop: strings that end the output; the text ends before the match.
        stop_regex: regular expressions in the syntax of Python's `re`; the output ends where one first matches, and the
            text ends before the match. A match is complete at its first possible end, so `a+` stops at the first "a".
            Matching takes linear time, so lookaround and references to groups are refused. Anchors for the end of a
            text or word, and expressions that match the empty text, are refused too. A match removes at most 4,096
            characters.
        stop_token_ids: token ids that end the output, in addition to the model's. Ids outside the vocabulary have no
            effect, so that one list serves several models.
        include_stop: whether the match of a stop string, expression or token is kept in the text.
        ignore_eos: whether generation continues after the model's end-of-sequence tokens. With a grammar, these tokens
            still end a complete output.
        skip_special_tokens: whether special tokens are omitted from the text.
        seed: seed of the sampler's noise, which does not depend on the batch; None: a random seed.
        n: number of completions per prompt, each with its own seed derived from `seed`.
        logprobs: number of most likely tokens whose log-probabilities are reported, in addition to that of the sampled
            token; None: no log-probabilities.
        prompt_logprobs: number of most likely tokens whose log-probabilities are reported for each prompt token, in
            addition to that of the prompt token; None: no log-probabilities. The first prompt token has none, because
            no token precedes it.
        prompt_logprobs_start: index of the first prompt token whose log-probability is reported; if it is past the
            prompt's end, no log-probability is reported. The prompt is computed from token `prompt_logprobs_start - 1`
            on, because a token's log-probability needs the logits of the token before it. Only earlier tokens may come
            from the prefix cache; with 0, the whole prompt is computed.
        logprob_token_ids: token ids whose log-probabilities are reported wherever `logprobs` or `prompt_logprobs`
            reports some, in `TokenLogprob.requested`.
        masked_logprobs: whether log-probabilities of the output are normalized over the tokens that the grammar allows.
            The log-probability of a forbidden token is then -inf, and `top` has only allowed tokens. False: the model's
            log-probabilities.
        logits_processors: processor name -> options; plugins provide the processors.
        json_schema: constrain the output to a JSON schema: a dict, true or false, JSON text, or a pydantic model class,
            which is converted to a dict. Needs a grammar backend. With the extra `outlines`, `json_schema`, `regex`,
            `ebnf` and `choice` also accept output types: terms of Outlines, dataclasses, enums, `Literal["a", "b"]`,
            `list[int]`. The type alone determines whether it is converted to a JSON schema, a regular expression or a
            grammar; any of the four fields accepts it.
        regex: constrain the output to a regular expression. Needs a grammar backend.
        ebnf: constrain the output to a grammar in EBNF or in Lark's format. Needs a grammar backend.
        choice: constrain the output to one of several strings. Needs a grammar backend.
        structural_tag: constrain parts of the output; a trigger text starts each part. A dict or JSON text, as
            described in `graftlm.contracts.GrammarKind`. Needs a grammar backend.
        reasoning_end: text that ends the model's reasoning, such as `</think>`. The constraint applies to the text
            after `reasoning_end` and up to two line breaks. Inside the reasoning, only the request's stop strings, stop
            tokens and `max_tokens` end the output.
        reasoning_begin: text that is a single token of the model, such as `<think>`; the model reasons only if the
            output begins with this text. None: the prompt already contains this text at its end, so the output begins
            inside the reasoning.
        strict: whether a JSON schema with keywords that cannot be enforced is refused. False: these keywords are
            ignored, and `RequestOutput.unenforced` lists them.
        grammar_backend: name of the grammar backend; None: the engine's default.
        jump_forward: whether tokens that the grammar forces are appended without sampling. False: every token is
            sampled under the mask, so `logprobs` does not change the text. None and True: the setting
            `grammar.jump_forward` of the configuration applies; True does not override a false setting.
        speculation: whether tokens are drafted for the request. False: no tokens are drafted. None and True: the
            setting `speculation` of the configuration applies. The output is the same in all cases.

    Raises:
        SamplingParamsError: a value is out of range; the message has the parameter's name.
    """

    max_tokens: int | None = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] | Sequence[str] | str = ()
    stop_regex: tuple[str, ...] | Sequence[str] | str = ()
    stop_token_ids: tuple[int, ...] | Sequence[int] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    logprob_token_ids: tuple[int, ...] | Sequence[int] = ()
    masked_logprobs: bool = False
    logits_processors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    json_schema: Mapping[str, Any] | bool | str | type[Any] | Any | None = None
    regex: str | Any | None = None
    ebnf: str | Any | None = None
    choice: tuple[str, ...] | Sequence[str] | Any | None = None
    structural_tag: Mapping[str, Any] | str | None = None
    reasoning_end: str | None = None
    reasoning_begin: str | None = None
    strict: bool = True
    grammar_backend: str | None = None
    jump_forward: bool | None = None
    speculation: bool | None = None

    def __post_init__(self) -> None:
        for name, expected in _LISTS.items():
            object.__setattr__(self, name, _as_tuple(name, getattr(self, name), expected))
        for name in ("json_schema", "regex", "ebnf", "choice"):
            if is_output_type(getattr(self, name)):
                _convert_type(self, name)
        if self.choice is not None and not isinstance(self.choice, str):
            object.__setattr__(self, "choice", _as_tuple("choice", self.choice, "a non-empty list of strings"))
        _check_mappings(self)
        _check_lengths(self)
        _check_numbers(self)
        _check_stops(self)
        _check_logprob_ids(self)
        _check_grammar(self)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always selected."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether a presence, frequency or repetition penalty is set."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def grammar_field(self) -> str | None:
        """Name of the field that constrains the output; None if there is none."""
        return next((name for name in GRAMMAR_FIELDS if getattr(self, name) is not None), None)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return tuple(self.stop)

    @property
    def stop_patterns(self) -> tuple[str, ...]:
        """`stop_regex` as a tuple."""
        return tuple(self.stop_regex)


#: Fields that are stored as tuples -> the expected value.
_LISTS: Final = {
    "stop": "a non-empty string, or a list of them",
    "stop_regex": "a regular expression, or a list of them",
    "stop_token_ids": "a list of token ids",
    "logprob_token_ids": "a list of token ids",
}


def _as_tuple(name: str, value: Any, expected: str) -> tuple[Any, ...]:
    """Return the items of a list; a string is a single item, None is an empty list."""
    if value is None or isinstance(value, str):
        return () if value is None else (value,)
    _check_type(isinstance(value, Iterable) and not isinstance(value, bytes), name, value, expected)
    return tuple(value)


def _convert_type(p: SamplingParams, name: str) -> None:
    """Replace an output type by the specification that it stands for, which may belong to another field."""
    field_name, specification = as_specification(name, getattr(p, name))
    if field_name != name and getattr(p, field_name) is not None:
        raise SamplingParamsError(f"{name}: the type is a specification for {field_name}, which is also given")
    object.__setattr__(p, name, None)
    object.__setattr__(p, field_name, specification)


def _check(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise SamplingParamsError(f"{name} must be {expected}, got {value!r}")


def _check_type(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise SamplingParamsError(f"{name} must be {expected}, got {type(value).__name__} {value!r}")


def _check_int(name: str, value: Any, low: int, high: int, expected: str, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    _check_type(_is_int(value), name, value, "a whole number, or None" if optional else "a whole number")
    _check(low <= value <= high, name, value, expected)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_lengths(p: SamplingParams) -> None:
    _check_int("max_tokens", p.max_tokens, 1, _MAX_COUNT, "at least 1, or None", optional=True)
    limit = _MAX_COUNT if p.max_tokens is None else p.max_tokens
    _check_int("min_tokens", p.min_tokens, 0, limit, "between 0 and max_tokens")
    _check_int("n", p.n, 1, 128, "between 1 and 128")
    for name in ("logprobs", "prompt_logprobs"):
        expected = f"between 0 and {MAX_LOGPROBS}, or None"
        _check_int(name, getattr(p, name), 0, MAX_LOGPROBS, expected, optional=True)
    expected = "the index of a prompt token, at least 0; to report none, leave prompt_logprobs None"
    _check_int("prompt_logprobs_start", p.prompt_logprobs_start, 0, _MAX_COUNT, expected)
    _check_int("seed", p.seed, 0, _MAX_SEED, "between 0 and 2**63 - 1, or None", optional=True)


def _check_numbers(p: SamplingParams) -> None:
    ranges: dict[str, tuple[float, float, str]] = {
        "temperature": (0.0, 100.0, "between 0 and 100"),
        "top_p": (0.0, 1.0, "above 0 and at most 1"),
        "min_p": (0.0, 1.0, "between 0 and 1"),
        "presence_penalty": (-2.0, 2.0, "between -2 and 2"),
        "frequency_penalty": (-2.0, 2.0, "between -2 and 2"),
        "repetition_penalty": (0.01, 100.0, "between 0.01 and 100"),
    }
    for name, (low, high, expected) in ranges.items():
        value = getattr(p, name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        _check_type(number, name, value, "a number")
        _check(low <= value <= high, name, value, expected)  # NaN fails every comparison
    _check(p.top_p > 0, "top_p", p.top_p, "above 0 and at most 1")
    _check_int("top_k", p.top_k, 1, _MAX_COUNT, "at least 1, or None", optional=True)
    for token, bias in p.logit_bias.items():
        _check(_is_int(token) and token >= 0, "logit_bias", token, "keyed by token ids")
        _check(
            isinstance(bias, int | float) and -1000 <= bias <= 1000,
            f"logit_bias[{token}]",
            bias,
            "between -1000 and 1000",
        )


def _check_mappings(p: SamplingParams) -> None:
    for name in ("logit_bias", "logits_processors"):
        _check(isinstance(getattr(p, name), Mapping), name, getattr(p, name), "a mapping")


def _check_stops(p: SamplingParams) -> None:
    for text in p.stop_strings:
        _check(isinstance(text, str) and text != "", "stop", text, _LISTS["stop"])
    _check_patterns(p)
    for token in p.stop_token_ids:
        _check(_is_int(token) and 0 <= token <= _MAX_COUNT, "stop_token_ids", token, "token ids")


def _check_logprob_ids(p: SamplingParams) -> None:
    ids = p.logprob_token_ids
    for token in ids:
        _check(_is_int(token) and token >= 0, "logprob_token_ids", token, "token ids")
    if len(ids) > MAX_LOGPROB_IDS:
        raise SamplingParamsError(f"logprob_token_ids: at most {MAX_LOGPROB_IDS} are possible, got {len(ids)}")
    if ids and p.logprobs is None and p.prompt_logprobs is None:
        raise SamplingParamsError("logprob_token_ids need logprobs or prompt_logprobs; set one of them, to 0 or more")


def _check_patterns(p: SamplingParams) -> None:
    num_states = 0
    for pattern in p.stop_patterns:
        _check(isinstance(pattern, str), "stop_regex", pattern, _LISTS["stop_regex"])
        try:
            num_states += compile_pattern(pattern).num_states
        except PatternError as error:
            raise SamplingParamsError(f"stop_regex: {pattern!r:.200} {error}", param="stop_regex") from None
    if num_states > MAX_STATES:
        raise SamplingParamsError(
            f"stop_regex: the expressions need {num_states} states together, at most {MAX_STATES} are possible; "
            "shorten them, or lower their repetition counts"
        )


def _check_grammar(p: SamplingParams) -> None:
    schema, tag, choice = p.json_schema, p.structural_tag, p.choice
    is_schema = schema is None or isinstance(schema, Mapping | str | bool)
    _check(is_schema, "json_schema", schema, "a dict, a string or a pydantic model class")
    _check(tag is None or isinstance(tag, Mapping | str), "structural_tag", tag, "a dict or a string")
    are_strings = choice is None or (choice and not isinstance(choice, str) and all(isinstance(c, str) for c in choice))
    _check(bool(are_strings), "choice", choice, "a non-empty list of strings")
    for name in ("regex", "ebnf", "grammar_backend", "reasoning_end", "reasoning_begin"):
        value = getattr(p, name)
        _check(value is None or isinstance(value, str), name, value, "a string")
    for name in ("include_stop", "ignore_eos", "skip_special_tokens", "strict", "masked_logprobs"):
        _check(isinstance(getattr(p, name), bool), name, getattr(p, name), "true or false")
    for name in ("jump_forward", "speculation"):
        value = getattr(p, name)
        _check(value is None or isinstance(value, bool), name, value, "true, false or None")
    given = [name for name in GRAMMAR_FIELDS if getattr(p, name) is not None]
    _check(len(given) <= 1, f"at most one of {', '.join(GRAMMAR_FIELDS)}", given, "given")
    _check_reasoning(p)


def _check_reasoning(p: SamplingParams) -> None:
    end, begin = p.reasoning_end, p.reasoning_begin
    for name, text in (("reasoning_end", end), ("reasoning_begin", begin)):
        is_text = text is None or (0 < len(text) <= MAX_TAG_CHARS and not any("\ud800" <= c <= "\udfff" for c in text))
        _check(is_text, name, text, f"text of 1 to {MAX_TAG_CHARS} characters")
    has_grammar = p.grammar_field is not None
    _check(end is None or has_grammar, "reasoning_end", end, f"combined with one of {', '.join(GRAMMAR_FIELDS)}")
    _check(begin is None or end is not None, "reasoning_begin", begin, "combined with reasoning_end")


_DEFAULTS: Final = {field.name: getattr(SamplingParams(), field.name) for field in fields(SamplingParams)}


def changed_fields(params: SamplingParams) -> dict[str, Any]:
    """Return the fields that differ from their default value."""
    values = {name: getattr(params, name) for name in _DEFAULTS}
    return {name: value for name, value in values.items() if value != _DEFAULTS[name]}
