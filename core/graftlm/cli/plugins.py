"""`graftlm plugins`, which lists the installed plugins, explains choices, checks contracts and writes new packages."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from graftlm.cli.options import ConfigOption, SetOption, fail, load_config

if TYPE_CHECKING:
    from rich.console import Console

    from graftlm.cli.plugin_choice import Choice
    from graftlm.contracts import Provider
    from graftlm.registry import Family, Registry
    from graftlm.testing import ConformanceResult

__all__ = ["app"]

#: Number of columns if the output is not a terminal. Each row of a table fits into one line.
_PIPE_WIDTH = 200

#: Maximum number of shown lines of the notes that hypothesis adds to an error, such as the steps before the error.
_NOTES_SHOWN = 40

#: Exit status if a plugin violates its contract.
_BROKEN = 1

_DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"] | None, typer.Option("--device", help="Check the availability for this device.")
]

app = typer.Typer(help="List plugins, and check them.", invoke_without_command=True, rich_markup_mode=None)


@app.callback()
def plugins(
    context: typer.Context,
    config: ConfigOption = None,
    overrides: SetOption = None,
    device: _DeviceOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List all plugins: family, name, distribution, and whether they can run on this machine. Observers come last."""
    if context.invoked_subcommand is not None:
        if config or overrides or device or as_json:
            fail([f"give the options of `graftlm plugins {context.invoked_subcommand}` after its name"])
        return
    registry = _load(config, overrides or (), device)
    if as_json:
        typer.echo(json.dumps(_as_json(registry), indent=2))
    else:
        _print_table(registry)


@app.command()
def check(
    which: Annotated[
        str,
        typer.Argument(
            metavar="[FAMILY/]NAME",
            help="The plugin to check, such as eviction/lru, or only lru if no other family has a plugin of this name.",
        ),
    ],
    options: Annotated[
        list[str] | None,
        typer.Option("--options", metavar="KEY=VALUE", help="An option of the plugin; the value is YAML. Repeatable."),
    ] = None,
    modules: Annotated[
        list[str] | None,
        typer.Option("--module", metavar="MODULE", help="A module with a plugin that is not installed. Repeatable."),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A small checkpoint; required to check a model.")
    ] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    device: _DeviceOption = None,
) -> None:
    """Run the conformance kit of a plugin's family, and print the result for each sentence of the contract."""
    if not __debug__:
        fail(["conformance kits consist of assertions, which python -O removes; run without -O"])
    registry = _load(config, overrides or (), device, modules or ())
    family, provider = _find(registry, which)
    results = _results(registry, family, provider, options or (), checkpoint)
    if not _print_results(results):
        sys.exit(_BROKEN)


@app.command()
def why(
    family: Annotated[
        str, typer.Argument(metavar="FAMILY", help="A family, such as attention; `graftlm plugins` lists all.")
    ],
    config: ConfigOption = None,
    overrides: SetOption = None,
    device: _DeviceOption = None,
) -> None:
    """Explain which plugin of a family a configuration selects, and why it does not select the others."""
    from rich.table import Table
    from rich.text import Text

    from graftlm.cli.plugin_choice import explain_choice

    registry = _load(config, overrides or (), device)
    choice = explain_choice(load_config(config, overrides), registry, _family(family))
    table = Table("name", "rank", "distribution", "verdict", box=None, pad_edge=False)
    for candidate, verdict in choice.verdicts():
        rank = "" if candidate.provider is None else str(candidate.provider.rank)
        style = "green" if verdict == "chosen" else "yellow" if candidate.obstacle else ""
        table.add_row(candidate.name, rank, candidate.distribution, Text(verdict, style))
    console = _console()
    console.print(Text(f"{choice.family.title}: {choice.name or 'none'}: {choice.reason}"), soft_wrap=True)
    console.print(table)
    for conflict in _conflicts(registry, choice):
        console.print(Text(f"conflict: {conflict}", "red"), soft_wrap=True)
    for failure in registry.failures:
        console.print(Text(f"failed: {failure}", "red"), soft_wrap=True)


@app.command()
def new(
    family: Annotated[str, typer.Argument(metavar="FAMILY", help="The family of the new plugin, such as cache.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The plugin's name in configurations, such as my-cache.")],
    path: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder to create; default: graftlm-NAME.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Allow the name of a plugin that is already installed.")
    ] = False,
) -> None:
    """Write a working plugin package: entry point, options, implementation, tests, README."""
    from graftlm.cli.plugin_package import PluginPackage, write_plugin_package

    package = PluginPackage.of(_family(family), name)
    if not force:
        _check_free(_load(None, (), None), package.family, name)
    folder = write_plugin_package(package, path or Path(package.distribution))
    for line in (
        f"{folder}: a working package with the {package.family.title} '{name}'. Next:",
        f"  pip install -e {quote(f'{folder}[test]')}",
        f"  cd {quote(str(folder))}",
        *(f"  {command}" for command in package.check_commands),
        "  pytest",
        "  graftlm serve engine.yaml",
    ):
        typer.echo(line)


def _load(config: Path | None, overrides: Sequence[str], device: str | None, modules: Sequence[str] = ()) -> Registry:
    """Load the plugins of a configuration and of `--module`.

    Raises:
        ConfigError: the configuration is wrong.
        PluginLoadError: a module of `--module` cannot be loaded.
    """
    from graftlm.registry import Registry, probe_platform

    settings = load_config(config, overrides, modules=modules)
    plugins = settings.plugins.model_copy(update={"modules": [*settings.plugins.modules, *modules]})
    registry = Registry.load(plugins, platform=probe_platform(device or settings.model.device))
    for failure in registry.failures:
        if failure.plugin.name in modules:  # the user named this module, so its error ends the command
            raise failure.error
    return registry


def _check_free(registry: Registry, family: Family, name: str) -> None:
    """Refuse a name that is in use.

    Raises:
        ConfigError: an installed plugin of the family has the name.
    """
    from graftlm.errors import ConfigError

    if owners := _owners(registry, family.key, name):
        raise ConfigError(
            f"The {family.title} '{name}' is already provided by {' and by '.join(owners)}. If two distributions "
            "provide a name, a configuration that uses it has to select one of them in plugins.prefer. Choose another "
            "name, or use --force."
        )


def _owners(registry: Registry, family: str, name: str) -> list[str]:
    """Return the distributions, with their versions, that provide a name."""
    return [
        f"{entry.distribution} {entry.version}" if entry.version else entry.distribution
        for entry in registry.entries()
        if (entry.family, entry.name) == (family, name)
    ]


def _conflicts(registry: Registry, choice: Choice) -> Iterator[str]:
    """Yield a sentence for each name of a family that several distributions provide."""
    for candidate in choice.candidates:
        owners = _owners(registry, choice.family.key, candidate.name)
        if len(owners) > 1 and candidate.provider is not None:
            outcome = f"plugins.prefer selects {candidate.distribution}"
        else:
            outcome = "it cannot be used until plugins.prefer selects one of them"
        if len(owners) > 1:
            yield f"'{candidate.name}' is provided by {' and by '.join(owners)}; {outcome}"


def _find(registry: Registry, which: str) -> tuple[str, Provider[Any]]:
    """Return the family and the provider for FAMILY/NAME or NAME.

    Raises:
        ConfigError: the family does not exist, or several families have the name.
        PluginError: the provider does not exist, or cannot run on this machine.
    """
    from graftlm.config import nearest
    from graftlm.errors import ConfigError
    from graftlm.registry import FAMILIES

    family, slash, name = which.partition("/")
    if not slash:
        having = [key for key in FAMILIES if which in registry.names(key)]
        if len(having) > 1:
            raise ConfigError(f"'{which}' is in several families: {', '.join(having)}. Give FAMILY/{which}.")
        family, name = (having[0], which) if having else (which, "")
    if not (name and family in FAMILIES):
        close = nearest(family, FAMILIES)
        hint = f" Did you mean '{close}/{name or 'NAME'}'?" if close else ""
        raise ConfigError(f"'{which}' is not a valid FAMILY/NAME; families are: {', '.join(FAMILIES)}.{hint}")
    return family, registry.provider(family, name)


def _family(text: str) -> str:
    """Return the key of a family; `text` may contain "-" instead of "_".

    Raises:
        ConfigError: the family does not exist.
    """
    from graftlm.config import nearest
    from graftlm.errors import ConfigError
    from graftlm.registry import FAMILIES

    key = text.replace("-", "_")
    if key not in FAMILIES:
        close = nearest(key, FAMILIES)
        hint = f" Did you mean '{close}'?" if close else ""
        raise ConfigError(f"There is no family '{text}'; families are: {', '.join(FAMILIES)}.{hint}")
    return key


def _results(
    registry: Registry, family: str, provider: Provider[Any], options: Sequence[str], checkpoint: Path | None
) -> Iterable[ConformanceResult]:
    """Return the results of a provider's conformance kit. Each is available as soon as its test has ended.

    Raises:
        ConfigError: an option is wrong, or the provider has no kit.
    """
    from graftlm.registry import FAMILIES
    from graftlm.testing import iter_conformance, provider_kit

    where = FAMILIES[family].options_path or f"{family}.{provider.name}"
    chosen = registry.options(provider, _read_options(options), where)
    kit = provider_kit(
        family,
        provider,
        lambda context: registry.create(family, provider, chosen, context),
        device=registry.platform.device,
        checkpoint=checkpoint,
    )
    return iter_conformance(kit)


def _read_options(texts: Sequence[str]) -> dict[str, Any]:
    """Return the options in texts of the form `key=value` or `key.inner=value`.

    Raises:
        ConfigError: a text has another form, or two texts contradict each other.
    """
    import yaml

    from graftlm.errors import ConfigError

    options: dict[str, Any] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        *parents, key = path.strip().split(".")
        if not equals or not all([*parents, key]):
            raise ConfigError(f"--options: got '{text}', expected KEY=VALUE, such as weight=0.5")
        inner = options
        for parent in parents:
            inner = inner.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"--options: '{text}' sets a key in '{parent}', but another option set it to a value")
        try:
            inner[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            message = f"--options: the value of '{text}' is not valid YAML: {' '.join(str(error).split())}"
            raise ConfigError(message) from error
    return options


def _print_results(results: Iterable[ConformanceResult]) -> bool:
    """Print one line per sentence of the contract when its cases have run.

    Returns: whether at least one sentence passed and none failed.
    """
    from collections import Counter

    console = _console()
    counts: Counter[str] = Counter()
    for _, cases in groupby(results, key=lambda result: result.name.partition("[")[0]):
        counts[_print_sentence(console, list(cases))] += 1
    console.print(", ".join(f"{counts[state]} {state}" for state in ("passed", "failed", "skipped")))
    return counts["failed"] == 0 and counts["passed"] > 0


def _print_sentence(console: Console, cases: list[ConformanceResult]) -> str:
    """Print the result of the cases of one test, with the reasons of the first failed and the first skipped case.

    Returns: "passed", "failed" or "skipped".
    """
    from rich.text import Text

    failed = [(case, case.error) for case in cases if case.error is not None]
    skipped = [case for case in cases if case.skipped is not None]
    state = "failed" if failed else "skipped" if len(skipped) == len(cases) else "passed"
    style = {"failed": "red", "skipped": "yellow", "passed": "green"}[state]
    console.print(Text.assemble((f"{state:<8}", style), cases[0].sentence), soft_wrap=True)
    if failed:
        first, error = failed[0]
        console.print(
            f"        in {len(failed)} of {len(cases)} cases, first {first.name}:", markup=False, highlight=False
        )
        for line in _reason(error):
            console.print(f"          {line}", markup=False, highlight=False, soft_wrap=True)
    if skipped:
        how_many = "" if len(skipped) == len(cases) else f"{len(skipped)} of {len(cases)} cases skipped: "
        console.print(f"        {how_many}{skipped[0].skipped}", markup=False, highlight=False, soft_wrap=True)
    return state


def _reason(error: Exception) -> list[str]:
    """Return lines that describe an error, with its message or the line that raised it, its location, and its notes.

    For an exception group, the first error is described.
    """
    from traceback import extract_tb

    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    frames = extract_tb(error.__traceback__)
    text = str(error) or next((frame.line or "" for frame in reversed(frames)), "")
    lines = [line for line in f"{type(error).__name__}: {text}".splitlines() if line.strip()]
    notes = [line for note in getattr(error, "__notes__", ()) for line in note.splitlines()]
    if len(notes) > _NOTES_SHOWN:
        notes[_NOTES_SHOWN:] = [f"... and {len(notes) - _NOTES_SHOWN} more lines; pytest prints all of them"]
    return [*lines, *(f"at {frame.filename}:{frame.lineno}: {frame.line}" for frame in frames[-1:]), *notes]


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def _as_json(registry: Registry) -> dict[str, object]:
    return {
        "providers": [dataclasses.asdict(entry) for entry in registry.entries()],
        "observers": [dataclasses.asdict(listener) for listener in registry.listeners()],
        "failures": [
            {
                "plugin": failure.plugin.name,
                "distribution": failure.plugin.distribution,
                "version": failure.plugin.version,
                "family": failure.family,
                "provider": failure.provider,
                "error": str(failure),
            }
            for failure in registry.failures
        ],
    }


def _print_table(registry: Registry) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("family", "name", "distribution", "version", "available", box=None, pad_edge=False)
    for entry in registry.entries():
        state = Text("yes", "green") if entry.unavailable is None else Text(f"no: {entry.unavailable}", "yellow")
        table.add_row(entry.family, entry.name, entry.distribution, entry.version or "", state)
    console = _console()
    console.print(table)
    if listeners := registry.listeners():
        observers = Table("observes", "plugin", "distribution", "version", box=None, pad_edge=False)
        for listener in listeners:
            observers.add_row(listener.hook, listener.plugin, listener.distribution, listener.version or "")
        console.print()
        console.print(observers)
    for failure in registry.failures:
        console.print(Text(f"failed: {failure}", "red"), soft_wrap=True)
