"""The requests of a run: from a dataset, or drawn at random."""

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

#: Tokenizers keep special tokens and single bytes at the low end of the ids, and more special tokens at the high end.
_NUM_LOW_IDS: Final = 300
_HIGH_SHARE: Final = 1 / 16

#: Short and frequent: most tokenizers have one token for each, with the space before it.
_WORDS: Final = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father "
    "power hour game line end member law car city name team minute idea body back face others level office door "
    "health person art war history party result change morning reason research girl guy moment air teacher force"
)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is sent.

    Attributes:
        warmup: before the measurement; random prompts that share nothing with what is measured.
        items: what is measured, in order of arrival.
        num_repeated: of the items, how many send a line of the dataset again.
        shared_share: of the prompt tokens, the share that a prefix cache without earlier runs can find at most; None:
            not known.
    """

    warmup: list[WorkItem]
    items: list[WorkItem]
    num_repeated: int = 0
    shared_share: float | None = None


@dataclass(frozen=True, slots=True)
class _Pieces:
    """What random prompts are made of: numbers below `count`, and how some of them make a prompt."""

    count: int
    to_prompt: Callable[[NDArray[np.int32]], Prompt]


def make_workload(settings: BenchSettings, accepts: tuple[type, ...], vocab_size: int | None) -> Workload:
    """Read or draw the requests of a run; the same settings give the same ones.

    Args:
        accepts: the forms of prompts that the API takes.
        vocab_size: of the model; None: not known.

    Raises:
        ConfigError: the dataset is wrong, or the vocabulary is needed and not known.
    """
    warmup_rng, rng = (np.random.default_rng([settings.seed, stream]) for stream in (0, 1))
    if settings.dataset is not None:
        lines = read_dataset(Path(settings.dataset), settings.num_prompts, settings.output_tokens, accepts)
        count = settings.num_prompts or len(lines)
        warmup = _random_items(settings, settings.warmup, _words(), warmup_rng)
        return Workload(warmup, list(islice(cycle(lines), count)), num_repeated=count - len(lines))
    pieces = _token_ids(vocab_size) if TokenPrompt in accepts else _words()
    count = settings.num_random_prompts
    # The first prompt of each prefix computes it.
    shared_share = (
        max(0, count - settings.num_prefixes) / count * settings.shared_prefix_tokens / settings.prompt_tokens
    )
    return Workload(
        warmup=_random_items(settings, settings.warmup, pieces, warmup_rng),
        items=_random_items(settings, count, pieces, rng),
        shared_share=shared_share,
    )


def ordinary_token_ids(vocab_size: int) -> range:
    """Return ids of tokens that are not special, as far as one can tell without the tokenizer."""
    high = vocab_size - int(vocab_size * _HIGH_SHARE)
    return range(min(_NUM_LOW_IDS, vocab_size // 2), high)


def _random_items(settings: BenchSettings, count: int, pieces: _Pieces, rng: np.random.Generator) -> list[WorkItem]:
    """Draw prompts of which every `num_prefixes`-th, in random order, begins alike."""
    own_len = settings.prompt_tokens - settings.shared_prefix_tokens
    prefixes = rng.integers(pieces.count, size=(settings.num_prefixes, settings.shared_prefix_tokens), dtype=np.int32)
    which = rng.permutation(count) % settings.num_prefixes
    own = rng.integers(pieces.count, size=(count, own_len), dtype=np.int32)
    prompts = (np.concatenate((prefixes[which[i]], own[i])) for i in range(count))
    return [WorkItem(pieces.to_prompt(prompt), settings.output_tokens) for prompt in prompts]


def _token_ids(vocab_size: int | None) -> _Pieces:
    if vocab_size is None:
        raise ConfigError(
            "the server does not tell its vocabulary's size at /get_model_info, which random prompts are drawn from; "
            "give --vocab-size, or a --dataset"
        )
    ids = ordinary_token_ids(vocab_size)
    return _Pieces(len(ids), lambda chosen: TokenPrompt(array("i", chosen + np.int32(ids.start))))


def _words() -> _Pieces:
    words = _WORDS.split()
    return _Pieces(len(words), lambda chosen: TextPrompt(" ".join(words[i] for i in chosen)))
