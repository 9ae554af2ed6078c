"""Checks prompts and sampling parameters, and makes requests from them. None of the checks needs a device."""

import reprlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import GrammarSpec
from graftlm.errors import (
    AdapterNotFoundError,
    InvalidPromptError,
    NeverFitsError,
    PromptTooLongError,
    RequestError,
    SamplingParamsError,
    UnsupportedFeatureError,
)
from graftlm.grammar.delayed_grammar import MAX_END_BYTES, matcher_behind
from graftlm.grammar.grammar_choice import Grammars
from graftlm.grammar.grammars import grammar_spec, reasoning_before
from graftlm.lora.adapters import AdapterCatalog, LoadedAdapter, prefix_namespace
from graftlm.media.request_media import RequestMedia
from graftlm.pooling.pooling import Pooling
from graftlm.request_options import DEFAULT_OPTIONS, RequestOptions
from graftlm.scheduling import CompletionId, Request, RequestGrammar
from graftlm.scheduling.request import StopWatch
from graftlm.types import SamplingParams, TokenIds

__all__ = ["MAX_TTL_S", "Intake", "IntakeLimits", "check_ttl", "completion_seed"]

_MAX_SEED = 2**63 - 1

#: Maximum time in seconds for which a prefix may be pinned (31 years).
MAX_TTL_S = 1e9


@dataclass(frozen=True, slots=True)
class IntakeLimits:
    """The limits of a request.

    The assembly derives them from the model and the memory; `Intake` checks each request against them.

    Attributes:
        vocab_size: size of the vocabulary; valid token ids are smaller.
        context_len: maximum number of tokens of prompt and output together.
        memory_tokens: number of tokens that fit into the KV memory.
        eos_token_ids: tokens that end an output.
        logits_processors: names of the logits processors that a request may use.
        generates: whether the model can generate tokens: it has a trained output projection.
        num_labels: number of values that the model's score head returns per text; None: it has no score head.
    """

    vocab_size: int
    context_len: int
    memory_tokens: int
    eos_token_ids: tuple[int, ...]
    logits_processors: frozenset[str] = frozenset()
    generates: bool = True
    num_labels: int | None = None


class Intake:
    """Checks users' prompts and parameters, and makes valid requests for the scheduler."""

    def __init__(
        self,
        limits: IntakeLimits,
        make_stop_watch: Callable[[SamplingParams], StopWatch],
        clock: Callable[[], float],
        grammars: Grammars | None = None,
        adapters: AdapterCatalog | None = None,
    ) -> None:
        """Create an intake.

        Args:
            grammars: compiles the grammars of requests; None: a request with a grammar is refused.
            adapters: finds the adapters of requests; None: a request with an adapter is refused.
        """
        self.limits = limits
        self._grammars = grammars
        self._adapters = adapters
        self._make_stop_watch = make_stop_watch
        self._clock = clock

    def check_prompt(
        self,
        token_ids: Sequence[int] | NDArray[Any],
        *,
        pooling: Pooling | None = None,
        media: RequestMedia | None = None,
    ) -> TokenIds:
        """Return a prompt as int32 [n].

        Args:
            pooling: how the request is pooled; None: it generates tokens.
            media: the prompt's pictures, whose placeholder ids are below 0; None: all ids are in the vocabulary.

        Raises:
            UnsupportedFeatureError: the model does not support this use of the prompt.
            InvalidPromptError: the prompt is empty, not made of integers, or contains an id outside the vocabulary.
            PromptTooLongError: the prompt leaves no room for output in the context; an embedding needs no such room.
        """
        self._check_able(pooling)
        prompt = _as_array(token_ids)
        if not len(prompt):
            raise InvalidPromptError("the prompt is empty; give at least one token")
        vocab_size = self.limits.vocab_size
        shown = prompt if media is None else media.shown(prompt)
        outside = shown[(shown < 0) | (shown >= vocab_size)]
        if len(outside):
            raise InvalidPromptError(f"token id {int(outside[0])} is outside the vocabulary of {vocab_size} tokens")
        num_output = 1 if pooling is None else 0
        if len(prompt) + num_output > self.limits.context_len:
            share = ", one of them for output" if num_output else ""
            raise PromptTooLongError(
                f"this model's maximum context length is {self.limits.context_len} tokens{share}; the prompt has "
                f"{len(prompt)} tokens. Shorten the prompt."
            )
        return prompt.astype(np.int32)  # a copy, because the caller may change its own array

    def check_params(self, params: SamplingParams) -> tuple[SamplingParams, tuple[str, ...]]:
        """Check sampling parameters against the model and the engine.

        Returns: the parameters, with the name of the grammar backend that was chosen for them; and the paths of the
            JSON schema's keywords that are not enforced because `strict` is False.

        Raises:
            SamplingParamsError: a token id of `logit_bias` or `logprob_token_ids` is outside the vocabulary.
            GrammarError: a JSON schema, regular expression or grammar cannot be enforced in full.
            UnsupportedFeatureError: this engine lacks a logits processor, grammars or a grammar backend.
        """
        for name in ("logit_bias", "logprob_token_ids"):
            for token_id in getattr(params, name):
                if token_id >= self.limits.vocab_size:
                    size = self.limits.vocab_size
                    raise SamplingParamsError(f"{name}: token id {token_id} is outside the vocabulary of {size} tokens")
        for name in params.logits_processors:
            if name not in self.limits.logits_processors:
                available = ", ".join(sorted(self.limits.logits_processors)) or "none"
                raise UnsupportedFeatureError(f"Unknown logits processor {name!r}. Available: {available}.")
        spec = grammar_spec(params)
        if spec is None:
            self._check_backend(params.grammar_backend)
            return params, ()
        grammars, reasoning = self._backends(spec), reasoning_before(params)
        if reasoning is not None:
            grammars.check_reasoning(reasoning)
        enforcement = grammars.choose(spec, params.grammar_backend)
        return replace(params, grammar_backend=enforcement.backend), enforcement.unenforced

    def check_room(self, prompt_len: int, params: SamplingParams, *, pooling: Pooling | None = None) -> int:
        """Return the number of tokens that a request may generate, limited by its parameters and the context.

        Args:
            pooling: how the request is pooled; None: it generates tokens. An embedding generates none.

        Raises:
            NeverFitsError: prompt and output need more than the KV memory.
        """
        max_new_tokens = 0 if pooling is not None else self._max_new_tokens(prompt_len, params)
        needed = prompt_len + max_new_tokens
        if needed > self.limits.memory_tokens:
            raise NeverFitsError(
                f"{prompt_len} prompt tokens and up to {max_new_tokens} more need room for {needed} tokens, but the "
                f"KV memory has room for {self.limits.memory_tokens}. "
                f"{'Lower max_tokens' if pooling is None else 'Shorten the prompt'} or raise memory.kv_tokens."
            )
        return max_new_tokens

    def request(
        self,
        completion_id: CompletionId,
        prompt_token_ids: TokenIds,
        params: SamplingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        index: int = 0,
        seed: int | None = None,
        media: RequestMedia | None = None,
    ) -> Request:
        """Make the request of one completion.

        Args:
            prompt_token_ids: result of `check_prompt`.
            params: result of `check_params`.
            index: index of the completion among the prompt's `n` completions.
            seed: seed of all completions of the prompt; None: the seed of `params`, or a random one.
            media: the prompt's pictures; None: no pictures.

        Raises:
            AdapterNotFoundError: there is no such adapter.
            RequestError: the request does not fit into memory. Or it is a pooling request, and `params` request several
                completions or log-probabilities.
        """
        pooling = options.pooling
        if pooling is not None:
            _check_vector(params)
        now = self._clock()
        max_new_tokens = self.check_room(len(prompt_token_ids), params, pooling=pooling)
        spec = grammar_spec(params)
        base = params.seed if seed is None else seed
        stops = frozenset(token_id for token_id in params.stop_token_ids if token_id < self.limits.vocab_size)
        if index and params.prompt_logprobs is not None:  # only the first completion reports prompt_logprobs
            params = replace(params, prompt_logprobs=None)
        return Request(
            request_id=completion_id,
            prompt_token_ids=prompt_token_ids,
            params=params,
            max_new_tokens=max_new_tokens,
            stop_token_ids=stops if params.ignore_eos else stops.union(self.limits.eos_token_ids),
            seed=completion_seed(draw_seed() if base is None else base, index),
            arrival_s=now,
            namespace=self.namespace(options.cache_salt, options.adapter),
            priority=options.priority,
            deadline_s=None if options.timeout_s is None else now + options.timeout_s,
            stop_watch=self._make_stop_watch(params) if params.stop_strings or params.stop_patterns else None,
            grammar=None if spec is None else self._grammar(spec, params, prompt_token_ids, now),
            pooling=pooling,
            adapter=self.find_adapter(options.adapter),
            media=media,
        )

    def find_adapter(self, name: str | None) -> LoadedAdapter | None:
        """Return the adapter with the given name; None if `name` is None.

        Raises:
            AdapterNotFoundError: there is no such adapter.
        """
        if name is None:
            return None
        if self._adapters is None:
            raise AdapterNotFoundError(
                f"no adapter {name!r:.200} is loaded: this engine does not support adapters. Set lora.adapters."
            )
        return self._adapters.find(name)

    def namespace(self, cache_salt: str, adapter: str | None) -> str:
        """Return the cache namespace of requests with the given salt and adapter.

        Raises:
            AdapterNotFoundError: there is no such adapter.
        """
        loaded = self.find_adapter(adapter)
        return prefix_namespace(cache_salt, None if loaded is None else loaded.digest)

    def _grammar(
        self, spec: GrammarSpec, params: SamplingParams, prompt_token_ids: TokenIds, now: float
    ) -> RequestGrammar:
        """Return the grammar of a specification that `check_params` has checked; it may still be compiling."""
        compiler = self._backends(spec).compiler(params.grammar_backend)
        reasoning, prompt_end = reasoning_before(params), prompt_token_ids[-MAX_END_BYTES:].tolist()
        compiling = compiler.compile(spec, reasoning)
        return RequestGrammar(
            compiling,
            lambda: compiler.deadline_s(compiling, now),
            self.limits.vocab_size,
            compiler.fill_bitmasks,
            lambda: compiler.leave(spec, reasoning),
            lambda compiled: matcher_behind(compiled, prompt_end),
        )

    def _check_able(self, pooling: Pooling | None) -> None:
        """Check that the model has the output head that a request needs."""
        if pooling is not None and pooling.way == "scores":
            if self.limits.num_labels is None:
                raise UnsupportedFeatureError(
                    "this model has no score head: it cannot classify. Serve a checkpoint of an architecture such "
                    "as Qwen3ForSequenceClassification. To score or rerank with a model that generates text, pass "
                    "label_token_ids to Engine.score, /v1/score or /v1/rerank; the scores are the probabilities of "
                    "these tokens as the next token."
                )
        elif not self.limits.generates and (pooling is None or pooling.way == "labels"):
            able = "embeddings" if self.limits.num_labels is None else "embeddings and scores"
            raise UnsupportedFeatureError(
                f"this model has no output projection: it computes {able}, but cannot generate tokens."
            )
        outside = () if pooling is None else [i for i in pooling.token_ids if not 0 <= i < self.limits.vocab_size]
        if outside:
            size = self.limits.vocab_size
            message = f"label_token_ids: token id {outside[0]} is outside the vocabulary of {size} tokens"
            raise RequestError(message, param="label_token_ids")

    def _check_backend(self, name: str | None) -> None:
        """Check that a named grammar backend exists, even if the request has no grammar."""
        if name is not None and self._grammars is None:
            raise UnsupportedFeatureError(f"Unknown grammar backend {name[:60]!r}. This engine has no grammar backend.")
        if name is not None and self._grammars is not None:
            self._grammars.check_name(name)

    def _backends(self, spec: GrammarSpec) -> Grammars:
        if self._grammars is None:
            raise UnsupportedFeatureError(f"{spec.kind.value}: this engine has no grammar backend to enforce it")
        if not self.limits.eos_token_ids:
            raise UnsupportedFeatureError(
                f"{spec.kind.value}: the model has no end-of-sequence token, so the output could not end. Set "
                "eos_token_id in the checkpoint's generation_config.json."
            )
        return self._grammars

    def _max_new_tokens(self, prompt_len: int, params: SamplingParams) -> int:
        """Limit the output by the context and, if the user set no limit, by the KV memory."""
        room = self.limits.context_len - prompt_len
        if params.max_tokens is None:
            return max(1, min(room, self.limits.memory_tokens - prompt_len))
        return min(room, params.max_tokens)


def _check_vector(params: SamplingParams) -> None:
    if params.n != 1 or params.prompt_logprobs is not None:
        raise SamplingParamsError(
            "pooling returns one vector and no log-probabilities: n must be 1 and prompt_logprobs None, got "
            f"{params.n} and {params.prompt_logprobs}"
        )


def _as_array(token_ids: object) -> NDArray[Any]:
    """Return token ids as an integer array [n]."""
    try:
        prompt = np.asarray(token_ids)
    except (ValueError, OverflowError):
        prompt = np.empty(())  # a ragged list, or integers too large for any dtype
    if prompt.ndim == 1 and (prompt.dtype.kind in "iu" or not len(prompt)):
        return prompt
    raise InvalidPromptError(f"a prompt is text or a flat list of token ids, got {reprlib.repr(token_ids)}")


def check_ttl(ttl_s: object) -> None:
    """Check the number of seconds for which a prefix is to be pinned.

    Raises:
        RequestError: the time is not a positive number of seconds up to `MAX_TTL_S`.
    """
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not 0 < ttl_s <= MAX_TTL_S:
        raise RequestError(f"ttl_s must be a positive number of seconds, at most {MAX_TTL_S:.0f}, got {_spell(ttl_s)}")


def _spell(value: object) -> str:
    """Return a value as text for an error message. Python refuses to convert an integer with thousands of digits."""
    try:
        return reprlib.repr(value)
    except ValueError:
        return "a number of thousands of digits"


def check_ids(request_ids: object, num_prompts: int) -> list[str]:
    """Return the ids of a call's requests.

    Raises:
        RequestError: the ids are not a list of distinct strings, one for each prompt.
    """
    if not isinstance(request_ids, list | tuple) or not all(isinstance(i, str) and i for i in request_ids):
        raise RequestError(f"request_ids must be a list of non-empty strings, got {request_ids!r}")
    if len(request_ids) != num_prompts:
        raise RequestError(f"request_ids: got {len(request_ids)}, expected one for each of {num_prompts} prompt(s)")
    twice = sorted({i for i in request_ids if request_ids.count(i) > 1}) if len(set(request_ids)) < num_prompts else []
    if twice:
        raise RequestError(f"request_ids: {twice[0]!r} is given twice in this call; give every request a different id")
    return list(request_ids)


def draw_seed() -> int:
    """Return an unpredictable seed."""
    return secrets.randbelow(_MAX_SEED)


def completion_seed(seed: int, index: int) -> int:
    """Return the seed of one completion of a prompt; the first completion has the prompt's seed."""
    return (seed + index * 0x1E3779B97F4A7C15) % _MAX_SEED if index else seed
