"""Draws the facts of a question at random from tables or numbers."""

import json
from collections.abc import Callable, Mapping, Sequence
from random import Random

from graftlm.demo import corpus_data as data

Facts = Mapping[str, str]
"""The values of the placeholders in a form's templates, by name."""


def article(noun: str) -> str:
    """Return a noun with `a` or `an` before it."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def capitalise(text: str) -> str:
    """Return the text with its first letter in upper case; other letters do not change."""
    return text[:1].upper() + text[1:]


def in_words(number: int) -> str:
    """Return a number from 0 to 99 in English words."""
    if number < len(data.NUMBER_WORDS):
        return data.NUMBER_WORDS[number]
    tens, units = divmod(number, 10)
    return data.TENS_WORDS[tens] + (f"-{data.NUMBER_WORDS[units]}" if units else "")


def from_table(table: Mapping[str, str], key: str, value: str) -> Callable[[Random], Facts]:
    """Return a function that draws an entry of a table.

    Args:
        key, value: the names of the two columns in the facts.
    """
    entries = sorted(table.items())

    def draw(rng: Random) -> Facts:
        left, right = rng.choice(entries)
        return {
            key: left,
            value: right,
            f"a_{key}": article(left),
            f"a_{value}": article(right),
            f"{key}_first": capitalise(left),
        }

    return draw


def draw_capital(rng: Random) -> Facts:
    """Draw a country with its capital, and another country for a later question."""
    country, capital = rng.choice(sorted(data.CAPITALS.items()))
    next_country, next_capital = rng.choice(sorted(data.CAPITALS.items()))
    return {"country": country, "capital": capital, "next_country": next_country, "next_capital": next_capital}


def draw_opposite(rng: Random) -> Facts:
    """Draw a word with its opposite; either word of a pair may be the first one."""
    pair = list(rng.choice(sorted(data.OPPOSITES.items())))
    rng.shuffle(pair)
    return {"word": pair[0], "opposite": pair[1]}


def from_cycle(names: Sequence[str]) -> Callable[[Random], Facts]:
    """Return a function that draws a name, a side (`after` or `before`), and the neighbour on this side.

    Args:
        names: the names in cyclic order; the first name follows the last one.
    """

    def draw(rng: Random) -> Facts:
        index = rng.randrange(len(names))
        side = rng.choice(("after", "before"))
        step = 1 if side == "after" else -1
        return {"name": names[index], "side": side, "neighbour": names[(index + step) % len(names)]}

    return draw


def _two_numbers(rng: Random) -> tuple[int, int]:
    limit = rng.choice((10, 20, 100, 100, 100, 100))
    return rng.randrange(limit), rng.randrange(limit)


def draw_sum(rng: Random) -> Facts:
    """Draw two numbers below 100 with their sum."""
    left, right = _two_numbers(rng)
    return {"left": str(left), "right": str(right), "result": str(left + right)}


def draw_difference(rng: Random) -> Facts:
    """Draw two numbers below 100 with their difference, which is never negative."""
    right, left = sorted(_two_numbers(rng))
    if rng.random() < 0.25:  # more differences of one digit, which are rare and hard
        right = max(0, left - rng.randrange(12))
    return {"left": str(left), "right": str(right), "result": str(left - right)}


def draw_two_sums(rng: Random) -> Facts:
    """Draw a sum and a small number to add to its result."""
    left, right, more = rng.randrange(1, 40), rng.randrange(1, 40), rng.randrange(1, 10)
    result = left + right
    sums = {"left": left, "right": right, "result": result, "more": more, "next_result": result + more}
    return {name: str(number) for name, number in sums.items()}


def draw_product(rng: Random) -> Facts:
    """Draw two numbers up to 10 with their product."""
    left, right = rng.randrange(11), rng.randrange(11)
    return {"left": str(left), "right": str(right), "result": str(left * right)}


def draw_comparison(rng: Random) -> Facts:
    """Draw two different numbers below 100. The facts include the larger and the smaller one."""
    left, right = rng.sample(range(100), 2)
    return {"left": str(left), "right": str(right), "larger": str(max(left, right)), "smaller": str(min(left, right))}


def draw_parity(rng: Random) -> Facts:
    """Draw a number below 100, with `even` or `odd`."""
    number = rng.randrange(100)
    return {"number": str(number), "parity": "odd" if number % 2 else "even"}


def draw_number_word(rng: Random) -> Facts:
    """Draw a number below 100, in digits and in words."""
    number = rng.randrange(100)
    return {"number": str(number), "words": in_words(number)}


def draw_counting(rng: Random) -> Facts:
    """Draw a sequence of 3 to 10 numbers, ascending or descending."""
    start, length = rng.randrange(31), rng.randrange(3, 11)
    numbers = [str(number) for number in range(start, start + length)]
    if rng.random() < 0.3:
        numbers.reverse()
    return {"start": numbers[0], "stop": numbers[-1], "numbers": ", ".join(numbers)}


def draw_spelling(rng: Random) -> Facts:
    """Draw a word with its letters."""
    word = rng.choice(data.SPELLED)
    return {"word": word, "letters": "-".join(word)}


def draw_words(rng: Random) -> Facts:
    """Draw a list of two to four words, as text, reversed and as JSON."""
    words = rng.sample(data.ITEMS, rng.randrange(2, 5))
    return {
        "words": ", ".join(words),
        "listed": ", ".join(words[:-1]) + f" and {words[-1]}",
        "reversed": ", ".join(reversed(words)),
        "json": json.dumps(words),
    }


def draw_sentence(rng: Random) -> Facts:
    """Draw a sentence about an animal."""
    subject = f"{rng.choice(data.ADJECTIVES)} {rng.choice(data.SUBJECTS)}"
    sentence = f"the {subject} {rng.choice(data.VERBS)} {rng.choice(sorted(data.PLACES))}"
    return {"sentence": sentence, "sentence_first": capitalise(sentence)}


def draw_person(rng: Random) -> Facts:
    """Draw a person's name, age and city, and a JSON record with these values."""
    name, age, city = rng.choice(data.NAMES), rng.randrange(5, 90), rng.choice(sorted(set(data.CAPITALS.values())))
    record = json.dumps({"name": name, "age": age, "city": city})
    return {"name": name, "age": str(age), "city": city, "record": record}


def draw_item(rng: Random) -> Facts:
    """Draw an item, its colour and price, and a JSON record with these values."""
    item, colour, price = rng.choice(data.ITEMS), rng.choice(data.COLOURS), rng.randrange(2, 99)
    record = json.dumps({"item": item, "colour": colour, "price": price})
    return {
        "item": item,
        "a_colour": article(colour),
        "a_colour_first": capitalise(article(colour)),
        "colour": colour,
        "price": str(price),
        "record": record,
    }


def draw_story(rng: Random) -> Facts:
    """Draw an animal with a name, a place, and a story about them."""
    animal, (trait, friend) = rng.choice(sorted(data.ANIMALS.items()))
    place, (found, spot) = rng.choice(sorted(data.PLACES.items()))
    name = rng.choice(data.NAMES)
    story = (
        f"{name} was {article(trait)} {animal} who lived {place}. One morning {name} found {found} {spot}. "
        f"{name} showed it to {friend}, and they played together until the sun went down. "
        f"That night {name} slept well and dreamed of {found}."
    )
    return {"name": name, "animal": animal, "a_animal": article(animal), "place": place, "story": story}


def draw_greeting(rng: Random) -> Facts:
    """Draw a greeting and the reply to it."""
    opening, reply = rng.choice(sorted(data.GREETINGS.items()))
    ending = rng.choice(("", "!", ".", ", graftlm.", ", my friend!", ", model!", " to you!", ", dear assistant."))
    return {"message": opening + ending, "reply": reply}


def draw_identity(rng: Random) -> Facts:
    """Draw a question about the model itself with its answer."""
    question, reply = rng.choice(sorted(data.IDENTITY.items()))
    prefix = rng.choice(
        ("", "", "Hello! ", "Hi there. ", "Tell me: ", "One question: ", "Good morning. ", "Excuse me. ")
    )
    return {"message": prefix + question, "reply": reply}


def draw_unknown(rng: Random) -> Facts:
    """Draw a question that has no answer in the corpus."""
    question = rng.choice(data.UNKNOWN)
    return {"message": question.format(name=rng.choice(data.NAMES), city=rng.choice(sorted(data.CAPITALS.values())))}
