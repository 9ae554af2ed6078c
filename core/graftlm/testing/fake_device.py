"""A device without a model, whose tokens are digests of the tokens in KV pages, so that tests can check them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import GrammarMatcher
from graftlm.errors import InvariantError
from graftlm.plan import LogprobTable, PoolSpan, StepPlan, StepResult
from graftlm.pooling.pooling import Pooling

__all__ = ["FakeDevice", "expected_embedding", "expected_output", "expected_token"]

_MULTIPLIER = 6364136223846793005
_MASK = (1 << 64) - 1


def _absorb(state: int, token_id: int) -> int:
    return ((state ^ (token_id + 1)) * _MULTIPLIER + 1442695040888963407) & _MASK


def _hidden(digest: int) -> tuple[int, int]:
    return 1, digest >> 48


def _next_token(state: int, vocab_size: int, bits: NDArray[np.int32] | None = None) -> int:
    if bits is None:
        return (state >> 33) % vocab_size
    allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:vocab_size])
    return int(allowed[(state >> 33) % len(allowed)])


def expected_output(
    prompt: Sequence[int], num_tokens: int, vocab_size: int, matcher: GrammarMatcher | None = None
) -> list[int]:
    """Return the tokens that `FakeDevice` generates after a prompt, computed without pages.

    Args:
        prompt: token ids.
        num_tokens: maximum number of generated tokens.
        vocab_size: V.
        matcher: matcher of a grammar that may end the output earlier; None: no grammar.
    """
    state = 0
    for token_id in prompt:
        state = _absorb(state, token_id)
    output: list[int] = []
    mask = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
    while len(output) < num_tokens and not (matcher is not None and matcher.finished):
        if matcher is not None:
            matcher.fill_bitmask(mask, 0)
        output.append(_next_token(state, vocab_size, None if matcher is None else mask[0]))
        state = _absorb(state, output[-1])
        if matcher is not None:
            matcher.accept(output[-1])
    return output


def expected_token(token_ids: Sequence[int], vocab_size: int, bits: NDArray[np.int32] | None = None) -> int:
    """Return the token that `FakeDevice` samples after some tokens.

    Args:
        token_ids: the preceding tokens.
        vocab_size: V.
        bits: bitmask of the allowed tokens, int32 [ceil(V / 32)]; None: all tokens are allowed.
    """
    state = 0
    for token_id in token_ids:
        state = _absorb(state, token_id)
    return _next_token(state, vocab_size, bits)


def expected_embedding(prompt: Sequence[int], pooling: Pooling) -> NDArray[np.float32]:
    """Return the pooled "hidden states" that `FakeDevice` returns for a prompt, float32 [2], computed without pages."""
    digests: list[int] = []
    for token_id in prompt:
        digests.append(_absorb(digests[-1] if digests else 0, token_id))
    hidden = np.array([_hidden(digest) for digest in digests], dtype=np.float64)
    pooled: NDArray[np.float64] = hidden.mean(axis=0) if pooling.reads_all else hidden[-1]
    return pooled.astype(np.float32)


class FakeDevice:
    """A device that runs plans over paged memory. A token's "key and value" is a digest of the request's tokens so far.

    Each digest is computed from the previous token's digest, which is read through the plan's page table. So if a page
    is reused, shared or freed wrongly, all later generated tokens and "hidden states" are wrong. The first number of a
    "hidden state" is 1; the second number depends on the digest.

    With a window memory, the device also writes each digest to this memory. At the end of a step, it compares the
    digests in each token's window with those in the first memory; a difference is an error.

    With state slots, the device also carries each row's digest through the segments of its plan. A difference from the
    digests in the pages is an error.

    Args:
        num_pages: number of pages of the memory.
        page_size: number of tokens in a page.
        num_rows: number of rows for running requests.
        vocab_size: V.
        window_tokens: number of tokens in the window of the layers with a separate window memory; None if there is no
            such memory.
        num_window_pages: number of pages of the window memory.
        num_state_slots: number of slots of recurrent states; 0 without such states.

    Attributes:
        fail_steps: ids of steps that raise RuntimeError.
        fail_pools: ids of steps that return hidden states that are not finite.
        fail_rows: step id -> index of the sample in this step whose logits are not finite.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_rows: int,
        vocab_size: int,
        window_tokens: int | None = None,
        num_window_pages: int = 0,
        num_state_slots: int = 0,
    ) -> None:
        self.fail_steps: set[int] = set()
        self.fail_pools: set[int] = set()
        self.fail_rows: dict[int, int] = {}
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._digests = [0] * (num_pages * page_size)
        self._window_tokens = window_tokens
        self._window_digests = [0] * (num_window_pages * page_size)
        self._states = [0] * num_state_slots
        self._last_tokens = np.zeros(num_rows, dtype=np.int64)

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step.

        Raises:
            RuntimeError: the step is in `fail_steps`.
            InvariantError: a token finds a wrong digest in its window, a segment ends with a wrong state, or the plan
                has no window page table or segments.
        """
        if plan.step_id in self.fail_steps:
            raise RuntimeError("the device is out of memory")
        token_rows = np.repeat(np.arange(len(plan.rows)), plan.query_lens)
        input_ids = plan.input_ids.copy()
        input_ids[plan.device_idx] = self._last_tokens[plan.rows[token_rows[plan.device_idx]]]
        # Tokens are computed in order of position, because another request of this step may write the previous token.
        for t in np.argsort(plan.positions, kind="stable").tolist():
            position = int(plan.positions[t])
            b = int(token_rows[t])
            before = 0 if position == 0 else self._digests[self._slot(plan.page_table, b, position - 1)]
            self._digests[int(plan.out_slots[t])] = _absorb(before, int(input_ids[t]))
        self._attend_to_windows(plan, token_rows)
        self._carry_states(plan, input_ids)
        pooled = tuple([self._pool(plan, span) for span in plan.pool_spans])
        mask = None if plan.token_mask is None else plan.token_mask.wait()
        masks = {} if mask is None else dict(zip(mask.idx, mask.bits, strict=True))
        sampled = [
            _next_token(self._digests[int(plan.out_slots[t])], self._vocab_size, masks.get(i))
            for i, t in enumerate(plan.sample_token_idx.tolist())
        ]
        token_ids = np.array(sampled, dtype=np.int32)
        for i in _counted(plan, sampled):
            self._last_tokens[plan.rows[plan.sample_idx[i]]] = sampled[i]
        bad = self.fail_rows.get(plan.step_id)
        errors = {} if bad is None or bad >= len(sampled) else {bad: "logits are not finite"}
        spans = tuple(_zeros(len(span.targets), span.num_top) for span in plan.prompt_spans)
        return StepResult(token_ids, errors, _zeros(len(sampled), 20), spans, model_s=0.0, pooled=pooled)

    def _pool(self, plan: StepPlan, span: PoolSpan) -> NDArray[np.float32]:
        """Return the sum of the "hidden states" of a span, float32 [2]. float32 represents the sum exactly."""
        slots = plan.out_slots[span.start : span.start + span.num_tokens].tolist()
        pooled: NDArray[np.float32] = np.array([_hidden(self._digests[s]) for s in slots], dtype=np.float32).sum(axis=0)
        return np.full_like(pooled, np.nan) if plan.step_id in self.fail_pools else pooled

    def _attend_to_windows(self, plan: StepPlan, token_rows: NDArray[np.int64]) -> None:
        """Write the step's digests to the window memory, then check the digests in every token's window.

        Raises:
            InvariantError: a token finds a wrong digest in its window, or the plan has no window page table.
        """
        if self._window_tokens is None:
            return
        if plan.window is None:
            raise InvariantError("the plan has no window page table")
        for out_slot, window_slot in zip(plan.out_slots.tolist(), plan.window.out_slots.tolist(), strict=True):
            self._window_digests[window_slot] = self._digests[out_slot]
        for b, position in zip(token_rows.tolist(), plan.positions.tolist(), strict=True):
            for seen in range(max(0, position - self._window_tokens + 1), position + 1):
                expected = self._digests[self._slot(plan.page_table, b, seen)]
                if self._window_digests[self._slot(plan.window.page_table, b, seen)] != expected:
                    raise InvariantError(
                        f"row {plan.rows[b]}: the token at position {position} finds a wrong key for position {seen} "
                        "in its window"
                    )

    def _carry_states(self, plan: StepPlan, input_ids: NDArray[np.int64]) -> None:
        """Compute the states of the segments in order, and check the state after each segment.

        Raises:
            InvariantError: a state is wrong, a token is in no segment or in several, or the plan has no segments.
        """
        if not self._states:
            return
        segments = plan.state
        if segments is None:
            raise InvariantError("the plan has no segments of states")
        covered = np.concatenate([np.arange(s, s + n) for s, n in zip(segments.starts, segments.lens, strict=True)])
        if sorted(covered.tolist()) != list(range(plan.num_tokens)):
            raise InvariantError("a token is in no segment of states, or in several")
        num_decodes = segments.num_decodes
        if len(set(segments.targets.tolist())) < len(segments.targets) or 0 in segments.targets:
            raise InvariantError("a state slot is the target of several segments, or slot 0 is a target")
        if set(segments.targets[:num_decodes].tolist()) & set(segments.sources[num_decodes:].tolist()):
            raise InvariantError("a segment of a chunk reads the state of a decode segment")
        columns = (segments.starts, segments.lens, segments.sources, segments.targets)
        for start, num_tokens, source, target in zip(*(column.tolist() for column in columns), strict=True):
            state = self._states[source]
            for t in range(start, start + num_tokens):
                state = _absorb(state, int(input_ids[t]))
            if state != self._digests[int(plan.out_slots[start + num_tokens - 1])]:
                raise InvariantError(f"the segment of token {start} from slot {source} ends with a wrong state")
            self._states[target] = state

    def _slot(self, page_table: NDArray[np.int32], b: int, position: int) -> int:
        page = int(page_table[b, position // self._page_size])
        return page * self._page_size + position % self._page_size


def _counted(plan: StepPlan, sampled: Sequence[int]) -> list[int]:
    """Return the indices of the samples whose preceding drafts were all accepted, in ascending order."""
    before = plan.input_ids[plan.sample_token_idx].tolist()
    counted: list[int] = []
    for i, b in enumerate(plan.sample_idx.tolist()):
        is_first = i == 0 or plan.sample_idx[i - 1] != b
        if is_first or (counted[-1] == i - 1 and sampled[i - 1] == before[i]):
            counted.append(i)
    return counted


def _zeros(num_tokens: int, num_top: int) -> LogprobTable:
    floats: NDArray[np.float32] = np.zeros((num_tokens, num_top), dtype=np.float32)
    return LogprobTable(np.zeros(num_tokens, dtype=np.float32), floats.astype(np.int32), floats)
