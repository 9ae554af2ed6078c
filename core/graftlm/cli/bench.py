"""`graftlm bench serve`: measures servers; `bench_engine` has the commands that measure an engine."""

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

#: Exit status when the server cannot be measured, or requests failed.
_FAILED = 1

_MAX_SOCKETS = 65536

#: Columns when nobody looks: wide enough that a row of a table stays one line.
_PIPE_WIDTH = 160

app = typer.Typer(help="Measure servers and engines.", no_args_is_help=True, rich_markup_mode=None)
app.command("offline")(bench_engine.offline)
app.command("roofline")(bench_engine.roofline)
app.command("ablation")(bench_engine.ablation)


@app.command()
def serve(
    url: Annotated[str, typer.Option("--url", help="The server, as in http://127.0.0.1:30000.")],
    api: Annotated[
        Literal["native", "openai-completions", "openai-chat"],
        typer.Option("--api", help="Which interface; native is /generate."),
    ] = "native",
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="In OpenAI's requests; asked of the server when absent."),
    ] = None,
    dataset: Annotated[
        Path | None,
        typer.Option(
            "--dataset", metavar="FILE", help='JSONL: {"prompt": ...}, {"messages": ...} or {"input_ids": ...}.'
        ),
    ] = None,
    random: Annotated[
        bool, typer.Option("--random", help="Draw prompts at random: what happens without --dataset.")
    ] = False,
    num_prompts: Annotated[
        int | None, typer.Option("--num-prompts", help="Requests; 200, or as many as the dataset has.")
    ] = None,
    request_rate: Annotated[
        float, typer.Option("--request-rate", metavar="RPS", help="Arrivals per second; inf: as fast as possible.")
    ] = math.inf,
    burstiness: Annotated[
        float, typer.Option("--burstiness", help="Of arrivals: 1 is Poisson, less comes in bursts, more is regular.")
    ] = 1.0,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", metavar="N", help="Requests under way at most; no bound when absent.")
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", help="Length of random prompts, shared prefix included.")
    ] = 512,
    output_tokens: Annotated[int, typer.Option("--output-tokens", help="To generate per request.")] = 128,
    shared_prefix_tokens: Annotated[
        int, typer.Option("--shared-prefix-tokens", help="Of a random prompt, the tokens it shares with others.")
    ] = 0,
    num_prefixes: Annotated[int, typer.Option("--num-prefixes", help="Different shared prefixes.")] = 1,
    warmup: Annotated[int, typer.Option("--warmup", help="Requests that come before and do not count.")] = 1,
    seed: Annotated[int, typer.Option("--seed", help="Of prompts and arrivals.")] = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--respect-eos", help="Go on to --output-tokens, or end where the model does.")
    ] = True,
    temperature: Annotated[float, typer.Option("--temperature", help="0 takes the most likely token.")] = 0.0,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="GRAFTLM_API_KEY", help="Sent as a bearer token, never saved.")
    ] = None,
    timeout_s: Annotated[float, typer.Option("--timeout-s", help="A request that takes longer has failed.")] = 600.0,
    percentiles: Annotated[
        str, typer.Option("--percentiles", metavar="P,P,...", help="Which ones to report.")
    ] = "50,90,99",
    vocab_size: Annotated[
        int | None,
        typer.Option("--vocab-size", help="Of the model, for random prompts; asked of the server when absent."),
    ] = None,
    flush_cache: Annotated[
        bool, typer.Option("--flush-cache", help="Empty the server's prefix cache before the measurement.")
    ] = False,
    output: Annotated[Path | None, typer.Option("--output", metavar="FILE", help="Save the result as JSON.")] = None,
    save_chunks: Annotated[
        bool, typer.Option("--save-chunks", help="Save the time of every chunk too, in large files.")
    ] = False,
    label: Annotated[str | None, typer.Option("--label", metavar="TEXT", help="Says what this run is.")] = None,
    compare: Annotated[
        Path | None, typer.Option("--compare", metavar="FILE", help="A saved result to print ratios to.")
    ] = None,
    allow_failures: Annotated[
        bool, typer.Option("--allow-failures", help="Exit with 0 though requests failed.")
    ] = False,
) -> None:
    """Send requests to a server and report latencies and throughput.

    Without --request-rate and --concurrency, all requests are sent at once. Exits with 1 when the server cannot be
    measured or a request failed, with 2 when the arguments are wrong.
    """
    from graftlm.bench import BenchSettings, check_writable, load_report, print_report, save_report

    if random and dataset is not None:
        fail(["--random and --dataset exclude each other"])
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
    """Run, with a progress bar on standard error; ends the process when the server cannot be measured."""
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
    """Let this process open more files, where the system has such a limit: each request under way has a connection."""
    with suppress(ImportError, OSError, ValueError):  # not raised, it shows as failed requests, which say why
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _MAX_SOCKETS if hard == resource.RLIM_INFINITY else min(_MAX_SOCKETS, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def _console() -> "Console":
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        return tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        fail([f"--percentiles must be numbers between commas, as in 50,90,99, got {text!r}"])
