"""The `xgrammar` backend: EBNF, and specifications translated to EBNF, with the xgrammar library (arXiv:2411.15100)."""

import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, cast

import numpy as np
import tokenizers
import transformers
import xgrammar
from numpy.typing import NDArray

from graftlm.contracts import (
    CompiledGrammar,
    GrammarBackend,
    GrammarContext,
    GrammarKind,
    GrammarMatcher,
    GrammarSpec,
)
from graftlm.errors import GrammarError
from graftlm_grammar.choice import choices_to_ebnf, parse_choices
from graftlm_grammar.ebnf import MAX_COUNT, read_ebnf
from graftlm_grammar.ebnf_text import ebnf_text, library_text
from graftlm_grammar.endless import endless_rules, reachable_rules
from graftlm_grammar.forced_tokens import find_forced_tokens
from graftlm_grammar.json_schema import translate_schema
from graftlm_grammar.large_counts import sound_counts
from graftlm_grammar.lark_ebnf import as_ebnf
from graftlm_grammar.mask_check import check_masks, unsound
from graftlm_grammar.options import XGrammarOptions
from graftlm_grammar.recursive_root import with_separate_root
from graftlm_grammar.regex import regex_to_ebnf
from graftlm_grammar.right_linear import right_linear
from graftlm_grammar.shortest import check_shortest
from graftlm_grammar.spec_text import check_text, reading_regex
from graftlm_grammar.structural_tag import parse_structural_tag

__all__ = ["XGrammarBackend"]

T = TypeVar("T")

_MAX_TEXT_LEN: Final = 1 << 18
_MAX_MASK_THREADS: Final = 8
#: Matches a reference to the root rule. It also matches "root" in a literal; the rewriting is then unnecessary.
_ROOT_REFERENCE: Final = re.compile(r"\broot\b(?!\s*::=)")
_LARGE_COUNT: Final = re.compile(r"\{\s*[1-9]\d+|\{\s*\d+\s*,\s*[1-9]\d\d")
_PROBE_TOKENS: Final = 128
#: Threads are used only for masks that need more time than this. Starting threads takes 0.1 ms, and they compete for
#: cores with the step that runs at the same time.
_WORTH_THREADS_S: Final = 0.002
_MAX_REWRITTEN_LEN: Final = 1 << 15
_MAX_STEP_S: Final = 0.05
_MAX_PROBE_S: Final = 2.0
_QUICK_PROBE_S: Final = 0.02
_NUM_RETRIES: Final = 3
_LOG_PREFIX: Final = re.compile(r"^\[\d\d:\d\d:\d\d\] \S+: (?:Check failed: \(.*?\) is false: )?")


class XGrammarBackend(GrammarBackend):
    """Compiles specifications for one tokenizer. The library's cache is off, because graftlm caches compiled grammars.

    Args:
        options: see `XGrammarOptions`.
        context: the tokenizer and its stop tokens.
    """

    def __init__(self, options: XGrammarOptions, context: GrammarContext) -> None:
        self._options = options
        info = _tokenizer_info(context)
        self._vocab_size = context.vocab_size
        self._run_idle = context.run_idle
        self._in_threads: Any = xgrammar.BatchGrammarMatcher(max_threads=min(_MAX_MASK_THREADS, os.cpu_count() or 1))
        self._in_turn: Any = xgrammar.BatchGrammarMatcher(max_threads=1)
        self._compiler: Any = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def check(self, spec: GrammarSpec) -> tuple[str, ...]:
        """Check a specification like `compile`, but without the vocabulary. Returns the paths that are not enforced."""
        return self._grammar(spec)[1]

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compute the allowed tokens of each state of the grammar.

        Raises:
            GrammarError: the specification is refused, or its masks are wrong or too slow.
        """
        grammar, _ = self._grammar(spec, _fast_form)
        compiled = _checked(spec.kind, lambda: self._run_idle(lambda: self._compiler.compile_grammar(grammar)))
        make_matcher = _Compiled(compiled, self._vocab_size).matcher
        check_masks(spec.kind, make_matcher(), self._vocab_size)
        mask_s = _check_speed(spec.kind, make_matcher, self._vocab_size)
        return _Compiled(compiled, self._vocab_size, mask_s)

    def fill_bitmasks(self, matchers: Sequence[GrammarMatcher], mask: NDArray[np.int32]) -> None:
        """Write the masks of several matchers, in several threads if that is faster. Row i is the mask of matcher i."""
        own = [cast(_Matcher, matcher) for matcher in matchers]
        rows = [i for i, matcher in enumerate(own) if not matcher.finished]
        if rows:
            batch = self._in_threads if sum(own[i].mask_s for i in rows) > _WORTH_THREADS_S else self._in_turn
            batch.batch_fill_next_token_bitmask([own[i].library_matcher for i in rows], mask, rows)
        for i, matcher in enumerate(own):
            matcher.trim(mask, i)

    def _grammar(self, spec: GrammarSpec, rewrite: Callable[[str], str] = str) -> tuple[Any, tuple[str, ...]]:
        """Return a specification as a grammar of the library, and the paths that are not enforced.

        Args:
            spec: the specification.
            rewrite: function that is applied to each EBNF text before the library reads the text.
        """
        kind, text = spec.kind, spec.text
        check_text(spec, _MAX_TEXT_LEN)
        if kind is GrammarKind.STRUCTURAL_TAG:
            return self._structural_tag(text, spec.strict, rewrite)
        unenforced: tuple[str, ...] = ()
        if kind is GrammarKind.JSON_SCHEMA:
            translated = translate_schema(text, self._options, spec.strict)
            ebnf, unenforced = translated.ebnf, translated.unenforced
        elif kind is GrammarKind.REGEX:
            with reading_regex():
                ebnf = f"root ::= {regex_to_ebnf(text)}"
        elif kind is GrammarKind.CHOICE:
            ebnf = choices_to_ebnf(parse_choices(text))
        else:
            ebnf = _finite_ebnf(as_ebnf(text))
        if kind is GrammarKind.EBNF or _LARGE_COUNT.search(ebnf):  # only these can have a long shortest text
            check_shortest(read_ebnf(ebnf, MAX_COUNT), kind.value)
        return _checked(kind, lambda: xgrammar.Grammar.from_ebnf(rewrite(ebnf))), unenforced

    def _structural_tag(self, text: str, strict: bool, rewrite: Callable[[str], str]) -> tuple[Any, tuple[str, ...]]:
        """Return a structural tag of the library and the paths that are not enforced.

        graftlm translates the parts of the tag, so that they are checked like other specifications.
        """
        tag = parse_structural_tag(text)
        for trigger in tag.triggers:
            if not any(structure.begin.startswith(trigger) for structure in tag.structures):
                raise GrammarError(f"structural_tag: $.triggers: no structure begins with {trigger!r}; remove it")
        tags, unenforced = [], list[str]()
        for structure in tag.structures:
            try:
                if structure.schema is not None:
                    part = translate_schema(structure.schema, self._options, strict, f"{structure.path}.schema")
                    ebnf = part.ebnf
                    unenforced += part.unenforced
                else:
                    ebnf = f"root ::= {regex_to_ebnf(structure.regex or '')}"
            except GrammarError as error:
                where = f"{structure.path}.regex: " if structure.schema is None else ""
                raise GrammarError(f"structural_tag: {where}{str(error).removeprefix('json_schema: ')}") from None
            content = {"type": "grammar", "grammar": rewrite(ebnf)}
            tags.append({"type": "tag", "begin": structure.begin, "content": content, "end": structure.end})
        form = {
            "type": "triggered_tags",
            "triggers": list(tag.triggers),
            "tags": tags,
            "at_least_one": tag.at_least_one,
            "stop_after_first": tag.stop_after_first,
        }
        whole = {"type": "structural_tag", "format": form}
        kind = GrammarKind.STRUCTURAL_TAG
        return _checked(kind, lambda: xgrammar.Grammar.from_structural_tag(whole)), tuple(unenforced)


class _Compiled(CompiledGrammar):
    def __init__(self, compiled: Any, vocab_size: int, mask_s: float = 0.0) -> None:
        self._compiled = compiled
        self._vocab_size = vocab_size
        self._mask_s = mask_s

    def matcher(self) -> GrammarMatcher:
        """Return a new matcher in the start state."""
        return _Matcher(xgrammar.GrammarMatcher(self._compiled), self._vocab_size, self._mask_s)


class _Matcher(GrammarMatcher):
    def __init__(self, matcher: Any, vocab_size: int, mask_s: float) -> None:
        self.library_matcher = matcher
        self.mask_s = mask_s  # average time of a mask in seconds
        self._finished = bool(matcher.is_terminated())
        self._vocab_size = vocab_size
        num_spare_bits = -vocab_size % 32
        self._last_word = np.int32(-1) if num_spare_bits == 0 else np.int32((1 << (32 - num_spare_bits)) - 1)

    def accept(self, token_id: int) -> bool:
        """Advance by a token. Returns False, and does not change the matcher, if the token is not allowed."""
        is_accepted = bool(self.library_matcher.accept_token(token_id))
        self._finished = bool(self.library_matcher.is_terminated())
        return is_accepted

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens."""
        self.library_matcher.rollback(num_tokens)
        self._finished = bool(self.library_matcher.is_terminated())

    def fill_bitmask(self, mask: NDArray[np.int32], row: int) -> None:
        """Write the allowed tokens to mask[row]."""
        if not self.finished:
            self.library_matcher.fill_next_token_bitmask(mask, row)
        self.trim(mask, row)

    def trim(self, mask: NDArray[np.int32], row: int) -> None:
        """Clear the bits that the library leaves set: bits from V on, and all bits after a stop token was accepted."""
        if self._finished:
            mask[row] = 0
        elif self._last_word != -1:
            mask[row, -1] &= self._last_word

    def forced_text(self) -> str:
        """Return the forced next text, up to the last complete character."""
        if self.finished:
            return ""
        try:
            return str(self.library_matcher.find_jump_forward_string())
        except UnicodeDecodeError as error:  # the text ends within a character
            return bytes(error.object[: error.start]).decode()

    def forced_tokens(self) -> list[int]:
        """Return the forced next tokens, at most 64."""
        return find_forced_tokens(self, self._vocab_size)

    @property
    def finished(self) -> bool:
        """Whether a stop token was accepted."""
        return self._finished


def _checked(kind: GrammarKind, call: Callable[[], T]) -> T:
    """Call the library, and convert its RuntimeError and ValueError to GrammarError.

    Raises:
        GrammarError: the library cannot read the grammar.
    """
    try:
        return call()
    except (RuntimeError, ValueError) as error:
        message = _LOG_PREFIX.sub("", str(error)).strip().split("\n")[0]
        raise GrammarError(f"{kind.value}: {message}") from error


def _check_speed(kind: GrammarKind, make_matcher: Callable[[], GrammarMatcher], vocab_size: int) -> float:
    """Refuse a grammar whose matchers are so slow that they would delay all requests, because steps wait for masks.

    One matcher always accepts the lowest allowed token; after it, another matcher always accepts the highest. Only CPU
    time of this thread counts. On a busy machine this time can also increase, so a slow step is measured again.

    Returns: average time per mask, in seconds.

    Raises:
        GrammarError: a step takes too long, or a mask is wrong.
    """
    mask = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
    start_s = time.thread_time()
    num_masks, masks_s, longest_s = 0, 0.0, 0.0
    for pick in (0, -1):
        matcher, pick_start_s = make_matcher(), time.thread_time()
        for _ in range(_PROBE_TOKENS):
            mask_s, step_s, is_end = _timed_step(kind, matcher, mask, pick)
            for _ in range(_NUM_RETRIES if step_s > _MAX_STEP_S and not is_end else 0):
                matcher.rollback(1)
                step_s = min(step_s, _timed_step(kind, matcher, mask, pick)[1])
            num_masks, masks_s, longest_s = num_masks + 1, masks_s + mask_s, max(longest_s, step_s)
            now_s = time.thread_time()
            if longest_s > _MAX_STEP_S or now_s - start_s > _MAX_PROBE_S:
                raise GrammarError(
                    f"{kind.value}: finding the next token takes {longest_s * 1000:.0f} ms in xgrammar, which would "
                    "delay other requests; use llguidance, fewer repetitions, or a less ambiguous grammar"
                )
            if is_end or now_s - pick_start_s > _QUICK_PROBE_S > 20 * longest_s:
                break
    return masks_s / num_masks


def _timed_step(
    kind: GrammarKind, matcher: GrammarMatcher, mask: NDArray[np.int32], pick: int
) -> tuple[float, float, bool]:
    """Compute a matcher's mask, and accept the first or the last allowed token.

    Args:
        kind: the kind of specification, for the error.
        matcher: the matcher.
        mask: int32 [1, ceil(V / 32)], overwritten.
        pick: index of the accepted token among the allowed tokens: 0 or -1.

    Returns: time of the mask and time of the whole step, both in seconds, and whether no token is allowed.

    Raises:
        GrammarError: the token is rejected.
    """
    start_s = time.thread_time()
    matcher.fill_bitmask(mask, 0)
    mask_s = time.thread_time() - start_s
    matcher.forced_text()
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    if len(allowed) and not matcher.accept(int(allowed[pick])):
        raise unsound(kind)
    return mask_s, time.thread_time() - start_s, not len(allowed)


def _fast_form(ebnf: str) -> str:
    """Rewrite a grammar for fast masks, unless it is so long that the rewriting would delay several steps.

    Large counts and references to the root rule are rewritten in any case, because masks would otherwise be wrong.
    """
    if len(ebnf) <= _MAX_REWRITTEN_LEN:
        return library_text(sound_counts(with_separate_root(right_linear(read_ebnf(ebnf, MAX_COUNT)))))
    if _LARGE_COUNT.search(ebnf) or _ROOT_REFERENCE.search(ebnf):
        return library_text(sound_counts(with_separate_root(read_ebnf(ebnf, MAX_COUNT))))
    return ebnf


def _finite_ebnf(text: str) -> str:
    """Return a grammar without its unreachable rules.

    Raises:
        GrammarError: the grammar is malformed, or no finite text matches a reachable rule.
    """
    rules = read_ebnf(text)
    endless = endless_rules(rules)
    if endless:
        raise GrammarError(
            f"ebnf: rule {endless[0]}: no finite text matches it; add an alternative that does not refer to the rule"
        )
    # An unreachable rule may be endless, and the library crashes on endless rules.
    return ebnf_text({name: rules[name] for name in reachable_rules(rules)})


def _tokenizer_info(context: GrammarContext) -> Any:
    """Return the library's description of the tokenizer. Special and stop tokens have no bytes."""
    core = tokenizers.Tokenizer.from_str(context.tokenizer_json)
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=core)
    stop_token_ids = [token_id for token_id in context.stop_token_ids if token_id < context.vocab_size]
    info = xgrammar.TokenizerInfo.from_huggingface(
        wrapped, vocab_size=context.vocab_size, stop_token_ids=stop_token_ids
    )
    vocab = [b"" if i in stop_token_ids else token for i, token in enumerate(info.decoded_vocab)]
    for token_id, added in core.get_added_tokens_decoder().items():
        if token_id < context.vocab_size:
            vocab[token_id] = b"" if added.special else added.content.encode()
    return xgrammar.TokenizerInfo(
        vocab,
        xgrammar.VocabType.RAW,
        vocab_size=context.vocab_size,
        stop_token_ids=stop_token_ids,
        add_prefix_space=info.add_prefix_space,
    )
