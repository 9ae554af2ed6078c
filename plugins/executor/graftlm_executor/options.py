"""Options of the executors."""

from collections.abc import Sequence

from pydantic import Field, field_validator

from graftlm.contracts import RankOptions
from graftlm.errors import ConfigError

__all__ = ["ProcessesOptions"]


class ProcessesOptions(RankOptions):
    """Options of `processes`."""

    cpus: tuple[str, ...] | None = Field(
        default=None,
        description="CPUs of each rank, one list per rank, such as `[0-15, 16-31]` for two sockets. The threads of a "
        "rank then run on these CPUs, and Linux allocates its memory on their NUMA node. Null: any CPUs.",
    )

    @field_validator("cpus", mode="before")
    @classmethod
    def _as_text(cls, value: object) -> object:
        """Return the lists as text; YAML reads a single CPU as a number."""
        return [str(item) for item in value] if isinstance(value, list | tuple) else value

    @field_validator("cpus")
    @classmethod
    def _check_cpus(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for item in value or ():
            _cpus_of(item)
        return value

    def cpu_sets(self, num_ranks: int) -> Sequence[frozenset[int] | None]:
        """Return the CPUs of each rank; None for a rank that may use any.

        Raises:
            ConfigError: `cpus` has another number of lists than there are ranks.
        """
        if self.cpus is None:
            return [None] * num_ranks
        if len(self.cpus) != num_ranks:
            raise ConfigError(f"parallel.options.cpus has {len(self.cpus)} lists, but there are {num_ranks} ranks")
        return [_cpus_of(item) for item in self.cpus]


def _cpus_of(text: str) -> frozenset[int]:
    """Return the CPUs of a list such as "0-3,8".

    Raises:
        ValueError: the text is not a list of CPUs.
    """
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.strip().isdecimal() or not (last or first).strip().isdecimal() or int(last or first) < int(first):
            raise ValueError(f"must be a list of CPUs such as 0-15 or 0,2,4, got {text!r}")
        cpus |= set(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
