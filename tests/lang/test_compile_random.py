"""Random programs generate the same text when they are compiled."""

import random

import pytest

from graftlm import assistant, function, gen, select, user

WORDS = ("day", "tea", "Monday", "Paris", "2 + 3 =", "the capital of France is")


class RandomProgram:
    """A program of random expressions, which are the same in every run."""

    def __init__(self, seed):
        self.__name__ = f"random_{seed}"
        self.seed = seed

    def __call__(self, s, topic, number):
        self.random = random.Random(self.seed)
        self.arguments = (topic, number)
        self.values = [topic]
        self.num_names = 0
        self.say_some(s, depth=0)
        return [self.values, {"text": s.text()}]

    def say_some(self, s, depth):
        s += "So "
        for _ in range(self.random.randrange(3, 9)):
            some = [self.say_text, self.generate, self.choose, self.scope, self.chat]
            some += [self.fork, self.fork_alike, self.copy] if depth < 2 else []
            self.random.choice(some)(s, depth)

    def name(self):
        self.num_names += 1
        return f"v{self.num_names}"

    def text(self):
        topic, number = self.arguments
        value = self.random.choice(self.values)
        makers = (
            lambda: self.random.choice(WORDS) + " ",
            lambda: topic,
            lambda: f" {topic!r} {number:>5}",
            lambda: f" {value} ",
            lambda: value + ".",
            lambda: value.strip() + topic.upper(),
        )
        return self.random.choice(makers)()

    def say_text(self, s, depth):
        s += self.text()

    def generate(self, s, depth):
        name = self.name()
        s += gen(name, max_tokens=self.random.choice([1, 3]), stop=self.random.choice([None, "."]))
        self.values.append(s[name])

    def choose(self, s, depth):
        name = self.name()
        s += select(name, self.random.choice([["tea", "cake"], ["tea"], [f"{self.arguments[0]}!", "x"]]))
        self.values.append(s[name])

    def scope(self, s, depth):
        name = self.name()
        with s.var_scope(name):
            self.say_text(s, depth)
        self.values.append(s[name])

    def chat(self, s, depth):
        name = self.name()
        s += user(self.text()) + assistant(f"{self.text()}" + gen(name, max_tokens=2))
        self.values.append(s[name])

    def fork(self, s, depth):
        forks = s.fork(self.random.choice([1, 2, 3]))
        for fork in forks:
            self.say_some(fork, depth + 1)
        self.finish(forks)

    def fork_alike(self, s, depth):
        forks = s.fork(3)
        forks += f" {self.text()} and so on" + gen(self.name(), max_tokens=2)
        self.finish(forks)

    def finish(self, forks):
        if self.random.random() < 0.6:
            forks.join()
        elif self.random.random() < 0.5:
            self.values.append(forks[-1].text())

    def copy(self, s, depth):
        with s.copy() as other:
            self.say_some(other, depth + 1)


def variables_of(state):
    return {name: state[name] for name in state.parts()[1].copy()}


@pytest.mark.few(seed=6)
@pytest.mark.parametrize("seed", range(12))
def test_a_random_program_generates_the_same_text_when_compiled(seed, in_process):
    program = function(RandomProgram(seed))
    expected = program.run("topic", 42, temperature=0, backend=in_process)
    compiled = program.compile()
    arguments = {"topic": "topic", "number": 42}
    streamed = compiled.run(**arguments, temperature=0, backend=in_process, stream=True)
    assert "".join(streamed.text_iter()) == expected.text()
    for state in [*compiled.run_batch([arguments] * 2, temperature=0, backend=in_process), streamed]:
        assert state.text() == expected.text()
        assert state.messages() == expected.messages()
        assert variables_of(state) == variables_of(expected)
    assert state.ret_value == expected.ret_value
