"""The plugins and capacities that a study compares, parsed from a command line."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from graftlm.errors import ConfigError

__all__ = ["Capacity", "Choice", "parse_capacities", "parse_choices"]

_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True, slots=True)
class Choice:
    """A plugin to compare.

    Attributes:
        name: name of the plugin's provider.
        options: options of the plugin.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        values = ",".join(f"{key}={_spell(value)}" for key, value in self.options.items())
        return f"{self.name}:{values}" if values else self.name


def parse_choices(text: str) -> list[Choice]:
    """Parse a list of plugins such as `name,name:key=value,key=value,name`. Values are YAML.

    Raises:
        ConfigError: the text has another form.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    for part in text.split(","):
        name, colon, assignment = part.strip().partition(":")
        if "=" in name:  # this part is another option of the previous name
            name, colon, assignment = "", ":", part.strip()
        if name:
            found.append((name, {}))
        if not found or (not name and not colon):
            raise ConfigError(f"{text!r} must be NAME or NAME:KEY=VALUE,KEY=VALUE; separate several names by commas")
        if colon:
            key, equals, value = assignment.partition("=")
            if not (key and equals):
                raise ConfigError(f"{text!r}: {assignment!r} must be KEY=VALUE, as in slru:protected_share=0.5")
            found[-1][1][key.strip()] = _value(value, text)
    return [Choice(name, options) for name, options in found]


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of a cache: a number of tokens, or a share of a trace's footprint.

    Attributes:
        text: the capacity as given on the command line.
        amount: the number of tokens, or the share of the footprint as a fraction.
        is_share: whether `amount` is a share.
    """

    text: str
    amount: float
    is_share: bool

    def pages(self, footprint_pages: int, page_size: int) -> int:
        """Return the capacity in whole pages, at least 1.

        Args:
            footprint_pages: number of distinct pages in the trace.
            page_size: number of tokens in a page.
        """
        exact = self.amount * footprint_pages if self.is_share else self.amount / page_size
        return max(int(exact), 1)


def parse_capacities(texts: Iterable[str]) -> list[Capacity]:
    """Parse capacities such as `500K`, `2M` or `10%`. A text may contain several capacities, separated by commas.

    Raises:
        ConfigError: a capacity has another form, or is not above 0.
    """
    return [_capacity(part.strip()) for part in _parts(texts)]


def _parts(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from text.split(",")


def _capacity(text: str) -> Capacity:
    is_share = text.endswith("%")
    digits, unit = (text[:-1], "%") if is_share else (text.rstrip("KkMmGg"), text.lstrip("0123456789.").upper())
    try:
        amount = float(digits) * (0.01 if is_share else _UNITS[unit])
    except (ValueError, KeyError):
        amount = 0.0
    if not 0 < amount < float("inf"):
        raise ConfigError(
            f"a capacity must be a number of tokens, such as 500K or 2M, or a share of the trace, such as 10%; "
            f"got {text!r}"
        )
    return Capacity(text, amount, is_share)


def _value(text: str, whole: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{whole!r}: the value {text!r} is not YAML: {error}") from error


def _spell(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
