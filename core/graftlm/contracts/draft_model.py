"""The contract of a draft model: a model that has its own KV memory and generates greedily.

The core loads and runs the model. A drafter decides which tokens the model computes, and in which pages it stores their
keys and values. All arguments and results are arrays on the host.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from graftlm.contracts.provider import Options
from graftlm.types import TokenIds

__all__ = ["Continuations", "DraftModel", "DraftModelBatch", "DraftModelOptions"]


class DraftModelOptions(Options):
    """Options of a drafter with a draft model; the drafter's own options class derives from this one.

    The core reads these options to check the checkpoint and to plan the memory before it loads the served model.
    """

    path: str = Field(
        description="Checkpoint of the draft model, in the same forms as `model.path`. It must have the vocabulary of "
        "the served model."
    )
    kv_tokens: int = Field(
        default=16384,
        ge=1,
        description="Size of the draft model's KV memory in tokens. The memory is allocated when the engine starts.",
    )


@dataclass(frozen=True, slots=True)
class DraftModelBatch:
    """Tokens of B sequences to compute, and the number of tokens to generate after each sequence.

    Sequence b has `query_lens[b]` consecutive tokens from position `starts[b]` on. Its pages must contain the keys and
    values of all tokens before `starts[b]`. Its token at position p is in page `page_table[b, p // page_size]`.

        position      0 ...     starts[b] ...        + query_lens[b] ...    + limits[b] - 1
                      computed  tokens of the batch  generated, computed    the last one is not computed

    Attributes:
        token_ids: int32 [T], concatenated in order of the sequences.
        query_lens: int32 [B], at least 1 each.
        starts: int32 [B].
        limits: int32 [B], number of tokens to generate for each sequence, at least 0; k is the largest of them.
        page_table: int32 [B, P], page ids; entries past a sequence's pages are valid page ids without meaning.
    """

    token_ids: TokenIds
    query_lens: NDArray[np.int32]
    starts: NDArray[np.int32]
    limits: NDArray[np.int32]
    page_table: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Continuations:
    """The generated tokens of B sequences.

    Attributes:
        token_ids: int32 [B, k], the most probable token at each position; row b has limits[b] tokens, then zeros.
        probabilities: float32 [B, k], the probability of each token in `token_ids`.
    """

    token_ids: TokenIds
    probabilities: NDArray[np.float32]


class DraftModel(Protocol):
    """A loaded draft model with its KV memory. Only one thread calls it.

    Attributes:
        vocab_size: V; the model's token ids are below V. Generated ids are also in the served model's vocabulary.
        context_len: maximum number of tokens of a sequence.
        max_rows: maximum number of sequences in a batch.
        num_pages, page_size: size of the KV memory in pages, and size of a page in tokens.
    """

    @property
    def vocab_size(self) -> int: ...  # noqa: D102

    @property
    def context_len(self) -> int: ...  # noqa: D102

    @property
    def max_rows(self) -> int: ...  # noqa: D102

    @property
    def num_pages(self) -> int: ...  # noqa: D102

    @property
    def page_size(self) -> int: ...  # noqa: D102

    def run(self, batch: DraftModelBatch) -> Continuations:
        """Compute a batch, and wait for the result.

        Effects: writes the keys and values of the batch's tokens, and of all generated tokens except each sequence's
            last.
        """
        ...
