"""What a run of the load generator is asked to do."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from graftlm.errors import ConfigError

__all__ = ["ApiName", "BenchSettings", "LoadMode"]

ApiName = Literal["native", "openai-completions", "openai-chat"]

#: burst: all at once. closed: the next when one ends. open: by a schedule. bounded: by a schedule, so many at most.
LoadMode = Literal["burst", "closed", "open", "bounded"]

_DEFAULT_NUM_PROMPTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """One run. The fields are the options of `graftlm bench serve`; the API key is not among them, as they are saved.

    Attributes:
        url: of the server, without a path.
        model: the name in OpenAI's requests; None asks the server for its first one.
        dataset: a JSONL file of prompts; None draws them at random.
        num_prompts: requests to send; None: 200, or as many as the dataset has.
        request_rate: arrivals per second; None: as fast as `concurrency` lets them.
        burstiness: shape of the gamma distribution of the gaps between arrivals; 1 is a Poisson process.
        concurrency: requests under way at most; None sets no bound.
        prompt_tokens: length of a random prompt, with its shared prefix.
        output_tokens: to generate, where a line of the dataset does not say.
        shared_prefix_tokens: of a random prompt, how many it shares.
        num_prefixes: different shared prefixes.
        warmup: requests before the measurement, one after the other.
        seed: of prompts and arrivals.
        ignore_eos: go on to `output_tokens`; an extension that OpenAI's own servers refuse.
        timeout_s: a request that takes longer is a failure.
        percentiles: which ones are reported.
        vocab_size: of the model; None asks the server.
        flush_cache: empty the server's prefix cache before the measurement.
        save_chunks: keep the time of every chunk in the saved report.
        label: says what this run was, in the report.

    Raises:
        ConfigError: a value is out of range, or two do not go together.
    """

    url: str
    api: ApiName = "native"
    model: str | None = None
    dataset: str | None = None
    num_prompts: int | None = None
    request_rate: float | None = None
    burstiness: float = 1.0
    concurrency: int | None = None
    prompt_tokens: int = 512
    output_tokens: int = 128
    shared_prefix_tokens: int = 0
    num_prefixes: int = 1
    warmup: int = 1
    seed: int = 0
    ignore_eos: bool = True
    temperature: float = 0.0
    timeout_s: float = 600.0
    percentiles: tuple[float, ...] = (50.0, 90.0, 99.0)
    vocab_size: int | None = None
    flush_cache: bool = False
    save_chunks: bool = False
    label: str | None = None

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"--url must begin with http:// or https://, got {self.url!r}")
        # A base URL as OpenAI's clients take it names the same server.
        object.__setattr__(self, "url", self.url.rstrip("/").removesuffix("/v1"))
        for names, is_ok, expected in _RANGES:
            for name in names:
                self._check(name, is_ok, expected)
        if self.shared_prefix_tokens >= self.prompt_tokens:
            raise ConfigError(
                f"--shared-prefix-tokens must be less than --prompt-tokens, got {self.shared_prefix_tokens} and "
                f"{self.prompt_tokens}: a prompt's own part is what is left"
            )

    @property
    def mode(self) -> LoadMode:
        """How requests come."""
        if self.request_rate is None:
            return "burst" if self.concurrency is None else "closed"
        return "open" if self.concurrency is None else "bounded"

    @property
    def num_random_prompts(self) -> int:
        """Requests of a run without a dataset."""
        return _DEFAULT_NUM_PROMPTS if self.num_prompts is None else self.num_prompts

    def _check(self, name: str, is_ok: Callable[[Any], bool], expected: str) -> None:
        value = getattr(self, name)
        if value is not None and not is_ok(value):
            raise ConfigError(f"--{name.replace('_', '-')} must be {expected}, got {value}")


_RANGES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("num_prompts", "concurrency", "prompt_tokens", "output_tokens"), lambda n: n >= 1, "at least 1"),
    (("num_prefixes",), lambda n: n >= 1, "at least 1"),
    (("shared_prefix_tokens", "warmup", "seed"), lambda n: n >= 0, "at least 0"),
    (("request_rate", "burstiness", "timeout_s"), lambda x: 0 < x < math.inf, "above 0"),
    (("temperature",), lambda x: 0 <= x <= 100, "between 0 and 100"),
    (("vocab_size",), lambda n: n >= 2, "at least 2"),
    (("percentiles",), lambda p: bool(p) and all(0 <= x <= 100 for x in p), "between 0 and 100, one or more"),
)
