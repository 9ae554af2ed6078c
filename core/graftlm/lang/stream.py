"""The interface through which a state runs or records its expressions."""

from collections.abc import Sequence
from typing import Protocol

from graftlm.errors import ProgramError
from graftlm.lang.call_site import CallSite
from graftlm.lang.steps import Action
from graftlm.lang.text_feed import TextFeed
from graftlm.lang.variables import Cell

__all__ = ["Stream"]


class Stream(Protocol):
    """The interface that Interpreter and the tracer's recorder implement."""

    @property
    def feed(self) -> TextFeed:
        """The feed of the text that the expressions have appended so far."""

    @property
    def error(self) -> ProgramError | None:
        """The error that ended the stream, if any."""

    def submit(self, action: Action, site: CallSite | None = None, cell: Cell | None = None) -> None:
        """Queue an action; see Interpreter."""

    def fork(self, number: int, site: CallSite) -> "Sequence[Stream]":
        """Return streams that continue from here."""

    def fail(self, error: ProgramError) -> None:
        """End the stream with an error."""
