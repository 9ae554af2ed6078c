"""The names of processes that others refer to."""

from typing import Final

__all__ = ["DETOKENIZER", "scheduler_index", "scheduler_name"]

#: The process that every replica's tokens pass through. Replicas are "scheduler-0", "scheduler-1" and so on.
DETOKENIZER: Final = "detokenizer"


def scheduler_name(index: int) -> str:
    """Return the name of a replica's process."""
    return f"scheduler-{index}"


def scheduler_index(name: str) -> int:
    """Return which replica a process is."""
    return int(name.rpartition("-")[2])
