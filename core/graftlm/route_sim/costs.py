"""The model of a step's duration."""

from dataclasses import dataclass, fields
from typing import Self

from graftlm.errors import ConfigError

__all__ = ["StepCosts"]


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The coefficients of a step's duration, which is a linear function of its tokens.

    The defaults were measured on the bundled model with one core (`python benchmarks/step_costs.py`).

    Attributes:
        step_ms: duration of a step without tokens, in ms.
        prefill_us: additional duration for each prompt token, in µs.
        decode_us: additional duration for each decode row, in µs.
    """

    step_ms: float = 0.94
    prefill_us: float = 91.0
    decode_us: float = 70.0

    def seconds(self, num_prefill_tokens: int, num_decodes: int) -> float:
        """Return the duration of a step in seconds."""
        return self.step_ms / 1e3 + (num_prefill_tokens * self.prefill_us + num_decodes * self.decode_us) / 1e6

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the coefficients in a text such as `step_ms=9,prefill_us=60`; the others have their defaults.

        Raises:
            ConfigError: a name is unknown, or a value is not a number of at least 0.
        """
        names = [field.name for field in fields(cls)]
        values: dict[str, float] = {}
        for part in text.split(","):
            name, _, number = part.strip().partition("=")
            try:
                values[name] = float(number)
            except ValueError:
                values[name] = -1.0
            if name not in names or not 0 <= values[name] < float("inf"):
                raise ConfigError(f"--cost: expected NAME=NUMBER with a name of {', '.join(names)}; got {part!r}")
        found = cls(**values)
        if found.seconds(1, 0) <= 0 or found.seconds(0, 1) <= 0:
            raise ConfigError("--cost: a step needs a duration above 0; set step_ms")
        return found
