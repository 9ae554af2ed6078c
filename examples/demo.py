"""Answer chat questions that share a system prompt, and show how much of it each one reused.

The bundled model is small, but everything around it is real: the tokenizer, the chat template, the radix tree, the
continuous batch. Run it with `make demo`.
"""

import time

from rich.console import Console
from rich.table import Table

from graftlm import Engine, RequestOutput, SamplingParams
from graftlm.demo import DEMO_QUESTIONS, SYSTEM_PROMPT

GREEDY = SamplingParams(temperature=0, max_tokens=96)


def ask(console: Console, engine: Engine, question: str) -> RequestOutput:
    """Stream one answer to the terminal and return the finished output."""
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
    console.print(f"[bold]{question}[/bold]")
    shown = 0
    for output in engine.stream(messages, GREEDY):
        console.print(output.text[shown:], end="", markup=False, highlight=False, soft_wrap=True)
        shown = len(output.text)
    console.print("\n")
    return output


def report(outputs: list[RequestOutput]) -> Table:
    """Lay out what each answer cost."""
    table = Table(title="What each question cost, in tokens")
    table.add_column("question", max_width=26, no_wrap=True, overflow="ellipsis")
    for name in ("prompt", "reused", "computed", "generated", "first, ms"):
        table.add_column(name, justify="right")
    for question, output in zip(DEMO_QUESTIONS, outputs, strict=True):
        usage = output.usage
        table.add_row(
            question,
            str(usage.prompt_tokens),
            str(usage.cached_tokens),
            str(usage.prompt_tokens - usage.cached_tokens),
            str(usage.completion_tokens),
            f"{1000 * (output.timings.first_token_s or 0):.1f}",
        )
    return table


def main() -> None:
    """Ask every question one after the other, then all at once."""
    console = Console()
    start = time.perf_counter()
    with Engine(model="demo") as engine:
        console.print(f"engine ready in {time.perf_counter() - start:.1f} s\n")
        outputs = [ask(console, engine, question) for question in DEMO_QUESTIONS]
        console.print(report(outputs))
        engine.flush_cache()
        chats = [
            [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
            for question in DEMO_QUESTIONS
        ]
        start = time.perf_counter()
        batch = engine.generate(chats, GREEDY)
        seconds = time.perf_counter() - start
        prompt = sum(o.usage.prompt_tokens for o in batch)
        reused = sum(o.usage.cached_tokens for o in batch)
        same = "the same" if [o.text for o in batch] == [o.text for o in outputs] else "different"
        console.print(
            f"\nAll {len(batch)} at once, from an empty cache: {seconds:.2f} s, {same} answers; "
            f"{reused} of {prompt} prompt tokens reused."
        )


if __name__ == "__main__":
    main()
