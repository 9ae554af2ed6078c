"""The check that a request's output limit fits into the context."""

from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.server.errors import ApiError

__all__ = ["check_output_room"]


def check_output_room(manager: TokenizerManager, prompt_len: int, max_tokens: int | None, param: str) -> None:
    """Refuse an output limit that exceeds the context, unless `server.clip_max_tokens` is set.

    Args:
        prompt_len: number of tokens in the prompt.
        max_tokens: the client's limit. None means the default limit, which is never refused.
        param: name of the client's field.

    Raises:
        ApiError: 400, prompt and output together exceed the context.
    """
    context_len = manager.model.context_len
    if max_tokens is None or prompt_len + max_tokens <= context_len or manager.config.server.clip_max_tokens:
        return
    message = (
        f"{param}: this model's maximum context length is {context_len} tokens. However, you requested "
        f"{prompt_len + max_tokens} tokens ({prompt_len} in the prompt, {max_tokens} in the completion). Lower it to "
        f"{context_len - prompt_len}, or set server.clip_max_tokens"
    )
    raise ApiError(400, message, param=param, code="context_length_exceeded")
