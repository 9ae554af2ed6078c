"""`graftlm batch`: answers a file of requests, without a server."""

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graftlm.cli.options import ConfigOption, SetOption, load_config

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["batch"]


def batch(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="File with requests in the format of OpenAI's Batch API: one JSON object per line."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="File for the answers; default: FILE.answers.jsonl."),
    ] = None,
    errors: Annotated[
        Path | None,
        typer.Option(
            "--errors", metavar="FILE", help="File for the errors of failed requests; default: FILE.errors.jsonl."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="PATH", help="A checkpoint folder, or `demo`, the bundled model.")
    ] = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    log_level: Annotated[
        str, typer.Option("--log-level", help="Lowest level of logged messages: debug, info, warning or error.")
    ] = "warning",
) -> None:
    """Answer a file of requests without a server, and show the progress.

    If the command was interrupted, run it again to continue: requests with a result are not sent again. Exits with 1
    if a request failed or has no result, with 2 if the file, the configuration, a plugin or the checkpoint is wrong.
    """
    from graftlm.errors import EngineError
    from graftlm.server.batches.offline import answer_file

    fields: dict[str, Any] = {"server": {"log_level": log_level}}
    if model is not None:
        fields["model"] = {"path": model}
    output = output or file.with_suffix(".answers.jsonl")
    errors = errors or file.with_suffix(".errors.jsonl")
    try:
        result = answer_file(load_config(config, set_, **fields), file, output, errors, _progress)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    print(f"{result.num_completed} of {result.num_total} requests are answered in {output}")
    if result.num_failed:
        print(f"{result.num_failed} failed; the errors are in {errors}", file=sys.stderr)
    if not result.is_whole:
        print("the other requests have no result yet; run the command again to continue", file=sys.stderr)
    raise typer.Exit(int(result.num_failed > 0 or not result.is_whole))


def _progress(total: int) -> "AbstractContextManager[Callable[[], None]]":
    from graftlm.progress import progress_bar

    return progress_bar(total, None, "answering")
