"""The forks of a state, written to and waited for together."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

from graftlm.errors import RequestError
from graftlm.lang.expressions import Expr

if TYPE_CHECKING:
    from graftlm.lang.state import ProgramState

__all__ = ["ProgramStateGroup"]

#: What a join does beside gathering variables, under SGLang's names.
_JOIN_MODES: Final = ("gather_variable", "concate_and_append")


class ProgramStateGroup(Sequence["ProgramState"]):
    """The forks of a state.

    `group += ...` writes to each of them: one expression for all, a list with one for each, or a function of the index.
    """

    def __init__(self, states: "Sequence[ProgramState]", parent: "ProgramState") -> None:
        self._states = list(states)
        self._parent = parent

    def __getitem__(self, index: Any) -> Any:
        return self._states[index]

    def __setitem__(self, index: int, state: "ProgramState") -> None:
        """Take back the state that `group[i] += ...` has written to.

        Raises:
            RequestError: it is another one.
        """
        if self._states[index] is not state:
            raise RequestError("a fork cannot be replaced; write to it by `forks[i] += ...`")

    def __len__(self) -> int:
        return len(self._states)

    def __iadd__(self, other: Expr | str | Sequence[Expr | str] | Callable[[int], Expr | str]) -> Self:
        for i, (state, part) in enumerate(zip(self._states, self._part_of_each(other), strict=True)):
            state += part
            self._states[i] = state
        return self

    def _part_of_each(self, other: Any) -> Sequence[Expr | str]:
        if isinstance(other, Expr | str):
            return [other] * len(self)
        if callable(other):
            return [other(i) for i in range(len(self))]
        parts = list(other)
        if len(parts) != len(self):
            raise RequestError(f"{len(parts)} expressions are given for {len(self)} forks; give one each")
        return parts

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:
            self.join()
            return
        for state in self._states:  # nobody will read them, and the error is what matters
            state.cancel()

    def join(self, mode: str = "gather_variable") -> None:
        """Wait for all, and give the parent each variable that is new in them, as the list of their values.

        The list has a place for each fork, in order, with None for those that did not set the variable.

        Args:
            mode: "gather_variable" leaves it at that. "concate_and_append" appends to the parent, besides, what each of
                them has written since the fork, in their order: its text, and the messages of the chat that it holds.

        Raises:
            ProgramError: one of them failed, or has begun a message of a chat and not ended it, or ended the parent's.
            RequestError: another mode.
        """
        if mode not in _JOIN_MODES:
            raise RequestError(f"join knows the modes {' and '.join(map(repr, _JOIN_MODES))}, got {mode!r}")
        for state in self._states:
            state.sync()
        self._gather()
        if mode == "concate_and_append":
            for state in self._states:
                self._parent += state.written()

    def _gather(self) -> None:
        known = self._parent.names()
        new = {name for state in self._states for name in state.names()} - known
        for name in sorted(new):
            self._parent[name] = [state[name] if name in state else None for state in self._states]  # noqa: SIM401 - a state has no get
