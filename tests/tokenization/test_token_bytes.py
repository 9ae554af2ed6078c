import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from graftlm.demo import demo_checkpoint
from graftlm.tokenization import Tokenizer

TEXT = st.text(max_size=40) | st.text("ab é你😀\n\t ", max_size=40)


@pytest.fixture(scope="module")
def demo():
    return Tokenizer.load(demo_checkpoint())


def joined(tokenizer, ids):
    return b"".join(tokenizer.token_bytes(token_id) for token_id in ids)


@given(text=TEXT)
def test_bytes_of_the_bundled_models_tokens_join_to_the_text(demo, text):
    assert joined(demo, demo.encode(text, add_special_tokens=False).tolist()) == text.encode()


@given(text=TEXT)
def test_bytes_of_byte_level_tokens_join_to_the_text(byte_level, text):
    assert joined(byte_level, byte_level.encode(text, add_special_tokens=False).tolist()) == text.encode()


@given(text=TEXT.filter(lambda text: "\u2581" not in text))
def test_bytes_of_byte_fallback_tokens_join_to_the_text_except_a_space_at_the_beginning(byte_fallback, text):
    found = joined(byte_fallback, byte_fallback.encode(text, add_special_tokens=False).tolist())
    assert found.removeprefix(b" ") == text.encode().removeprefix(b" ")


def test_every_byte_can_be_a_separate_token(byte_pieces):
    assert joined(byte_pieces, range(256)) == bytes(range(256))


@pytest.mark.parametrize(
    ("token", "data"),
    [("<0x0A>", b"\n"), ("<0xFF>", b"\xff"), ("\u2581ab", b" ab"), ("\u2581", b" "), ("a", b"a"), ("</s>", b"</s>")],
)
def test_a_byte_fallback_token_has_the_byte_in_its_name(byte_fallback, token, data):
    token_id = Core.from_str(byte_fallback.to_json()).token_to_id(token)
    assert byte_fallback.token_bytes(token_id) == data


def test_a_special_token_has_the_bytes_of_its_name(demo):
    assert demo.token_bytes(demo.encode("")[0]) == b"<|bos|>"


@pytest.mark.parametrize("token_id", [10**6, 2**31 - 1])
def test_an_unknown_token_has_no_bytes(demo, byte_fallback, token_id):
    assert demo.token_bytes(token_id) == byte_fallback.token_bytes(token_id) == b""


def test_tokens_of_other_vocabularies_have_the_bytes_of_their_text():
    core = Core(models.WordPiece({"[UNK]": 0, "grün": 1, "##lich": 2}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=core))
    assert tokenizer.token_bytes(1) == "grün".encode()


def test_a_byte_level_token_with_other_characters_is_used_unchanged():
    core = Core(models.BPE({"\u0120a": 0, "a b": 1, "\u4f60": 2}, []))
    core.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=core))
    assert [tokenizer.token_bytes(i) for i in range(3)] == [b" a", b"a b", "\u4f60".encode()]
    assert [tokenizer.decode([i]) for i in range(3)] == [" a", "a b", "\u4f60"]


@given(text=TEXT.filter(lambda text: "\u2581" not in text))
def test_bytes_of_metaspace_tokens_join_to_the_text_except_a_space_at_the_beginning(text):
    characters = sorted({"\u2581", *text.replace(" ", "\u2581")})
    core = Core(models.BPE({character: i for i, character in enumerate(characters)}, []))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    core.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=core))
    found = joined(tokenizer, tokenizer.encode(text).tolist())
    assert found.removeprefix(b" ") == text.encode().removeprefix(b" ")
