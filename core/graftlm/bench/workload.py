"""The requests of a run, which come from a dataset or are random."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from graftlm.bench.dataset import read_dataset
from graftlm.bench.prompts import Prompt, TextPrompt, TokenPrompt, WorkItem
from graftlm.bench.settings import BenchSettings
from graftlm.errors import ConfigError

__all__ = ["Workload", "make_workload", "ordinary_token_ids"]

#: The lowest token ids are often special tokens and single bytes; the highest token ids are often special tokens too.
_NUM_LOW_IDS: Final = 300
_HIGH_SHARE: Final = 1 / 16

#: Short and frequent words. Most tokenizers have one token for each word with the space before it.
_WORDS: Final = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father "
    "power hour game line end member law car city name team minute idea body back face others level office door "
    "health person art war history party result change morning reason research girl guy moment air teacher force"
)


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a run.

    Attributes:
        warmup: requests before the measurement; their random prompts share no prefix with the measured prompts.
        items: the measured requests, in order of arrival.
        num_repeated: number of measured requests that repeat a line of the dataset.
        shared_share: highest hit rate, from 0 to 1, of a prefix cache that is empty at the start; None: unknown.
    """

    warmup: list[WorkItem]
    items: list[WorkItem]
    num_repeated: int = 0
    shared_share: float | None = None


@dataclass(frozen=True, slots=True)
class _Alphabet:
    """The elements of random prompts.

    Attributes:
        count: number of elements; element numbers are from 0 to `count` - 1.
        to_prompt: function from a sequence of element numbers to a prompt.
    """

    count: int
    to_prompt: Callable[[NDArray[np.int32]], Prompt]


def make_workload(settings: BenchSettings, accepts: tuple[type, ...], vocab_size: int | None) -> Workload:
    """Read or create the requests of a run. The same settings give the same requests.

    Args:
        settings: the settings of the run.
        accepts: the forms of prompts that the API accepts.
        vocab_size: the model's vocabulary size; None: unknown.

    Raises:
        ConfigError: the dataset is wrong, or the vocabulary size is needed but unknown.
    """
    warmup_rng, rng = (np.random.default_rng([settings.seed, stream]) for stream in (0, 1))
    if settings.dataset is not None:
        lines = read_dataset(Path(settings.dataset), settings.num_prompts, settings.output_tokens, accepts)
        count = settings.num_prompts or len(lines)
        warmup = _random_items(settings, settings.warmup, _words(), warmup_rng)
        return Workload(warmup, list(islice(cycle(lines), count)), num_repeated=count - len(lines))
    alphabet = _token_ids(vocab_size) if TokenPrompt in accepts else _words()
    count = settings.num_random_prompts
    # The first prompt with a shared prefix has no hit.
    shared_share = (
        max(0, count - settings.num_prefixes) / count * settings.shared_prefix_tokens / settings.prompt_tokens
    )
    return Workload(
        warmup=_random_items(settings, settings.warmup, alphabet, warmup_rng),
        items=_random_items(settings, count, alphabet, rng),
        shared_share=shared_share,
    )


def ordinary_token_ids(vocab_size: int) -> range:
    """Return a range of token ids that probably has no special tokens; the exact list is only in the tokenizer."""
    high = vocab_size - int(vocab_size * _HIGH_SHARE)
    return range(min(_NUM_LOW_IDS, vocab_size // 2), high)


def _random_items(settings: BenchSettings, count: int, alphabet: _Alphabet, rng: np.random.Generator) -> list[WorkItem]:
    """Return random prompts, in random order. Each shared prefix has the same number of prompts."""
    own_len = settings.prompt_tokens - settings.shared_prefix_tokens
    prefixes = rng.integers(alphabet.count, size=(settings.num_prefixes, settings.shared_prefix_tokens), dtype=np.int32)
    which = rng.permutation(count) % settings.num_prefixes
    own = rng.integers(alphabet.count, size=(count, own_len), dtype=np.int32)
    prompts = (np.concatenate((prefixes[which[i]], own[i])) for i in range(count))
    return [WorkItem(alphabet.to_prompt(prompt), settings.output_tokens) for prompt in prompts]


def _token_ids(vocab_size: int | None) -> _Alphabet:
    if vocab_size is None:
        raise ConfigError(
            "random prompts need the model's vocabulary size, but the server does not provide it at "
            "/get_model_info; set --vocab-size, or use --dataset"
        )
    ids = ordinary_token_ids(vocab_size)
    return _Alphabet(len(ids), lambda numbers: TokenPrompt(array("i", numbers + np.int32(ids.start))))


def _words() -> _Alphabet:
    words = _WORDS.split()
    return _Alphabet(len(words), lambda numbers: TextPrompt(" ".join(words[i] for i in numbers)))
