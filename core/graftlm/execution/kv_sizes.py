"""Computes the number of pages of the KV memory and of the separate memory of sliding-window layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graftlm.contracts import AttentionLayer
from graftlm.errors import ConfigError
from graftlm.execution.kv_store import KVStore
from graftlm.memory import WindowSpan

__all__ = ["KVDemand", "KVSizes", "size_kv"]

#: Number of window pages for cached prefixes, as a share of all pages. Window pages of running requests are additional.
CACHED_WINDOW_SHARE = 1 / 4


@dataclass(frozen=True, slots=True)
class KVDemand:
    """The requirements from which the size of the KV memory is computed.

    Attributes:
        kv_tokens, window_tokens: configured numbers of tokens; None: they are computed.
        kv_fraction: share of `free_bytes` that the KV memory may use.
        free_bytes: free memory in bytes.
        reserved_bytes: number of bytes of `free_bytes` that are reserved for steps.
        num_rows: maximum number of running requests.
        context_len: maximum number of tokens of a request.
        prefill_tokens: maximum number of prompt tokens in a step.
        span: size of the window of the layers with a separate memory; None if all layers share one memory.
    """

    kv_tokens: int | None
    window_tokens: int | None
    kv_fraction: float
    free_bytes: int
    page_size: int
    num_rows: int
    context_len: int
    prefill_tokens: int
    span: WindowSpan | None = None
    reserved_bytes: int = 0

    @property
    def budget_bytes(self) -> int:
        """Maximum size of all pages in bytes, at least 0."""
        return max(0, min(int(self.free_bytes * self.kv_fraction), self.free_bytes - self.reserved_bytes))

    @property
    def useful_pages(self) -> int:
        """Maximum number of pages that all rows together can use."""
        return self.num_rows * -(-self.context_len // self.page_size)


@dataclass(frozen=True, slots=True)
class KVSizes:
    """Numbers of pages and of window pages. `num_window_pages` is None if all layers share one memory."""

    num_pages: int
    num_window_pages: int | None = None


def size_kv(layers: Sequence[AttentionLayer], dtype: torch.dtype, demand: KVDemand) -> KVSizes:
    """Return the sizes of the KV memory: as configured, or from the free memory, up to the pages that all rows can use.

    With a span, sliding-window layers get pages for the windows of running requests, for one step's prompts, and for
    the windows of cached prefixes, which are a quarter of all pages.

    Raises:
        ConfigError: the memory, or the configured number of window tokens, is too small to run one request.
    """
    window_layers = [layer for layer in layers if layer.sliding_window is not None and demand.span is not None]
    full_layers = [layer for layer in layers if layer not in window_layers]
    full_bytes = KVStore.bytes_per_token(full_layers, dtype) * demand.page_size
    window_bytes = KVStore.bytes_per_token(window_layers, dtype) * demand.page_size
    if demand.kv_tokens is not None:
        num_pages = demand.kv_tokens // demand.page_size
    else:
        num_pages = min(_fitting_pages(demand, full_bytes, window_bytes), demand.useful_pages)
    if num_pages == 0:
        raise ConfigError(
            f"The free memory of {demand.free_bytes >> 20} MiB is too small for one KV page of "
            f"{full_bytes + window_bytes} bytes: memory.kv_fraction is {demand.kv_fraction}, and steps need "
            f"{demand.reserved_bytes >> 20} MiB. Free memory, lower scheduling.prefill_tokens_per_step or set "
            "memory.kv_tokens."
        )
    if demand.span is None:
        return KVSizes(num_pages)
    return KVSizes(num_pages, _num_window_pages(demand, demand.span, num_pages, window_bytes))


def _fitting_pages(demand: KVDemand, full_bytes: int, window_bytes: int) -> int:
    """Return the number of pages that fit into the budget together with the window pages that they need."""
    budget = demand.budget_bytes
    if full_bytes + window_bytes == 0:  # no attention layers: pages only name prefixes
        return demand.useful_pages
    unsplit = budget // (full_bytes + window_bytes)  # pages if each has a window page
    if demand.span is None:
        return unsplit
    if demand.window_tokens is not None:
        rest, share = budget - demand.window_tokens // demand.page_size * window_bytes, 0.0
    else:
        rest, share = budget - _running_pages(demand, demand.span) * window_bytes, CACHED_WINDOW_SHARE
    page_bytes = full_bytes + share * window_bytes
    # If all layers have windows and the size of their memory is fixed, further pages need no memory.
    split = demand.useful_pages if page_bytes == 0 else int(rest / page_bytes)
    return max(unsplit, split)


def _running_pages(demand: KVDemand, span: WindowSpan) -> int:
    """Return the maximum number of window pages of running requests and one step's prompts."""
    return demand.num_rows * span.row_pages + -(-demand.prefill_tokens // demand.page_size)


def _num_window_pages(demand: KVDemand, span: WindowSpan, num_pages: int, window_bytes: int) -> int:
    if demand.window_tokens is None:
        wanted = _running_pages(demand, span) + int(num_pages * CACHED_WINDOW_SHARE)
    else:
        wanted = demand.window_tokens // demand.page_size
    least = min(num_pages, span.row_pages)
    if wanted < least:
        raise ConfigError(
            f"memory.window_tokens is {demand.window_tokens}, but one request with a window of {span.window_tokens} "
            f"tokens may need {least * demand.page_size} tokens. Increase or remove memory.window_tokens."
        )
    return min(num_pages, wanted)
