"""The names of processes that others refer to."""

from typing import Final

__all__ = ["DETOKENIZER"]

#: The process that every replica's tokens pass through. Replicas are "scheduler-0", "scheduler-1" and so on.
DETOKENIZER: Final = "detokenizer"
