"""Times each operator in a forward pass, with hooks that are registered only during the measurement."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from graftlm.bench.roofline.clock import Clock
from graftlm.bench.roofline.operators import Operator

__all__ = ["OperatorTimer"]


@dataclass(slots=True)
class _Span:
    """One call of a module, as marks of the clock.

        enters | time of the hook | starts | the call | ends | time of the hook | leaves

    Attributes:
        name: name of the operator.
        enters, starts, ends, leaves: marks of the clock, as in the line above.
        inside: calls of other operators during this call.
    """

    name: str
    enters: Any
    starts: Any = None
    ends: Any = None
    leaves: Any = None
    inside: list["_Span"] = field(default_factory=list)


class OperatorTimer:
    """A timer of operators, which uses forward hooks.

    An operator's time is the time of its modules' calls, without the time of other operators inside and of their hooks.

    Args:
        clock: clock that sets the marks.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: list[_Span] = []
        self._done: list[_Span] = []

    @contextmanager
    def attached(self, operators: Sequence[Operator]) -> Iterator[None]:
        """Return a context in which this timer's hooks are registered on the operators."""
        with ExitStack() as stack:
            for operator in operators:
                before = operator.module.register_forward_pre_hook(self._enter(operator.name))
                after = operator.module.register_forward_hook(self._leave)
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Return a context that is timed as one call of an operator, for operators that are not modules."""
        span = self._begin(name)
        span.starts = self._clock.mark()
        yield
        span.ends = self._clock.mark()
        self._end(span)

    def take(self) -> dict[str, float]:
        """Return operator name -> time in seconds, for the calls since the last call of this method."""
        self._clock.sync()
        seconds: dict[str, float] = defaultdict(float)
        for span in self._done:
            inside_s = sum(self._clock.seconds(inner.enters, inner.leaves) for inner in span.inside)
            seconds[span.name] += self._clock.seconds(span.starts, span.ends) - inside_s
        self._done.clear()
        return dict(seconds)

    def _enter(self, name: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            span = self._begin(name)
            span.starts = self._clock.mark()

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        ends = self._clock.mark()
        span = self._open[-1]
        span.ends = ends
        self._end(span)

    def _begin(self, name: str) -> _Span:
        span = _Span(name, self._clock.mark())
        if self._open:
            self._open[-1].inside.append(span)
        self._open.append(span)
        return span

    def _end(self, span: _Span) -> None:
        self._open.pop()
        self._done.append(span)
        span.leaves = self._clock.mark()
