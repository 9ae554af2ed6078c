"""The forms of questions that the demo model answers. A form has templates for the question and for the answer."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

from graftlm.demo import corpus_data as data
from graftlm.demo import facts
from graftlm.demo.facts import Facts


@dataclass(frozen=True, slots=True)
class Form:
    """A form of question. The templates contain names of facts in braces.

    Attributes:
        name: unique name.
        draw: function that draws the facts of a question.
        questions: templates of the question, one for each phrasing.
        answer: template of the answer, which depends only on the facts.
        key: names of the facts that identify a question; the order of their values does not matter.
        weight: probability of the form in the training text, relative to the other forms.
        holds_out: with `arguments`, held-out facts occur in no training question, so the model must generalise. With
            `phrasing`, held-out facts occur in training questions with other phrasings; this is for facts that cannot
            be derived, such as the capital of France.
        after: form of the earlier turn to which the question refers; both turns use the same facts.
        split_as: name of another form. Questions of both forms with equal facts are held out together, because their
            answers contain the same equation.
    """

    name: str
    draw: Callable[[Random], Facts]
    questions: tuple[str, ...]
    answer: str
    key: tuple[str, ...]
    weight: float = 1.0
    holds_out: Literal["arguments", "phrasing"] = "phrasing"
    after: "Form | None" = None
    split_as: str | None = None


CAPITAL: Final = Form(
    "capital",
    facts.draw_capital,
    (
        "What is the capital of {country}?",
        "Which city is the capital of {country}?",
        "Name the capital of {country}.",
        "Tell me the capital of {country}.",
        "What is {country}'s capital?",
        "What is the capital city of {country}?",
        "Do you know the capital of {country}?",
        "Capital of {country}?",
    ),
    "The capital of {country} is {capital}.",
    key=("country",),
    weight=2.5,
)

FACT_FORMS: Final = (
    CAPITAL,
    Form(
        "capital again",
        facts.draw_capital,
        (
            "And of {next_country}?",
            "And the capital of {next_country}?",
            "What about {next_country}?",
            "And {next_country}?",
        ),
        "The capital of {next_country} is {next_capital}.",
        key=("next_country",),
        weight=1.5,
        after=CAPITAL,
    ),
    Form(
        "country",
        facts.draw_capital,
        (
            "Which country has the capital {capital}?",
            "{capital} is the capital of which country?",
            "What country is {capital} the capital of?",
            "Name the country whose capital is {capital}.",
            "Of which country is {capital} the capital?",
            "Which country's capital is {capital}?",
        ),
        "{capital} is the capital of {country}.",
        key=("country",),
        weight=3.5,
    ),
    Form(
        "opposite",
        facts.draw_opposite,
        (
            "What is the opposite of {word}?",
            "Give me the opposite of {word}.",
            "Which word is the opposite of {word}?",
            "What is the antonym of {word}?",
            "Opposite of {word}?",
            "Tell me the opposite of the word {word}.",
        ),
        "The opposite of {word} is {opposite}.",
        key=("word",),
        weight=2.5,
    ),
    Form(
        "plural",
        facts.from_table(data.PLURALS, "singular", "plural"),
        (
            "What is the plural of {singular}?",
            "Give me the plural of {singular}.",
            "Plural of {singular}?",
            "What is the plural form of {singular}?",
            "One {singular}, two what?",
            "What do you call more than one {singular}?",
        ),
        "The plural of {singular} is {plural}.",
        key=("singular",),
        weight=2.5,
    ),
    Form(
        "colour",
        facts.from_table(data.COLOURS_OF, "thing", "colour"),
        (
            "What colour is {thing}?",
            "What color is {thing}?",
            "Which colour does {thing} have?",
            "Tell me the colour of {thing}.",
            "What is the colour of {thing}?",
        ),
        "{thing_first} is {colour}.",
        key=("thing",),
        weight=1.5,
    ),
    Form(
        "sound",
        facts.from_table(data.SOUNDS, "animal", "sound"),
        (
            "What sound does {a_animal} make?",
            "What does {a_animal} say?",
            "Which sound does {a_animal} make?",
            "How does {a_animal} sound?",
            "What noise does {a_animal} make?",
        ),
        "The {animal} says {sound}.",
        key=("animal",),
    ),
    Form(
        "young",
        facts.from_table(data.YOUNG, "animal", "young"),
        (
            "What is a baby {animal} called?",
            "What do you call a young {animal}?",
            "What is the young of {a_animal} called?",
            "Name the young of {a_animal}.",
            "What is the name for a baby {animal}?",
        ),
        "A young {animal} is called {a_young}.",
        key=("animal",),
    ),
    Form(
        "legs",
        facts.from_table(data.LEGS, "animal", "legs"),
        (
            "How many legs does {a_animal} have?",
            "How many legs has {a_animal}?",
            "Tell me how many legs {a_animal} has.",
            "What is the number of legs of {a_animal}?",
        ),
        "The {animal} has {legs} legs.",
        key=("animal",),
    ),
    *(
        Form(
            unit,
            facts.from_cycle(names),
            (
                f"Which {unit} comes {{side}} {{name}}?",
                f"What {unit} comes {{side}} {{name}}?",
                f"What {unit} is {{side}} {{name}}?",
                f"Name the {unit} {{side}} {{name}}.",
                f"Tell me the {unit} that comes {{side}} {{name}}.",
                "What comes {side} {name}?",
            ),
            "{neighbour} comes {side} {name}.",
            key=("name", "side"),
        )
        for unit, names in (("day", data.DAYS), ("month", data.MONTHS))
    ),
)

SUM: Final = Form(
    "sum",
    facts.draw_sum,
    (
        "What is {left} + {right}?",
        "What is {left} plus {right}?",
        "Add {left} and {right}.",
        "Calculate {left} + {right}.",
        "How much is {left} plus {right}?",
        "{left} + {right} = ?",
        "What is the sum of {left} and {right}?",
    ),
    "{left} + {right} = {result}.",
    key=("left", "right"),
    weight=9,
    holds_out="arguments",
)

NUMBER_FORMS: Final = (
    SUM,
    Form(
        "difference",
        facts.draw_difference,
        (
            "What is {left} - {right}?",
            "What is {left} minus {right}?",
            "Subtract {right} from {left}.",
            "Calculate {left} - {right}.",
            "How much is {left} minus {right}?",
            "{left} - {right} = ?",
            "Take {right} away from {left}.",
        ),
        "{left} - {right} = {result}.",
        key=("left", "right"),
        weight=12,
        holds_out="arguments",
    ),
    Form(
        "sum again",
        facts.draw_two_sums,
        ("And {more} more?", "Add {more} more.", "Plus {more}?", "Now add {more}."),
        "{result} + {more} = {next_result}.",
        key=("result", "more"),
        weight=1.5,
        holds_out="arguments",
        after=SUM,
        split_as="sum",
    ),
    Form(
        "product",
        facts.draw_product,
        (
            "What is {left} times {right}?",
            "What is {left} * {right}?",
            "Multiply {left} by {right}.",
            "Calculate {left} * {right}.",
            "How much is {left} times {right}?",
        ),
        "{left} * {right} = {result}.",
        key=("left", "right"),
        weight=2,
    ),
    Form(
        "larger",
        facts.draw_comparison,
        (
            "Which is larger, {left} or {right}?",
            "Which number is larger: {left} or {right}?",
            "What is more, {left} or {right}?",
            "Is {left} or {right} larger?",
        ),
        "{larger} is larger than {smaller}.",
        key=("left", "right"),
        weight=4,
        holds_out="arguments",
    ),
    Form(
        "even or odd",
        facts.draw_parity,
        ("Is {number} even or odd?", "Is the number {number} odd or even?", "Even or odd: {number}?"),
        "{number} is {parity}.",
        key=("number",),
        weight=1.5,
    ),
    Form(
        "number in words",
        facts.draw_number_word,
        (
            "Write {number} in words.",
            "How do you write {number} in words?",
            "Write the number {number} as a word.",
            "What is {number} in words?",
        ),
        "{number} is written {words}.",
        key=("number",),
        weight=1.5,
    ),
    Form(
        "count",
        facts.draw_counting,
        (
            "Count from {start} to {stop}.",
            "Can you count from {start} to {stop}?",
            "Please count from {start} to {stop}.",
            "List the numbers from {start} to {stop}.",
        ),
        "{numbers}.",
        key=("start", "stop"),
        weight=4.5,
        holds_out="arguments",
    ),
)

STORY: Final = Form(
    "story",
    facts.draw_story,
    (
        "Tell me a short story about {a_animal} named {name} {place}.",
        "Write a short story about {a_animal} called {name} who lives {place}.",
        "Tell a story: {name} is {a_animal} {place}.",
        "I would like a story about {name}, {a_animal} {place}.",
    ),
    "{story}",
    key=("name", "animal", "place"),
    weight=1.25,
    holds_out="arguments",
)

TEXT_FORMS: Final = (
    Form(
        "spell",
        facts.draw_spelling,
        (
            "Spell {word}.",
            "Spell the word {word}.",
            "How do you spell {word}?",
            "Can you spell {word}?",
            "What is the spelling of {word}?",
        ),
        "{letters}",
        key=("word",),
        weight=3.5,
    ),
    Form(
        "reverse",
        facts.draw_words,
        (
            "Reverse this list: {words}.",
            "Write the list backwards: {words}.",
            "Turn this list around: {words}.",
            "What is this list in reverse: {words}?",
        ),
        "{reversed}",
        key=("words",),
        weight=2,
        holds_out="arguments",
    ),
    Form(
        "repeat",
        facts.draw_sentence,
        ("Repeat after me: {sentence}.", "Say this: {sentence}.", "Repeat: {sentence}.", "Please repeat: {sentence}."),
        "{sentence_first}.",
        key=("sentence",),
        holds_out="arguments",
    ),
    Form(
        "JSON list",
        facts.draw_words,
        (
            "Write a JSON list of {listed}.",
            "Write {listed} as a JSON list.",
            "Make a JSON list with {listed}.",
            "Give me a JSON array of {listed}.",
        ),
        "{json}",
        key=("words",),
        weight=2,
        holds_out="arguments",
    ),
    Form(
        "JSON person",
        facts.draw_person,
        (
            "Write a JSON record for {name}, age {age}, city {city}.",
            "Make a JSON object for {name}, who is {age} years old and lives in {city}.",
            "{name} is {age} years old and lives in {city}. Write that as JSON.",
            "Give me JSON for a person: {name}, {age}, {city}.",
            "Write JSON with name {name}, age {age} and city {city}.",
        ),
        "{record}",
        key=("name", "city"),
        weight=2,
        holds_out="arguments",
    ),
    Form(
        "JSON item",
        facts.draw_item,
        (
            "Write a JSON record for {a_colour} {item} that costs {price} euros.",
            "{a_colour_first} {item} costs {price} euros. Write that as JSON.",
            "Write JSON with item {item}, colour {colour} and price {price}.",
            "Make a JSON object for {a_colour} {item} with the price {price}.",
        ),
        "{record}",
        key=("item", "colour"),
        weight=1.5,
        holds_out="arguments",
    ),
    STORY,
)

TALK_FORMS: Final = (
    Form("greeting", facts.draw_greeting, ("{message}",), "{reply}", key=("message",)),
    Form(
        "identity",
        facts.draw_identity,
        ("{message}",),
        "{reply}",
        key=("message",),
        weight=1.5,
    ),
    Form(
        "unknown",
        facts.draw_unknown,
        ("{message}",),
        "Sorry, I am only a small demo model and I do not know that.",
        key=("message",),
        weight=0.5,
        holds_out="arguments",
    ),
)

FORMS: Final = (*FACT_FORMS, *NUMBER_FORMS, *TEXT_FORMS, *TALK_FORMS)
"""All forms."""
