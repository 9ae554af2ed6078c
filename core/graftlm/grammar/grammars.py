"""Compiled grammars: each compiled once, in threads beside the step loop, and kept for the requests to come."""

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

#: What is compiled once: a specification, and the reasoning that it waits for.
_Key: TypeAlias = tuple[GrammarSpec, Reasoning | None]

_EXIT_TIMEOUT_S: Final = 5.0
#: Longer than all but a few specifications take.
_LONG_S: Final = 1.0


def grammar_spec(params: SamplingParams) -> GrammarSpec | None:
    """Return the grammar that sampling parameters ask for, None if they ask for none.

    Raises:
        SamplingParamsError: a JSON schema or structural tag given as a dict is not JSON.
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
        # Halves of surrogate pairs are escaped, for a backend to say where they stand.
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
    """Return the reasoning whose end the grammar of sampling parameters waits for, None if it holds from the start."""
    return None if params.reasoning_end is None else Reasoning(params.reasoning_end, params.reasoning_begin)


class Compilation(Future[CompiledGrammar]):
    """A compiled grammar, or one on its way.

    Attributes:
        began_s: clock reading at which a thread took it up; None while it waits for one.
        num_users: calls of `compile` that returned it, less those of `leave`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.began_s: float | None = None
        self.num_users = 0
        self.set_running_or_notify_cancel()


class GrammarCompiler:
    """Compiles specifications, the same one only once at a time, and keeps the latest used.

    Of what waits its turn, short texts go first. A compilation under way cannot be stopped. A request stops waiting for
    it `timeout_s` after it began; the thread goes on, and what it makes is kept. What waits its turn is forgotten when
    nobody wants it any more. So that a few specifications that take for ever do not keep all others waiting, a thread
    that is busy for longer than a second no longer counts among the `num_threads`, up to `MAX_THREADS` altogether. One
    is what steps leave a core to.

    The backend is created when it is first needed. All methods may be called from several threads.

    Args:
        delay: has a compiled grammar wait for the end of the reasoning.
        beside: makes a context within which each compilation runs.

    Attributes:
        timeout_s: how long a request waits while its grammar is compiled.
        hits, misses: calls of `compile` that found the grammar, compiled or under way, and those that did not.
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
        self._patience_s = min(timeout_s, _LONG_S)
        self._delay = delay
        self._beside = beside
        self._lock = threading.Lock()
        self._cache: OrderedDict[_Key, Compilation] = OrderedDict()
        self._waiting: OrderedDict[_Key, Compilation] = OrderedDict()
        self._busy_since: dict[threading.Thread, float] = {}
        self._last_began_s = -math.inf
        self._num_begun = 0
        self._looks_again = False
        weakref.finalize(self, _end, self._lock, self._waiting, self._busy_since)  # at the end of the process

    def preload(self) -> None:
        """Create the backend now.

        Raises:
            GraftlmError: it cannot be created.
        """
        self._get_backend()

    def check(self, spec: GrammarSpec) -> tuple[str, ...]:
        """Refuse a specification that is malformed or cannot be enforced.

        Returns: what of it is not enforced, which is nothing when it is strict.

        Raises:
            GrammarError: the message says what, and where in the specification.
            GraftlmError: the backend could not be created.
        """
        with self._lock:
            if (spec, None) in self._cache and spec.strict:
                return ()
        return _guarded(lambda spec: tuple(map(str, self._get_backend().check(spec) or ())), spec)

    def compile(self, spec: GrammarSpec, reasoning: Reasoning | None = None) -> Compilation:
        """Compile a specification, unless that is done or under way.

        Args:
            reasoning: what it waits for; None: it holds from the start.

        Returns: a future of the compiled grammar, or of the GraftlmError that refuses it. It cannot be cancelled.
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
        """Return the clock reading at which a request that asked at `since_s` waits no longer. It may move on.

        Where the compilation waits its turn, time counts from when another had it: a queue that moves is waited for.
        """
        began_s = self._last_began_s if compilation.began_s is None else compilation.began_s
        return max(since_s, began_s) + self.timeout_s

    def leave(self, spec: GrammarSpec, reasoning: Reasoning | None = None) -> None:
        """Want a specification no longer that `compile` was called for. What nobody wants is not begun."""
        key = spec, reasoning
        with self._lock:
            future = self._waiting.get(key)
            if future is not None:
                future.num_users -= 1
                if future.num_users == 0:
                    del self._waiting[key], self._cache[key]

    def close(self) -> None:
        """Begin nothing more of what waits; who waits for it gets an EngineClosedError."""
        with self._lock:
            waiting = dict(self._waiting)
            self._waiting.clear()
            for key in waiting:
                del self._cache[key]
        for future in waiting.values():
            future.set_exception(EngineClosedError("this engine is closed"))

    def fill_bitmasks(self, matchers: Sequence[GrammarMatcher], mask: NDArray[np.int32]) -> None:
        """Write the tokens that matchers of this compiler's grammars allow, those of matchers[i] into mask[i]."""
        fill_bitmasks(self._get_backend().fill_bitmasks, matchers, mask)

    def _forget_oldest(self) -> None:
        """Bound what is kept. What is under way is not forgotten: others may ask for it."""
        surplus = len(self._cache) - self._cache_size
        if surplus > 0:
            done = [key for key, future in self._cache.items() if future.done()]
            for key in done[:surplus]:
                del self._cache[key]

    def _start_thread(self) -> None:
        num_started = 0
        if self._num_counted() < self._num_threads and len(self._busy_since) < self.MAX_THREADS:
            thread = threading.Thread(target=self._work, name="graftlm-grammar", daemon=True)
            thread.start()
            self._busy_since[thread] = self._clock()
            num_started = 1
        if len(self._waiting) > num_started and not self._looks_again:
            timer = threading.Timer(self._patience_s / 2, self._look_again)
            timer.daemon = True
            timer.start()
            self._looks_again = True

    def _num_counted(self) -> int:
        """Return how many threads have not been busy for too long."""
        limit = self._clock() - self._patience_s
        return sum(since >= limit for since in self._busy_since.values())

    def _look_again(self) -> None:
        """Start a thread for what waits behind compilations that have turned out to take too long."""
        with self._lock:
            self._looks_again = False
            if self._waiting:
                self._start_thread()

    def _work(self) -> None:
        """Compile what waits, and end: also when enough others do, since this one no longer counted."""
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
            except BaseException as error:  # whoever waits must hear of it
                with self._lock:
                    self._cache.pop(key, None)
                future.set_exception(error)
            else:
                future.set_result(compiled)
                with self._lock:
                    self._forget_oldest()

    def _next_key(self) -> _Key:
        """Choose what is compiled next: the shortest text, so that small ones do not wait for many large ones.

        Each fourth is the one that has waited longest, so that none waits for ever.
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
        if known is None:  # others may ask for it without reasoning, or after another
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
    """Let compilations end, if they do soon: one that comes back to an interpreter that is gone aborts the process."""
    with lock:
        waiting.clear()
    limit = time.monotonic() + _EXIT_TIMEOUT_S
    for thread in list(threads):
        thread.join(max(0.0, limit - time.monotonic()))


def _guarded(call: Callable[[GrammarSpec], T], spec: GrammarSpec) -> T:
    """Call a backend; whatever it raises becomes one of graftlm's errors.

    A panic in a library written in Rust is no `Exception`.
    """
    try:
        return call(spec)
    except (GraftlmError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise GrammarError(f"the grammar backend failed: {type(error).__name__}: {error}") from error
