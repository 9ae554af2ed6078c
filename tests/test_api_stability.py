"""The plugin API may grow: plugins for an earlier set of hooks still work, and the docs say for how long."""

import logging
import re
from collections.abc import Iterable
from inspect import signature
from pathlib import Path
from types import ModuleType

import pytest

from graftlm import Provider, hookimpl, hookspecs
from graftlm.contracts import API_VERSION, OLDEST_API_VERSION, EvictionStrategy, Platform
from graftlm.errors import ApiVersionError
from graftlm.hookspecs import hookspec
from graftlm.registry import FAMILIES, OBSERVER_HOOKS, Registry
from graftlm.registry.hook_trace import HookTrace, trace_of
from graftlm.registry.loading import PluginLoader
from graftlm.registry.offers import collect

POLICY = (Path(__file__).parent.parent / "docs" / "api-stability.md").read_text(encoding="utf-8")


class First(EvictionStrategy):
    def priority(self, node):
        return (node.created,)


def provider(api_version=1, name="first"):
    return Provider(name=name, summary="x", api_version=api_version, create=lambda options, context: First())


class WrittenToday:
    """A plugin with every kind of hook, in the form of today's hooks."""

    def __init__(self):
        self.heard = []

    @hookimpl
    def provide_eviction_strategies(self):
        return [provider()]

    @hookimpl
    def request_finished(self, record):
        self.heard.append(record)

    @hookimpl
    def step_finished(self):
        self.heard.append("a step")


def next_hooks(**added):
    """Return the hooks of a later graftlm: today's hooks, with the given ones replaced."""
    module = ModuleType("next_hooks")
    for name, value in vars(hookspecs).items():
        if hasattr(value, "graftlm_spec"):
            setattr(module, name, value)
    for name, value in added.items():
        setattr(module, name, value)
    return module


@hookspec
def provide_eviction_strategies(platform: Platform) -> Iterable[Provider[EvictionStrategy]]:
    """This hook has an additional argument."""


@hookspec
def request_finished(record: object, engine_id: str) -> None:
    """This hook has an additional argument."""


def loaded(specs, plugin):
    loader = PluginLoader(("graftlm",), specs=specs)
    loader.load_object(plugin)
    return loader


def test_a_plugin_for_older_hooks_works_after_hooks_get_arguments():
    plugin = WrittenToday()
    loader = loaded(
        next_hooks(provide_eviction_strategies=provide_eviction_strategies, request_finished=request_finished), plugin
    )
    (offers,) = loader.implementations("provide_eviction_strategies")
    assert [one.name for one in offers.call(platform=Platform())] == ["first"]
    for hook, arguments in (
        ("request_finished", {"record": "r", "engine_id": "e"}),
        ("step_finished", {"record": "s"}),
    ):
        (implementation,) = loader.implementations(hook)
        implementation.call(**arguments)
    assert plugin.heard == ["r", "a step"]


def test_a_plugin_may_take_an_argument_that_was_added_later():
    class WrittenLater:
        @hookimpl
        def provide_eviction_strategies(self, platform):
            return [provider(name=platform.device)]

    loader = loaded(next_hooks(provide_eviction_strategies=provide_eviction_strategies), WrittenLater())
    (offers,) = loader.implementations("provide_eviction_strategies")
    assert [one.name for one in offers.call(platform=Platform("cpu"))] == ["cpu"]


@pytest.mark.parametrize(
    ("decorator", "said"),
    [
        (hookspec(warn_on_impl=DeprecationWarning("step_finished goes; use steps_finished")), "use steps_finished"),
        (hookspec(warn_on_impl_args={"record": DeprecationWarning("record goes; use steps")}), "use steps"),
    ],
)
def test_a_deprecated_hook_warns_once_and_is_still_called(decorator, said, caplog):
    class Steps:
        heard = ()

        @hookimpl
        def step_finished(self, record):
            self.heard = (record,)

    def step_finished(record):
        """An old hook."""

    plugin = Steps()
    with caplog.at_level(logging.WARNING):
        loader = loaded(next_hooks(step_finished=decorator(step_finished)), plugin)
    (message,) = (record.getMessage() for record in caplog.records)
    assert said in message
    assert "Steps" in message
    (implementation,) = loader.implementations("step_finished")
    implementation.call(record=1)
    assert plugin.heard == (1,)


@pytest.mark.parametrize(
    ("api_version", "spoken", "refusal"),
    [
        (1, range(1, 3), None),  # the older hook, which still works
        (2, range(1, 3), None),
        (3, range(1, 3), r"for plugin API 3, this graftlm supports 1 to 2: install an older release"),
        (1, range(2, 4), r"for plugin API 1, this graftlm supports 2 to 3: install a newer release"),
    ],
)
def test_providers_of_the_supported_api_versions_are_accepted(api_version, spoken, refusal):
    class Plugin:
        @hookimpl
        def provide_eviction_strategies(self):
            return [provider(api_version)]

    offers, failures = collect(loaded(hookspecs, Plugin()), api_versions=spoken)
    if refusal is None:
        assert ([offer.provider.api_version for offer in offers], failures) == ([api_version], [])
    else:
        (failure,) = failures
        assert isinstance(failure.error, ApiVersionError)
        assert re.search(refusal, str(failure.error))


def test_the_current_api_version_is_accepted_and_the_next_is_refused():
    class Plugin:
        @hookimpl
        def provide_eviction_strategies(self):
            return [provider(API_VERSION)]

    assert Registry.load(plugins=[Plugin()]).find("eviction", "first").api_version == API_VERSION
    assert OLDEST_API_VERSION <= API_VERSION


#: The hooks of plugin API 1 with their arguments. A line may get more arguments but lose none, and no line may be
#: removed.
API_1 = {
    **{family.hook: () for family in FAMILIES.values()},
    "request_finished": ("record",),
    "step_finished": ("record",),
    "cache_event": ("event",),
}


@pytest.mark.parametrize(("hook", "arguments"), API_1.items())
def test_hooks_of_api_1_keep_their_arguments(hook, arguments):
    assert tuple(signature(getattr(hookspecs, hook)).parameters)[: len(arguments)] == arguments


def test_the_policy_page_names_the_versions():
    assert f"API_VERSION = {API_VERSION}" in POLICY
    assert f"OLDEST_API_VERSION = {OLDEST_API_VERSION}" in POLICY


# -- Output of GRAFTLM_TRACE_HOOKS


class Lines:
    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text


class Fails:
    @hookimpl
    def provide_eviction_strategies(self):
        raise ValueError("no")


def test_a_traced_hook_call_prints_plugin_count_and_time():
    lines = Lines()
    ticks = iter([0.0, 0.0015, 1.0, 1.25])
    trace = HookTrace(lines, lambda: next(ticks))
    loader = PluginLoader(("graftlm",), trace)
    loader.load_object(Fails())
    loader.load_object(WrittenToday())
    collect(loader, trace)
    first, second = (re.sub(r" +", " ", line.partition("] ")[2]) for line in lines.text.splitlines())
    assert first.startswith("provide_eviction_strategies WrittenToday (")  # the last registered plugin is called first
    assert first.endswith(": 1 provider (first), 1.5 ms")
    assert second.startswith("provide_eviction_strategies Fails (")
    assert second.endswith(": raised, 250.0 ms")


@pytest.mark.parametrize(("value", "speaks"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_the_environment_variable_switches_tracing_on(value, speaks, capsys):
    environment = {} if value is None else {"GRAFTLM_TRACE_HOOKS": value}
    assert trace_of(environment).call("hook", "plugin", lambda: 3, str) == 3
    assert ("hook" in capsys.readouterr().err) is speaks


class Observes:
    @hookimpl
    def step_finished(self):
        pass


def test_tracing_lists_observers_when_an_engine_looks_them_up(monkeypatch, capsys):
    monkeypatch.setenv("GRAFTLM_TRACE_HOOKS", "1")
    registry = Registry.load(plugins=[Observes()])
    capsys.readouterr()
    for hook in OBSERVER_HOOKS:
        registry.observers(hook)
    told = [re.sub(r" +", " ", line.partition("] ")[2]) for line in capsys.readouterr().err.splitlines()]
    assert told[0] == "request_finished no observers"
    assert told[1].startswith("step_finished Observes (")
    assert told[1].endswith("): observes")
    assert told[2] == "cache_event no observers"


def test_every_hook_belongs_to_a_family_or_to_observers():
    hooks = [name for name, value in vars(hookspecs).items() if hasattr(value, "graftlm_spec")]
    assert sorted(hooks) == sorted([*(family.hook for family in FAMILIES.values()), *OBSERVER_HOOKS])
