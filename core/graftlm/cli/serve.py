"""`graftlm serve`: the HTTP server."""

import gc
import sys
from typing import Annotated, Any

import typer

from graftlm.cli.options import SetOption, TargetArgument, load_config, split_target
from graftlm.runtime.garbage import collection_paused

__all__ = ["serve"]


def serve(
    target: TargetArgument = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="PATH", help="A checkpoint folder, or `demo`, the bundled model.")
    ] = None,
    host: Annotated[
        str | None, typer.Option("--host", help="Address to listen on; 0.0.0.0 means all addresses.")
    ] = None,
    port: Annotated[int | None, typer.Option("--port", help="TCP port; 0 selects any free port.")] = None,
    log_format: Annotated[str | None, typer.Option("--log-format", help="Format of log lines: text or json.")] = None,
    log_level: Annotated[
        str | None, typer.Option("--log-level", help="Lowest level of logged messages: debug, info, warning or error.")
    ] = None,
    overrides: SetOption = None,
    is_dry: Annotated[
        bool, typer.Option("--dry-run", help="Check everything except the weights, print the plan, and do not serve.")
    ] = False,
) -> None:
    """Serve a model over HTTP: the APIs of OpenAI, Anthropic and SGLang, metrics and a dashboard.

    Exits with 2 before it listens if the configuration, a plugin or the checkpoint is wrong. Exits with 1 if a process
    died and was not restarted.
    """
    with collection_paused():
        from graftlm.errors import EngineError
        from graftlm.server.serve import dry_run
        from graftlm.server.serve import serve as run

    given: dict[str, Any] = {"host": host, "port": port, "log_format": log_format, "log_level": log_level}
    fields: dict[str, Any] = {"server": {key: value for key, value in given.items() if value is not None}}
    file, model = split_target(target, model)
    if model is not None:
        fields["model"] = {"path": model}
    config = load_config(file, overrides, **fields)
    if is_dry:
        print("\n".join(dry_run(config)))
        return
    try:
        status = run(config, on_ready=_announce)
    except EngineError as error:  # the error does not concern the configuration, so the status is not 2
        print(f"error: {error}", file=sys.stderr)
        status = 1
    raise typer.Exit(status)


def _announce(url: str) -> None:
    """Print the URL of the server, and exempt the objects that exist from garbage collection.

    They live until the process ends. Without the exemption, each full collection would stop the event loop for 0.1 s,
    and the last one would take 0.2 s at the end of the process.
    """
    gc.freeze()
    print(f"serving on {url}", flush=True)
