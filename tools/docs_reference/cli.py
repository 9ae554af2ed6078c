"""The reference of the command line: every command with its help text, arguments and options."""

from collections.abc import Iterator
from typing import Any

import typer

from docs_reference.markdown import code, plain, table
from graftlm.cli.entry import app

__all__ = ["cli_page", "walk_commands"]

_HEAD = """\
# Command line reference

Every command has `--help`. The exit status is 0 for success and 2 for wrong arguments, a wrong configuration or a
plugin error.
"""


def walk_commands(name: str = "graftlm", command: Any = None) -> Iterator[tuple[str, Any]]:
    """Yield (full name, command) of the whole tree; a group comes before its commands."""
    command = typer.main.get_command(app) if command is None else command
    yield name, command
    for child, inner in getattr(command, "commands", {}).items():
        yield from walk_commands(f"{name} {child}", inner)


def cli_page() -> str:
    """Return the page in Markdown."""
    return "\n".join([_HEAD, *(_section(name, command) for name, command in walk_commands())])


def _section(name: str, command: Any) -> str:
    context = command.context_class(command, info_name=name)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    rows = [[code(words).replace("|", "\\|"), plain(text)] for words, text in parameters(command, context)]
    described = table(["Argument or option", "Meaning"], rows) if rows else ""
    return f"## {code(name)}\n\n```text\n{usage}\n```\n\n{plain(command.help or '')}\n\n{described}"


def parameters(command: Any, context: Any) -> Iterator[tuple[str, str]]:
    """Yield (usage, meaning) of each visible argument and option of a command, except `--help`."""
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is not None:
            yield record
