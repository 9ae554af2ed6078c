"""An engine's statistics since its start, and its records of requests, steps and prefix cache events."""

from dataclasses import dataclass, field

from graftlm.types import FinishReason, Timings, TokenIds, Usage

__all__ = ["CacheEvent", "EngineStats", "RequestRecord", "StateStats", "StepRecord", "TierStats"]


@dataclass(frozen=True, slots=True)
class TierStats:
    """Statistics of a prefix cache's tiers below the device's memory: current state, and counters since the start.

    Attributes:
        block_tokens: number of tokens of a block, the unit of the lower tiers.
        host_blocks, host_used_blocks: capacity of host memory in blocks, and number of blocks in use.
        stored_blocks, loaded_blocks: number of blocks copied from the device to host memory, and back.
        evicted_blocks: number of blocks evicted from host memory.
        skipped_stores: number of blocks that were not stored, because host memory was full and no block could be
            evicted.
        lost_copies: number of block copies that were lost because their step failed.
        prefetched_blocks: number of blocks prefetched from storage to host memory for waiting requests.
        late_prefetches: number of requests that were admitted before their prefetch was complete.
        skipped_writes: number of blocks that were not written to storage, because storage is too slow or because the
            block contains numbers that are not finite.
        storage_blocks ... storage_failures: see `graftlm.contracts.StorageStats`; zeros without a storage.
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
class StateStats:
    """Statistics of the recurrent states that are stored for later requests.

    Attributes:
        num_snapshots: number of slots.
        num_stored: number of slots that store the state at the end of a cached page.
        num_free: number of free slots; the others belong to running requests.
        num_stores: number of states that were stored since the start.
        num_evicted: number of stored states that were evicted since the start, while their page stayed cached.
    """

    num_snapshots: int
    num_stored: int
    num_free: int
    num_stores: int
    num_evicted: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine's statistics: current state, and counters since the start.

    Attributes:
        total_pages, free_pages, evictable_pages, locked_pages, owned_pages: numbers of KV pages: all, free, of
            evictable prefixes, of prefixes that running requests use, and owned by one running request.
        steps ... retracted_tokens: counters. `aged_requests` counts requests that were admitted first because later
            requests had overtaken them. `retracted_tokens` counts computed tokens of requests that were retracted.
        eviction_age_s: seconds between the last use and the eviction of the most recently evicted node; None before the
            first eviction, or if not measured.
        host_s, model_s: seconds spent on planning and committing steps, and seconds spent on running them.
        cached_host_tokens, cached_storage_tokens: numbers of `cached_tokens` that were loaded from each lower tier.
        tiers: statistics of the prefix cache's lower tiers; None without lower tiers.
        jump_forward_tokens: number of `generated_tokens` that the grammar forced, and that were not sampled.
        grammar_hits, grammar_misses: numbers of requests with a grammar. A hit: the grammar was already compiled or
            being compiled. A miss: its compilation had to be started.
        drafts: name of a drafter -> number of its tokens that steps verified, and number of accepted tokens.
        states: statistics of stored recurrent states; None if the model has no such states.
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
    drafts: dict[str, tuple[int, int]] = field(default_factory=dict)
    states: StateStats | None = None


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """The record of `request_finished` observers."""

    request_id: str
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    num_retractions: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The record of `step_finished` observers: one forward pass of a ragged batch.

    Attributes:
        num_decodes: number of decode requests.
        num_prefill_tokens: number of tokens of prefill chunks.
        host_s: seconds that the scheduler needed to plan and commit the step.
        model_s: seconds that the runner needed.
        free_pages, evictable_pages, locked_pages: numbers of KV pages after the step.
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
    """A change of a node of the prefix cache. An external indexer that replays all events has the same tree.

    Attributes:
        kind: "stored": a new node below `parent_id`. "split": the first `num_tokens` tokens of node `node_id` moved to
            a new node, `parent_id`, which is now its parent. "removed": node `node_id` was removed; it had no children.
            "cleared": all nodes were removed by a flush or by a restart after a failure.
        num_tokens: number of tokens that were stored, moved, removed or cleared.
        node_id: unique until "cleared", after which ids may be reused; None for "cleared", and in caches without nodes.
        parent_id: None for a node at the start of a prompt.
        namespace: namespace of the node.
        token_ids: int32 [num_tokens], the own tokens of a "stored" node; read-only.
    """

    kind: str
    num_tokens: int
    node_id: int | None = None
    parent_id: int | None = None
    namespace: str = ""
    token_ids: TokenIds | None = None
