"""What a state writes to."""

from collections.abc import Sequence
from typing import Protocol

from graftlm.errors import ProgramError
from graftlm.lang.call_site import CallSite
from graftlm.lang.steps import Action
from graftlm.lang.text_feed import TextFeed
from graftlm.lang.variables import Cell

__all__ = ["Stream"]


class Stream(Protocol):
    """An Interpreter, or a tracer's recorder."""

    @property
    def feed(self) -> TextFeed:
        """The text as it grows."""

    @property
    def error(self) -> ProgramError | None:
        """What ended the stream."""

    def submit(self, action: Action, site: CallSite | None = None, cell: Cell | None = None) -> None:
        """Do something behind what was submitted before; see Interpreter."""

    def fork(self, number: int, site: CallSite) -> "Sequence[Stream]":
        """Return streams that go on from here."""

    def fail(self, error: ProgramError) -> None:
        """End the stream with an error."""
