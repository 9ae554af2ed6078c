"""Log-probabilities of texts in which a token ends within a character."""

import numpy as np
import openai
import pytest

from graftlm import Engine, SamplingParams

TEXT = "Grüße, 世界 🎉 na"


@pytest.fixture(scope="module")
def engine():
    with Engine(model="demo", memory={"kv_tokens": 2048}) as it:
        yield it


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as it:
        yield it


def as_bytes(token):
    """Return the bytes of a token as OpenAI's completions write it."""
    if not token.startswith("bytes:"):
        return token.encode()
    return bytes(int(byte, 16) for byte in token.removeprefix("bytes:").split("\\x")[1:])


@pytest.mark.parametrize("stream", [False, True])
def test_echoed_tokens_join_to_the_text_and_their_offsets_count_characters(client, stream):
    answer = client.completions.create(
        model="demo", prompt=TEXT, echo=True, logprobs=1, max_tokens=3, temperature=0, stream=stream
    )
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    text = "".join(choice.text for choice in choices)
    # the first token is <|bos|>
    pieces = [as_bytes(token) for choice in choices for token in choice.logprobs.tokens][1:]
    offsets = [offset for choice in choices for offset in choice.logprobs.text_offset][1:]
    assert text.startswith(TEXT)
    assert b"".join(pieces).startswith(TEXT.encode())
    assert any(len(as_bytes(t)) < 3 for choice in choices for t in choice.logprobs.tokens if t.startswith("bytes:"))
    begun = b""
    for piece, offset in zip(pieces, offsets, strict=True):
        assert offset == len(begun.decode(errors="ignore"))
        begun += piece


def test_the_most_likely_tokens_are_those_of_the_engine_and_include_the_sampled_one(client, engine):
    params = SamplingParams(max_tokens=8, seed=5, temperature=1.5, logprobs=4)
    expected = engine.generate(TEXT, params)[0]
    answer = client.completions.create(model="demo", prompt=TEXT, max_tokens=8, seed=5, temperature=1.5, logprobs=4)
    found = answer.choices[0].logprobs
    assert answer.choices[0].text == expected.text
    np.testing.assert_allclose(found.token_logprobs, [entry.logprob for entry in expected.logprobs], atol=1e-3)
    for token, value, rivals, entry in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, expected.logprobs, strict=True
    ):
        assert rivals[token] == value
        assert len(rivals) in (4, 5)
        np.testing.assert_allclose(sorted(rivals.values())[-1], entry.top[0][1], atol=1e-3)


def test_the_bytes_of_a_chats_tokens_join_to_characters(client):
    party = "🎉".encode()
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "x"}],
        extra_body={"regex": "🎉🎉"},
        logprobs=True,
        top_logprobs=0,
        temperature=0,
        max_tokens=30,
    )
    content = answer.choices[0].logprobs.content
    assert answer.choices[0].message.content == "🎉🎉"
    assert b"".join(bytes(entry.bytes) for entry in content).startswith(party * 2)
    assert any(len(entry.bytes) < len(party) for entry in content)
    assert all(entry.top_logprobs == [] for entry in content)


def test_top_logprobs_0_is_accepted_without_logprobs(client):
    answer = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "x"}], logprobs=False, top_logprobs=0, max_tokens=2
    )
    assert answer.choices[0].logprobs is None
