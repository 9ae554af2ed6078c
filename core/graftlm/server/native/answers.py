"""Conversion of a prompt's output into answers of /generate, with SGLang's field names."""

import math
from collections.abc import Callable
from typing import Any

from graftlm.errors import RequestError
from graftlm.outputs import GatheredOutput
from graftlm.processes.generation import PreparedRequest
from graftlm.server.native.prompts import NativePrompt
from graftlm.types import Completion, FinishReason, TokenLogprob

__all__ = ["AnswerWriter"]

#: [log-probability or null, token id, text or null]
_Entry = list[Any]


class AnswerWriter:
    """Writes the answers of one prompt. Each answer contains everything that was generated so far."""

    def __init__(
        self,
        prompt: NativePrompt,
        request: PreparedRequest,
        seconds: Callable[[], float],
        token_text: Callable[[int], str] | None,
    ) -> None:
        """Initialize the writer.

        Args:
            seconds: returns the seconds since the request arrived.
            token_text: returns the text of a token, for log-probabilities; None leaves the texts out.

        Raises:
            RequestError: `logprob_start_len` is larger than the prompt's length.
        """
        prompt_len = len(request.prompt_token_ids)
        if prompt.logprob_start is not None and prompt.logprob_start > prompt_len:
            start = prompt.logprob_start
            raise RequestError(
                f"logprob_start_len must be at most the number of prompt tokens, {prompt_len}; got {start}"
            )
        self._prompt = prompt
        self._request = request
        self._seconds = seconds
        self._token_text = token_text
        self._input: dict[str, Any] | None = None
        self._token_ids = tuple(prompt.params.logprob_token_ids)
        self._outputs = [_OutputLogprobs(self._entry, self._token_ids) for _ in range(prompt.params.n)]

    @property
    def has_token_texts(self) -> bool:
        """Whether the answers contain the text of each token."""
        return self._token_text is not None

    def answers(self, output: GatheredOutput, weight_version: str = "default") -> list[dict[str, Any]]:
        """Return the answers of all completions. `answer` describes the arguments."""
        return [self.answer(output, index, weight_version) for index in range(len(output.completions))]

    def answer(self, output: GatheredOutput, index: int, weight_version: str = "default") -> dict[str, Any]:
        """Return one completion's answer.

        Args:
            output: everything that was generated so far for the prompt.
            index: index of the completion.
            weight_version: name of the weights at the start of the request.
        """
        completion = output.completions[index]
        hides_output = self._prompt.prompt_only
        token_ids = () if hides_output else completion.token_ids
        meta: dict[str, Any] = {
            "id": self._request.request_id,
            "finish_reason": _finish_reason(completion, None if hides_output else len(token_ids)),
            "prompt_tokens": output.usage.prompt_tokens,
            "completion_tokens": len(token_ids),
            "cached_tokens": output.usage.cached_tokens,
            "cached_tokens_details": output.usage.cached_tokens_by_tier,
            "jump_forward_tokens": completion.jump_forward_tokens,
            "drafted_tokens": completion.drafted_tokens,
            "accepted_draft_tokens": completion.accepted_draft_tokens,
            "weight_version": weight_version,
        }
        if self._request.unenforced:
            meta["unenforced"] = self._request.unenforced
        if completion.finish_reason is not None:
            meta["e2e_latency"] = self._seconds()
        if completion.logprobs is not None:
            meta |= self._input_logprobs(output)
            # If the client requests no output, these are still the log-probabilities of the first generated token.
            meta |= self._outputs[index].write(completion.logprobs, self._num_top)
        return {"text": "" if hides_output else completion.text, "output_ids": token_ids, "meta_info": meta}

    @property
    def _num_top(self) -> int:
        return self._prompt.params.logprobs or 0

    def _input_logprobs(self, output: GatheredOutput) -> dict[str, Any]:
        """Return the fields with the prompt's log-probabilities, which are complete at the first generated token."""
        if self._input is None:
            start = self._prompt.logprob_start
            ids = () if start is None else self._request.prompt_token_ids[start:].tolist()
            # The first entry has no log-probability, even if it is not the prompt's first token, because SGLang's
            # clients expect this. After an abort, the last entries may be missing.
            known = list(zip(ids, (output.prompt_logprobs or ())[start:], strict=False))
            self._input = {
                "input_token_logprobs": [
                    self._entry(token_id, None if logprob is None else logprob.logprob) for token_id, logprob in known
                ]
            }
            if self._num_top:
                self._input["input_top_logprobs"] = [
                    None if logprob is None else [self._entry(*pair) for pair in logprob.top] for _, logprob in known
                ]
            if self._token_ids:
                self._input["input_token_ids_logprobs"] = [
                    None if logprob is None else _requested(logprob, self._token_ids, self._entry)
                    for _, logprob in known
                ]
        return self._input

    def _entry(self, token_id: int, logprob: float | None) -> _Entry:
        return [logprob, token_id, None if self._token_text is None else self._token_text(token_id)]


class _OutputLogprobs:
    """The log-probabilities of one completion. Every answer contains all of them, but each is converted only once."""

    def __init__(self, entry: Callable[[int, float | None], _Entry], token_ids: tuple[int, ...]) -> None:
        self._entry = entry
        self._token_ids = token_ids
        self._requested: list[list[_Entry]] = []
        self._sampled: list[_Entry] = []
        self._top: list[list[_Entry]] = []

    def write(self, logprobs: tuple[TokenLogprob, ...], num_top: int) -> dict[str, Any]:
        """Return the fields of an answer.

        Args:
            logprobs: log-probabilities of all tokens so far. Only those added since the last call are converted.
            num_top: number of most likely tokens to report at each position.
        """
        for logprob in logprobs[len(self._sampled) :]:
            self._sampled.append(self._entry(logprob.token_id, logprob.logprob))
            self._top.append([self._entry(*pair) for pair in logprob.top])
            self._requested.append(_requested(logprob, self._token_ids, self._entry))
        known: dict[str, Any] = {
            "output_token_logprobs": self._sampled,
            "output_token_logprobs_length": len(self._sampled),
        }
        if num_top:
            known["output_top_logprobs"] = self._top
        if self._token_ids:
            known["output_token_ids_logprobs"] = self._requested
        return known


def _requested(
    logprob: TokenLogprob, token_ids: tuple[int, ...], entry: Callable[[int, float | None], _Entry]
) -> list[_Entry]:
    """Return the entries of the tokens that the request names, in its order; JSON has no infinity, so -inf is None."""
    return [
        entry(token_id, None if value == -math.inf else value)
        for token_id, value in zip(token_ids, logprob.requested, strict=True)
    ]


def _finish_reason(completion: Completion, num_tokens: int | None) -> dict[str, Any] | None:
    """Return the reason why a completion ended, in SGLang's format; None if it has not ended.

    Args:
        num_tokens: number of output tokens; None if the request asks for no output.
    """
    match completion.finish_reason:
        case None:
            return None
        case FinishReason.STOP if num_tokens is not None:
            return {"type": "stop", "matched": completion.matched_stop}
        case FinishReason.STOP | FinishReason.LENGTH:
            return {"type": "length", "length": num_tokens or 0}
        case FinishReason.ABORT | FinishReason.ERROR:
            return {"type": "abort", "message": completion.error or "the request was aborted"}
