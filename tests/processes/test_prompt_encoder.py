import numpy as np
import pytest

from graftlm.demo import demo_checkpoint
from graftlm.errors import InvalidPromptError, PromptTooLongError
from graftlm.processes.prompt_encoder import PromptEncoder
from graftlm.prompts import TextPair
from graftlm.tokenization import Tokenizer

CHAT = [{"role": "user", "content": "What is 2 plus 3?"}]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(demo_checkpoint())


@pytest.fixture(scope="module")
def encoder(tokenizer):
    return PromptEncoder(tokenizer, tokenizer.vocab_size, context_len=64)


def test_a_prompt_is_encoded_as_by_the_tokenizer(encoder, tokenizer):
    np.testing.assert_array_equal(encoder.encode("a day", {}), tokenizer.encode("a day"))
    np.testing.assert_array_equal(encoder.encode(TextPair("a day", "off"), {}), tokenizer.encode_pair("a day", "off"))
    np.testing.assert_array_equal(encoder.encode(CHAT, {}), tokenizer.encode_chat(CHAT))
    open_chat = {"add_generation_prompt": False}
    np.testing.assert_array_equal(encoder.encode(CHAT, open_chat), tokenizer.encode_chat(CHAT, **open_chat))
    assert encoder.encode([5, 6], {}) == [5, 6]
    assert encoder.decode(tokenizer.encode("a day"), skip_special_tokens=True) == "a day"


@pytest.mark.parametrize(
    ("prompt", "error", "says"),
    [
        ("", InvalidPromptError, "empty"),
        ("\ud800", InvalidPromptError, "cannot be encoded"),
        ([{"role": "user"}], InvalidPromptError, "no content"),
        ([{"role": "user", "content": "\ud800"}], InvalidPromptError, "cannot be encoded"),
        ("word " * 10_000, PromptTooLongError, "50,000 characters"),
        ([{"role": "user", "content": "word " * 10_000}], PromptTooLongError, "characters"),
    ],
)
def test_an_invalid_prompt_is_refused(encoder, prompt, error, says):
    with pytest.raises(error, match=says):
        encoder.encode(prompt, {})


@pytest.mark.parametrize("token_id", [-1, 10**6])
def test_a_token_id_outside_the_vocabulary_is_refused(encoder, token_id):
    with pytest.raises(InvalidPromptError, match=f"token id {token_id} is outside the vocabulary"):
        encoder.decode(np.array([5, token_id], dtype=np.int32), skip_special_tokens=True)
