"""Ends completions at regular expressions that an engine or a server does not support."""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from graftlm.lang.backend import Generation, GenerationRequest
from graftlm.lang.sampling import Sampling
from graftlm.stop_patterns import PatternError, compile_pattern

__all__ = ["complete_until_match", "is_engine_supported", "keeps_matches", "stream_until_match"]

#: A backend's method that streams one completion.
Stream = Callable[[GenerationRequest], AsyncGenerator[Generation, None]]


def keeps_matches(sampling: Sampling) -> bool:
    """Return whether a backend that keeps every match in the text keeps only those of `stop_regex`."""
    return not sampling.stop and not sampling.stop_token_ids


def is_engine_supported(sampling: Sampling) -> bool:
    """Return whether engines support all of `stop_regex`."""
    try:
        return all(compile_pattern(pattern) for pattern in sampling.stop_regex or ())
    except PatternError:
        return False


async def stream_until_match(stream: Stream, request: GenerationRequest) -> AsyncGenerator[Generation, None]:
    """Stream a completion up to the first match of one of its `stop_regex`, which is the end of the text.

    The rest of the request is aborted. As in SGLang, `finish_reason` contains the pattern as `matched`.
    """
    patterns = [re.compile(pattern) for pattern in request.sampling.stop_regex or ()]
    plain = replace(request, sampling=replace(request.sampling, stop_regex=None))
    async with aclosing(stream(plain)) as generations:
        async for generation in generations:
            ended = _up_to_match(generation, patterns)
            yield ended or generation
            if ended is not None:
                return


async def complete_until_match(stream: Stream, request: GenerationRequest) -> list[Generation]:
    """Return the `n` completions of a request, each ended as in `stream_until_match`."""
    one = replace(request, sampling=replace(request.sampling, n=None))
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_last(stream, one)) for _ in range(request.sampling.n or 1)]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _last(stream: Stream, request: GenerationRequest) -> Generation:
    async with aclosing(stream_until_match(stream, request)) as generations:
        return [generation async for generation in generations][-1]  # a stream yields at least once


def _up_to_match(generation: Generation, patterns: Sequence[re.Pattern[str]]) -> Generation | None:
    """Return the completion up to the end of the first match; None if nothing matches."""
    matches = [match for pattern in patterns if (match := pattern.search(generation.text))]
    if not matches:
        return None
    first = min(matches, key=re.Match.end)
    reason = {"type": "stop", "matched": first.re.pattern}
    return Generation(generation.text[: first.end()], generation.meta_info | {"finish_reason": reason})
