"""The tokenizer that is read from a GGUF file."""

import pytest

from graftlm.errors import CheckpointError
from graftlm.testing.gguf_files import write_gguf
from graftlm.tokenization import Tokenizer

TEXTS = ["Hello, world!", "", "<|user|>\nA river<|end|>\n", " two  spaces\n\n", "ünïcödé 小さな川 🙂"]


@pytest.fixture(scope="module")
def pair(checkpoint, tmp_path_factory):
    """Return the bundled model's tokenizer, and the tokenizer of a GGUF file made from it."""
    folder = tmp_path_factory.mktemp("gguf")
    file = write_gguf(checkpoint("demo"), folder / "demo.gguf", tokenizer=True)
    (folder / "tokenizer.json").write_text("{}")  # from another model
    return Tokenizer.load(checkpoint("demo")), Tokenizer.load(file)


@pytest.mark.parametrize("text", TEXTS)
def test_it_encodes_and_decodes_like_the_checkpoints_tokenizer(pair, text):
    own, made = pair
    assert made.encode(text).tolist() == own.encode(text).tolist()
    assert made.encode(text, add_special_tokens=False).tolist() == own.encode(text, add_special_tokens=False).tolist()
    assert made.decode(own.encode(text)) == own.decode(own.encode(text))


def test_it_has_exactly_the_tokens_of_the_file(pair):
    own, made = pair
    assert made.vocab_size == own.vocab_size
    assert made.eos_token_ids == own.eos_token_ids
    assert made.chat_template == own.chat_template
    assert made.special_tokens["bos_token"] == own.special_tokens["bos_token"]


def test_a_file_without_a_tokenizer_is_refused_with_its_name(checkpoint, tmp_path):
    file = write_gguf(checkpoint("llama"), tmp_path / "bare.gguf")
    with pytest.raises(CheckpointError, match=r"cannot load a tokenizer from .*bare.gguf"):
        Tokenizer.load(file)
