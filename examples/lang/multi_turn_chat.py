"""Chat in several turns; each turn reuses the cached keys and values of the previous turns."""

from collections.abc import Sequence

from example_backend import example_backend

from graftlm import ProgramState, assistant, function, gen, system, user

QUESTIONS = ("What is the capital of Portugal?", "What is 47 plus 38?", "Which day comes after Thursday?")


@function
def chat(s: ProgramState, questions: Sequence[str]) -> None:
    """Ask the questions one after the other."""
    s += system("You are a friendly assistant that answers in one short sentence.")
    for i, question in enumerate(questions):
        s += user(question)
        s += assistant(gen(f"answer_{i}", max_tokens=48))


def main() -> None:
    """Chat, and print the answers while they are generated."""
    with example_backend(__doc__):
        state = chat.run(QUESTIONS, temperature=0, stream=True)
        for i, question in enumerate(QUESTIONS):
            print(f"> {question}")
            for chunk in state.text_iter(f"answer_{i}"):
                print(chunk, end="", flush=True)
            usage = state.get_meta_info(f"answer_{i}")
            print(f"   [{usage['cached_tokens']} of {usage['prompt_tokens']} prompt tokens reused]")


if __name__ == "__main__":
    main()
