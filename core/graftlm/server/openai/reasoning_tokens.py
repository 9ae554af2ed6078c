"""The number of reasoning tokens in an answer."""

from graftlm.processes.request_preparer import RequestPreparer

__all__ = ["num_reasoning_tokens"]


async def num_reasoning_tokens(preparer: RequestPreparer, reasoning: object) -> int:
    """Return the number of tokens in a reasoning text; 0 if the value is not a text.

    The text is tokenised again without its tags.
    """
    if not isinstance(reasoning, str) or not reasoning:
        return 0
    return len(await preparer.encode(reasoning, add_special_tokens=False))
