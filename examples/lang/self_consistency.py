"""Sample several answers to a question, and return the most frequent one.

This method is self-consistency (https://arxiv.org/abs/2203.11171). The common prefix of all answers is computed once.
"""

from collections import Counter

from example_backend import example_backend

from graftlm import ProgramState, assistant_begin, function, gen, user


@function
def vote(s: ProgramState, question: str, num_answers: int = 5) -> str:
    """Return the most frequent answer."""
    s += user(question) + assistant_begin()
    with s.fork(num_answers) as forks:
        forks += gen("answer", max_tokens=24, stop="\n")
    answer, num_votes = Counter(s["answer"]).most_common(1)[0]
    s["votes"] = num_votes
    return answer


def main() -> None:
    """Ask one question."""
    with example_backend(__doc__):
        state = vote.run("What is 2 + 3?", temperature=0.7)
        print(f"{state['votes']} of {len(state['answer'])} say: {state.ret_value}")


if __name__ == "__main__":
    main()
