"""The number of an answer's tokens that are reasoning."""

from graftlm.processes.request_preparer import RequestPreparer

__all__ = ["num_reasoning_tokens"]


async def num_reasoning_tokens(preparer: RequestPreparer, reasoning: object) -> int:
    """Return the number of tokens of a reasoning text; 0 for what is no text.

    The text is tokenised again, without the tags around it.
    """
    if not isinstance(reasoning, str) or not reasoning:
        return 0
    return len(await preparer.encode(reasoning, add_special_tokens=False))
