"""Speculation on random models never changes the text, and makes at most one additional call."""

import asyncio
import random
import zlib

import pytest

from graftlm.lang import Generation, GenerationRequest, Sampling
from graftlm.lang.backends.speculation import SpeculativeBackend
from graftlm.lang.backends.usage import UsageMeter

LETTERS = "ab:\n"
DEFAULT_MAX_TOKENS = 9


class Writer:
    """A backend whose model generates letter by letter, each as a function of the whole text before it."""

    def __init__(self, seed):
        self.seed = seed
        self.calls = []

    async def generate(self, request):
        self.calls.append(request)
        sampling = request.sampling
        text, reason = "", {"type": "length"}
        for _ in range(sampling.max_tokens or DEFAULT_MAX_TOKENS):
            number = zlib.crc32(f"{self.seed}{request.prompt}{text}".encode())
            if number % 19 == 0:
                reason = {"type": "stop", "matched": None}
                break
            text += LETTERS[number % len(LETTERS)]
            stops = [stop for stop in sampling.stop or () if text.endswith(stop)]
            if stops:
                text, reason = text.removesuffix(stops[0]), {"type": "stop", "matched": stops[0]}
                break
        return [Generation(text, {"finish_reason": reason, "prompt_tokens": 1, "completion_tokens": len(text)})]


def template(draw):
    """Return the parts of a random program: constant texts, and the sampling of `gen`s."""
    parts = ["a"]
    for _ in range(draw.randint(1, 6)):
        parts.append("".join(draw.choices(LETTERS, k=draw.randint(0, 2))))
        stop = draw.choice([None, ("\n",), ("\n",), (":",), ("a:", "\n")])
        parts.append(Sampling(stop=stop, max_tokens=draw.choice([None, 1, 3, 20]), temperature=0.0))
    return parts


def written(backend, parts):
    """Return the text that a program generates."""

    async def write():
        text = ""
        for part in parts:
            text += part if isinstance(part, str) else (await backend.generate(GenerationRequest(text, part)))[0].text
        return text

    return asyncio.run(write())


@pytest.mark.parametrize("num_tokens", [1, 8, 40])
def test_any_program_on_any_model_has_the_same_text_and_at_most_one_more_call(num_tokens):
    saved = 0
    for seed in range(150):
        parts = template(random.Random(seed))
        plain, ahead, meter = Writer(seed), Writer(seed), UsageMeter()
        guessing = SpeculativeBackend(ahead, num_tokens, meter, default_max_tokens=DEFAULT_MAX_TOKENS)
        assert written(guessing, parts) == written(plain, parts), f"seed {seed}: {parts}"
        num_guessed = meter.usage.saved_calls
        assert len(ahead.calls) <= len(plain.calls) - num_guessed + 1, f"seed {seed}: {parts}"
        saved += num_guessed
    assert saved > 10 or num_tokens == 1
