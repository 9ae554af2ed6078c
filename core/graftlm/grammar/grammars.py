"""Compiles grammars in separate threads, and caches them for later requests."""

import json
import math
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import CompiledGrammar, GrammarBackend, GrammarKind, GrammarMatcher, GrammarSpec
from graftlm.errors import EngineClosedError, GraftlmError, GrammarError, SamplingParamsError
from graftlm.grammar.delayed_grammar import Reasoning, fill_bitmasks
from graftlm.types import SamplingParams

__all__ = ["Compilation", "GrammarCompiler", "grammar_spec", "reasoning_before"]

T = TypeVar("T")

#: Key of a compiled grammar: a specification, and the reasoning after which it starts.
_Key: TypeAlias = tuple[GrammarSpec, Reasoning | None]

_EXIT_TIMEOUT_S: Final = 5.0
#: A compilation counts as long after this number of seconds; few specifications take so much time.
_LONG_S: Final = 1.0


def grammar_spec(params: SamplingParams) -> GrammarSpec | None:
    """Return the specification in sampling parameters; None if there is none.

    Raises:
        SamplingParamsError: a JSON schema or structural tag that was passed as a dict is not JSON.
    """
    name = params.grammar_field
    if name is None:
        return None
    value = getattr(params, name)
    return GrammarSpec(GrammarKind(name), value if isinstance(value, str) else _json_text(name, value), params.strict)


def _json_text(name: str, value: object) -> str:
    value = dict(value) if isinstance(value, Mapping) else value
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        # Unpaired surrogates are escaped, so that the backend can report their path.
        return text if _is_text(text) else json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        hint = "; write a pydantic class as its model_json_schema()" if "ModelMetaclass" in str(error) else ""
        raise SamplingParamsError(f"{name} is not JSON: {error}{hint}") from None


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def reasoning_before(params: SamplingParams) -> Reasoning | None:
    """Return the reasoning after which the grammar of sampling parameters starts; None: it starts immediately."""
    return None if params.reasoning_end is None else Reasoning(params.reasoning_end, params.reasoning_begin)


class Compilation(Future[CompiledGrammar]):
    """The future of a compiled grammar.

    Attributes:
        began_s: clock reading at which a thread started the compilation; None while it is queued.
        num_users: number of calls of `compile` that returned this future, minus calls of `leave`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.began_s: float | None = None
        self.num_users = 0
        self.set_running_or_notify_cancel()


class GrammarCompiler:
    """Compiles specifications and caches the most recently used grammars.

    A specification is never compiled by two threads at the same time.

    Queued specifications with short texts are compiled first. A running compilation cannot be stopped. A request stops
    waiting `timeout_s` after the compilation started; the compilation continues, and its result is cached. A queued
    compilation without waiters is cancelled.

    A few specifications whose compilation never ends must not block all others. Therefore a thread that is busy for
    more than a second no longer counts towards `num_threads`, and another thread is started, up to `MAX_THREADS` in
    total. By default there is one thread, because steps leave one core free.

    The backend is created at its first use. Thread-safe.

    Args:
        make_backend: function that creates the backend.
        clock: monotonic clock in seconds.
        delay: function that returns a grammar that starts after the end of a reasoning.
        cache_size: maximum number of cached grammars.
        timeout_s: see the attribute.
        num_threads: number of threads that compile at the same time.
        beside: function that creates the context in which each compilation runs.

    Attributes:
        timeout_s: maximum time in seconds that a request waits while its grammar is compiled.
        hits, misses: numbers of calls of `compile` whose grammar was already compiled or in progress, and of all other
            calls.
    """

    MAX_THREADS = 8

    def __init__(
        self,
        make_backend: Callable[[], GrammarBackend],
        clock: Callable[[], float],
        *,
        delay: Callable[[CompiledGrammar, Reasoning], CompiledGrammar],
        cache_size: int,
        timeout_s: float,
        num_threads: int = 1,
        beside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.timeout_s = timeout_s
        self.hits = self.misses = 0
        self._make_backend = make_backend
        self._backend: GrammarBackend | None = None
        self._backend_lock = threading.Lock()
        self._clock = clock
        self._cache_size = cache_size
        self._num_threads = num_threads
        self._long_s = min(timeout_s, _LONG_S)
        self._delay = delay
        self._beside = beside
        self._lock = threading.Lock()
        self._cache: OrderedDict[_Key, Compilation] = OrderedDict()
        self._waiting: OrderedDict[_Key, Compilation] = OrderedDict()
        self._busy_since: dict[threading.Thread, float] = {}
        self._last_began_s = -math.inf
        self._num_begun = 0
        self._has_timer = False
        weakref.finalize(self, _end, self._lock, self._waiting, self._busy_since)  # runs also at the process's exit

    def preload(self) -> None:
        """Create the backend now.

        Raises:
            GraftlmError: the backend cannot be created.
        """
        self._get_backend()

    def check(self, spec: GrammarSpec) -> tuple[str, ...]:
        """Check a specification.

        Returns: paths of the keywords that are not enforced; empty if the specification is strict.

        Raises:
            GrammarError: the specification is malformed, or is strict and cannot be enforced; the message has the
                reason and the path.
            GraftlmError: the backend could not be created.
        """
        with self._lock:
            if (spec, None) in self._cache and spec.strict:
                return ()
        return _guarded(lambda spec: tuple(map(str, self._get_backend().check(spec) or ())), spec)

    def compile(self, spec: GrammarSpec, reasoning: Reasoning | None = None) -> Compilation:
        """Compile a specification, unless it is compiled or in progress.

        Args:
            spec: the specification.
            reasoning: the reasoning after which the grammar starts; None: it starts immediately.

        Returns: a future of the compiled grammar, or of a GraftlmError. It cannot be cancelled.
        """
        key = spec, reasoning
        with self._lock:
            future = self._cache.get(key)
            if future is not None:
                self.hits += 1
                future.num_users += 1
                self._cache.move_to_end(key)
                return future
            self.misses += 1
            future = self._cache[key] = self._waiting[key] = Compilation()
            future.num_users = 1
            self._forget_oldest()
            self._start_thread()
        return future

    def deadline_s(self, compilation: Compilation, since_s: float) -> float:
        """Return the clock reading at which a request that has waited since `since_s` stops waiting.

        The result can increase: while the compilation is queued, the waiting time is counted from the latest start of
        any compilation.
        """
        began_s = self._last_began_s if compilation.began_s is None else compilation.began_s
        return max(since_s, began_s) + self.timeout_s

    def leave(self, spec: GrammarSpec, reasoning: Reasoning | None = None) -> None:
        """Undo one call of `compile`; a queued compilation without waiters is cancelled."""
        key = spec, reasoning
        with self._lock:
            future = self._waiting.get(key)
            if future is not None:
                future.num_users -= 1
                if future.num_users == 0:
                    del self._waiting[key], self._cache[key]

    def close(self) -> None:
        """Cancel all queued compilations; their futures fail with EngineClosedError."""
        with self._lock:
            waiting = dict(self._waiting)
            self._waiting.clear()
            for key in waiting:
                del self._cache[key]
        for future in waiting.values():
            future.set_exception(EngineClosedError("this engine is closed"))

    def fill_bitmasks(self, matchers: Sequence[GrammarMatcher], mask: NDArray[np.int32]) -> None:
        """Write the masks of matchers of this compiler's grammars; mask[i] is the mask of matchers[i]."""
        fill_bitmasks(self._get_backend().fill_bitmasks, matchers, mask)

    def _forget_oldest(self) -> None:
        """Limit the cache to `cache_size`; keep compilations that are not done, because requests may wait for them."""
        surplus = len(self._cache) - self._cache_size
        if surplus > 0:
            done = [key for key, future in self._cache.items() if future.done()]
            for key in done[:surplus]:
                del self._cache[key]

    def _start_thread(self) -> None:
        """Start a thread if `_num_counted` is less than `num_threads`; start a timer if compilations remain queued."""
        num_started = 0
        if self._num_counted() < self._num_threads and len(self._busy_since) < self.MAX_THREADS:
            thread = threading.Thread(target=self._work, name="graftlm-grammar", daemon=True)
            thread.start()
            self._busy_since[thread] = self._clock()
            num_started = 1
        if len(self._waiting) > num_started and not self._has_timer:
            timer = threading.Timer(self._long_s / 2, self._on_timer)
            timer.daemon = True
            timer.start()
            self._has_timer = True

    def _num_counted(self) -> int:
        """Return the number of threads that are not busy with a long compilation."""
        limit = self._clock() - self._long_s
        return sum(since >= limit for since in self._busy_since.values())

    def _on_timer(self) -> None:
        """Start a thread for queued compilations if running ones have become long."""
        with self._lock:
            self._has_timer = False
            if self._waiting:
                self._start_thread()

    def _work(self) -> None:
        """Run queued compilations until none is queued, or enough other threads were started in the meantime."""
        thread = threading.current_thread()
        while True:
            with self._lock:
                del self._busy_since[thread]
                if not self._waiting or self._num_counted() >= self._num_threads:
                    return
                key = self._next_key()
                future = self._waiting.pop(key)
                self._busy_since[thread] = future.began_s = self._last_began_s = self._clock()
            try:
                with self._beside():
                    compiled = self._compile(*key)
            except BaseException as error:  # every error must reach the waiting requests
                with self._lock:
                    self._cache.pop(key, None)
                future.set_exception(error)
            else:
                future.set_result(compiled)
                with self._lock:
                    self._forget_oldest()

    def _next_key(self) -> _Key:
        """Return the key of the shortest queued specification, so that short specifications do not wait for long ones.

        Every fourth result is the specification that has waited longest, so that no specification waits forever.
        """
        self._num_begun += 1
        if self._num_begun % 4 == 0:
            return next(iter(self._waiting))
        return min(self._waiting, key=lambda key: len(key[0].text))

    def _compile(self, spec: GrammarSpec, reasoning: Reasoning | None) -> CompiledGrammar:
        with self._lock:
            known = self._cache.get((spec, None))
        if reasoning is not None and known is not None and known.done() and known.exception() is None:
            compiled = known.result()
        else:
            compiled = _guarded(lambda spec: self._get_backend().compile(spec), spec)
        if reasoning is None:
            return compiled
        if known is None:  # requests may use the grammar without reasoning, or after another reasoning
            done = Compilation()
            done.set_result(compiled)
            with self._lock:
                self._cache.setdefault((spec, None), done)
        return self._delay(compiled, reasoning)

    def _get_backend(self) -> GrammarBackend:
        with self._backend_lock:
            if self._backend is None:
                self._backend = self._make_backend()
            return self._backend


def _end(
    lock: threading.Lock, waiting: "OrderedDict[_Key, Compilation]", threads: Mapping[threading.Thread, float]
) -> None:
    """Wait at most 5 s for running compilations, because a return after the interpreter's end aborts the process."""
    with lock:
        waiting.clear()
    limit = time.monotonic() + _EXIT_TIMEOUT_S
    for thread in list(threads):
        thread.join(max(0.0, limit - time.monotonic()))


def _guarded(call: Callable[[GrammarSpec], T], spec: GrammarSpec) -> T:
    """Call a backend.

    Raises:
        GrammarError: the backend raised anything except a GraftlmError or KeyboardInterrupt. This includes the panic of
            a Rust library, which is a BaseException.
        GraftlmError: the backend raised this error.
    """
    try:
        return call(spec)
    except (GraftlmError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise GrammarError(f"the grammar backend failed: {type(error).__name__}: {error}") from error
