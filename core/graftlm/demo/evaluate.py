"""Measures the share of held-out questions that a model answers correctly with greedy decoding."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from graftlm.demo import SYSTEM_PROMPT
from graftlm.demo.corpus import Message, Question, as_messages, held_out_questions, training_question

MAX_ANSWER_TOKENS: Final = 120
_BATCH_SIZE: Final = 64


@dataclass(frozen=True, slots=True)
class Answered:
    """A question with the model's reply."""

    question: Question
    reply: str

    @property
    def right(self) -> bool:
        """Whether the reply equals the correct answer."""
        return self.reply == self.question.answer


def answer_questions(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    questions: Sequence[Question],
    *,
    system: str | None = None,
    before: Sequence[tuple[str, str]] = (),
) -> list[Answered]:
    """Ask each question in a separate chat.

    Args:
        system: system prompt of each chat; None: no system prompt.
        before: (question, answer) turns before each question.
    """
    chats = [as_messages([*before, *question.turns], system)[:-1] for question in questions]
    replies = complete_chats(model, tokenizer, chats)
    return [Answered(question, reply) for question, reply in zip(questions, replies, strict=True)]


def complete_chats(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, chats: Sequence[list[Message]]
) -> list[str]:
    """Return the model's reply to each chat, with greedy decoding."""
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    replies = [""] * len(chats)
    for group in _equal_lengths([len(prompt) for prompt in prompts]):
        ids = torch.tensor([prompts[index] for index in group])
        output = model.generate(ids, do_sample=False, max_new_tokens=MAX_ANSWER_TOKENS)
        texts = tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)
        for index, text in zip(group, texts, strict=True):
            replies[index] = text
    return replies


def _equal_lengths(lengths: Sequence[int]) -> Iterable[list[int]]:
    """Yield batches of indices into `lengths`. The lengths in a batch are equal, so it needs no padding."""
    groups: dict[int, list[int]] = defaultdict(list)
    for index, length in enumerate(lengths):
        groups[length].append(index)
    for group in groups.values():
        yield from (group[start : start + _BATCH_SIZE] for start in range(0, len(group), _BATCH_SIZE))


def accuracy_by_form(answers: Iterable[Answered]) -> dict[str, float]:
    """Return the share of correct answers (0 to 1) for each form, and for all forms under the key `all`."""
    marks: dict[str, list[bool]] = defaultdict(list)
    for answered in answers:
        marks[answered.question.form].append(answered.right)
        marks["all"].append(answered.right)
    return {form: sum(right) / len(right) for form, right in marks.items()}


@dataclass(frozen=True, slots=True)
class Report:
    """The result of an evaluation."""

    num_questions: int  # sum over all settings
    accuracy: dict[str, dict[str, float]]  # setting -> form -> share of correct answers, 0 to 1


def evaluate(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> Report:
    """Ask the held-out questions in several settings; print the accuracies and some of the wrong answers."""
    settings = {
        "alone": (None, 60, []),
        "after the system prompt": (SYSTEM_PROMPT, 60, []),
        "after three other turns": (None, 20, _other_turns(Random(f"other turns {seed}"), 3)),
    }
    num_questions, accuracy = 0, {}
    for name, (system, per_form, before) in settings.items():
        questions = held_out_questions(seed, per_form)
        answers = answer_questions(model, tokenizer, questions, system=system, before=before)
        num_questions += len(answers)
        accuracy[name] = accuracy_by_form(answers)
        print(f"{name}: {accuracy[name]['all']:.1%} of {len(questions)} correct", flush=True)
        for answered in [answered for answered in answers if not answered.right][:40]:
            print(f"  {answered.question.text} -> {answered.reply!r}, not {answered.question.answer!r}")
    return Report(num_questions, accuracy)


def _other_turns(rng: Random, num_questions: int) -> list[tuple[str, str]]:
    return [turn for _ in range(num_questions) for turn in training_question(rng).turns]
