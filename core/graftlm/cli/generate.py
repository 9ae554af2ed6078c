"""The commands `graftlm generate` and `graftlm chat`, which run a model."""

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from graftlm.cli.options import (
    ConfigOption,
    SetOption,
    TargetArgument,
    fail,
    load_config,
    names_target,
    split_target,
)

if TYPE_CHECKING:
    from graftlm.engine.engine import Engine
    from graftlm.types import Message, RequestOutput, SamplingParams

__all__ = ["chat", "generate"]

ModelOption = Annotated[
    str | None, typer.Option("--model", metavar="PATH", help="A checkpoint folder, or `demo`, the bundled model.")
]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", help="Maximum number of tokens to generate.")]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", help="Temperature of sampling; 0 selects the most likely token.")
]
TopPOption = Annotated[
    float,
    typer.Option(
        "--top-p",
        help="Sample only from the smallest set of the most likely tokens whose total probability is at least this "
        "number.",
    ),
]
TopKOption = Annotated[
    int | None, typer.Option("--top-k", help="Sample only from this number of the most likely tokens.")
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", help="Seed of sampling, which makes the output reproducible.")
]
SystemOption = Annotated[str | None, typer.Option("--system", help="A system prompt.")]


def generate(
    prompts: Annotated[
        list[str], typer.Argument(metavar="PROMPT...", help="Prompts to complete; `-` reads one prompt from stdin.")
    ],
    model: ModelOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    as_chat: Annotated[bool, typer.Option("--chat", help="Send each prompt as a user's chat message.")] = False,
    system: SystemOption = None,
    max_tokens: MaxTokensOption = 128,
    temperature: TemperatureOption = 1.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = None,
    seed: SeedOption = None,
    n: Annotated[int, typer.Option("-n", help="Number of completions per prompt.")] = 1,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="Stop at this string. Repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per prompt.")] = False,
) -> None:
    """Complete prompts and print the answers."""
    from graftlm.types import SamplingParams

    if model is None and config is None and names_target(prompts[0]):
        _refuse_target(prompts)
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        n=n,
        stop=stop or (),
    )
    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]
    chats = [[*_opening(system), {"role": "user", "content": text}] for text in texts]
    with _engine(model, config, set_) as engine:
        outputs = engine.generate(chats if as_chat or system is not None else texts, params)
    for prompt, output in zip(texts, outputs, strict=True):
        if as_json:
            print(json.dumps(_as_json(prompt, output), ensure_ascii=False))
        else:
            print("\n---\n".join(completion.text for completion in output.completions))
    failed = [output.error for output in outputs if output.error is not None]
    if failed:
        fail([str(error) for error in failed])


def _refuse_target(prompts: list[str]) -> NoReturn:
    """Refuse a command whose first prompt is a model's name or a configuration file, and print the right command."""
    file, _ = split_target(prompts[0], None)
    option, what = ("--model", "model") if file is None else ("--config", "configuration file")
    command = shlex.join(["graftlm", "generate", option, *prompts])
    hint = "" if prompts[1:] else " PROMPT"
    fail([f"{prompts[0]!r} is a {what}, but all arguments of graftlm generate are prompts; use: {command}{hint}"])


def chat(
    target: TargetArgument = None,
    model: ModelOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    system: SystemOption = None,
    max_tokens: MaxTokensOption = 512,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = None,
    seed: SeedOption = None,
) -> None:
    """Chat with a model. /image FILE adds a picture to the next message, and /reset begins a new conversation.

    /exit or the end of input exits, Ctrl-C stops an answer.
    """
    from graftlm.types import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    file, model = split_target(target, model)
    if file is not None and config is not None:
        fail([f"two configurations are given: {file} and --config {config}"])
    with _engine(model, config or file, set_) as engine:
        messages, pictures = _opening(system), list[Path]()
        for line in _lines():
            if line == "/exit":
                return
            if line == "/reset":
                messages, pictures = _opening(system), []
                continue
            command, _, rest = line.partition(" ")
            if command == "/image" and rest:
                pictures.append(Path(rest.strip().strip("'\"")).expanduser())
                continue
            if line.startswith("/"):
                message = (
                    f"error: unknown command {command}; use /image FILE for a picture, /reset for a new conversation, "
                    "/exit to exit"
                )
                print(message, file=sys.stderr)
                continue
            question: Message = {"role": "user", "content": _content(line, pictures)}
            pictures = []
            answer = _answer(engine, [*messages, question], params)
            if answer is not None:
                messages += [question, {"role": "assistant", "content": answer}]


def _content(text: str, pictures: list[Path]) -> Any:
    """Return the content of a message: its text, or parts if it has pictures."""
    if not pictures:
        return text
    return [*[{"type": "image", "image": picture} for picture in pictures], {"type": "text", "text": text}]


@contextmanager
def _engine(model: str | None, config: ConfigOption, overrides: list[str] | None) -> "Iterator[Engine]":
    from graftlm.engine.engine import Engine

    fields: dict[str, Any] = {} if model is None else {"model": {"path": model}}
    with Engine(load_config(config, overrides, **fields)) as engine:
        yield engine


def _opening(system: str | None) -> "list[Message]":
    return [] if system is None else [{"role": "system", "content": system}]


def _lines() -> Iterator[str]:
    """Yield the user's lines, without empty ones. A prompt is shown only on a terminal."""
    interactive = sys.stdin.isatty()
    if interactive:
        with suppress(ImportError):  # readline does not exist on Windows
            import readline  # noqa: F401  # adds a history and line editing to input()
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line:
            yield line


def _answer(engine: "Engine", messages: "list[Message]", params: "SamplingParams") -> str | None:
    """Print an answer while it is generated, and return it; None if the request was refused."""
    from graftlm.errors import RequestError

    output: RequestOutput | None = None
    shown = 0
    try:
        for output in engine.stream(messages, params):
            print(output.text[shown:], end="", flush=True)
            shown = len(output.text)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except RequestError as error:
        print(f"error: {error}", file=sys.stderr)
        return None
    print()
    if output is None:
        return None
    usage, first_token_s = output.usage, output.timings.first_token_s
    if output.finished and first_token_s is not None:
        print(
            f"[{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them cached; {usage.completion_tokens} "
            f"generated; first token after {1000 * first_token_s:.0f} ms]",
            file=sys.stderr,
        )
    return output.text


def _as_json(prompt: str, output: "RequestOutput") -> dict[str, object]:
    return {
        "prompt": prompt,
        "completions": [
            {
                "text": completion.text,
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
                "matched_stop": completion.matched_stop,
                "error": completion.error,
            }
            for completion in output.completions
        ],
        "usage": {
            "prompt_tokens": output.usage.prompt_tokens,
            "completion_tokens": output.usage.completion_tokens,
            "cached_tokens": output.usage.cached_tokens,
        },
    }
