"""The demo corpus, and the checkpoint that was trained on it."""

import json
import re
from itertools import islice
from random import Random

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from graftlm.demo import DEMO_QUESTIONS, SYSTEM_PROMPT, demo_checkpoint
from graftlm.demo.batches import answer_weights
from graftlm.demo.corpus import (
    HELD_OUT_SHARE,
    RESERVED,
    Message,
    Question,
    as_messages,
    draw_question,
    held_out_questions,
    is_held_out,
    training_question,
    training_texts,
)
from graftlm.demo.evaluate import answer_questions, complete_chats
from graftlm.demo.facts import in_words
from graftlm.demo.forms import FORMS

CHECKPOINT_LIMIT_BYTES = 10_000_000


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(demo_checkpoint())
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(demo_checkpoint(), dtype=torch.float32).eval()


def drawn(held_out: bool, per_form: int = 20) -> list[Question]:
    """Draw questions of every form, either held out or for training."""
    rng = Random("test")
    return [draw_question(form, rng, held_out=held_out) for form in FORMS for _ in range(per_form)]


def test_the_same_seed_gives_the_same_text() -> None:
    first, again, other = (list(islice(training_texts(seed), 200)) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_held_out_questions_are_the_same_on_every_call() -> None:
    assert held_out_questions(0, 5) == held_out_questions(0, 5)


def test_no_held_out_question_is_in_the_training_text() -> None:
    trained = {question.identity for question in drawn(held_out=False)}
    assert not trained & {question.identity for question in drawn(held_out=True)}


def test_a_held_out_question_is_absent_from_conversations() -> None:
    texts = islice(training_texts(0), 4000)
    asked = {message["content"] for text in texts if not isinstance(text, str) for message in text}
    # "And 3 more?" is a different question after a different sum
    standalone = {question.text for question in held_out_questions(0, 40) if question.earlier is None}
    assert sorted(asked & (standalone | set(DEMO_QUESTIONS))) == []


def test_every_demo_question_is_reserved() -> None:
    assert len(RESERVED) == len(DEMO_QUESTIONS)
    assert all(is_held_out(Question("", identity, "", "")) for identity in RESERVED)
    rng = Random("demo")
    by_name = {form.name: form for form in FORMS}
    days = {draw_question(by_name["day"], rng, held_out=True).text for _ in range(500)}
    assert any(DEMO_QUESTIONS[4] in text for text in days)


def test_a_question_refers_back_to_a_turn_for_training() -> None:
    questions = [question for question in drawn(held_out=True) if question.earlier is not None]
    assert questions
    assert not any(is_held_out(question.earlier) for question in questions if question.earlier)


def test_a_held_out_sum_is_absent_in_either_order_and_every_phrasing() -> None:
    trained = [training_question(Random(seed)) for seed in range(3000)]
    equations = [re.match(r"(\d+) \+ (\d+) =", question.answer) for question in trained]
    pairs = {tuple(sorted(equation.groups())) for equation in equations if equation}
    assert len(pairs) > 300
    assert ("38", "47") not in pairs


def test_the_share_of_held_out_identities_is_as_stated() -> None:
    rng = Random("share")
    questions = (Question("sum", f"sum|{rng.random()}", "", "") for _ in range(20_000))
    share = sum(is_held_out(question) for question in questions) / 20_000
    assert share == pytest.approx(HELD_OUT_SHARE, rel=0.1)


@pytest.mark.parametrize(
    ("number", "words"), [(0, "zero"), (7, "seven"), (13, "thirteen"), (20, "twenty"), (99, "ninety-nine")]
)
def test_numbers_are_written_as_words(number: int, words: str) -> None:
    assert in_words(number) == words


def test_json_answers_are_json() -> None:
    kinds = {"JSON list": list, "JSON person": dict, "JSON item": dict}
    answers = [(it.form, json.loads(it.answer)) for it in drawn(held_out=False) if it.form.startswith("JSON")]
    assert {form for form, _ in answers} == kinds.keys()
    assert all(isinstance(answer, kinds[form]) and answer for form, answer in answers)


def test_the_checkpoint_is_small() -> None:
    assert sum(path.stat().st_size for path in demo_checkpoint().iterdir()) <= CHECKPOINT_LIMIT_BYTES


@pytest.mark.parametrize(
    "text",
    [
        "",
        "What is 12 + 345?",
        "  two  spaces\n\n\ttabs\r\n",
        "héllo ☃ 漢字 🤖 \u0000 \u2028 \ufffd",
        "".join(chr(code) for code in range(0, 0x3000, 7)),
        '{"name": "Ana", "tags": [1, 2.5e-3, null]}',
    ],
)
def test_the_tokenizer_preserves_any_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert ids[0] == tokenizer.bos_token_id


def test_every_digit_is_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.tokenize("12+345") == ["1", "2", "+", "3", "4", "5"]


def test_the_chat_template_renders(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = as_messages([("Hi!", "Hello.")], "Be brief.")
    rendered = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    assert rendered == "<|bos|><|system|>\nBe brief.<|end|>\n<|user|>\nHi!<|end|>\n<|assistant|>\n"


def test_only_answers_have_weight_in_the_loss(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer.apply_chat_template(as_messages([("Hi!", "Hello."), ("Bye.", "Ciao.")], "X"), return_dict=False)
    weights = answer_weights(tokenizer, ids)
    assert tokenizer.decode([token for token, weight in zip(ids, weights, strict=True) if weight]) == (
        "Hello.<|end|>Ciao.<|end|>"
    )


def test_the_config_has_the_entries_of_old_and_new_transformers() -> None:
    config = json.loads((demo_checkpoint() / "config.json").read_text(encoding="utf-8"))
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    generation = json.loads((demo_checkpoint() / "generation_config.json").read_text(encoding="utf-8"))
    assert len(generation["eos_token_id"]) == 2


def test_the_model_answers_held_out_questions(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    answers = answer_questions(model, tokenizer, held_out_questions(1, 2))
    assert sum(answered.right for answered in answers) / len(answers) >= 0.9


def test_the_model_answers_every_demo_question(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    chats: list[list[Message]] = [as_messages([(asked, "")], SYSTEM_PROMPT)[:-1] for asked in DEMO_QUESTIONS]
    replies = complete_chats(model, tokenizer, chats)
    assert replies[:5] == [
        "The capital of Portugal is Lisbon.",
        "47 + 38 = 85.",
        '{"name": "Ana", "age": 31, "city": "Lima"}',
        "r-a-b-b-i-t",
        "Friday comes after Thursday.",
    ]
    assert replies[5].startswith("Mia was a clever fox who lived in the forest.")
