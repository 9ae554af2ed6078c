"""Write an outline of an answer first, and then expand all of its points in parallel.

This method is skeleton of thought (https://arxiv.org/abs/2307.15337). The points of a long answer depend more on the
question than on each other. In parallel, they take the time of the longest point instead of the sum.
"""

from example_backend import example_backend

from graftlm import ProgramState, assistant, function, gen, system, user

NUM_POINTS = 4
SKELETON = r"\n".join([rf"{i + 1}\. [A-Z][a-z]{{1,9}}( [a-z]{{1,9}}){{1,4}}" for i in range(NUM_POINTS)])


@function
def answer(s: ProgramState, question: str) -> str:
    """Return the answer, with one paragraph for each point."""
    s += system("You answer questions well and in order.")
    s += user(f"{question} Write only the skeleton of the answer: {NUM_POINTS} points of two to five words each.")
    s += assistant(gen("skeleton", max_tokens=128, regex=SKELETON))
    points = s["skeleton"].split("\n")

    forks = s.fork(len(points))
    forks += [user(f"Write point {i + 1} out, in one sentence.") for i in range(len(points))]
    forks += [assistant(f"{point}: " + gen("paragraph", max_tokens=32, stop="\n")) for point in points]
    return "\n".join([f"{point}: {fork['paragraph']}" for point, fork in zip(points, forks, strict=True)])


def main() -> None:
    """Answer one question."""
    with example_backend(__doc__):
        state = answer.run("Why is it good to plant trees in a city?", temperature=0)
        print(state.ret_value)


if __name__ == "__main__":
    main()
