"""Telling observers, whose errors are theirs alone."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Observer", "Observers", "notify"]

logger = logging.getLogger(__name__)

Observer = Callable[[Any], object]


@dataclass(frozen=True, slots=True)
class Observers:
    """Who wants to hear of requests and steps; looked up once, empty costs nothing."""

    request_finished: tuple[Observer, ...] = ()
    step_finished: tuple[Observer, ...] = ()


def notify(observers: tuple[Observer, ...], record: object) -> None:
    """Call each observer with a record; one that raises is logged and costs nobody else anything."""
    for observer in observers:
        try:
            observer(record)
        except Exception:
            logger.exception("observer %r failed", observer)
