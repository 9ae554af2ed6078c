"""A prompt that has ended, as attributes and phases of a span."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from graftlm.outputs import GatheredOutput
from graftlm.processes.generation import PreparedRequest
from graftlm.types import SamplingParams, Timings

__all__ = ["AttributeValue", "Phase", "TracedPrompt"]

AttributeValue: TypeAlias = str | bool | int | float | list[str]

#: Outcomes of prompts that are not errors.
_SUCCESSES: Final = frozenset({"stop", "length"})


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a prompt's time, in nanoseconds since the epoch."""

    name: str
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class TracedPrompt:
    """A prompt that has ended, without its text and tokens.

    Attributes:
        is_pooled: whether the prompt's vector was computed instead of tokens.
        model: name of the adapter, or else of the model.
        sent_ns: time immediately before the prompt was sent to a replica, in nanoseconds since the epoch.
        end_ns: time at which its last output arrived, on the same clock.
        outcome: as in `RequestMetrics.finished`.
    """

    request_id: str
    params: SamplingParams
    is_pooled: bool
    model: str
    sent_ns: int
    end_ns: int
    timings: Timings
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    finish_reasons: list[str]
    outcome: str

    @classmethod
    def of(
        cls, request: PreparedRequest, output: GatheredOutput, outcome: str, model: str, sent_ns: int, end_ns: int
    ) -> "TracedPrompt":
        """Copy what spans contain, so that the request and its output can be freed."""
        usage = output.usage
        return cls(
            request_id=request.request_id,
            params=request.params,
            is_pooled=request.options.pooling is not None,
            model=request.options.adapter or model,
            sent_ns=sent_ns,
            end_ns=end_ns,
            timings=output.timings,
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            finish_reasons=[str(it.finish_reason or "error") for it in output.completions],
            outcome=outcome,
        )

    @property
    def failure(self) -> str | None:
        """The outcome if the prompt failed or was aborted, else None."""
        return None if self.outcome in _SUCCESSES else self.outcome

    def phases(self) -> Iterator[Phase]:
        """Yield the phases that the prompt reached. The last one ends with the prompt.

        The scheduler measures its times from the prompt's arrival there, shortly after `sent_ns`.
        """
        timings = self.timings
        end_ns = self._after(timings.total_s, self.end_ns)
        admitted_ns = self._after(timings.queue_s, end_ns)
        yield Phase("queue", self.sent_ns, admitted_ns)
        if timings.queue_s is not None:
            first_token_ns = self._after(timings.first_token_s, end_ns)
            yield Phase("prefill", admitted_ns, first_token_ns)
            if timings.first_token_s is not None:
                yield Phase("decode", first_token_ns, end_ns)

    def attributes(self) -> dict[str, AttributeValue]:
        """Return the attributes of the span, with names of OpenTelemetry's conventions for generative models."""
        found: dict[str, AttributeValue] = {
            "gen_ai.response.id": self.request_id,
            "gen_ai.usage.input_tokens": self.input_tokens,
            "gen_ai.usage.cache_read.input_tokens": self.cached_tokens,
        }
        if not self.is_pooled:
            found |= self._sampling_attributes()
            found["gen_ai.usage.output_tokens"] = self.output_tokens
            found["gen_ai.response.finish_reasons"] = self.finish_reasons
        return found | self._latencies()

    def _after(self, seconds: float | None, otherwise_ns: int) -> int:
        """Return the time `seconds` after the prompt was sent; `otherwise_ns` if `seconds` is None."""
        return otherwise_ns if seconds is None else self.sent_ns + round(seconds * 1e9)

    def _sampling_attributes(self) -> dict[str, AttributeValue]:
        params = self.params
        optional: dict[str, AttributeValue | None] = {
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.request.seed": params.seed,
            "gen_ai.request.choice.count": params.n if params.n > 1 else None,
            "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
            "gen_ai.request.presence_penalty": params.presence_penalty or None,
        }
        return {
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
        } | {name: value for name, value in optional.items() if value is not None}

    def _latencies(self) -> dict[str, AttributeValue]:
        """Return the durations in seconds, with the names of vLLM's attributes."""
        queue_s, first_s, total_s = self.timings.queue_s, self.timings.first_token_s, self.timings.total_s
        found = {
            "time_in_queue": queue_s,
            "time_to_first_token": first_s,
            "e2e": total_s,
            "time_in_model_prefill": _difference(first_s, queue_s),
            "time_in_model_decode": _difference(total_s, first_s),
            "time_in_model_inference": _difference(total_s, queue_s),
        }
        return {f"gen_ai.latency.{name}": value for name, value in found.items() if value is not None}


def _difference(end_s: float | None, begin_s: float | None) -> float | None:
    return None if end_s is None or begin_s is None else end_s - begin_s
