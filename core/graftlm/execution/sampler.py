"""The sampler: selects the next token of each row from its logits."""

from typing import Final, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftlm.errors import RequestError
from graftlm.execution.batch import to_device
from graftlm.execution.device_rows import put_rows, take_rows
from graftlm.execution.draft_samples import DraftSamples
from graftlm.execution.logprobs import TokenLogprobs, padded_ids, token_logprobs
from graftlm.execution.native_masks import NativeMasks
from graftlm.execution.native_sampling import DrawSettings, NativeSampling
from graftlm.execution.noise import exponential, noise_keys
from graftlm.execution.penalties import Penalties
from graftlm.execution.row_processors import MakeProcessor, RowProcessors
from graftlm.execution.sampling_filters import keep_min_p, keep_top_k, keep_top_p
from graftlm.execution.token_edits import TokenEdits
from graftlm.execution.token_masks import forbid
from graftlm.execution.vocab_blocks import draw, most_likely, num_noise
from graftlm.plan import RowSetup, TokenMask
from graftlm.sampling_params import SamplingParams

__all__ = ["NOT_FINITE", "Sampled", "Sampler", "TokenSampler"]

#: Error of a request whose sample is True in `Sampled.failed`.
NOT_FINITE: Final = "logits are not finite"

#: Minimum temperature. With a smaller one, logit / temperature could exceed the range of float32.
_MIN_TEMPERATURE: Final = 1e-6


class Sampled(msgspec.Struct, frozen=True, eq=False):
    """The sampler's result, S samples. The tensors are on the device and may not be computed yet.

    Attributes:
        token_ids: int64 [S], sampled tokens; below V even if sampling failed.
        failed: bool [S], samples whose logits contain NaN or +inf, or no finite number.
        processor_errors: sample index -> error of the sample's logits processors; on the host.
        logprobs: log-probabilities; None if no row returns log-probabilities. They are 0 in rows that return none.
        counted: bool [S], samples whose preceding drafts were all accepted; None without drafts.
    """

    token_ids: Tensor
    failed: Tensor
    processor_errors: dict[int, str]
    logprobs: TokenLogprobs | None
    counted: Tensor | None = None


class TokenSampler(Protocol):
    """Samples tokens for the runner; see `Sampler`."""

    def set_row(self, setup: RowSetup) -> None:
        """Set a row's request."""
        ...

    def sample(
        self,
        logits: Tensor,
        rows: NDArray[np.int32],
        positions: NDArray[np.int64],
        token_mask: TokenMask | None = None,
        drafts: DraftSamples | None = None,
    ) -> Sampled:
        """Sample S tokens."""
        ...


class Sampler:
    """Samples each row with the parameters of its request.

    The parameters are on the host, so each stage runs only for the rows that need it. Only logits processors wait for
    the device. If all rows are greedy, sampling is one pass over the logits.

    A sampled token depends on its logits, its row's parameters and seed, its position and the tokens before it. It does
    not depend on other requests in the batch. A token after drafts is the token that would be sampled if the drafts
    were output.

    Args:
        num_rows: R, number of rows of the request table.
        vocab_size: V.
        device: device of the logits.
        make_processor: function that creates logits processors.
        native_masks: kernel that applies masks on a CPU; None: numpy applies them.
        native_sampling: kernel that samples on a CPU; None: torch samples.
    """

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        device: torch.device,
        make_processor: MakeProcessor,
        native_masks: NativeMasks | None = None,
        native_sampling: NativeSampling | None = None,
    ) -> None:
        self._device = device
        self._native_masks = native_masks
        self._native_sampling = native_sampling
        self._penalties = Penalties(num_rows, vocab_size, device)
        self._token_edits = TokenEdits(num_rows, vocab_size, device)
        self._processors = RowProcessors(num_rows, vocab_size, make_processor)
        self._failures: dict[int, str] = {}  # row -> error before or during sampling
        self._greedy = np.ones(num_rows, dtype=np.bool_)
        self._temperature = np.ones(num_rows, dtype=np.float64)
        self._top_k = np.full(num_rows, vocab_size, dtype=np.int64)
        self._top_p = np.ones(num_rows, dtype=np.float64)
        self._min_p = np.zeros(num_rows, dtype=np.float64)
        self._seed = np.zeros(num_rows, dtype=np.uint64)
        self._returns_logprobs = np.zeros(num_rows, dtype=np.bool_)
        self._num_top = np.zeros(num_rows, dtype=np.int64)
        self._masks_logprobs = np.zeros(num_rows, dtype=np.bool_)
        self._logprob_ids: dict[int, tuple[int, ...]] = {}  # row -> tokens whose log-probabilities it reports
        self._needs_full_sampling = np.zeros(num_rows, dtype=np.bool_)  # whether a row may need more than argmax
        self._argmax_rows: NDArray[np.int32] | None = None  # latest `rows` that needed only argmax; `set_row` resets it

    def set_row(self, setup: RowSetup) -> None:
        """Set a row's request.

        If the creation of a logits processor fails, the request fails at its next sample.
        """
        row, params = setup.row, setup.params
        self._argmax_rows = None
        self._greedy[row] = params.is_greedy
        self._temperature[row] = max(params.temperature, _MIN_TEMPERATURE)
        self._top_k[row] = np.iinfo(np.int64).max if params.top_k is None else params.top_k
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seed[row] = setup.seed
        self._returns_logprobs[row] = params.logprobs is not None
        self._num_top[row] = params.logprobs or 0
        self._masks_logprobs[row] = params.masked_logprobs and params.logprobs is not None
        self._logprob_ids.pop(row, None)
        if params.logprob_token_ids and params.logprobs is not None:
            self._logprob_ids[row] = tuple(params.logprob_token_ids)
        self._needs_full_sampling[row] = _needs_full_sampling(params)
        self._penalties.set_row(setup)
        self._failures.pop(row, None)
        try:
            self._processors.set_row(setup)
            self._token_edits.set_row(setup)
        except RequestError as error:
            self._failures[row] = str(error)

    def sample(
        self,
        logits: Tensor,
        rows: NDArray[np.int32],
        positions: NDArray[np.int64],
        token_mask: TokenMask | None = None,
        drafts: DraftSamples | None = None,
    ) -> Sampled:
        """Sample S tokens.

        Args:
            logits: [S, V], any floating dtype; not changed.
            rows: int32 [S], the row of each sample; unique, except for rows with drafts.
            positions: int64 [S], positions of the sampled tokens.
            token_mask: allowed tokens of some samples; it has precedence over all other parameters.
            drafts: the drafts of rows with drafts; None: no row has drafts.

        Effects: adds each token that counts to its row's penalty counts and to the output of its row's processors.
        """
        token_ids, failed = self._most_likely(logits)
        if token_mask is None and self._are_argmax_only(rows):
            return Sampled(token_ids, failed, {}, None, None if drafts is None else drafts.counted(token_ids))
        at = rows.astype(np.int64)
        edited = self._edited(at, positions)
        edited_by_params = edited.copy()
        if token_mask is not None:
            edited[token_mask.idx] = True
        worked = np.flatnonzero(edited | ~self._greedy[at])
        errors: dict[int, str] = {}
        if edited.any():
            scores = _own_floats(logits, worked)
            errors = self._edit(scores, worked, at, positions, drafts)
            if token_mask is not None:
                unedited = take_rows(logits, token_mask.idx) if edited_by_params[token_mask.idx].any() else None
                masked = np.searchsorted(worked, token_mask.idx)
                forbid(scores, masked, token_mask.bits, fallback=unedited, native=self._native_masks)
            self._penalties.apply(scores, at[worked], positions[worked], *_prefixes(drafts, worked))
            ids, not_finite = self._most_likely(scores)
            drawn = np.flatnonzero(~self._greedy[at[worked]])
            if len(drawn):
                ids = put_rows(ids, drawn, self._draw(scores, drawn, at[worked[drawn]], positions[worked[drawn]]))
            token_ids = put_rows(token_ids, worked, ids)
            failed = put_rows(failed, worked, take_rows(failed, worked) | not_finite)
        elif len(worked):
            token_ids = put_rows(token_ids, worked, self._draw(logits, worked, at[worked], positions[worked]))
        counted = None if drafts is None else drafts.counted(token_ids)
        self._penalties.count(at, positions, token_ids, counted)
        self._processors.record(at, token_ids, counted)
        errors |= {i: self._failures[row] for i, row in enumerate(at.tolist()) if row in self._failures}
        return Sampled(token_ids, failed, errors, self._logprobs(logits, at, token_ids, token_mask), counted)

    def _are_argmax_only(self, rows: NDArray[np.int32]) -> bool:
        """Return whether all rows need only the argmax. The latest array for which this is true is cached."""
        if rows is self._argmax_rows:
            return True
        if self._failures or self._needs_full_sampling[rows].any():
            return False
        self._argmax_rows = rows
        return True

    def _edited(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which samples have edited logits, bool [S]."""
        by_tokens = self._token_edits.active(rows, positions)
        return by_tokens | self._processors.active(rows) | self._penalties.active(rows)

    def _edit(
        self,
        scores: Tensor,
        worked: NDArray[np.int64],
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        drafts: DraftSamples | None,
    ) -> dict[int, str]:
        """Apply logits processors, biases and min_tokens to logits, float32 [n, V], in place; masks are applied later.

        Args:
            worked: int64 [n], sample index of each row of `scores`.
            rows, positions: int64 [S], row and position of each sample.

        Returns: sample index -> error of a sample after drafts. The request fails with this error only if the sample
            counts.
        """
        errors: dict[int, str] = {}
        drafted = {} if drafts is None else {i: drafts.prefix(i) for i in worked.tolist() if drafts.depths[i]}
        for i, error in self._processors.apply(scores, worked, rows, drafted).items():
            if i in drafted:
                errors[i] = error
            else:
                self._failures[int(rows[i])] = error
        self._token_edits.apply(scores, rows[worked], positions[worked])
        return errors

    def _most_likely(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        native = self._native_sampling
        return most_likely(logits) if native is None or not native.takes(logits) else native.most_likely(logits)

    def _draw(
        self, logits: Tensor, idx: NDArray[np.int64], rows: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> Tensor:
        """Draw tokens, int64 [m], from the rows `idx` of logits, [n, V]. The logits are not changed."""
        keys = noise_keys(self._seed[rows], positions)
        top_k, top_p, min_p = self._top_k[rows], self._top_p[rows], self._min_p[rows]
        native = self._native_sampling
        if native is not None and native.takes(logits):
            return native.draw(logits, idx, DrawSettings(self._temperature[rows], top_k, top_p, min_p, keys))
        temperature = to_device(self._temperature[rows], self._device)
        kept = keep_top_k(take_rows(logits, idx).float(), top_k)
        probs = torch.softmax(kept / temperature.float()[:, None], dim=1)
        probs = keep_min_p(keep_top_p(probs, top_p), min_p)
        noise = exponential(to_device(keys, self._device), num_noise(probs.shape[1]))
        return draw(probs, noise)

    def _logprobs(
        self, logits: Tensor, rows: NDArray[np.int64], token_ids: Tensor, token_mask: TokenMask | None
    ) -> TokenLogprobs | None:
        local = np.flatnonzero(self._returns_logprobs[rows])
        if len(local) == 0:
            return None
        num_top = int(self._num_top[rows[local]].max())
        requested = self._requested(rows[local]) if self._logprob_ids else None
        scores = take_rows(logits, local)
        if token_mask is not None and (masked := self._masks_logprobs[rows[token_mask.idx]]).any():
            scores = scores.to(torch.float32, copy=True)
            at = np.searchsorted(local, token_mask.idx[masked])
            forbid(scores, at, token_mask.bits[masked], native=self._native_masks)
        found = token_logprobs(scores, take_rows(token_ids, local), num_top, requested)
        return found.each(lambda part: put_rows(part.new_zeros(len(rows), *part.shape[1:]), local, part))

    def _requested(self, rows: NDArray[np.int64]) -> Tensor | None:
        """Return the tokens whose log-probabilities rows report, int64 [n, m]; None if no row names tokens."""
        ids = padded_ids([self._logprob_ids.get(row, ()) for row in rows.tolist()])
        return None if ids is None else to_device(ids, self._device)


def _needs_full_sampling(params: SamplingParams) -> bool:
    """Return whether a request may need more than the argmax of the model's logits."""
    has_edits = params.has_penalties or bool(params.logit_bias) or bool(params.logits_processors)
    return not params.is_greedy or has_edits or params.min_tokens > 0 or params.logprobs is not None


def _own_floats(logits: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """Return rows of logits as a float32 copy, which the caller may change."""
    scores = take_rows(logits, rows).float()
    return scores.clone() if scores is logits else scores


def _prefixes(drafts: DraftSamples | None, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
    """Return a tuple of the drafts before samples, int64 [n, k], padded with -1; an empty tuple without drafts."""
    if drafts is None or not drafts.depths[samples].any():
        return ()
    depths = drafts.depths[samples]
    places = np.arange(int(depths.max()))
    at = np.minimum(drafts.firsts[samples, None] + 1 + places, len(drafts.before) - 1)
    return (np.where(places < depths[:, None], drafts.before[at], -1),)
