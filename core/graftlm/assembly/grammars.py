"""Creates the configured grammar backends.

This module must not import torch: the server's main process checks grammars and does not need torch.
"""

import time
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache, lru_cache
from typing import Any, Final

from graftlm.config import EngineConfig
from graftlm.contracts import (
    CompiledGrammar,
    GrammarBackend,
    GrammarContext,
    GrammarOptions,
    ModelConfig,
    Provider,
)
from graftlm.errors import ConfigError
from graftlm.grammar.delayed_grammar import DelayedGrammar, Reasoning, ReasoningTokens, TextTokens, check_reasoning
from graftlm.grammar.grammar_choice import Grammars
from graftlm.grammar.grammars import GrammarCompiler
from graftlm.registry import AUTO, Registry, circular_fallbacks
from graftlm.runtime.idle_threads import run_idle
from graftlm.runtime.spare_core import SpareCore
from graftlm.tokenization import Tokenizer

__all__ = ["make_grammars"]

#: Maximum number of kinds of reasoning (pairs of begin and end text) whose tokens are cached. A model has one or two.
_MAX_REASONINGS: Final = 8


def make_grammars(
    config: EngineConfig,
    registry: Registry,
    tokenizer: Tokenizer,
    model_config: ModelConfig,
    spare_core: SpareCore | None = None,
) -> Grammars | None:
    """Return the grammar backends; None if none is installed and none is configured.

    A backend is created with the first request that needs it, because it reads the whole vocabulary.

    Args:
        spare_core: reserves a CPU core for compilations while steps run; None: none is reserved.

    Raises:
        GraftlmError: the configured backend, its options or a fallback are wrong.
    """
    settings = config.grammar
    if settings.name == AUTO and not registry.available("grammar"):
        return None
    default: Provider[GrammarBackend] = registry.provider("grammar", settings.name)
    options = registry.options(default, settings.options, "grammar.options", config.origins)
    fallback = options.fallback if isinstance(options, GrammarOptions) else ()
    for name in fallback:
        registry.provider("grammar", name, "grammar.options.fallback")  # raises if there is no such backend
    for problem in circular_fallbacks(config, registry):
        raise ConfigError(problem)

    @cache
    def text_tokens() -> TextTokens:
        return TextTokens(tokenizer, model_config.vocab_size, model_config.eos_token_ids)

    @lru_cache(maxsize=_MAX_REASONINGS)
    def reasoning_tokens(reasoning: Reasoning) -> ReasoningTokens:
        return ReasoningTokens(reasoning, text_tokens(), tokenizer)

    def delay(compiled: CompiledGrammar, reasoning: Reasoning) -> CompiledGrammar:
        return DelayedGrammar(compiled, reasoning_tokens(reasoning))

    def make_compiler(name: str) -> GrammarCompiler:
        is_default = name == default.name
        provider = default if is_default else registry.provider("grammar", name)

        def make_backend() -> GrammarBackend:
            vocab_size, stop_token_ids = model_config.vocab_size, model_config.eos_token_ids
            context = GrammarContext(tokenizer.to_json(), vocab_size, stop_token_ids, run_idle)
            raw = settings.options if is_default else _shared(settings.options, provider)
            backend: GrammarBackend = registry.create("grammar", provider, raw, context, config.origins)
            return backend

        size, timeout_s = settings.cache_size, settings.timeout_s
        beside = nullcontext if spare_core is None else spare_core.taken
        return GrammarCompiler(
            make_backend, time.monotonic, delay=delay, cache_size=size, timeout_s=timeout_s, beside=beside
        )

    available = [provider.name for provider in registry.available("grammar")]
    return Grammars(
        make_compiler,
        default.name,
        fallback,
        available,
        check_reasoning=lambda reasoning: check_reasoning(reasoning, tokenizer),
    )


def _shared(options: Mapping[str, Any], provider: Provider[GrammarBackend]) -> dict[str, Any]:
    """Return the default backend's options that `provider` also has, so that both produce the same JSON format."""
    names = provider.options.model_fields.keys() - GrammarOptions.model_fields.keys()
    return {name: value for name, value in options.items() if name in names}
