"""`graftlm plugins`: what is installed, where it comes from, whether it runs here and keeps its contract."""

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

_PIPE_WIDTH = 200  # columns when nobody looks: wide enough that a line of the table stays one line

#: Lines of what hypothesis adds to an error, such as the history that led to it.
_NOTES_SHOWN = 40

#: Exit status when a plugin breaks its contract.
_BROKEN = 1

_DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"] | None, typer.Option("--device", help="Judge availability for this device.")
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
    """List every plugin: family, name, where it comes from, whether it runs here or why not; then who observes."""
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
        str, typer.Argument(metavar="[FAMILY/]NAME", help="What to check, such as eviction/lru, or lru if only one is.")
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
        Path | None, typer.Option(metavar="FOLDER", help="A small checkpoint, to check a model with.")
    ] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    device: _DeviceOption = None,
) -> None:
    """Check that a plugin keeps its contract: run its family's conformance kit, and say how each sentence fared."""
    if not __debug__:
        fail(["conformance kits are made of assertions, which python -O leaves out; run without it"])
    registry = _load(config, overrides or (), device, modules or ())
    family, provider = _find(registry, which)
    results = _results(registry, family, provider, options or (), checkpoint)
    if not _print_results(results):
        sys.exit(_BROKEN)


@app.command()
def why(
    family: Annotated[str, typer.Argument(metavar="FAMILY", help="Such as attention; `graftlm plugins` lists them.")],
    config: ConfigOption = None,
    overrides: SetOption = None,
    device: _DeviceOption = None,
) -> None:
    """Explain which plugin of a family a configuration gets, and why the others are passed over."""
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
    family: Annotated[str, typer.Argument(metavar="FAMILY", help="What it is to provide, such as cache.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="What a configuration will write, such as my-cache.")],
    path: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder to make; graftlm-NAME when left out.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Take a name that an installed plugin of the family has.")
    ] = False,
) -> None:
    """Write a plugin package that works: entry point, options, implementation, tests, README."""
    from graftlm.cli.plugin_package import PluginPackage, write_plugin_package

    package = PluginPackage.of(_family(family), name)
    if not force:
        _check_free(_load(None, (), None), package.family, name)
    folder = write_plugin_package(package, path or Path(package.distribution))
    for line in (
        f"{folder}: {package.family.title} '{name}', a package that works. Next:",
        f"  pip install -e {quote(f'{folder}[test]')}",
        f"  cd {quote(str(folder))}",
        *(f"  {command}" for command in package.check_commands),
        "  pytest",
        "  graftlm serve engine.yaml",
    ):
        typer.echo(line)


def _load(config: Path | None, overrides: Sequence[str], device: str | None, modules: Sequence[str] = ()) -> Registry:
    """Load the plugins that a configuration and `--module` name.

    Raises:
        ConfigError: the configuration is wrong.
        PluginLoadError: one of the modules cannot be loaded.
    """
    from graftlm.registry import Registry, probe_platform

    settings = load_config(config, overrides, modules=modules)
    plugins = settings.plugins.model_copy(update={"modules": [*settings.plugins.modules, *modules]})
    registry = Registry.load(plugins, platform=probe_platform(device or settings.model.device))
    for failure in registry.failures:
        if failure.plugin.name in modules:  # asked for by name: it is not enough to list its error
            raise failure.error
    return registry


def _check_free(registry: Registry, family: Family, name: str) -> None:
    """Refuse a name that somebody has.

    Raises:
        ConfigError: an installed plugin provides it.
    """
    from graftlm.errors import ConfigError

    if owners := _owners(registry, family.key, name):
        raise ConfigError(
            f"The {family.title} '{name}' is provided by {' and by '.join(owners)} already: with a second one, a "
            f"configuration that names it is refused until plugins.prefer says whose it means. "
            f"Take another name, or give --force."
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
            outcome = f"plugins.prefer takes that of {candidate.distribution}"
        else:
            outcome = "it is refused until plugins.prefer says whose it means"
        if len(owners) > 1:
            yield f"'{candidate.name}' is provided by {' and by '.join(owners)}; {outcome}"


def _find(registry: Registry, which: str) -> tuple[str, Provider[Any]]:
    """Return the family and the provider that FAMILY/NAME means.

    Raises:
        ConfigError: there is no such family.
        PluginError: there is no such provider, or it cannot run here.
    """
    from graftlm.config import nearest
    from graftlm.errors import ConfigError
    from graftlm.registry import FAMILIES

    family, slash, name = which.partition("/")
    if not slash:
        having = [key for key in FAMILIES if which in registry.names(key)]
        if len(having) > 1:
            raise ConfigError(f"'{which}' is provided in several families: {', '.join(having)}. Check FAMILY/{which}.")
        family, name = (having[0], which) if having else (which, "")
    if not (name and family in FAMILIES):
        close = nearest(family, FAMILIES)
        hint = f" Did you mean '{close}/{name or 'NAME'}'?" if close else ""
        raise ConfigError(f"'{which}' is no FAMILY/NAME; families are: {', '.join(FAMILIES)}.{hint}")
    return family, registry.provider(family, name)


def _family(text: str) -> str:
    """Return the key of a family.

    Raises:
        ConfigError: there is no such family.
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
    """Return the results of a provider's kit, which come as its tests end.

    Raises:
        ConfigError: an option is wrong, or there is no kit for it.
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
    """Read `key=value` or `key.inner=value`.

    Raises:
        ConfigError: a text has no such form.
    """
    import yaml

    from graftlm.errors import ConfigError

    options: dict[str, Any] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        *parents, key = path.strip().split(".")
        if not equals or not all([*parents, key]):
            raise ConfigError(f"--options: got '{text}', expected KEY=VALUE, as in weight=0.5")
        inner = options
        for parent in parents:
            inner = inner.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"--options: '{text}' sets something in '{parent}', which another one gave a value")
        try:
            inner[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--options: the value of '{text}' is no YAML: {' '.join(str(error).split())}") from error
    return options


def _print_results(results: Iterable[ConformanceResult]) -> bool:
    """Print a line for each sentence when its cases have run. Returns whether all that ran passed, and any did."""
    from collections import Counter

    console = _console()
    counts: Counter[str] = Counter()
    for _, cases in groupby(results, key=lambda result: result.name.partition("[")[0]):
        counts[_print_sentence(console, list(cases))] += 1
    console.print(", ".join(f"{counts[state]} {state}" for state in ("passed", "failed", "skipped")))
    return counts["failed"] == 0 and counts["passed"] > 0


def _print_sentence(console: Console, cases: list[ConformanceResult]) -> str:
    """Print how the cases of one test went, with the first reason of each kind.

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
    """Return what an error says, or the line that raised it, and where that stands; of a group, its first error."""
    from traceback import extract_tb

    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    frames = extract_tb(error.__traceback__)
    said = str(error) or next((frame.line or "" for frame in reversed(frames)), "")
    lines = [line for line in f"{type(error).__name__}: {said}".splitlines() if line.strip()]
    notes = [line for note in getattr(error, "__notes__", ()) for line in note.splitlines()]
    if len(notes) > _NOTES_SHOWN:
        notes[_NOTES_SHOWN:] = [f"... and {len(notes) - _NOTES_SHOWN} more lines, which pytest prints of the same kit"]
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
