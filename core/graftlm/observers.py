"""Calls observers, and logs their exceptions."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Observer", "Observers", "notify"]

logger = logging.getLogger(__name__)

Observer = Callable[[Any], object]


@dataclass(frozen=True, slots=True)
class Observers:
    """The implementations of the observer hooks, looked up once at assembly."""

    request_finished: tuple[Observer, ...] = ()
    step_finished: tuple[Observer, ...] = ()


def notify(observers: tuple[Observer, ...], record: object) -> None:
    """Call each observer with a record; an exception is logged, and the other observers are still called."""
    for observer in observers:
        try:
            observer(record)
        except Exception:
            logger.exception("observer %r failed", observer)
