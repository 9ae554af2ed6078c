"""The settings of a run of the load generator."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from graftlm.errors import ConfigError

__all__ = ["ApiName", "BenchSettings", "LoadMode"]

ApiName = Literal["native", "openai-completions", "openai-chat"]

#: burst: all requests start immediately. closed: a request starts when another one ends. open: requests start at
#: scheduled times. bounded: like open, with a limit on the number of simultaneous requests.
LoadMode = Literal["burst", "closed", "open", "bounded"]

_DEFAULT_NUM_PROMPTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """The settings of a run: the options of `graftlm bench serve`, except the API key, because settings are saved.

    Attributes:
        url: the server's URL, without a path.
        api: the interface to use.
        model: the model's name in OpenAI's requests; None: the first model of the server.
        dataset: a JSONL file of prompts; None: random prompts.
        num_prompts: number of requests; None: the size of the dataset, or 200 without a dataset.
        request_rate: arrivals per second; None: as fast as `concurrency` permits.
        burstiness: shape of the gamma distribution of the gaps between arrivals; 1 is a Poisson process.
        concurrency: maximum number of requests that run at the same time; None: no limit.
        prompt_tokens: length of a random prompt, including its shared prefix.
        output_tokens: maximum number of tokens to generate, for random prompts and for lines without a maximum.
        shared_prefix_tokens: length of the prefix that random prompts share with other prompts.
        num_prefixes: number of different shared prefixes.
        warmup: number of requests that run one after the other before the measurement.
        seed: seed of prompts and arrivals.
        ignore_eos: whether to generate exactly `output_tokens` tokens; OpenAI's own servers refuse this extension.
        temperature: 0 selects the most likely token.
        timeout_s: seconds after which a request counts as failed.
        percentiles: the percentiles to report.
        vocab_size: the model's vocabulary size; None: as reported by the server.
        flush_cache: whether to empty the server's prefix cache before the measurement.
        save_chunks: whether to save the time of every chunk in the report.
        label: description of the run, for the report.

    Raises:
        ConfigError: a value is out of range, or two values contradict each other.
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
        # The user may have given the base URL of OpenAI's clients, which ends with /v1.
        object.__setattr__(self, "url", self.url.rstrip("/").removesuffix("/v1"))
        for names, is_ok, expected in _RANGES:
            for name in names:
                self._check(name, is_ok, expected)
        if self.shared_prefix_tokens >= self.prompt_tokens:
            raise ConfigError(
                f"--shared-prefix-tokens must be less than --prompt-tokens, got {self.shared_prefix_tokens} and "
                f"{self.prompt_tokens}: each prompt needs at least one token of its own"
            )

    @property
    def mode(self) -> LoadMode:
        """The way in which requests are started."""
        if self.request_rate is None:
            return "burst" if self.concurrency is None else "closed"
        return "open" if self.concurrency is None else "bounded"

    @property
    def num_random_prompts(self) -> int:
        """Number of requests of a run without a dataset."""
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
