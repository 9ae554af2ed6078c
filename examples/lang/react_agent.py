"""Let the model use tools: it thinks, picks a tool, and reads what the tool says, until it knows the answer.

ReAct (https://arxiv.org/abs/2210.03629). `select` can only pick a tool that exists, and each tool's arguments have a
form, so nothing has to be parsed and no call can be malformed. Each turn finds the whole text before it in the cache.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass

from example_backend import example_backend

from graftlm import ProgramState, function, gen, select

FACTS = {"Lima": "the capital of Peru", "Oslo": "the capital of Norway", "Ben": "45 years old", "Mia": "28 years old"}
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
EXAMPLES = """\
Answer questions with tools: calculate[sum], look up[name], finish[answer].

Question: How old will Ana be in 7 years?
Thought: I need the age of Ana.
Action: look up[Ana]
Observation: 31 years old
Thought: I add 7 to 31.
Action: calculate[31 + 7]
Observation: 38
Thought: I know the answer.
Action: finish[38]

"""


def calculate(expression: str) -> str:
    """Return the value of two numbers with a sign between them."""
    left, sign, right = expression.split()
    return str(OPERATORS[sign](int(left), int(right)))


def look_up(name: str) -> str:
    """Return what is known of a name."""
    return FACTS.get(name, f"nothing is known of {name}")


@dataclass(frozen=True, slots=True)
class Tool:
    """Something that the model can call, and the form of what it takes."""

    call: Callable[[str], str]
    argument: str


TOOLS = {
    "calculate": Tool(calculate, r"[0-9]{1,3} [-+*] [0-9]{1,3}"),
    "look up": Tool(look_up, r"[A-Z][a-z]{1,12}"),
    "finish": Tool(str, r"[\w ]{1,24}"),
}


@function
def agent(s: ProgramState, question: str, max_turns: int = 3) -> str | None:
    """Return the answer, or None when it took too long."""
    s += EXAMPLES + f"Question: {question}\n"
    tools = ["calculate", "look up"]  # to begin with: an answer without a look at anything is a guess
    for _ in range(max_turns):
        s += "Thought:" + gen("thought", max_tokens=24, stop="\n") + "\nAction: "
        s += select("tool", tools)
        tool = TOOLS[s["tool"]]
        s += "[" + gen("argument", max_tokens=16, regex=tool.argument) + "]\n"
        observation = tool.call(s["argument"])
        if s["tool"] == "finish":
            return observation
        s += f"Observation: {observation}\n"
        tools = list(TOOLS)
    return None


def main() -> None:
    """Answer one question, showing the way to it."""
    with example_backend(__doc__):
        state = agent.run("How old will Mia be in 6 years?", temperature=0)
        print(state.text().removeprefix(EXAMPLES))
        print("no answer" if state.ret_value is None else state.ret_value)


if __name__ == "__main__":
    main()
