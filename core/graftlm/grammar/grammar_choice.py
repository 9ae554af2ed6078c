"""Chooses the grammar backend of a specification: the default, the request's backend, or a fallback."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graftlm.config.problems import nearest
from graftlm.contracts import GrammarSpec
from graftlm.errors import GrammarError, UnsupportedFeatureError
from graftlm.grammar.delayed_grammar import Reasoning
from graftlm.grammar.grammars import GrammarCompiler

__all__ = ["Enforcement", "Grammars"]

_MAX_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Enforcement:
    """The backend of a specification, and the parts that it does not enforce.

    Attributes:
        backend: the backend's name.
        unenforced: paths of the keywords that the backend does not enforce; empty if the specification is strict.
    """

    backend: str
    unenforced: tuple[str, ...] = ()


class Grammars:
    """The grammar backends that requests can use. Thread-safe.

    Args:
        make_compiler: function from a backend's name to its compiler; called at the first use of a backend.
        default: the backend of requests that do not select one.
        fallback: backends that are tried, in this order, if the default refuses a specification.
        available: names of the backends that a request may select.
        check_reasoning: function that raises a RequestError for a reasoning whose texts the model's tokens cannot form.
    """

    def __init__(
        self,
        make_compiler: Callable[[str], GrammarCompiler],
        default: str,
        fallback: Sequence[str] = (),
        available: Sequence[str] = (),
        check_reasoning: Callable[[Reasoning], None] = lambda _: None,
    ) -> None:
        self.check_reasoning = check_reasoning
        self._make_compiler = make_compiler
        self._available = available
        self._order = (default, *fallback)
        self._compilers: dict[str, GrammarCompiler] = {}
        self._lock = threading.Lock()
        self._chosen: OrderedDict[tuple[GrammarSpec, str | None], Enforcement] = OrderedDict()

    @property
    def hits(self) -> int:
        """Number of requests whose grammar was already compiled or being compiled."""
        return sum(compiler.hits for compiler in list(self._compilers.values()))

    @property
    def misses(self) -> int:
        """Number of requests whose grammar had to be compiled."""
        return sum(compiler.misses for compiler in list(self._compilers.values()))

    def choose(self, spec: GrammarSpec, backend: str | None = None) -> Enforcement:
        """Return the first backend that enforces all of a specification.

        If no backend does and the specification is not strict, return the backend that ignores the fewest keywords.

        Args:
            spec: the specification.
            backend: the only backend to try; None: the default and its fallbacks.

        Raises:
            UnsupportedFeatureError: the backend is unknown.
            GrammarError: all backends refuse the specification; the message has each backend's reason.
            GraftlmError: a backend could not be created.
        """
        if backend is not None:
            self.check_name(backend)
        key = spec, backend
        with self._lock:
            known = self._chosen.get(key)
            if known is not None:
                self._chosen.move_to_end(key)
                return known
        chosen = self._ask(spec, self._order if backend is None else (backend,))
        with self._lock:
            self._chosen[key] = chosen
            while len(self._chosen) > _MAX_REMEMBERED:
                self._chosen.popitem(last=False)
        return chosen

    def check_name(self, backend: str) -> None:
        """Check that a backend of this name is available.

        Raises:
            UnsupportedFeatureError: the backend is not available; the message names the available backends.
        """
        if backend not in self._available:
            close = nearest(backend, self._available)
            hint = f" Did you mean '{close}'?" if close else ""
            names = ", ".join(self._available) or "none"
            raise UnsupportedFeatureError(f"Unknown grammar backend {backend[:60]!r}.{hint} Available: {names}.")

    def preload(self) -> None:
        """Create the default backend now.

        Raises:
            GraftlmError: the backend cannot be created.
        """
        self.compiler().preload()

    def close(self) -> None:
        """Cancel queued compilations, and start no new ones."""
        for compiler in list(self._compilers.values()):
            compiler.close()

    def _ask(self, spec: GrammarSpec, names: Sequence[str]) -> Enforcement:
        found: list[Enforcement] = []
        refusals: dict[str, str] = {}
        for name in names:
            try:
                found.append(Enforcement(name, self.compiler(name).check(spec)))
            except GrammarError as error:
                if str(error) not in refusals.values():
                    refusals[name] = str(error)
            else:
                if not found[-1].unenforced:
                    return found[-1]
        if not found:
            (_, first), *others = refusals.items()
            reasons = [first.rstrip("."), *[f"{name}: {reason}" for name, reason in others]]
            raise GrammarError("; fallback ".join(reasons))
        return min(found, key=lambda enforcement: len(enforcement.unenforced))

    def compiler(self, backend: str | None = None) -> GrammarCompiler:
        """Return the compiler of a backend; None selects the default backend.

        Raises:
            GraftlmError: the backend does not exist, or it cannot run on this machine.
        """
        name = self._order[0] if backend is None else backend
        with self._lock:
            compiler = self._compilers.get(name)
        if compiler is None:
            made = self._make_compiler(name)
            with self._lock:
                compiler = self._compilers.setdefault(name, made)
        return compiler
