"""What an engine tells of itself: sums since its start, and records of requests, steps and the prefix cache."""

from dataclasses import dataclass

from graftlm.types import FinishReason, Timings, TokenIds, Usage

__all__ = ["CacheEvent", "EngineStats", "RequestRecord", "StepRecord", "TierStats"]


@dataclass(frozen=True, slots=True)
class TierStats:
    """The tiers of a prefix cache below the device's memory, at one moment, and sums since the start.

    Attributes:
        block_tokens: tokens of a block, the unit of the lower tiers.
        host_blocks, host_used_blocks: how many fit into host memory, and how many are there.
        stored_blocks, loaded_blocks: copied from the device to host memory, and back.
        evicted_blocks: given up by host memory to make room.
        skipped_stores: blocks not kept because nothing in host memory could be given up.
        lost_copies: copies that were not made because their step failed.
        prefetched_blocks: brought from storage to host memory for waiting requests.
        late_prefetches: requests that were admitted before all of theirs had arrived.
        skipped_writes: blocks not written to storage because it is too slow, or their numbers are not finite.
        storage_blocks ... storage_failures: as in `graftlm.contracts.StorageStats`; zeros without a storage.
    """

    block_tokens: int = 0
    host_blocks: int = 0
    host_used_blocks: int = 0
    stored_blocks: int = 0
    loaded_blocks: int = 0
    evicted_blocks: int = 0
    skipped_stores: int = 0
    lost_copies: int = 0
    prefetched_blocks: int = 0
    late_prefetches: int = 0
    skipped_writes: int = 0
    storage_blocks: int = 0
    storage_bytes: int = 0
    storage_hits: int = 0
    storage_misses: int = 0
    storage_stored: int = 0
    storage_evicted: int = 0
    storage_corrupt: int = 0
    storage_foreign: int = 0
    storage_failures: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine at one moment.

    Attributes:
        total_pages, free_pages, evictable_pages, locked_pages, owned_pages: the KV memory by owner: nobody, prefixes
            that may be evicted, prefixes that running requests use, running requests alone.
        steps ... retracted_tokens: sums since the start; `aged_requests` went first because they had been passed over,
            `retracted_tokens` had been computed for requests that were sent back to the queue.
        eviction_age_s: how long what was evicted last had not been used; None when nothing was, or it is not known.
        host_s, model_s: seconds spent on planning and committing, and on the device.
        cached_host_tokens, cached_storage_tokens: of `cached_tokens`, those loaded from lower tiers.
        tiers: of a prefix cache that has lower tiers.
        jump_forward_tokens: of `generated_tokens`, those that were not sampled, because a grammar forced them.
        grammar_hits, grammar_misses: requests whose grammar was compiled already or under way, and the others.
    """

    running_requests: int
    waiting_requests: int
    total_pages: int
    free_pages: int
    evictable_pages: int
    locked_pages: int
    owned_pages: int
    evicted_pages: int
    evicted_tokens: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    finished_requests: int
    retractions: int
    aged_requests: int
    retracted_tokens: int
    eviction_age_s: float | None
    host_s: float
    model_s: float
    cached_host_tokens: int = 0
    cached_storage_tokens: int = 0
    tiers: TierStats | None = None
    jump_forward_tokens: int = 0
    grammar_hits: int = 0
    grammar_misses: int = 0


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What `request_finished` observers get."""

    request_id: str
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    num_retractions: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What `step_finished` observers get: one forward pass over a ragged batch.

    Attributes:
        num_decodes: requests that brought the one token sampled last.
        num_prefill_tokens: tokens of prompt chunks.
        host_s: seconds the scheduler spent planning and committing it.
        model_s: seconds the runner spent on it.
        free_pages, evictable_pages, locked_pages: the KV memory after it.
    """

    step_id: int
    num_running: int
    num_waiting: int
    num_decodes: int
    num_prefill_tokens: int
    host_s: float
    model_s: float
    free_pages: int
    evictable_pages: int
    locked_pages: int


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """What became of a node of the prefix cache: enough for an indexer outside to hold the same tree.

    Attributes:
        kind: "stored": a new node below `parent_id`. "split": the first `num_tokens` tokens of node `node_id` moved to
            a new node `parent_id` above it. "removed": node `node_id` is gone; it had no children. "cleared": all
            nodes are gone, because the cache was flushed or started anew after a failure.
        num_tokens: tokens stored, moved, removed or cleared.
        node_id: unique until "cleared", after which ids may begin again; None for "cleared", and in caches without
            nodes.
        parent_id: None for a node at the start of a prompt.
        namespace: of the node.
        token_ids: int32 [num_tokens] of a "stored" node, its own run; read-only.
    """

    kind: str
    num_tokens: int
    node_id: int | None = None
    parent_id: int | None = None
    namespace: str = ""
    token_ids: TokenIds | None = None
