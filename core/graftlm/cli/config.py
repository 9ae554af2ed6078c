"""`graftlm config`, which prints the schema of configurations and the values in effect, and checks configurations."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graftlm.cli.options import ConfigFile, SetOption, fail, load_config, warn

if TYPE_CHECKING:
    from graftlm.config import Setting

__all__ = ["app"]

ElsewhereOption = Annotated[
    bool,
    typer.Option(
        "--elsewhere",
        help="Do not check files, devices and disks of this machine, because the configuration is for another machine.",
    ),
]

app = typer.Typer(help="Show and check configurations.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def schema() -> None:
    """Print the JSON Schema of configuration files, with the options of the installed plugins."""
    from graftlm.registry import Registry, json_schema

    typer.echo(json.dumps(json_schema(Registry.load()), indent=2))


@app.command()
def show(file: ConfigFile, overrides: SetOption = None) -> None:
    """Print the configuration in effect, as YAML, with the source of every value."""
    from graftlm.config import EngineConfig, explain

    config = EngineConfig.load(file, overrides or ())
    typer.echo("\n".join(annotated_yaml(explain(config))))


@app.command()
def check(file: ConfigFile, overrides: SetOption = None, elsewhere: ElsewhereOption = False) -> None:
    """Check a configuration: keys, values, names and options of plugins, and whether this machine meets its needs.

    Reads the checkpoint's configuration, but no weights. Exits with 2 if there is an error.
    """
    from graftlm.assembly.machine_check import check_machine
    from graftlm.errors import ConfigError
    from graftlm.registry import Registry, check, probe_platform

    problems: list[str] = []
    try:
        config = load_config(file, overrides)
    except ConfigError as error:
        problems = str(error).splitlines()
        try:  # if unknown keys are the only problems, the names and options of plugins can still be checked
            config = load_config(file, overrides, leave_out_unknown=True)
        except ConfigError:
            fail(problems)
    registry = Registry.load(config.plugins, platform=probe_platform(config.model.device))
    findings = check(config, registry)
    warn(findings.warnings)
    errors = problems + findings.errors + ([] if elsewhere else check_machine(config, registry))
    if errors:
        fail(errors)
    typer.echo("OK")


def annotated_yaml(settings: list[Setting]) -> list[str]:
    """Return settings as lines of YAML, with the source of each value as a comment."""
    rows: list[tuple[str, str]] = []  # (line, source); the source of a section's line is ""
    parents: tuple[str | int, ...] = ()
    for setting in settings:
        keys = setting.keys
        common = next((i for i, pair in enumerate(zip(parents, keys, strict=False)) if pair[0] != pair[1]), None)
        first_new = min(len(parents), len(keys) - 1) if common is None else common
        rows += [(f"{'  ' * depth}{_scalar(keys[depth])}:", "") for depth in range(first_new, len(keys) - 1)]
        rows.append((f"{'  ' * (len(keys) - 1)}{_scalar(keys[-1])}: {_scalar(setting.value)}", setting.source))
        parents = keys[:-1]
    width = max((len(line) for line, source in rows if source), default=0)
    return [f"{line:<{width}}  # {source}" if source else line for line, source in rows]


def _scalar(value: Any) -> str:
    """Return a key, a scalar or a list as one line of YAML. JSON strings are valid YAML strings in double quotes."""
    import yaml

    if isinstance(value, str):
        text = yaml.safe_dump(value, width=float("inf"), allow_unicode=True).removesuffix("...\n").strip()
        return text if "\n" not in text else json.dumps(value, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)
