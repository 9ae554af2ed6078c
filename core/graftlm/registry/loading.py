"""Finds plugins, imports them and registers their hooks; a plugin that fails is recorded with its error."""

import functools
import importlib
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from inspect import signature
from types import ModuleType
from typing import Any

import pluggy

from graftlm import hookspecs
from graftlm.config import nearest
from graftlm.errors import PluginLoadError
from graftlm.registry.hook_trace import HookTrace

__all__ = [
    "ENTRY_POINT_GROUP",
    "HookImplementation",
    "Plugin",
    "PluginFailure",
    "PluginLoader",
    "describe_error",
    "import_names",
]

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "graftlm"


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plugin's name and origin.

    Attributes:
        name: name of the plugin's entry point, or of its module.
        module: name of the plugin's module.
        distribution: the installed distribution that contains the plugin, or its module if there is none.
        version: version of the distribution, or None.
    """

    name: str
    module: str
    distribution: str
    version: str | None = None

    @property
    def label(self) -> str:
        """The distribution and its version, for messages."""
        return f"{self.distribution} {self.version}" if self.version else self.distribution

    def has_name(self, name: str) -> bool:
        """Return whether a name is that of this plugin, its module or its distribution (in any spelling)."""
        return name in (self.name, self.module) or _normalised(name) == _normalised(self.distribution)


@dataclass(frozen=True, slots=True)
class PluginFailure:
    """A plugin, or a part of one, that could not be loaded.

    Attributes:
        family, provider: the failed part; None if the whole plugin failed, or if the part is unknown.
    """

    plugin: Plugin
    error: PluginLoadError
    family: str | None = None
    provider: str | None = None

    def __str__(self) -> str:
        return str(self.error)


@dataclass(frozen=True, slots=True)
class HookImplementation:
    """One plugin's function for one hook.

    `PluginLoader.implementations` returns one for each plugin that has the hook.
    """

    plugin: Plugin
    function: Callable[..., Any]
    argument_names: tuple[str, ...]

    def call(self, **arguments: object) -> Any:
        """Call the function with the arguments that it accepts; newer versions of a hook may have more arguments."""
        return self.function(*(arguments[name] for name in self.argument_names))


def describe_error(error: BaseException) -> str:
    """Return an exception's type and message in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


def _normalised(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()  # the normalization of package indexes


class PluginLoader:
    """Loads plugins into a pluggy manager, one by one."""

    def __init__(
        self, disabled: Sequence[str] = (), trace: HookTrace | None = None, specs: ModuleType | type = hookspecs
    ) -> None:
        """Create a loader without plugins.

        Args:
            disabled: names of plugins, modules or distributions that are not loaded.
            trace: prints every import.
            specs: the module or class with the hook specifications.
        """
        self._trace = trace or HookTrace()
        self._specs = specs
        self.failures: list[PluginFailure] = []
        self._disabled = disabled
        self._seen: list[Plugin] = []  # including disabled and failed plugins
        self._manager = pluggy.PluginManager(hookspecs.PROJECT_NAME)
        self._manager.add_hookspecs(specs)
        self._plugins: dict[int, Plugin] = {}  # by id of the registered object; the manager keeps the object alive

    def load_installed(self) -> None:
        """Load the entry points of installed distributions, in an order that is the same in all processes."""
        points = metadata.entry_points(group=ENTRY_POINT_GROUP)
        owner = functools.cache(_name_and_version)  # each read of a distribution's name parses its metadata
        found = [(_plugin_of_entry_point(point, owner), point) for point in points]
        for plugin, point in sorted(found, key=lambda pair: (pair[0].distribution, pair[0].name, pair[1].value)):
            self._load_or_record(plugin, point.load)

    def load_module(self, name: str) -> None:
        """Load a module by its import name."""
        self._load_or_record(
            _plugin_of_module(name, _distribution_named_like(name) or _distribution_containing(name)),
            lambda: importlib.import_module(name),
        )

    def load_object(self, plugin_object: object) -> Plugin:
        """Load a plugin (a module, an import name or an instance) unless it is disabled.

        Raises:
            PluginLoadError: the plugin cannot be imported, or its hooks are wrong.
        """
        if isinstance(plugin_object, str):
            return self._load_name(plugin_object)
        if plugin_object is None:
            raise PluginLoadError("a plugin must be a module, the import name of a module, or an instance, got None")
        if isinstance(plugin_object, ModuleType):
            plugin = _plugin_of_module(plugin_object.__name__, _distribution_named_like(plugin_object.__name__))
        elif isinstance(plugin_object, type):
            name = plugin_object.__qualname__
            raise PluginLoadError(f"a plugin must be a module or an instance, got the class {name}; pass {name}()")
        else:
            kind = type(plugin_object)
            home = _plugin_of_module(kind.__module__, _distribution_named_like(kind.__module__))
            plugin = Plugin(kind.__qualname__, home.module, home.distribution, home.version)
        if not self._is_disabled(plugin):
            self._register(plugin, plugin_object)
        return self._plugins.get(id(plugin_object), plugin)

    def _load_name(self, name: str) -> Plugin:
        if not name or name.startswith("."):
            raise PluginLoadError(f"plugins: expected the import name of a module, got {name!r}")
        plugin = _plugin_of_module(name, _distribution_named_like(name))
        if not self._is_disabled(plugin):
            self._register(plugin, self._import(plugin, lambda: importlib.import_module(name)))
        return plugin

    def implementations(self, hook: str) -> list[HookImplementation]:
        """Return the implementations of a hook, in pluggy's calling order."""
        caller: pluggy.HookCaller = getattr(self._manager.hook, hook)
        return [
            HookImplementation(self._plugins[id(impl.plugin)], impl.function, tuple(impl.argnames))
            for impl in reversed(caller.get_hookimpls())
        ]

    def _load_or_record(self, plugin: Plugin, import_object: Callable[[], object]) -> None:
        if self._is_disabled(plugin):
            return
        try:
            self._register(plugin, self._import(plugin, import_object))
        except PluginLoadError as error:
            self.failures.append(PluginFailure(plugin, error))

    def _import(self, plugin: Plugin, import_object: Callable[[], object]) -> object:
        who = f"{plugin.name} ({plugin.label})"
        return self._trace.call("import", who, lambda: _imported(plugin, import_object), lambda _: plugin.module)

    def unknown(self, names: Iterable[str]) -> list[tuple[str, str | None]]:
        """Return the names that no plugin has, each with the nearest name of a plugin or None."""
        known = {name for plugin in self._seen for name in (plugin.name, plugin.module, plugin.distribution)}
        return [
            (name, nearest(name, sorted(known)))
            for name in names
            if not any(plugin.has_name(name) for plugin in self._seen)
        ]

    def _is_disabled(self, plugin: Plugin) -> bool:
        self._seen.append(plugin)
        return any(plugin.has_name(name) for name in self._disabled)

    def _register(self, plugin: Plugin, plugin_object: object) -> None:
        if id(plugin_object) in self._plugins:
            return  # a module that is passed twice is one plugin
        key = f"{plugin.label}/{plugin.name}/{len(self._plugins)}"
        try:
            with warnings.catch_warnings(record=True) as deprecations:
                warnings.simplefilter("always")
                self._manager.register(plugin_object, name=key)
        except ValueError as error:
            raise PluginLoadError(f"plugin '{plugin.name}' is equal to another loaded plugin") from error
        except pluggy.PluginValidationError as error:
            mismatch = self._signature_mismatch(plugin, plugin_object)
            refused = f"plugin '{plugin.name}' has a hook that cannot be registered: {' '.join(str(error).split())}"
            raise PluginLoadError(mismatch or refused) from error
        if message := self._misuse(plugin, plugin_object):
            self._manager.unregister(plugin_object)
            raise PluginLoadError(message)
        self._plugins[id(plugin_object)] = plugin
        for deprecation in deprecations:
            logger.warning("plugin '%s' (dist %s): %s", plugin.name, plugin.label, _one_line(deprecation.message))

    def _misuse(self, plugin: Plugin, plugin_object: object) -> str | None:
        """Return the error in a registered plugin's hooks, or None."""
        callers = self._manager.get_hookcallers(plugin_object) or []
        known = _hook_names(self._specs)
        if not callers:
            return f"plugin '{plugin.name}' implements no hook; mark its functions with @graftlm.hookimpl"
        for caller in callers:
            impl = next(impl for impl in caller.get_hookimpls() if impl.plugin is plugin_object)
            if impl.wrapper or impl.hookwrapper:
                return f"plugin '{plugin.name}' wraps hook '{caller.name}'; graftlm's hooks do not support wrappers"
            if not caller.has_spec() and not impl.optionalhook:
                close = nearest(caller.name, known)
                hint = f"did you mean {_definition(self._specs, close)}?" if close else f"hooks are: {', '.join(known)}"
                found = f"{caller.name}{signature(impl.function)}"
                return f"plugin '{plugin.name}' implements unknown hook {found}; {hint}"
        return None

    def _signature_mismatch(self, plugin: Plugin, plugin_object: object) -> str | None:
        """Return an error with both signatures if an implementation has an argument that its hook does not have."""
        for attribute in dir(plugin_object):
            options = self._manager.parse_hookimpl_opts(plugin_object, attribute)
            if options is None:
                continue
            hook = options.get("specname") or attribute
            found = signature(getattr(plugin_object, attribute))
            spec = getattr(self._specs, hook, None)
            if spec is not None and not set(found.parameters) <= set(signature(spec).parameters):
                return (
                    f"plugin '{plugin.name}' implements hook '{hook}' as {hook}{found}; "
                    f"graftlm calls it as {_definition(self._specs, hook)}"
                )
        return None


def _imported(plugin: Plugin, import_object: Callable[[], object]) -> object:
    try:
        return import_object()
    except (Exception, SystemExit) as error:  # importing a third-party module may raise anything
        raise PluginLoadError(
            f"plugin '{plugin.name}' (dist {plugin.label}) failed to load: {describe_error(error)}"
        ) from error


def _name_and_version(distribution: metadata.Distribution) -> tuple[str, str]:
    fields = distribution.metadata
    return fields["Name"], fields["Version"]


def _plugin_of_entry_point(
    point: metadata.EntryPoint, owner: Callable[[metadata.Distribution], tuple[str, str]]
) -> Plugin:
    if point.dist is None:
        return Plugin(point.name, point.module, point.module)
    return Plugin(point.name, point.module, *owner(point.dist))


def _plugin_of_module(name: str, distribution: metadata.Distribution | None) -> Plugin:
    if distribution is None:
        return Plugin(name, name, name)
    return Plugin(name, name, distribution.name, distribution.version)


def _distribution_named_like(module: str) -> metadata.Distribution | None:
    """Return the distribution with the name of a module's top package, or None."""
    try:
        return metadata.distribution(module.partition(".")[0])
    except metadata.PackageNotFoundError:
        return None


def _distribution_containing(module: str) -> metadata.Distribution | None:
    """Return the distribution that contains a module, or None. Slow: reads the files of all distributions."""
    names = metadata.packages_distributions().get(module.partition(".")[0])
    return metadata.distribution(names[0]) if names else None


def _one_line(message: Warning | str) -> str:
    return " ".join(str(message).split())


def _hook_names(specs: ModuleType | type) -> list[str]:
    return [name for name, value in vars(specs).items() if hasattr(value, f"{hookspecs.PROJECT_NAME}_spec")]


def _definition(specs: ModuleType | type, hook: str) -> str:
    names = ", ".join(signature(getattr(specs, hook)).parameters)
    return f"{hook}({names})"


def import_names(objects: Iterable[object]) -> list[str]:
    """Return the import names of plugins that were passed as objects, for another process.

    Raises:
        PluginLoadError: a plugin is not an importable module; the message has its name.
    """
    names = []
    for plugin_object in objects:
        if isinstance(plugin_object, str):
            names.append(plugin_object)
            continue
        name = getattr(plugin_object, "__name__", None)
        module = sys.modules.get(name) if isinstance(name, str) else None
        if module is not plugin_object or name == "__main__" or module is None or module.__spec__ is None:
            raise PluginLoadError(
                f"plugin {plugin_object!r} is not an importable module, so other processes cannot load it; "
                "put its hooks in a module and add that to plugins.modules"
            )
        names.append(module.__name__)
    return names
