"""Runs the steps of plans on the device, and returns sampled tokens."""

from dataclasses import replace

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftlm.contracts import AttentionBackend, DraftHeadBatch, Model
from graftlm.errors import InvariantError
from graftlm.execution.adapter_layers import AdapterLayers
from graftlm.execution.batch import BatchBuilder, to_device
from graftlm.execution.block_mover import BlockMover
from graftlm.execution.draft_samples import DraftSamples
from graftlm.execution.generation import LaunchedTokens
from graftlm.execution.graphs import ReplayedSteps
from graftlm.execution.head_steps import HeadSteps
from graftlm.execution.hidden_capture import HiddenCapture
from graftlm.execution.logprobs import TokenLogprobs, padded_ids, token_logprobs
from graftlm.execution.media_features import MediaFeatures
from graftlm.execution.readback import Readback, readback_from
from graftlm.execution.readouts import read_out
from graftlm.execution.sampler import NOT_FINITE, Sampled, TokenSampler
from graftlm.execution.streams import DeviceStreams, streams_of
from graftlm.plan import LogprobTable, MediaResult, PoolSpan, PromptLogprobSpan, StepPlan, StepResult

__all__ = ["LaunchedStep", "ModelRunner"]

_NO_TOKENS = np.empty(0, dtype=np.int32)


class _SampledOnHost(msgspec.Struct, frozen=True, eq=False):
    """The sampler's result in host tensors, which are filled when the readback's `wait` has returned."""

    token_ids: Tensor
    failed: Tensor
    processor_errors: dict[int, str]
    logprobs: TokenLogprobs | None

    def errors(self) -> dict[int, str]:
        (failed,) = self.failed.numpy().nonzero()
        if not len(failed):
            return self.processor_errors
        return dict.fromkeys(failed.tolist(), NOT_FINITE) | self.processor_errors


class LaunchedStep(msgspec.Struct, frozen=True, eq=False):
    """A step that was launched on the device. Its host tensors are filled when the readback's `wait` has returned.

    Attributes:
        sampled: the samples; None if no request samples.
        prompt_logprobs: log-probabilities of the tokens of all prompt spans, concatenated; None without spans.
        span_lens: number of tokens of each span.
        pooled: float32, one vector per pooling span.
        media: the features of pictures that were computed; None without media work.
    """

    readback: Readback
    sampled: _SampledOnHost | None
    prompt_logprobs: TokenLogprobs | None
    span_lens: tuple[int, ...]
    pooled: tuple[Tensor, ...]
    media: MediaResult | None = None

    def result(self) -> StepResult:
        """Wait for the device, and return the step's result. Any thread may call this method, once."""
        model_s = self.readback.wait()
        sampled = self.sampled
        return StepResult(
            token_ids=_NO_TOKENS if sampled is None else sampled.token_ids.numpy(),
            errors={} if sampled is None else sampled.errors(),
            logprobs=None if sampled is None or sampled.logprobs is None else _table(sampled.logprobs),
            prompt_logprobs=() if self.prompt_logprobs is None else _split(self.prompt_logprobs, self.span_lens),
            pooled=tuple([vector.numpy() for vector in self.pooled]),
            model_s=model_s,
            media=self.media,
        )


class ModelRunner:
    """Runs plans in order, one at a time. Always the same thread calls it.

    The latest token of every row stays on the device, so the next step can read it before the host has its value. On a
    GPU, steps run in a separate stream. `launch` does not wait for this stream, except if the step has a row with
    logits processors, which run on the host, or has copies.

    Args:
        graphs: replays the steps that it supports; None: the model runs all steps.
        adapters: sets the adapters of the requests; None: requests cannot have adapters.
        streams: streams of the device; None: torch's streams on a GPU, no streams on a CPU.
        head: the draft head, and the forward pass that returns the hidden states that it reads; None: no head.
        media: computes and stores the features of pictures; None: requests cannot have pictures.
    """

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        sampler: TokenSampler,
        num_rows: int,
        device: torch.device,
        mover: BlockMover | None = None,
        graphs: ReplayedSteps | None = None,
        adapters: AdapterLayers | None = None,
        streams: DeviceStreams | None = None,
        head: tuple[HeadSteps, HiddenCapture] | None = None,
        media: MediaFeatures | None = None,
    ) -> None:
        self._head: HeadSteps | None = None if head is None else head[0]
        self._capture: HiddenCapture | None = None if head is None else head[1]
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._device = device
        self._mover = mover
        self._graphs = graphs
        self._adapters = adapters
        self._media = media
        self._streams = streams_of(device) if streams is None else streams
        self._stream = None if self._streams is None else self._streams.stream()
        if graphs is None:
            self._last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        else:
            self._last_tokens = graphs.last_tokens
        self._batches = BatchBuilder(self._last_tokens)
        self._inference_mode = torch.inference_mode()  # reused, because steps enter it one at a time

    def run(self, plan: StepPlan) -> StepResult:
        """Run a step with its copies, and wait for its result."""
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch a step with its copies on the device. `LaunchedStep.result` waits for its result."""
        with self._inference_mode:
            if self._streams is None or self._stream is None:
                return self._launch_with_copies(plan)
            # Let work that the caller launched before, such as loading weights, finish before the step.
            self._stream.wait_stream(self._streams.current())
            with self._streams.use(self._stream):
                return self._launch_with_copies(plan)

    def draft(self, batch: DraftHeadBatch, page_table: NDArray[np.int32]) -> LaunchedTokens:
        """Launch the drafting of the draft head after the latest step; see `HeadSteps.draft`.

        Raises:
            InvariantError: there is no draft head.
        """
        if self._head is None:
            raise InvariantError("the engine has no draft head")
        with self._inference_mode:
            if self._streams is None or self._stream is None:
                return self._head.draft(batch, page_table).launch_copy(readback_from(None))
            with self._streams.use(self._stream):
                readback = readback_from(self._streams)
                return self._head.draft(batch, page_table).launch_copy(readback)

    def _launch_with_copies(self, plan: StepPlan) -> LaunchedStep:
        if self._mover is None or plan.copies is None:
            return self._launch(plan)
        with self._mover.overlapped(plan.copies):
            return self._launch(plan)

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        readback = readback_from(self._streams)
        media = None
        if plan.media_work is not None and self._media is not None:
            media = self._media.work(plan.media_work)
            if not plan.num_tokens:
                readback.close()
                return LaunchedStep(readback, None, None, (), (), media)
        for setup in plan.setups:
            self._sampler.set_row(setup)
        states, is_selected = self._forward(plan)
        hidden = states if self._capture is None else self._capture.final(states)
        sampled, drafts = None, DraftSamples.of(plan)
        if len(plan.sample_idx):
            sampled = self._sample(plan, hidden if is_selected else _last_of_each(plan, hidden, self._device), drafts)
        if self._head is not None:
            self._observe(self._head, plan, states, sampled, drafts)
        launched = LaunchedStep(
            readback,
            sampled=None if sampled is None else _fetch_sampled(sampled, readback),
            prompt_logprobs=self._prompt_logprobs(plan.prompt_spans, hidden, readback) if plan.prompt_spans else None,
            span_lens=tuple([len(span.targets) for span in plan.prompt_spans]),
            pooled=self._pooled(plan.pool_spans, hidden, readback) if plan.pool_spans else (),
            media=media,
        )
        readback.close()
        return launched

    def _forward(self, plan: StepPlan) -> tuple[Tensor, bool]:
        """Return hidden states, and whether they are only those of the sampled tokens."""
        if self._adapters is not None:
            self._adapters.route(plan)
        hidden = None if self._graphs is None or not _is_replayable(plan) else self._graphs.replay(plan)
        if hidden is not None:
            return hidden, False
        # With adapters, each layer must compute all tokens of the step, because the route has an adapter per token.
        # A draft head reads the hidden states of all tokens.
        may_select = self._model.selects_tokens and self._adapters is None and self._capture is None
        reads_all = len(plan.sample_idx) == plan.num_tokens or plan.prompt_spans or plan.pool_spans
        is_selected = may_select and not reads_all
        batch = self._batches.build(plan, selects_tokens=is_selected)
        if plan.feature_spans and self._media is not None:
            features, feature_idx = self._media.rows(plan.feature_spans)
            batch = replace(batch, features=features, feature_idx=feature_idx)
        self._attention.prepare(batch)
        forward = self._model.forward if self._capture is None else self._capture.forward
        return forward(batch), is_selected

    def _observe(
        self, head: HeadSteps, plan: StepPlan, states: Tensor, sampled: Sampled | None, drafts: DraftSamples | None
    ) -> None:
        """Write the keys and values of the draft head for a step's tokens."""
        head.start_rows(plan)
        if sampled is None:
            head.observe(plan, states, None, None, None)
        else:
            head.observe(plan, states, sampled.token_ids, drafts, sampled.counted)

    def _sample(self, plan: StepPlan, hidden: Tensor, drafts: DraftSamples | None) -> Sampled:
        logits = self._model.logits(hidden)
        samples_all = drafts is None and len(plan.sample_idx) == len(plan.rows)
        rows = plan.rows if samples_all else plan.rows[plan.sample_idx]
        token_mask = None if plan.token_mask is None else plan.token_mask.wait()
        sampled = self._sampler.sample(logits, rows, plan.sample_positions, token_mask, drafts)
        if drafts is None or sampled.counted is None:
            self._last_tokens.index_copy_(0, self._batches.rows_on_device(rows), sampled.token_ids)
        else:
            latest = drafts.latest(sampled.token_ids, sampled.counted)
            self._last_tokens.index_copy_(0, self._batches.rows_on_device(rows[drafts.lasts]), latest)
        return sampled

    def _prompt_logprobs(
        self, spans: tuple[PromptLogprobSpan, ...], hidden: Tensor, readback: Readback
    ) -> TokenLogprobs:
        """Compute the log-probabilities of all prompt spans in one call, and start their copy to the host."""
        idx = np.concatenate([np.arange(span.start, span.start + len(span.targets)) for span in spans])
        targets = np.concatenate([span.targets for span in spans])
        logits = self._model.logits(hidden[to_device(idx, self._device)])
        num_top = max(span.num_top for span in spans)
        ids = padded_ids([span.requested for span in spans])
        requested = None
        if ids is not None:
            requested = to_device(np.repeat(ids, [len(span.targets) for span in spans], axis=0), self._device)
        return _fetch(token_logprobs(logits, to_device(targets, self._device), num_top, requested), readback)

    def _pooled(self, spans: tuple[PoolSpan, ...], hidden: Tensor, readback: Readback) -> tuple[Tensor, ...]:
        """Compute the vectors of all pooling spans, and start one copy of them to the host."""
        vectors = read_out(self._model, spans, hidden)
        together = readback.fetch(torch.cat(vectors))
        ends = np.cumsum([len(vector) for vector in vectors]).tolist()
        return tuple([together[end - len(vector) : end] for vector, end in zip(vectors, ends, strict=True)])


def _is_replayable(plan: StepPlan) -> bool:
    """Return whether a step has no features and no positions of three axes, which replayed steps do not read."""
    return not plan.feature_spans and (plan.rope_positions is None or plan.rope_positions.ndim == 1)


def _last_of_each(plan: StepPlan, hidden: Tensor, device: torch.device) -> Tensor:
    """Return the hidden states of the sampled tokens, [S, hidden]."""
    if len(plan.sample_idx) == plan.num_tokens:
        return hidden
    return hidden.index_select(0, to_device(plan.sample_token_idx, device))


def _fetch_sampled(sampled: Sampled, readback: Readback) -> _SampledOnHost:
    return _SampledOnHost(
        readback.fetch(sampled.token_ids),
        readback.fetch(sampled.failed),
        sampled.processor_errors,
        None if sampled.logprobs is None else _fetch(sampled.logprobs, readback),
    )


def _fetch(found: TokenLogprobs, readback: Readback) -> TokenLogprobs:
    return found._replace(top_ids=found.top_ids.to(torch.int32)).each(readback.fetch)


def _table(found: TokenLogprobs) -> LogprobTable:
    requested = None if found.requested is None else found.requested.numpy()
    return LogprobTable(found.token_logprobs.numpy(), found.top_ids.numpy(), found.top_logprobs.numpy(), requested)


def _split(found: TokenLogprobs, lens: tuple[int, ...]) -> tuple[LogprobTable, ...]:
    table = _table(found)
    ends = np.cumsum(lens).tolist()
    return tuple([table.rows(end - n, end) for n, end in zip(lens, ends, strict=True)])
