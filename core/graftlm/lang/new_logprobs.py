"""The log-probabilities of a growing text that were not reported before."""

from typing import Any, Final

__all__ = ["NewLogprobs"]

#: Lists of a completion's meta information with one entry for each generated token.
_KEYS: Final = ("output_token_logprobs", "output_top_logprobs")


class NewLogprobs:
    """Shortens the log-probabilities of one completion's meta information to the entries since the last call."""

    def __init__(self) -> None:
        self._lens: dict[str, int] = {}

    def of(self, meta_info: Any) -> Any:
        """Return meta information with new entries only; a list for several completions is returned unchanged."""
        if not isinstance(meta_info, dict):
            return meta_info
        new = dict(meta_info)
        for key in _KEYS:
            if key in meta_info:
                new[key] = meta_info[key][self._lens.get(key, 0) :]
                self._lens[key] = len(meta_info[key])
        return new
