"""Answer a question from documents: retrieve passages, select the helpful ones, and answer from them.

The retriever is BM25 (Robertson and Zaragoza, 2009) over a few texts in memory. For each passage, a fork decides
whether the passage helps; the forks run in parallel, and their common prefix is computed once. The prompt of the answer
contains only the helpful passages.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from example_backend import example_backend

from graftlm import ProgramState, assistant, function, gen, select, system, user

PASSAGES = (
    "Lima is the capital of Peru. It lies at the sea, and ten million people live there.",
    "The capital of Norway is Oslo. In winter its people ski in the woods around the city.",
    "Lisbon is the capital of Portugal, and older than Rome. Its trams climb seven hills.",
    "A young fox is called a cub. Foxes live in forests and fields, and in cities too.",
)


class BM25:
    """Ranks texts by the words that they share with a query; rare words have more weight, long texts less."""

    def __init__(self, texts: Sequence[str], k1: float = 1.5, b: float = 0.75) -> None:
        self._texts, self._k1, self._b = texts, k1, b
        self._counts = [Counter(words(text)) for text in texts]
        self._mean_len = sum(count.total() for count in self._counts) / len(texts)
        num_with = Counter([word for count in self._counts for word in count])
        self._weights = {w: math.log(1 + (len(texts) - n + 0.5) / (n + 0.5)) for w, n in num_with.items()}

    def best(self, query: str, number: int) -> list[str]:
        """Return the `number` texts with the highest scores for a query."""
        order = sorted(range(len(self._texts)), key=lambda i: self._score(query, self._counts[i]), reverse=True)
        return [self._texts[i] for i in order[:number]]

    def _score(self, query: str, count: Counter[str]) -> float:
        size = self._k1 * (1 - self._b + self._b * count.total() / self._mean_len)
        return sum(self._weights[w] * count[w] * (self._k1 + 1) / (count[w] + size) for w in words(query) if count[w])


def words(text: str) -> list[str]:
    """Return a text's words in lower case."""
    return re.findall(r"\w+", text.lower())


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, and the passages that were in its prompt."""

    text: str
    sources: tuple[str, ...]


@function
def ask(s: ProgramState, question: str, retriever: BM25, num_passages: int = 3) -> Answer:
    """Return an answer from the helpful passages; if the model finds none helpful, from the best one."""
    found = retriever.best(question, num_passages)
    s += system("You answer questions from the passages that you are given, and from nothing else.")

    forks = s.fork(len(found))
    forks += [user(f"Does this passage help to answer the question? {question}\n\n{passage}") for passage in found]
    forks += assistant(select("helps", ["yes", "no"]))
    helpful = [passage for passage, fork in zip(found, forks, strict=True) if fork["helps"] == "yes"]
    sources = helpful or found[:1]

    s += user("\n\n".join(sources) + f"\n\n{question}")
    s += assistant(gen("answer", max_tokens=32, stop="\n"))
    return Answer(s["answer"], tuple(sources))


def main() -> None:
    """Answer one question."""
    with example_backend(__doc__):
        answer = ask.run("What is the capital of Norway?", BM25(PASSAGES), temperature=0).ret_value
        print(answer.text)
        for source in answer.sources:
            print(f"  from: {source}")


if __name__ == "__main__":
    main()
