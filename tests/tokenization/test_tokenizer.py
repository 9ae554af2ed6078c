import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from transformers import AutoTokenizer

from graftlm.errors import CheckpointError, InvalidPromptError
from graftlm.tokenization import Tokenizer

TEXTS = ["", "hello world", " leading space", "你好 😀", "a\n\n\tb", "<s>hello</s>"]


@pytest.fixture
def copied(byte_level_folder, tmp_path):
    return shutil.copytree(byte_level_folder, tmp_path / "checkpoint")


# Encoding and decoding


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_encoded_as_by_hugging_face(byte_level, byte_level_folder, text):
    reference = AutoTokenizer.from_pretrained(byte_level_folder, local_files_only=True)
    ids = byte_level.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == reference(text).input_ids
    assert byte_level.encode(text, add_special_tokens=False).tolist() == reference.encode(
        text, add_special_tokens=False
    )
    for skip in (True, False):
        assert byte_level.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)


def test_a_serialized_tokenizer_encodes_and_decodes_the_same_and_has_no_chat_template(byte_level):
    copy = Tokenizer.from_json(byte_level.to_json())
    for text in TEXTS:
        ids = byte_level.encode(text)
        assert copy.encode(text).tolist() == ids.tolist()
        assert copy.decode(ids, skip_special_tokens=False) == byte_level.decode(ids, skip_special_tokens=False)
    assert copy.vocab_size == byte_level.vocab_size
    assert (copy.eos_token_ids, copy.special_tokens, copy.has_chat_template) == ((), {}, False)
    with pytest.raises(InvalidPromptError, match="no chat template"):
        copy.apply_chat_template([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("text", ["", "{}", "[1]"])
def test_text_that_is_no_serialized_tokenizer_is_refused(text):
    with pytest.raises(CheckpointError, match="cannot read a serialized tokenizer"):
        Tokenizer.from_json(text)


def test_a_batch_is_encoded_like_its_single_texts(byte_level):
    batch = byte_level.encode_batch(TEXTS)
    assert [ids.tolist() for ids in batch] == [byte_level.encode(text).tolist() for text in TEXTS]
    assert byte_level.encode_batch([]) == []


def test_padding_and_truncation_of_the_file_have_no_effect(copied):
    data = json.loads((copied / "tokenizer.json").read_text(encoding="utf-8"))
    data["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    data["padding"] = {
        "strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<s>",
    }  # fmt: skip
    (copied / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    text = "hello world, the quick brown fox"
    tokenizer = Tokenizer.load(copied)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch([text, "a"])[1].tolist() == tokenizer.encode("a").tolist()


def test_other_threads_run_during_the_encoding_of_a_long_text(byte_level):
    longest_s = 0.0
    with ThreadPoolExecutor(1) as pool:
        start_s = last_s = time.perf_counter()
        encoding = pool.submit(byte_level.encode, "hello world " * 20_000)
        while not encoding.done():
            now_s = time.perf_counter()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
        end_s = time.perf_counter()
    assert max(longest_s, end_s - last_s) < 0.5 * (end_s - start_s)


def test_threads_may_encode_and_render_concurrently(byte_level):
    texts = [f"hello {i} world " * 20 for i in range(200)]
    with ThreadPoolExecutor(8) as pool:
        encoded = list(pool.map(lambda text: byte_level.encode(text).tolist(), texts))
        chats = list(pool.map(lambda text: byte_level.encode_chat([{"role": "user", "content": text}]).tolist(), texts))
    assert encoded == [byte_level.encode(text).tolist() for text in texts]
    assert chats == [byte_level.encode_chat([{"role": "user", "content": text}]).tolist() for text in texts]


def test_vocabulary_size_and_special_tokens_are_known(byte_level):
    assert byte_level.vocab_size == 329
    assert byte_level.eos_token_ids == (1,)
    assert [byte_level.is_special(i) for i in (0, 1, 2)] == [True, True, False]
    assert [byte_level.is_known(i) for i in (0, 328, 329)] == [True, True, False]
    assert byte_level.decode([329, 5000]) == ""


def test_a_tokenizer_without_end_of_sequence_token_has_none(copied):
    (copied / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert Tokenizer.load(copied).eos_token_ids == ()


# Chats


def test_a_chat_is_rendered_and_encoded_with_one_bos_token(byte_level):
    messages = [{"role": "user", "content": " hello "}]
    assert byte_level.apply_chat_template(messages) == "<s><user>hello</s><assistant>"
    ids = byte_level.encode_chat(messages)
    assert ids.dtype == np.int32
    assert ids.tolist().count(0) == 1
    assert byte_level.decode(ids, skip_special_tokens=False) == "<s><user>hello</s><assistant>"


def test_variables_reach_the_template(byte_level):
    messages = [{"role": "user", "content": "hi"}]
    text = byte_level.apply_chat_template(messages, add_generation_prompt=False, suffix="!")
    assert text == "<s><user>hi</s>!"


@pytest.mark.parametrize(
    ("messages", "said"),
    [([], "empty"), ([{"role": "tool", "content": "1"}], "tools are not known"), (["hello"], "refuses these messages")],
)
def test_messages_that_the_template_refuses_are_an_error_of_the_request(byte_level, messages, said):
    with pytest.raises(InvalidPromptError, match=said):
        byte_level.apply_chat_template(messages)


def test_a_chat_without_a_template_is_refused(byte_fallback):
    assert not byte_fallback.has_chat_template
    with pytest.raises(InvalidPromptError, match="no chat template"):
        byte_fallback.encode_chat([{"role": "user", "content": "hi"}])


# Files


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer.json", "{nope", "tokenizer.json is not readable JSON"),
        ("tokenizer.json", "{}", "tokenizer.json is not a tokenizer"),
        ("tokenizer_config.json", "{nope", "tokenizer_config.json is not readable JSON"),
    ],
)
def test_a_missing_or_invalid_file_is_refused_with_its_name(copied, file, content, said):
    if content is None:
        (copied / file).unlink()
    else:
        (copied / file).write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=said):
        Tokenizer.load(copied)


def test_the_generic_class_is_loaded_without_torch(byte_level_folder):
    code = (
        "import sys, pathlib, graftlm.tokenization; graftlm.tokenization.Tokenizer.load(pathlib.Path(sys.argv[1])); "
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(byte_level_folder)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_the_generic_class_uses_the_file_unchanged_for_any_model(copied, byte_level):
    # the class of this model splits words differently
    (copied / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert Tokenizer.load(copied).to_json() == byte_level.to_json()


def test_the_class_of_a_family_is_found_by_its_name(copied):
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (copied / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(copied)
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"


def test_a_path_that_is_not_a_folder_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="not a folder"):
        Tokenizer.load(tmp_path / "nothing")


def test_a_slow_tokenizer_is_refused(copied):
    (copied / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    with pytest.raises(CheckpointError, match="not a fast tokenizer"):
        Tokenizer.load(copied)
