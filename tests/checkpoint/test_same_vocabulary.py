import json

import pytest
import tokenizers

from graftlm.checkpoint import check_same_vocabulary
from graftlm.contracts import ModelConfig
from graftlm.errors import CheckpointError

WORDS = ["a", "b", "c"]


@pytest.fixture
def make(tmp_path):
    """Return a function that writes a checkpoint's tokenizer: its words, or None without one."""

    def make(name, words, vocab_size, **changes):
        folder = tmp_path / name
        folder.mkdir()
        if words is not None:
            model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
            text = json.loads(tokenizers.Tokenizer(model).to_str()) | changes
            (folder / "tokenizer.json").write_text(json.dumps(text))
        return ModelConfig(("Llama",), vocab_size, 100), folder

    return make


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ((None, 300), (None, 300)),
        ((WORDS, 300), (WORDS, 300)),
        ((WORDS, 300), (None, 300)),
        ((WORDS, 384), (WORDS, 320)),  # embeddings are padded to different sizes
    ],
)
def test_the_same_vocabulary_is_accepted(make, own, other):
    check_same_vocabulary(*make("own", *own), *make("other", *other))


def test_only_the_ids_of_tokens_are_compared(make):
    other = make("other", WORDS, 300, padding={
        "strategy": "BatchLongest", "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "a",
    })  # fmt: skip
    check_same_vocabulary(*make("own", WORDS, 300), *other)


@pytest.mark.parametrize(
    ("own", "other", "message"),
    [
        ((None, 300), (None, 320), "has a vocabulary of 320 tokens, the served model .*own has 300. Choose"),
        ((WORDS, 3000), (None, 320), "320 tokens, the served model .*own has 3,000. Choose"),
        ((WORDS, 300), (["a", "c", "b"], 300), "2 tokens have other ids; the id of 'b' is 2, expected 1"),
        ((WORDS, 300), (["a", "b"], 300), "1 tokens have other ids; the id of 'c' is missing, expected 2"),
        ((WORDS, 300), ([*WORDS, "d"], 320), "320 tokens.*1 tokens have other ids; the id of 'd' is 3, expected miss"),
    ],
)
def test_another_vocabulary_is_refused(make, own, other, message):
    with pytest.raises(CheckpointError, match=message):
        check_same_vocabulary(*make("own", *own), *make("other", *other))


def test_a_broken_tokenizer_is_refused(make):
    own, other = make("own", WORDS, 300), make("other", WORDS, 300)
    (other[1] / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        check_same_vocabulary(*own, *other)
