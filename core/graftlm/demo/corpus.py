"""The demo corpus: conversations and documents for training, and held-out questions that never occur in training."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Final, Literal, TypedDict

from graftlm.demo import SYSTEM_PROMPT
from graftlm.demo.facts import Facts
from graftlm.demo.forms import FORMS, STORY, Form

HELD_OUT_SHARE: Final = 0.08
"""Share of the questions of each form that are used only in the evaluation."""


class Message(TypedDict):
    """A chat message in the form that chat templates expect."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its correct answer."""

    form: str
    identity: str  # equal for variants of one question, such as variants with small talk
    text: str
    answer: str
    earlier: "Question | None" = None  # the question of the earlier turn to which this question refers

    @property
    def turns(self) -> list[tuple[str, str]]:
        """The (question, answer) turns that end with this question."""
        turn = (self.text, self.answer)
        return [turn] if self.earlier is None else [*self.earlier.turns, turn]


WRAPPERS: Final = (
    "Hi! {}",
    "Hello. {}",
    "{} Thanks!",
    "Quick question: {}",
    "I have a question. {}",
    "Please help me. {}",
)
"""Small talk around a question. It does not change the answer."""

WRAPPED_SHARE: Final = 0.15
"""Share of the questions with small talk, in forms with several phrasings."""

SYSTEM_SENTENCES: Final = (
    "You are a helpful assistant.", "You are graftlm.", "You answer questions.", "You are a friendly assistant.",
    "Answer briefly.", "Answer in one sentence.", "Be polite.", "Be brief and clear.", "Do not guess.",
    "Use simple words.", "You know many capitals.", "You know a few facts about animals.", "You can write JSON.",
    "You can tell short stories.", "You are good with small numbers.", "The user may ask several questions.",
    "Every question stands alone unless it refers to the last answer.", "Write complete sentences.",
    "When you are asked for JSON, write only JSON.", "Today is a fine day.", "You work in a library.",
    "Your readers are children.", "Your readers are teachers.", "Never write more than the user asks for.",
    "Say so when you do not know something.", "You were trained on a small corpus.", "You are talking to a new user.",
)  # fmt: skip
"""Sentences of the system prompts in the training text."""


RESERVED: Final = frozenset(
    {
        "capital|Portugal|What is the capital of {country}?",
        "sum|38|47",
        "JSON person|Ana|Lima",
        "spell|rabbit|Spell the word {word}.",
        "day|Thursday|after|Which day comes {side} {name}?",
        "story|Mia|fox|in the forest",
    }
)
"""Identities of the questions in `DEMO_QUESTIONS`. These are always held out."""


def is_held_out(question: Question) -> bool:
    """Return whether a question is only for the evaluation. A hash of its identity decides this."""
    digest = hashlib.sha256(question.identity.encode()).digest()
    return question.identity in RESERVED or int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def draw_question(form: Form, rng: Random, *, held_out: bool) -> Question:
    """Draw a question of a form: a held-out question or a training question.

    If the question refers to an earlier question, the earlier one is a training question.
    """
    while True:
        question = _any_question(form, rng)
        if is_held_out(question) == held_out and not (question.earlier and is_held_out(question.earlier)):
            return question


def _any_question(form: Form, rng: Random) -> Question:
    facts = form.draw(rng)
    earlier = None if form.after is None else _ask(form.after, facts, rng)
    return _ask(form, facts, rng, earlier)


def _ask(form: Form, facts: Facts, rng: Random, earlier: Question | None = None) -> Question:
    template = rng.choice(form.questions)
    text = template.format_map(facts)
    if len(form.questions) > 1 and rng.random() < WRAPPED_SHARE:
        text = rng.choice(WRAPPERS).format(text)
    return Question(form.name, _identify(form, facts, template), text, form.answer.format_map(facts), earlier)


def _identify(form: Form, facts: Facts, template: str) -> str:
    """Return the identity of a question. Questions with the same identity are all held out, or all for training."""
    parts = [form.split_as or form.name, *sorted(facts[name] for name in form.key)]
    return "|".join(parts if form.holds_out == "arguments" else [*parts, template])


def held_out_questions(seed: int, per_form: int) -> list[Question]:
    """Return up to `per_form` distinct held-out questions of each form."""
    rng = Random(f"held out {seed}")
    questions: list[Question] = []
    for form in FORMS:
        drawn: dict[str, Question] = {}
        for _ in range(10 * per_form):
            question = draw_question(form, rng, held_out=True)
            drawn.setdefault(question.text, question)
        questions += list(drawn.values())[:per_form]
    return questions


def training_question(rng: Random) -> Question:
    """Draw a training question. A form's weight is its relative probability."""
    (form,) = rng.choices(FORMS, weights=[form.weight for form in FORMS])
    return draw_question(form, rng, held_out=False)


def training_text(rng: Random) -> str | list[Message]:
    """Draw a training text: usually a conversation, sometimes a plain document."""
    return training_document(rng) if rng.random() < 0.1 else training_conversation(rng)


def training_conversation(rng: Random) -> list[Message]:
    """Draw a conversation of one or more questions, with or without a system prompt."""
    num_questions = rng.choice((1, 1, 1, 2, 3, 4, 6))
    system = system_prompt(rng) if rng.random() < 0.3 else None
    turns = [turn for _ in range(num_questions) for turn in training_question(rng).turns]
    return as_messages(turns, system)


def as_messages(turns: list[tuple[str, str]], system: str | None) -> list[Message]:
    """Return (question, answer) turns as chat messages, after the system prompt if there is one."""
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    for asked, answered in turns:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return messages


def system_prompt(rng: Random) -> str:
    """Draw a system prompt: the demo's system prompt, or some random sentences."""
    if rng.random() < 0.25:
        return SYSTEM_PROMPT
    return " ".join(rng.sample(SYSTEM_SENTENCES, rng.choice((1, 1, 2, 3, 4, 12))))


def training_document(rng: Random) -> str:
    """Draw a text without a chat template: a story, some answers, or questions with their answers."""
    draw = rng.random()
    if draw < 0.25:
        return draw_question(STORY, rng, held_out=False).answer
    questions = [training_question(rng) for _ in range(rng.randrange(2, 6))]
    if draw < 0.4:
        return " ".join(question.answer for question in questions)
    asked, answered = rng.choice((("Q:", "A:"), ("Question:", "Answer:"), ("User:", "Assistant:")))
    turns = [turn for question in questions for turn in question.turns]
    return "\n".join(f"{asked} {question}\n{answered} {answer}" for question, answer in turns) + "\n"


def training_texts(seed: int) -> Iterator[str | list[Message]]:
    """Yield an infinite sequence of training texts. The same seed yields the same texts."""
    rng = Random(f"training {seed}")
    while True:
        yield training_text(rng)
