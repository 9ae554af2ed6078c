"""Answer a question with tools: in each turn, the model writes a thought, selects a tool and reads its result.

This is the method ReAct (https://arxiv.org/abs/2210.03629). `select` chooses among the existing tools, and a regular
expression constrains the tool's argument, so every call is valid. Each turn reuses the cached keys and values of the
previous turns.
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
    """Return the value of an expression of two numbers and an operator."""
    left, sign, right = expression.split()
    return str(OPERATORS[sign](int(left), int(right)))


def look_up(name: str) -> str:
    """Return the fact about a name."""
    return FACTS.get(name, f"nothing is known of {name}")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model can call, and the regular expression of its argument."""

    call: Callable[[str], str]
    argument: str


TOOLS = {
    "calculate": Tool(calculate, r"[0-9]{1,3} [-+*] [0-9]{1,3}"),
    "look up": Tool(look_up, r"[A-Z][a-z]{1,12}"),
    "finish": Tool(str, r"[\w ]{1,24}"),
}


@function
def agent(s: ProgramState, question: str, max_turns: int = 3) -> str | None:
    """Return the answer, or None if the model does not finish within `max_turns`."""
    s += EXAMPLES + f"Question: {question}\n"
    tools = ["calculate", "look up"]  # no "finish" in the first turn: an answer without a tool would be a guess
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
    """Answer one question, and print the thoughts and tool calls."""
    with example_backend(__doc__):
        state = agent.run("How old will Mia be in 6 years?", temperature=0)
        print(state.text().removeprefix(EXAMPLES))
        print("no answer" if state.ret_value is None else state.ret_value)


if __name__ == "__main__":
    main()
