"""Serve the bundled model, ask it questions with the `openai` package, and print what cache and draft head saved.

The bundled model is small, but the server is complete: processes, HTTP, tokenizer, chat template, radix cache and
continuous batching. Run this script with `make demo`.
"""

import time
from dataclasses import dataclass

import openai
from rich.console import Console
from rich.table import Table

from graftlm.demo import DEMO_QUESTIONS, SYSTEM_PROMPT
from graftlm.testing.server_process import ServerProcess

SPECULATION = {"drafter": {"name": "eagle3", "options": {"path": "demo-eagle3"}}}


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, its numbers of tokens, and its TTFT in seconds.

    Attributes:
        prompt, reused: tokens of the prompt, and those of them that were cached.
        generated: tokens of the answer.
        accepted: tokens of the answer that the draft head had drafted. Each saved one step of the model.
    """

    question: str
    text: str
    prompt: int
    reused: int
    generated: int
    accepted: int
    first_s: float


def ask(client: openai.OpenAI, console: Console, question: str) -> Answer:
    """Ask a question, and print the answer while it is streamed."""
    console.print(f"[bold]{question}[/bold]")
    start, first_s, text = time.perf_counter(), 0.0, ""
    stream = client.chat.completions.create(
        model="demo",
        messages=[{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}],
        temperature=0,
        max_tokens=96,
        stream=True,
        stream_options={"include_usage": True},
    )
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        piece = chunk.choices[0].delta.content if chunk.choices else None
        if piece:
            first_s = first_s or time.perf_counter() - start
            text += piece
            console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
    console.print("\n")
    if usage is None or usage.prompt_tokens_details is None:
        raise RuntimeError("the server sent no usage")
    reused = usage.prompt_tokens_details.cached_tokens or 0
    accepted: int = getattr(usage.completion_tokens_details, "accepted_draft_tokens", None) or 0
    return Answer(question, text, usage.prompt_tokens, reused, usage.completion_tokens, accepted, first_s)


def report(answers: list[Answer]) -> Table:
    """Return a table with the numbers of tokens and the TTFT of each answer."""
    table = Table(title="What each question cost, in tokens")
    table.add_column("question", max_width=16, no_wrap=True, overflow="ellipsis")
    for name in ("prompt", "reused", "computed", "generated", "drafted", "first, ms"):
        table.add_column(name, justify="right")
    for a in answers:
        numbers = (a.prompt, a.reused, a.prompt - a.reused, a.generated, a.accepted, f"{1000 * a.first_s:.1f}")
        table.add_row(a.question, *[str(number) for number in numbers])
    return table


def savings(answers: list[Answer]) -> str:
    """Return a sentence with the prompt tokens and steps that were saved."""
    reused, accepted = sum(a.reused for a in answers), sum(a.accepted for a in answers)
    generated = sum(a.generated for a in answers)
    return (
        f"\nThe prefix cache saved the computation of {reused} prompt tokens. The draft head predicted {accepted} of "
        f"{generated} generated tokens; each of these saved one step of the model."
    )


def main() -> None:
    """Start the server, ask all questions, and stop the server."""
    console = Console()

    def show_kernels(line: str) -> None:
        """Print the lines of the server's log that are about the compilation of kernels."""
        if "compil" in line:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    console.print("$ graftlm serve --model demo --port 0  # and the model's EAGLE-3 head")
    with ServerProcess({"model": "demo", "speculation": SPECULATION}, on_log=show_kernels) as server:
        console.print(f"serving on {server.url} after {server.start_s:.1f} s\n")
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            answers = [ask(client, console, question) for question in DEMO_QUESTIONS]
        console.print(report(answers))
        console.print(savings(answers))
        status = server.stop()
        console.print(f"\nthe server ended with status {status}")


if __name__ == "__main__":
    main()
