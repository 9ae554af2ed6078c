"""The spans of one HTTP request: the server's span, and spans of its prompts."""

import time
from collections.abc import Callable, Mapping
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode, Tracer, set_span_in_context

from graftlm.outputs import GatheredOutput
from graftlm.processes.generation import PreparedRequest
from graftlm.server.traces.traced_prompt import AttributeValue, TracedPrompt

__all__ = ["RequestSpans"]

#: Maximum number of prompts of one request that get spans. A request for embeddings may have thousands of prompts, and
#: their spans would fill the queue.
_MAX_TRACED_PROMPTS: Final = 32


class RequestSpans:
    """Collects the prompts of an HTTP request, and ends its spans when the answer and all prompts have ended.

    If the request has one prompt, the server's span has the prompt's attributes and phases:

        POST /v1/chat/completions   queue, prefill, decode

    If it has several prompts, each has a span, and the server's span has the sums of their tokens:

        POST /v1/completions        prompt (queue, prefill, decode), prompt (queue, prefill, decode), ...

    Spans are created with the times that the scheduler measured, after the last token of the request.
    A prompt that starts after the end of the answer, such as a background response, has a span in both cases.

    Args:
        span: the server's span, which has begun.
        tracer: creates the other spans.
        model: name of the served model.
        clock_ns: nanoseconds since the epoch.
    """

    def __init__(self, span: Span, tracer: Tracer, model: str, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._span = span
        self._tracer = tracer
        self._model = model
        self._clock_ns = clock_ns
        self._context = set_span_in_context(span, Context())
        self._num_running = 0
        self._num_prompts = 0
        self._ended: list[TracedPrompt] = []
        self._input_tokens = self._cached_tokens = self._output_tokens = 0
        self._failure: str | None = None
        self._answered_ns: int | None = None
        self._is_written = False

    def begin_prompt(self, request: PreparedRequest) -> "_RunningPrompt":
        """Record that a prompt will now be sent to a replica."""
        self._num_running += 1
        self._num_prompts += 1
        return _RunningPrompt(self, request, self._clock_ns())

    def end_answer(self, name: str, attributes: Mapping[str, AttributeValue], failure: str | None) -> None:
        """Record the end of the answer.

        Args:
            name: the final name of the server's span.
            attributes: further attributes of the server's span.
            failure: the kind of error if the answer is an error of the server; None if it is not.
        """
        self._span.update_name(name)
        self._span.set_attributes(attributes)
        self._failure = self._failure or failure
        self._answered_ns = self._clock_ns()
        self._write_if_ended()

    def end_prompt(self, request: PreparedRequest, sent_ns: int, output: GatheredOutput, outcome: str) -> None:
        """Record the end of a prompt."""
        self._num_running -= 1
        prompt = TracedPrompt.of(request, output, outcome, self._model, sent_ns, self._clock_ns())
        if len(self._ended) < _MAX_TRACED_PROMPTS:
            self._ended.append(prompt)
        self._input_tokens += prompt.input_tokens
        self._cached_tokens += prompt.cached_tokens
        self._output_tokens += prompt.output_tokens
        if prompt.failure is not None and self._failure in (None, "abort"):
            self._failure = prompt.failure  # if one prompt fails, the others are aborted
        self._write_if_ended()

    def cancel_prompt(self) -> None:
        """Forget a prompt that could not be sent."""
        self._num_running -= 1
        self._num_prompts -= 1
        self._write_if_ended()

    def _write_if_ended(self) -> None:
        if self._answered_ns is None or self._num_running:
            return
        prompts, self._ended = self._ended, []
        if self._is_written:
            for prompt in prompts:
                self._write_prompt(prompt)
            return
        self._is_written = True
        if self._num_prompts == 1:
            self._span.set_attributes(prompts[0].attributes())
            self._write_phases(prompts[0], self._context)
        elif self._num_prompts:
            self._span.set_attributes(
                {
                    "gen_ai.usage.input_tokens": self._input_tokens,
                    "gen_ai.usage.output_tokens": self._output_tokens,
                    "gen_ai.usage.cache_read.input_tokens": self._cached_tokens,
                    "graftlm.prompts": self._num_prompts,
                }
            )
            for prompt in prompts:
                self._write_prompt(prompt)
        if prompts:
            self._span.set_attributes(_model_attributes(prompts[0]))
        _mark(self._span, self._failure)
        self._span.end(self._answered_ns)

    def _write_prompt(self, prompt: TracedPrompt) -> None:
        span = self._tracer.start_span("prompt", self._context, start_time=prompt.sent_ns)
        span.set_attributes(_model_attributes(prompt))
        span.set_attributes(prompt.attributes())
        self._write_phases(prompt, set_span_in_context(span, Context()))
        _mark(span, prompt.failure)
        span.end(prompt.end_ns)

    def _write_phases(self, prompt: TracedPrompt, context: Context) -> None:
        for phase in prompt.phases():
            self._tracer.start_span(phase.name, context, start_time=phase.begin_ns).end(phase.end_ns)


class _RunningPrompt:
    """A prompt that has not ended."""

    def __init__(self, spans: RequestSpans, request: PreparedRequest, sent_ns: int) -> None:
        self._spans = spans
        self._request = request
        self._sent_ns = sent_ns

    def end(self, output: GatheredOutput, outcome: str) -> None:
        self._spans.end_prompt(self._request, self._sent_ns, output, outcome)

    def cancel(self) -> None:
        self._spans.cancel_prompt()


def _model_attributes(prompt: TracedPrompt) -> dict[str, AttributeValue]:
    return {
        "gen_ai.provider.name": "graftlm",
        "gen_ai.request.model": prompt.model,
        "gen_ai.response.model": prompt.model,
    }


def _mark(span: Span, failure: str | None) -> None:
    """Mark a span as failed, unless `failure` is None."""
    if failure is not None:
        span.set_attribute("error.type", failure)
        span.set_status(Status(StatusCode.ERROR, failure))
