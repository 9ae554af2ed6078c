"""`graftlm bench serve`, which measures servers. `bench_engine` has the commands that measure an engine."""

import asyncio
import math
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from graftlm.cli import bench_engine
from graftlm.cli.options import fail

if TYPE_CHECKING:
    from rich.console import Console

    from graftlm.bench import BenchSettings, Report

__all__ = ["app"]

#: Exit status if the server cannot be measured, or if requests failed.
_FAILED = 1

_MAX_SOCKETS = 65536

#: Number of columns if the output is not a terminal. Each row of a table fits into one line.
_PIPE_WIDTH = 160

app = typer.Typer(help="Measure servers and engines.", no_args_is_help=True, rich_markup_mode=None)
app.command("offline")(bench_engine.offline)
app.command("roofline")(bench_engine.roofline)
app.command("ablation")(bench_engine.ablation)


@app.command()
def serve(
    url: Annotated[str, typer.Option("--url", help="The server's URL, such as http://127.0.0.1:30000.")],
    api: Annotated[
        Literal["native", "openai-completions", "openai-chat"],
        typer.Option("--api", help="The API to use; native is /generate."),
    ] = "native",
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="Name of the model in requests to OpenAI's API; default: the first model that the server lists.",
        ),
    ] = None,
    dataset: Annotated[
        Path | None,
        typer.Option(
            "--dataset",
            metavar="FILE",
            help='Dataset with one JSON object per line: {"prompt": ...}, {"messages": ...} or {"input_ids": ...}.',
        ),
    ] = None,
    random: Annotated[
        bool, typer.Option("--random", help="Use random prompts. This is the default without --dataset.")
    ] = False,
    num_prompts: Annotated[
        int | None, typer.Option("--num-prompts", help="Number of requests; default: 200, or the size of the dataset.")
    ] = None,
    request_rate: Annotated[
        float,
        typer.Option(
            "--request-rate", metavar="RPS", help="Number of requests to send per second; inf: as fast as possible."
        ),
    ] = math.inf,
    burstiness: Annotated[
        float,
        typer.Option(
            "--burstiness",
            help="Distribution of the times between requests: 1 is a Poisson process, smaller values give bursts, "
            "larger values give more regular times.",
        ),
    ] = 1.0,
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", metavar="N", help="Maximum number of concurrent requests; default: no limit."),
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", help="Length of random prompts in tokens, including the shared prefix.")
    ] = 512,
    output_tokens: Annotated[
        int, typer.Option("--output-tokens", help="Number of tokens to generate per request.")
    ] = 128,
    shared_prefix_tokens: Annotated[
        int,
        typer.Option(
            "--shared-prefix-tokens",
            help="Length in tokens of the prefix that a random prompt shares with other prompts.",
        ),
    ] = 0,
    num_prefixes: Annotated[int, typer.Option("--num-prefixes", help="Number of different shared prefixes.")] = 1,
    warmup: Annotated[
        int, typer.Option("--warmup", help="Number of warm-up requests before the measurement. They are not counted.")
    ] = 1,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the prompts and arrivals.")] = 0,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos/--respect-eos",
            help="Always generate --output-tokens tokens, or stop at the end-of-sequence token.",
        ),
    ] = True,
    temperature: Annotated[
        float, typer.Option("--temperature", help="Temperature of sampling; 0 selects the most likely token.")
    ] = 0.0,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key", envvar="GRAFTLM_API_KEY", help="API key. It is sent as a bearer token and never saved."
        ),
    ] = None,
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout-s", help="Time limit of a request in seconds. A request that takes longer counts as failed."
        ),
    ] = 600.0,
    percentiles: Annotated[
        str, typer.Option("--percentiles", metavar="P,P,...", help="The percentiles to report.")
    ] = "50,90,99",
    vocab_size: Annotated[
        int | None,
        typer.Option(
            "--vocab-size",
            help="Size of the model's vocabulary, for random prompts; default: the size that the server reports.",
        ),
    ] = None,
    flush_cache: Annotated[
        bool, typer.Option("--flush-cache", help="Empty the server's prefix cache before the measurement.")
    ] = False,
    output: Annotated[Path | None, typer.Option("--output", metavar="FILE", help="Save the result as JSON.")] = None,
    save_chunks: Annotated[
        bool, typer.Option("--save-chunks", help="Also save the time of every chunk, which makes large files.")
    ] = False,
    label: Annotated[str | None, typer.Option("--label", metavar="TEXT", help="A description of this run.")] = None,
    compare: Annotated[
        Path | None,
        typer.Option(
            "--compare", metavar="FILE", help="A saved result. The ratios of the new figures to it are printed."
        ),
    ] = None,
    allow_failures: Annotated[
        bool, typer.Option("--allow-failures", help="Exit with 0 even if requests failed.")
    ] = False,
) -> None:
    """Send requests to a server and report latencies and throughput.

    Without --request-rate and --concurrency, all requests are sent at once. Exits with 1 if the server cannot be
    measured or a request failed, with 2 if the arguments are wrong.
    """
    from graftlm.bench import BenchSettings, check_writable, load_report, print_report, save_report

    if random and dataset is not None:
        fail(["--random and --dataset cannot be combined"])
    settings = BenchSettings(
        url=url,
        api=api,
        model=model,
        dataset=None if dataset is None else str(dataset),
        num_prompts=num_prompts,
        request_rate=None if request_rate == math.inf else request_rate,
        burstiness=burstiness,
        concurrency=concurrency,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        shared_prefix_tokens=shared_prefix_tokens,
        num_prefixes=num_prefixes,
        warmup=warmup,
        seed=seed,
        ignore_eos=ignore_eos,
        temperature=temperature,
        timeout_s=timeout_s,
        percentiles=_percentiles(percentiles),
        vocab_size=vocab_size,
        flush_cache=flush_cache,
        save_chunks=save_chunks,
        label=label,
    )
    if output is not None:
        check_writable(output)
    other = None if compare is None else load_report(compare)
    report = _run(settings, api_key, allow_failures)
    print_report(report, _console(), other)
    if output is not None:
        save_report(report, output)
        print(f"saved as {output}")
    if report.summary.failed and not allow_failures:
        raise typer.Exit(_FAILED)


def _run(settings: "BenchSettings", api_key: str | None, allow_failures: bool) -> "Report":
    """Run the benchmark, with a progress bar on standard error.

    Raises:
        typer.Exit: the server cannot be measured. The exit status is 1; the reason has been printed.
    """
    from rich.console import Console

    from graftlm.bench import BenchError, load_progress, run_benchmark

    _allow_many_sockets()
    bar_console = Console(stderr=True)
    try:
        return asyncio.run(
            run_benchmark(
                settings,
                api_key=api_key,
                allow_failures=allow_failures,
                watch=lambda num_requests: load_progress(num_requests, bar_console),
            )
        )
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(_FAILED) from None


def _allow_many_sockets() -> None:
    """Raise this process's limit of open files if the system has one, because each running request has a connection."""
    with suppress(ImportError, OSError, ValueError):  # if the limit is too low, requests fail, which the report shows
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        target = _MAX_SOCKETS if hard == resource.RLIM_INFINITY else min(_MAX_SOCKETS, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, target), hard))


def _console() -> "Console":
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        return tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        fail([f"--percentiles must be numbers separated by commas, such as 50,90,99, got {text!r}"])
