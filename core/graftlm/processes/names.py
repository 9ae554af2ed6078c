"""The names of the child processes."""

from typing import Final

__all__ = ["DETOKENIZER", "scheduler_index", "scheduler_name"]

#: The process that converts the tokens of all replicas to text. The replicas' names are "scheduler-0" and so on.
DETOKENIZER: Final = "detokenizer"


def scheduler_name(index: int) -> str:
    """Return the name of the process of replica `index`."""
    return f"scheduler-{index}"


def scheduler_index(name: str) -> int:
    """Return the index of the replica with this process name."""
    return int(name.rpartition("-")[2])
