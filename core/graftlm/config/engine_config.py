"""The checked configuration of an engine, with the source of every value."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, PrivateAttr, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from graftlm.config.layers import KeyPath, Layer, Origin, dotted, expand, given, known, merge
from graftlm.config.problems import problems_in, report
from graftlm.config.section import Section
from graftlm.config.sections import (
    AttentionSettings,
    CacheSettings,
    ChatSettings,
    ExecutionSettings,
    GrammarSettings,
    LoraSettings,
    MediaSettings,
    MemorySettings,
    ModelSettings,
    ParallelSettings,
    PluginSettings,
    SchedulingSettings,
    SpeculationSettings,
)
from graftlm.config.server_sections import (
    ServerSettings,
)
from graftlm.config.yaml_source import read_override, read_yaml_file
from graftlm.errors import ConfigError

__all__ = ["EngineConfig", "Setting", "explain"]


class EngineConfig(Section):
    """An engine's configuration, checked and immutable. Two configurations are equal if all values are equal.

    `EngineConfig(cache={"page_size": 16})` accepts sections as mappings, as objects or in shorthand. `load` also reads
    files. A registry checks the names and options of providers later.

    Raises:
        ConfigError: a value is wrong. The message has one line per problem.
    """

    model: ModelSettings = ModelSettings()
    attention: AttentionSettings = AttentionSettings()
    cache: CacheSettings = CacheSettings()
    grammar: GrammarSettings = GrammarSettings()
    chat: ChatSettings = ChatSettings()
    lora: LoraSettings = LoraSettings()
    media: MediaSettings = MediaSettings()
    scheduling: SchedulingSettings = SchedulingSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    execution: ExecutionSettings = ExecutionSettings()
    memory: MemorySettings = MemorySettings()
    parallel: ParallelSettings = ParallelSettings()
    server: ServerSettings = ServerSettings()
    plugins: PluginSettings = PluginSettings()
    debug: bool = Field(
        default=False,
        description="After every step, check that each KV page is accounted for exactly once. This is slow.",
    )

    _origins: dict[KeyPath, Origin] = PrivateAttr(default_factory=dict)

    def __init__(self, layer: Layer | None = None, /, **values: Any) -> None:
        """Check values. `load` passes them as a layer, which has the origin of each value."""
        layer = expand(given(values), EngineConfig) if layer is None else layer
        problems = list(layer.problems)
        # Checks of several fields run only if all keys are known. Therefore validate again without the unknown keys.
        for values in (layer.values, known(layer, EngineConfig).values):
            try:
                super().__init__(**values)
                break
            except ValidationError as error:
                problems += problems_in(error, EngineConfig, values, layer.origins)
        if problems:
            raise ConfigError(report(problems))
        self._origins = layer.origins

    @model_validator(mode="after")
    def _check_kv_tokens(self) -> EngineConfig:
        kv_tokens, page_size = self.memory.kv_tokens, self.cache.page_size
        if kv_tokens is not None and kv_tokens < page_size:
            message = f"must be at least one page of cache.page_size {page_size}, got {kv_tokens}"
            raise PydanticCustomError("kv_tokens", "{message}", {"path": ("memory", "kv_tokens"), "message": message})
        return self

    @model_validator(mode="after")
    def _check_keys(self) -> EngineConfig:
        server, path = self.server, ("server", "open_admin")
        message = None
        if server.open_admin and server.admin_api_key is not None:
            message = (
                "gives every client administrator rights, so server.admin_api_key has no effect; remove one of them"
            )
        elif server.api_key is not None and server.api_key == server.admin_api_key:
            path = ("server", "admin_api_key")
            message = "is equal to server.api_key, so every client has administrator rights; use different keys"
        if message is not None:
            raise PydanticCustomError("keys", "{message}", {"path": path, "message": message})
        return self

    @model_validator(mode="after")
    def _check_traces_endpoint(self) -> EngineConfig:
        # Not checked by the field, because the error of a field contains its value.
        if "@" in (self.server.traces.endpoint or "").partition("://")[2].partition("/")[0]:
            message = "must not contain a user or a password; send them in server.traces.headers"
            path = ("server", "traces", "endpoint")
            raise PydanticCustomError("traces_endpoint", "{message}", {"path": path, "message": message})
        return self

    @model_validator(mode="after")
    def _check_graph_batch_sizes(self) -> EngineConfig:
        sizes, most = self.execution.graph_batch_sizes, self.scheduling.max_running_requests
        if sizes is not None and max(sizes) > most:
            message = f"must be at most scheduling.max_running_requests {most}, got {max(sizes)}"
            path = ("execution", "graph_batch_sizes")
            raise PydanticCustomError("graph_batch_sizes", "{message}", {"path": path, "message": message})
        return self

    @classmethod
    def load(
        cls,
        source: EngineConfig | Mapping[str, Any] | str | Path | None = None,
        overrides: Sequence[str] = (),
        *,
        environment: Mapping[str, str] | None = None,
        leave_out_unknown: bool = False,
        **fields: Any,
    ) -> EngineConfig:
        """Read a configuration.

        Args:
            source: a YAML file, a mapping with the same structure, another configuration, or None for the defaults.
            overrides: texts such as `cache.page_size=16`, as in `--set`. Each value is YAML.
            environment: the variables for `${VAR}` in a file; None for the process's environment.
            leave_out_unknown: whether to ignore unknown keys, so that other checks can run after `load` has reported
                these keys.
            fields: sections and fields by name, as keyword arguments. They replace values of the source, and
                `overrides` replace both. Mappings are merged key by key.

        Raises:
            ConfigError: a value is wrong. The message has one line per problem.
        """
        layers = [_layer_of(source, os.environ if environment is None else environment), given(fields)]
        layers += [read_override(text) for text in overrides]
        merged = merge([expand(layer, cls) for layer in layers])
        return cls(known(merged, cls) if leave_out_unknown else merged)

    @property
    def sources(self) -> dict[str, str]:
        """Dotted path -> source of the value: "default", "engine.yaml:7", "--set" or "given"."""
        return {setting.path: setting.source for setting in explain(self)}

    @property
    def origins(self) -> Mapping[KeyPath, Origin]:
        """Key path -> origin of each value that is not a default, for the registry's messages."""
        return self._origins

    def __eq__(self, other: object) -> bool:
        # Origins are not compared, so private attributes are excluded.
        if not isinstance(other, EngineConfig):
            return NotImplemented
        return self.model_dump() == other.model_dump()


def _layer_of(source: EngineConfig | Mapping[str, Any] | str | Path | None, environment: Mapping[str, str]) -> Layer:
    if source is None:
        return Layer()
    if isinstance(source, EngineConfig):
        layer = given(source)
        return Layer(layer.values, {path: source._origins.get(path, origin) for path, origin in layer.origins.items()})
    if isinstance(source, Mapping):
        return given(source)
    if isinstance(source, str | Path):
        return read_yaml_file(Path(source), environment)
    raise ConfigError(f"a configuration must be a file, a mapping or an EngineConfig, got {type(source).__name__}")


@dataclass(frozen=True, slots=True)
class Setting:
    """One effective value.

    Attributes:
        keys: the path from the root.
        value: the value in YAML's types. A secret is shown as asterisks.
        source: "default", "engine.yaml:7", "engine.yaml:7 (${PORT})", "--set" or "given".
    """

    keys: KeyPath
    value: Any
    source: str

    @property
    def path(self) -> str:
        """The dotted path."""
        return dotted(self.keys)


def explain(config: EngineConfig) -> list[Setting]:
    """Return all effective values with their sources, in the order of the sections."""
    return list(_settings(config, config.model_dump(mode="json", fallback=str), (), config._origins))


def _settings(
    model: BaseModel | None, values: Mapping[str, Any], path: KeyPath, origins: Mapping[KeyPath, Origin]
) -> Iterator[Setting]:
    for key, value in values.items():
        here = (*path, key)
        if isinstance(value, dict) and value:
            inner = getattr(model, key, None)
            yield from _settings(inner if isinstance(inner, BaseModel) else None, value, here, origins)
        elif here in origins:
            yield Setting(here, value, origins[here].source)
        else:
            yield Setting(here, value, "default" if model is None or key not in model.model_fields_set else "given")
