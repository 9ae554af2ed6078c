"""The `graftlm` command with its sub-commands and the printing of errors.

Commands import modules only when they run, so that `graftlm --help` is fast.
"""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from graftlm import __version__
from graftlm.cli import batch, bench, cache_sim, config, generate, plugins, route_sim, serve, warmup
from graftlm.cli.options import fail
from graftlm.cli.other_options import ServeCommand
from graftlm.errors import GraftlmError
from graftlm.runtime.kernel_events import KernelWatch, print_line, watching

__all__ = ["app", "main"]

app = typer.Typer(
    name="graftlm",
    help="A plugin-based engine for serving large language models.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("serve", cls=ServeCommand)(serve.serve)
app.command("batch")(batch.batch)
app.command("warmup")(warmup.warmup)
app.command("generate")(generate.generate)
app.command("chat")(generate.chat)
app.add_typer(config.app, name="config")
app.add_typer(bench.app, name="bench")
app.command("cache-sim")(cache_sim.cache_sim)
app.command("route-sim")(route_sim.route_sim)
app.add_typer(plugins.app, name="plugins")


def _show_version(is_set: bool) -> None:
    if is_set:
        typer.echo(f"graftlm {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """A plugin-based engine for serving large language models."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: the arguments after the program's name; None for the arguments of the process.

    Raises:
        SystemExit: always raised. The status is 0 for success, and 2 if the arguments, the configuration or a plugin is
            wrong. Some commands use 1 for other failures.
    """
    try:
        with watching(KernelWatch(print_line)):
            app(args=None if arguments is None else list(arguments))
    except GraftlmError as error:
        fail(str(error).splitlines())
    sys.exit(0)
