"""The meta information of an engine's completion, in the form of SGLang's `meta_info`."""

from collections.abc import Callable
from typing import Any

from graftlm.lang.sampling import Sampling
from graftlm.types import Completion, FinishReason, RequestOutput

__all__ = ["meta_info"]


def meta_info(
    output: RequestOutput, completion: Completion, sampling: Sampling, token_text: Callable[[int], str]
) -> dict[str, Any]:
    """Return a completion's id, finish reason and token counts, and its log-probabilities if `sampling` requests them.

    Args:
        token_text: returns the text of a token.
    """
    meta: dict[str, Any] = {
        "id": output.request_id,
        "finish_reason": _finish_reason(completion),
        "prompt_tokens": output.usage.prompt_tokens,
        "completion_tokens": len(completion.token_ids),
        "cached_tokens": output.usage.cached_tokens,
        "jump_forward_tokens": completion.jump_forward_tokens,
    }
    if sampling.return_logprob:
        write = _Entries(token_text if sampling.return_text_in_logprobs else None, sampling.top_logprobs_num or 0)
        meta |= write.of_output(completion) | write.of_prompt(output, sampling.logprob_start_len)
    return meta


def _finish_reason(completion: Completion) -> dict[str, Any] | None:
    match completion.finish_reason:
        case None:
            return None
        case FinishReason.STOP:
            return {"type": "stop", "matched": completion.matched_stop}
        case reason:
            return {"type": reason.value, "length": len(completion.token_ids)}


class _Entries:
    """Creates entries of the form [log-probability, token id, text or None]."""

    def __init__(self, token_text: Callable[[int], str] | None, num_top: int) -> None:
        self._token_text = token_text
        self._num_top = num_top

    def of_output(self, completion: Completion) -> dict[str, Any]:
        logprobs = completion.logprobs or ()
        entries = [self._entry(t.logprob, t.token_id) for t in logprobs]
        meta: dict[str, Any] = {"output_token_logprobs": entries, "output_token_logprobs_length": len(entries)}
        if self._num_top:
            meta["output_top_logprobs"] = [[self._entry(p, i) for i, p in t.top] for t in logprobs]
        return meta

    def of_prompt(self, output: RequestOutput, start: int | None) -> dict[str, Any]:
        if start is None or start < 0 or output.prompt_logprobs is None:
            return {"input_token_logprobs": []}
        ids, logprobs = output.prompt_token_ids[start:], output.prompt_logprobs[start:]
        # The first reported token has no log-probability, as in SGLang: programs for SGLang skip this token.
        numbers = [None if t is None else t.logprob for t in logprobs]
        meta: dict[str, Any] = {"input_token_logprobs": [self._entry(p, i) for p, i in zip(numbers, ids, strict=True)]}
        if self._num_top:
            tops = [None if t is None else [self._entry(p, i) for i, p in t.top] for t in logprobs]
            meta["input_top_logprobs"] = tops
        return meta

    def _entry(self, logprob: float | None, token_id: int) -> list[Any]:
        return [logprob, token_id, None if self._token_text is None else self._token_text(token_id)]
