"""Creates the JSON Schema of configurations, with the names and options of the installed plugins."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticUserError

from graftlm.config import EngineConfig, Section
from graftlm.contracts import Provider
from graftlm.errors import PluginError
from graftlm.registry.families import FAMILIES, Family
from graftlm.registry.registry import AUTO, Registry

__all__ = ["json_schema"]

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_VARIABLE = {
    "type": "string",
    "pattern": r"\$\{",
    "description": "An environment variable: ${NAME} or ${NAME:-default}.",
}


def json_schema(registry: Registry) -> dict[str, Any]:
    """Return a Draft 2020-12 schema of configuration files, with which editors complete names and options."""
    schema = EngineConfig.model_json_schema()
    definitions: dict[str, Any] = schema["$defs"]
    for family in FAMILIES.values():
        if family.name_path is not None:
            section = _section(family)
            properties = definitions[section.__name__]["properties"]
            _name_all(properties[family.name_path.rpartition(".")[2]], family, registry)
            if family.options_path is not None:
                _add_options(definitions, section, family, registry)
    for definition in [schema, *definitions.values()]:
        _allow_variables(definition)
    _allow_shorthands(schema, definitions)
    return {"$schema": _DRAFT, **schema, "title": "graftlm configuration"}


def _name_all(name: dict[str, Any], family: Family, registry: Registry) -> None:
    """Set the allowed names of a property."""
    if family.has_auto:
        name["enum"] = [AUTO, *registry.names(family.key)]
    else:
        name.pop("anyOf")
        name["enum"] = [None, *registry.names(family.key)]


def _section(family: Family) -> type[Section]:
    """Return the configuration section with a family's name."""
    section: type[Section] = EngineConfig
    for part in (family.name_path or "").split(".")[:-1]:
        section = _inner_section(section, part)
    return section


def _inner_section(section: type[Section], field: str) -> type[Section]:
    annotation = section.model_fields[field].annotation
    if not (isinstance(annotation, type) and issubclass(annotation, Section)):
        raise TypeError(f"{section.__name__}.{field} is not a section")
    return annotation


def _add_options(definitions: dict[str, Any], section: type[Section], family: Family, registry: Registry) -> None:
    """Add one rule per provider to a section: the provider's name determines the schema of the options."""
    rules = []
    field = (family.name_path or "").rpartition(".")[2]
    default = section.model_fields[field].default
    for provider in _selectable(family, registry):
        key = f"{family.key}.{provider.name}"
        options = _options_schema(provider, key)
        definitions.update(options.pop("$defs", {}))
        definitions[key] = options
        condition: dict[str, Any] = {"properties": {field: {"const": provider.name}}}
        if provider.name != default:  # a section without a name has the default name
            condition["required"] = [field]
        rules.append({"if": condition, "then": {"properties": {"options": {"$ref": f"#/$defs/{key}"}}}})
    if rules:
        definitions[section.__name__]["allOf"] = rules


def _selectable(family: Family, registry: Registry) -> Iterator[Provider[Any]]:
    for name in registry.names(family.key):
        try:
            yield registry.find(family.key, name)
        except PluginError:
            continue  # two distributions provide this name: its options are unknown


def _options_schema(provider: Provider[Any], key: str) -> dict[str, Any]:
    model: type[BaseModel] = provider.options
    try:
        schema = model.model_json_schema(ref_template=f"#/$defs/{key}.{{model}}")
    except (PydanticInvalidForJsonSchema, PydanticUserError, ValidationError):
        return {"type": "object", "description": "Options that JSON Schema cannot describe."}
    if "$defs" in schema:
        schema["$defs"] = {f"{key}.{name}": definition for name, definition in schema["$defs"].items()}
    return schema


def _allow_variables(definition: dict[str, Any]) -> None:
    """Allow an environment variable for every property that is not a plain string."""
    for name, value in definition.get("properties", {}).items():
        alternatives = value.get("anyOf", [value])
        if any(one.get("type") in ("integer", "number", "boolean") or "enum" in one for one in alternatives):
            described = {key: value[key] for key in ("title", "description", "default") if key in value}
            bare = [{key: one[key] for key in one if key not in described} for one in alternatives]
            definition["properties"][name] = {**described, "anyOf": [*bare, _VARIABLE]}


def _allow_shorthands(schema: dict[str, Any], definitions: dict[str, Any]) -> None:
    """Allow null for a section, and a plain string if it has a shorthand."""
    sections = {section.__name__: section for section in _sections(EngineConfig)}
    for owner in [schema, *definitions.values()]:
        for name, value in owner.get("properties", {}).items():
            target = value.get("$ref", "").removeprefix("#/$defs/")
            if target not in sections:
                continue
            forms: list[dict[str, Any]] = [{"$ref": value["$ref"]}, {"type": "null"}]
            if (shorthand := sections[target].shorthand) is not None:
                forms.insert(1, _bare(definitions[target]["properties"][shorthand]))
            owner["properties"][name] = {**{k: value[k] for k in value if k != "$ref"}, "anyOf": forms}


def _bare(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in ("title", "default")}


def _sections(section: type[Section]) -> Iterator[type[Section]]:
    for field in section.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield field.annotation
            yield from _sections(field.annotation)
