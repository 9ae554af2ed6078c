"""The reference of the configuration: every key of every section, and the options of all built-in providers."""

from pydantic import BaseModel

from docs_reference.families import builtin_providers
from docs_reference.markdown import code, plain
from docs_reference.options import Option, list_options, option_table
from graftlm.config import EngineConfig
from graftlm.registry import FAMILIES

__all__ = ["configuration_page"]

_HEAD = """\
# Configuration reference

This page lists every configuration key. [Configuration](../configuration.md) explains files, short forms, environment
variables and precedence. `graftlm config schema` prints the same as a JSON Schema for editors.
"""


def configuration_page() -> str:
    """Return the page: first the sections in order, then the options of providers by family."""
    parts = [_HEAD]
    loose: list[Option] = []
    for name, field in EngineConfig.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            parts.append(f"## {code(name)}\n\n{plain(section.__doc__ or '')}\n")
            parts.append(option_table(list_options(section, f"{name}.")))
        else:
            loose += [option for option in list_options(EngineConfig) if option.path == name]
    parts += ["## Without a section\n", option_table(iter(loose))]
    parts += _provider_options()
    return "\n".join(parts)


def _provider_options() -> list[str]:
    """Return a table for each provider that has options."""
    parts = [
        "## Options of built-in plugins\n\nUnder `options` of the family, or in the request that names the plugin.\n"
    ]
    for key, family in FAMILIES.items():
        for provider in builtin_providers(key):
            if options := option_table(list_options(provider.options)):
                where = f" ({code(family.options_path)})" if family.options_path else ""
                parts += [f"### {code(f'{key}/{provider.name}')}{where}\n\n{plain(provider.summary)}.\n", options]
    return parts
