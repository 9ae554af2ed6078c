from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers import AutoTokenizer

from graftlm.checkpoint import iter_weights, load_model_config
from graftlm.testing.hugging_face import HuggingFaceModel
from graftlm.testing.tiny_models import Family, write_tiny_checkpoint

FAMILIES = pytest.mark.parametrize("family", get_args(Family))


@FAMILIES
def test_equal_arguments_give_equal_files(family: Family, tmp_path: Path) -> None:
    one, two, other = (
        write_tiny_checkpoint(tmp_path / name, family, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    weights = (one / "model.safetensors").read_bytes()
    assert (two / "model.safetensors").read_bytes() == weights
    assert (other / "model.safetensors").read_bytes() != weights


def test_writing_does_not_change_the_random_state(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    write_tiny_checkpoint(tmp_path, "llama")
    assert torch.equal(torch.get_rng_state(), before)


@FAMILIES
def test_no_two_tensors_and_no_two_rows_are_equal(family: Family, tmp_path: Path) -> None:
    for name, tensor in iter_weights(write_tiny_checkpoint(tmp_path, family)):
        assert tensor.unique().numel() > tensor.numel() * 0.9, name


def test_shards_contain_the_weights_of_a_single_file(tmp_path: Path) -> None:
    whole = dict(iter_weights(write_tiny_checkpoint(tmp_path / "whole", "llama")))
    folder = write_tiny_checkpoint(tmp_path / "shards", "llama", shards=3)
    parts = dict(iter_weights(folder))
    assert len(list(folder.glob("*.safetensors"))) == 3
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.items())


@FAMILIES
def test_greedy_answers_are_varied_and_have_a_clear_margin(family: Family, tmp_path: Path) -> None:
    model = HuggingFaceModel(write_tiny_checkpoint(tmp_path, family))
    answer = model.generate(list(range(20, 40)), max_tokens=24)
    best, second = model.logits([*range(20, 40), *answer]).topk(2).values.T
    assert len(set(answer)) > 8
    assert float((best - second).min()) > 1e-4  # ten times the effect of rounding on a logit


def test_the_dtype_is_written_to_the_configuration(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    assert load_model_config(folder).raw["dtype"] == "bfloat16"
    assert {tensor.dtype for _, tensor in iter_weights(folder)} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("eos_token_id", "tokenizer", "expected"),
    [(None, False, ()), (None, True, (0,)), (9, True, (9,)), (9, False, (9,))],
)
def test_end_of_sequence_tokens_are_as_requested(
    eos_token_id: int | None, tokenizer: bool, expected: tuple[int, ...], tmp_path: Path
) -> None:
    write_tiny_checkpoint(tmp_path, "llama", eos_token_id=eos_token_id, tokenizer=tokenizer)
    assert load_model_config(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("vocab_size", [261, 320, 400])
def test_the_tokenizer_encodes_any_text_within_the_vocabulary(vocab_size: int, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "llama", vocab_size=vocab_size, tokenizer=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = 'The river {"a": 12} 小さな\t\n🐟'
    token_ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(token_ids) == text
    assert max(token_ids) < vocab_size
    chat = [{"role": "user", "content": "hello"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|user|>hello<|end|><|assistant|>"
    assert tokenizer(prompt)["input_ids"][0] < 5


def test_a_vocabulary_too_small_for_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 261, got 200"):
        write_tiny_checkpoint(tmp_path, "llama", vocab_size=200, tokenizer=True)
