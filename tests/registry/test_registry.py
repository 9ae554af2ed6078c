"""The registry: sources of plugins, refusals with their reasons, and the choice of a provider by name."""

import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from pydantic import ConfigDict, field_validator

from graftlm import hookspecs
from graftlm.config import EngineConfig, PluginSettings
from graftlm.contracts import (
    AttentionCapabilities,
    CacheCapabilities,
    EvictionStrategy,
    ModelCapabilities,
    NoOptions,
    Options,
    Platform,
    Provider,
)
from graftlm.errors import (
    ApiVersionError,
    ConfigError,
    DuplicateProviderError,
    PluginError,
    PluginLoadError,
    ProviderUnavailableError,
    RequestError,
    UnknownProviderError,
    UnsupportedArchitectureError,
)
from graftlm.hookspecs import hookimpl
from graftlm.registry import FAMILIES, Registry, check, json_schema, probe_platform, selections

PLUGIN_DOCS = Path(__file__).parents[2] / "docs" / "plugins.md"


class Oldest(EvictionStrategy):
    def priority(self, node):
        return (node.created,)


class SharedOptions(Options):
    weight: float = 1.0
    window_s: int = 60


def provider(name="oldest", **fields) -> Provider:
    defaults = {"summary": "A test's", "api_version": 1, "create": lambda options, context: Oldest()}
    return Provider(**{"name": name, **defaults, **fields})


class Strategies:
    """A plugin object that offers eviction strategies."""

    def __init__(self, *providers):
        self.providers = providers

    @hookimpl
    def provide_eviction_strategies(self):
        return self.providers


def load(*plugins, platform=None, **settings) -> Registry:
    """Load only the given plugins; the built-in ones are disabled."""
    disabled = ("graftlm", *settings.pop("disabled", ()))
    return Registry.load(PluginSettings(disabled=disabled, **settings), plugins, platform)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a distribution like pip: modules, dist-info and entry points, on sys.path."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def install_distribution(distribution, source, version="1.0", entry_points=None, module=None):
        module = module or distribution.replace("-", "_")
        if source is not None:
            (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "top_level.txt").write_text(f"{module}\n")
        points = {distribution: module} if entry_points is None else entry_points
        (info / "entry_points.txt").write_text(
            "[graftlm]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        )
        importlib.invalidate_caches()

    yield install_distribution
    for name in set(sys.modules) - before:
        del sys.modules[name]


def source_of_strategies(*names, api_version=1) -> str:
    return f"""
from graftlm import Provider, hookimpl

@hookimpl
def provide_eviction_strategies():
    for name in {names!r}:
        yield Provider(name=name, summary="x", api_version={api_version!r}, create=lambda options, context: None)
"""


# -- Sources of plugins


def test_installed_distributions_are_loaded_by_their_entry_points(install):
    install("graftlm-alpha", source_of_strategies("alpha"), version="2.1")
    (entry,) = load().entries()
    assert (entry.family, entry.name, entry.plugin) == ("eviction", "alpha", "graftlm-alpha")
    assert (entry.distribution, entry.version, entry.unavailable) == ("graftlm-alpha", "2.1", None)


def test_an_entry_point_may_name_an_object_in_a_module(install):
    source = source_of_strategies("alpha").replace("@hookimpl\n", "class Plugin:\n  @hookimpl\n  @staticmethod\n  ")
    source = re.sub(r"\n    (for|    yield)", r"\n      \1", source) + "\nplugin = Plugin()\n"
    install("graftlm-alpha", source, entry_points={"a": "graftlm_alpha:plugin"})
    registry = load()
    assert (registry.names("eviction"), registry.failures) == (["alpha"], ())


def test_configured_modules_are_loaded_with_their_distribution(install):
    install("graftlm-alpha", source_of_strategies("alpha"), entry_points={})
    (entry,) = load(modules=("graftlm_alpha",)).entries()
    assert (entry.plugin, entry.distribution, entry.version) == ("graftlm_alpha", "graftlm-alpha", "1.0")


def test_a_module_is_assigned_to_its_distribution_with_another_name(install):
    install("vendor-suite", source_of_strategies("alpha"), entry_points={}, module="alpha_part")
    (entry,) = load(modules=("alpha_part",)).entries()
    assert (entry.distribution, entry.version) == ("vendor-suite", "1.0")


def test_a_module_without_a_distribution_has_its_own_name(tmp_path, install):
    (tmp_path / "loose_plugin.py").write_text(source_of_strategies("loose"))
    (entry,) = load(modules=("loose_plugin",)).entries()
    assert (entry.distribution, entry.version) == ("loose_plugin", None)


def test_a_passed_plugin_may_be_an_instance_or_a_module():
    module = ModuleType("in_memory")
    module.provide_eviction_strategies = hookimpl(specname="provide_eviction_strategies")(lambda: [provider("two")])
    assert load(Strategies(provider("one")), module).names("eviction") == ["one", "two"]


def test_a_module_that_is_installed_and_configured_is_loaded_once(install):
    install("graftlm-alpha", source_of_strategies("alpha"))
    registry = load(modules=("graftlm_alpha",))
    assert registry.find("eviction", "alpha").name == "alpha"
    assert load(sys.modules["graftlm_alpha"]).find("eviction", "alpha").name == "alpha"


def test_plugins_load_in_the_same_order_in_every_process(install):
    for name in ("zeta", "alpha"):
        install(f"graftlm-{name}", source_of_strategies(name))
    assert [entry.name for entry in load().entries()] == ["alpha", "zeta"]


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("the-entry", ()),
        ("graftlm-alpha", ("graftlm_alpha",)),
        ("Graftlm.Alpha", ("graftlm_alpha",)),
        ("graftlm_alpha", ("graftlm_alpha",)),
    ],
)
def test_a_disabled_plugin_is_neither_loaded_nor_imported(install, name, modules):
    install("graftlm-alpha", source_of_strategies("alpha"), entry_points={"the-entry": "graftlm_alpha"})
    registry = load(modules=modules, disabled=(name,))
    assert (registry.names("eviction"), registry.failures) == ([], ())
    assert "graftlm_alpha" not in sys.modules


def test_a_disabled_object_is_not_loaded():
    assert load(Strategies(provider()), disabled=("Strategies",)).names("eviction") == []


# -- Plugins that fail

FAILURES = [
    ("import no_such_module_here", "failed to load: ModuleNotFoundError: No module named 'no_such_module_here'"),
    ("1 +", "failed to load: SyntaxError: "),
    ("raise SystemExit(3)", "failed to load: SystemExit: 3"),
    ("x = 1", "implements no hook; mark its functions with @graftlm.hookimpl"),
    (
        "from graftlm import hookimpl\n@hookimpl\ndef provide_eviction_strategy(): return []",
        "implements unknown hook provide_eviction_strategy(); did you mean provide_eviction_strategies()?",
    ),
    (
        "from graftlm import hookimpl\n@hookimpl\ndef zzz(a): return []",
        "implements unknown hook zzz(a); hooks are: provide_attention_backends, ",
    ),
    (
        "from graftlm import hookimpl\n@hookimpl\ndef request_finished(record, extra): pass",
        "implements hook 'request_finished' as request_finished(record, extra); "
        "graftlm calls it as request_finished(record)",
    ),
    (
        "from graftlm import hookimpl\n@hookimpl(wrapper=True)\ndef provide_models():\n    return (yield)",
        "wraps hook 'provide_models'; graftlm's hooks do not support wrappers",
    ),
    (
        "from graftlm import hookimpl\n@hookimpl(wrapper=True)\ndef provide_models(): return []",
        "has a hook that cannot be registered: ",
    ),
    (
        "from graftlm import hookimpl\n@hookimpl\ndef provide_models(): raise KeyError('oops')",
        "failed in provide_models: KeyError: 'oops'",
    ),
    (
        "from graftlm import hookimpl\n@hookimpl\ndef provide_models():\n    yield 1/0",
        "failed in provide_models: ZeroDivisionError: division by zero",
    ),
    (
        "from graftlm import hookimpl\n@hookimpl\ndef provide_models(): return None",
        "must return a list of providers from provide_models, got NoneType",
    ),
]


@pytest.mark.parametrize(("source", "message"), FAILURES)
def test_a_failing_plugin_is_recorded_and_does_not_affect_others(install, source, message):
    install("graftlm-broken", source)
    install("graftlm-sound", source_of_strategies("sound"))
    registry = load()
    assert registry.provider("eviction", "sound").name == "sound"
    (failure,) = registry.failures
    assert (failure.plugin.name, failure.plugin.version) == ("graftlm-broken", "1.0")
    assert str(failure).startswith("plugin 'graftlm-broken'")
    assert message in str(failure)


@pytest.mark.parametrize(("source", "message"), FAILURES[3:])
def test_a_failing_object_raises(install, source, message):
    install("graftlm-broken", source, entry_points={})
    with pytest.raises(PluginLoadError, match=re.escape(message)):
        load(importlib.import_module("graftlm_broken"))


def test_two_objects_that_are_equal_cannot_both_be_plugins():
    class Same(Strategies):
        def __eq__(self, other):
            return True

        __hash__ = object.__hash__

    with pytest.raises(PluginLoadError, match="is equal to another loaded plugin"):
        load(Same(), Same())


def test_a_class_is_refused_as_a_plugin():
    with pytest.raises(PluginLoadError, match=r"got the class Strategies; pass Strategies\(\)"):
        load(Strategies)


def test_a_failing_configured_module_is_recorded():
    (failure,) = load(modules=("no_such_plugin",)).failures
    assert str(failure) == (
        "plugin 'no_such_plugin' (dist no_such_plugin) failed to load: "
        "ModuleNotFoundError: No module named 'no_such_plugin'"
    )


def test_a_failed_plugin_is_fatal_if_a_missing_name_is_selected(install):
    install("foo", "import no_such_module_here")
    with pytest.raises(UnknownProviderError) as caught:
        load(Strategies(provider("lru"))).provider("eviction", "theirs")
    assert str(caught.value) == (
        "Unknown eviction strategy 'theirs'. Available: lru. Set cache.eviction.name. Note: plugin 'foo' "
        "(dist foo 1.0) failed to load: ModuleNotFoundError: No module named 'no_such_module_here'."
    )


# -- Refused providers


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (provider("Upper"), "provides eviction strategy 'Upper', whose name must be lower case letters, digits"),
        (provider(""), "whose name must be lower case letters"),
        (provider(None), "whose name must be lower case letters"),
        (provider("auto"), "whose name must be lower case letters, digits, '_', '.' or '-', and not 'auto'"),
        (provider(summary="two\nlines"), "whose summary must be one line of text"),
        (provider(create=None), "whose create must be a function, got None"),
        (provider(options=dict), "whose options must be a pydantic model class, got <class 'dict'>"),
        (provider(options=NoOptions()), "whose options must be a pydantic model class"),
        (provider(unavailable="never"), "whose unavailable must be a function, got 'never'"),
        (provider(rank="high"), "whose rank must be an integer, got 'high'"),
        ("lru", "returned 'lru' from provide_eviction_strategies, expected instances of graftlm.Provider"),
    ],
)
def test_a_provider_with_a_wrong_field_is_refused(install, bad, message):
    with pytest.raises(PluginLoadError, match=re.escape(message)):
        load(Strategies(provider("sound"), bad))


@pytest.mark.parametrize(
    ("hook", "capabilities", "expected"),
    [
        ("provide_attention_backends", None, "AttentionCapabilities, got None"),
        ("provide_prefix_caches", AttentionCapabilities(), "CacheCapabilities, got AttentionCapabilities("),
        ("provide_models", {"architectures": []}, "ModelCapabilities, got {'architectures': []}"),
    ],
)
def test_capabilities_must_have_the_type_of_the_family(hook, capabilities, expected):
    module = ModuleType("caps")
    setattr(module, hook, hookimpl(specname=hook)(lambda: [provider(capabilities=capabilities)]))
    with pytest.raises(PluginLoadError, match=re.escape(f"capabilities must be an instance of {expected}")):
        load(module)


@pytest.mark.parametrize(("version", "remedy"), [(0, "a newer"), (2, "an older"), ("one", "an older")])
def test_a_provider_for_another_api_version_is_refused(install, version, remedy):
    install("foo", source_of_strategies("theirs", api_version=version))
    registry = load(Strategies(provider("sound")))
    sentence = (
        f"foo 1.0 built eviction strategy 'theirs' for plugin API {version}, this graftlm supports 1: "
        f"install {remedy} release of foo, or another version of graftlm"
    )
    assert [str(failure) for failure in registry.failures] == [sentence]
    assert registry.names("eviction") == ["sound"]
    with pytest.raises(ApiVersionError) as caught:
        registry.provider("eviction", "theirs")
    assert str(caught.value) == sentence


def test_a_refused_provider_does_not_affect_others_of_its_plugin(install):
    install("foo", source_of_strategies("good", "BAD", "fine"))
    registry = load()
    assert registry.names("eviction") == ["fine", "good"]
    assert [(f.family, f.provider) for f in registry.failures] == [("eviction", "BAD")]


# -- Names

BUILTIN_NAMES = ("fifo", "filo", "lfu", "lru", "mru", "priority", "slru")


@pytest.fixture
def seven() -> Registry:
    return load(Strategies(*map(provider, BUILTIN_NAMES)))


@pytest.mark.parametrize(
    ("name", "path", "end"),
    [
        ("lfru", None, "Set cache.eviction.name. Did you mean 'lru'?"),
        ("zzz", None, "Set cache.eviction.name."),
        ("LRU", "my.path", "Set my.path. Did you mean 'lru'?"),
    ],
)
def test_the_error_for_an_unknown_name_lists_all_names_and_the_nearest(seven, name, path, end):
    with pytest.raises(UnknownProviderError) as caught:
        seven.provider("eviction", name, path)
    assert str(caught.value) == (
        f"Unknown eviction strategy '{name}'. Available: fifo, filo, lfu, lru, mru, priority, slru. {end}"
    )


def test_the_error_for_an_unknown_name_in_an_empty_family_says_none():
    with pytest.raises(UnknownProviderError, match=r"^Unknown logits processor 'x'\. Available: none\.$"):
        load().provider("logits_processor", "x")


@pytest.fixture
def two_lrus(install):
    install("dist-one", source_of_strategies("lru", "only-one"))
    install("dist-two", source_of_strategies("lru"), version="2.0")


def test_a_duplicate_name_is_an_error_with_both_distributions_if_selected(two_lrus):
    registry = load()
    assert registry.provider("eviction", "only-one").name == "only-one"
    with pytest.raises(DuplicateProviderError) as caught:
        registry.provider("eviction", "lru")
    assert str(caught.value) == (
        "Eviction strategy 'lru' is provided by dist-one 1.0 and by dist-two 2.0. "
        "Choose with plugins.prefer: {eviction/lru: dist-one}, or disable one with plugins.disabled."
    )


@pytest.mark.parametrize("spelling", ["dist-two", "Dist_Two", "dist_two"])
def test_prefer_selects_one_of_two_duplicates(two_lrus, spelling):
    registry = load(prefer={"eviction/lru": spelling})
    chosen = registry.provider("eviction", "lru")
    assert chosen is not load(prefer={"eviction/lru": "dist-one"}).provider("eviction", "lru")
    with pytest.raises(PluginError, match=r"\(dist-two 2\.0\) must create an instance"):
        registry.create("eviction", chosen, {}, None)


def test_auto_does_not_choose_a_duplicate_name(two_lrus):
    assert load().choose("eviction").name == "only-one"


def test_prefer_can_distinguish_plugins_of_one_distribution(install):
    points = {"one": "twins:one", "two": "twins:two"}
    source = "\nclass Twin: provide_eviction_strategies = staticmethod(provide_eviction_strategies)\n"
    install("twins", source_of_strategies("lru") + source + "one, two = Twin(), Twin()\n", entry_points=points)
    with pytest.raises(DuplicateProviderError, match=r"by twins 1\.0 \(plugin '\w+'\) and by twins 1\.0 \(plugin"):
        load().provider("eviction", "lru")
    with pytest.raises(DuplicateProviderError):
        load(prefer={"eviction/lru": "twins"}).provider("eviction", "lru")
    assert load(prefer={"eviction/lru": "two"}).provider("eviction", "lru").name == "lru"


def test_preferring_a_distribution_that_does_not_provide_the_name_is_an_error(two_lrus):
    registry = load(prefer={"eviction/only-one": "dist-two"})
    with pytest.raises(
        UnknownProviderError, match="selects 'dist-two' for eviction/only-one, but 'dist-two' does not provide it"
    ):
        registry.provider("eviction", "only-one")


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("evicton/lru", "did you mean 'eviction/lru'?"),
        ("eviction", "did you mean 'eviction/name'?"),
        ("zzz/lru", f"families are: {', '.join(FAMILIES)}"),
    ],
)
def test_prefer_needs_a_family_and_a_name(key, hint):
    with pytest.raises(ConfigError) as caught:
        load(prefer={key: "dist"})
    assert str(caught.value) == f"plugins.prefer: '{key}' must be family/name, such as eviction/lru; {hint}"


# -- Availability and auto


def needs_cuda(platform: Platform) -> str | None:
    return None if platform.device == "cuda" else "needs a CUDA device"


def raises(platform: Platform) -> str | None:
    raise OSError("no driver")


@pytest.fixture
def ranked() -> Registry:
    return load(
        Strategies(
            provider("gpu", rank=9, unavailable=needs_cuda),
            provider("b", rank=5),
            provider("a", rank=5),
            provider("low", rank=-1),
            provider("odd", rank=7, unavailable=raises),
        )
    )


def test_the_error_for_a_provider_that_cannot_run_has_the_reason(ranked):
    with pytest.raises(ProviderUnavailableError) as caught:
        ranked.provider("eviction", "gpu")
    assert str(caught.value) == (
        f"Eviction strategy 'gpu' ({__name__}) cannot run here: needs a CUDA device. "
        "Available here: a, b, low. Set cache.eviction.name."
    )
    assert ranked.find("eviction", "gpu").name == "gpu"


def test_a_provider_whose_availability_check_raises_is_unavailable(ranked):
    with pytest.raises(ProviderUnavailableError, match="its check of the machine failed: OSError: no driver"):
        ranked.provider("eviction", "odd")


@pytest.mark.parametrize(
    ("platform", "fits", "chosen"),
    [
        (None, None, "a"),
        (Platform("cuda", (9, 0)), None, "gpu"),
        (None, lambda p: "too good" if p.rank > 0 else None, "low"),
        (None, lambda p: "not this" if p.name == "a" else None, "b"),
    ],
)
def test_auto_chooses_the_highest_rank_that_runs_and_fits(ranked, platform, fits, chosen):
    assert ranked.choose("eviction", platform, fits).name == chosen


def test_the_name_auto_is_resolved(ranked):
    assert ranked.provider("eviction", "auto").name == "a"
    assert [p.name for p in ranked.available("eviction")] == ["a", "b", "low"]


def test_if_no_provider_fits_the_error_has_the_reason_of_each(ranked):
    with pytest.raises(ProviderUnavailableError) as caught:
        ranked.choose("eviction", fits=lambda p: f"rank {p.rank}")
    assert str(caught.value) == (
        "No eviction strategy can be used here: gpu: needs a CUDA device; odd: its check of the machine failed: "
        "OSError: no driver; a: rank 5; b: rank 5; low: rank -1."
    )


def test_if_no_provider_is_installed_the_error_says_so():
    with pytest.raises(ProviderUnavailableError, match=r"^No grammar backend is installed\.$"):
        load().provider("grammar", "auto")


# -- Models


class Models:
    @hookimpl
    def provide_models(self):
        def model(name, *architectures, **fields):
            return provider(name, capabilities=ModelCapabilities(architectures), **fields)

        return [
            model("llama", "LlamaForCausalLM", "MistralForCausalLM"),
            model("fast", "LlamaForCausalLM", rank=5, unavailable=needs_cuda),
            model("gpu-only", "GpuForCausalLM", unavailable=needs_cuda),
        ]


class AnyModel:
    @hookimpl
    def provide_models(self):
        return [provider("any", capabilities=ModelCapabilities(any_architecture=True), rank=9)]


@pytest.mark.parametrize(
    ("architectures", "name", "device", "chosen"),
    [
        (("LlamaForCausalLM",), "auto", "cpu", "llama"),
        (("LlamaForCausalLM",), "auto", "cuda", "fast"),
        (("Unknown", "MistralForCausalLM"), "auto", "cpu", "llama"),
        (("Unknown",), "llama", "cpu", "llama"),
    ],
)
def test_a_model_is_found_by_architecture_or_name(architectures, name, device, chosen):
    assert load(Models(), platform=Platform(device)).model_for(architectures, name).name == chosen


@pytest.mark.parametrize(
    ("architectures", "name", "chosen"),
    [
        (("LlamaForCausalLM",), "auto", "llama"),
        (("Unknown", "MistralForCausalLM"), "auto", "llama"),
        (("Unknown",), "auto", "any"),
        (("LlamaForCausalLM",), "any", "any"),
    ],
)
def test_a_model_for_any_architecture_has_lower_precedence(architectures, name, chosen):
    assert load(Models(), AnyModel()).model_for(architectures, name).name == chosen


def test_an_architecture_with_its_own_model_does_not_use_the_general_one():
    with pytest.raises(ProviderUnavailableError, match="gpu-only: needs a CUDA device"):
        load(Models(), AnyModel()).model_for(("GpuForCausalLM",))


def test_the_error_for_an_unsupported_architecture_lists_the_supported_ones():
    with pytest.raises(UnsupportedArchitectureError) as caught:
        load(Models()).model_for(("LamaForCausalLM",))
    assert str(caught.value) == (
        "No model supports LamaForCausalLM. Supported architectures: GpuForCausalLM, LlamaForCausalLM, "
        "MistralForCausalLM. The nearest is LlamaForCausalLM. Install a plugin that supports it, or set "
        "model.architecture to one of: fast, gpu-only, llama."
    )


def test_the_error_for_a_model_that_cannot_run_has_the_reason():
    with pytest.raises(ProviderUnavailableError, match="gpu-only: needs a CUDA device"):
        load(Models()).model_for(("GpuForCausalLM",))


def test_an_unknown_model_name_is_an_unknown_provider():
    with pytest.raises(UnknownProviderError, match=r"Unknown model 'lama'.*Set model\.architecture"):
        load(Models()).model_for(("LlamaForCausalLM",), "lama")


# -- Options and creation


class TightOptions(Options):
    pages: int = 4
    mode: int | list[str] = 0

    @field_validator("pages")
    @classmethod
    def check_pages(cls, value):
        if value % 2:
            raise ValueError("must be even")
        return value


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"page": 2}, "cache.eviction.options.page: unknown key; did you mean 'pages'?"),
        ({"pages": "x"}, "cache.eviction.options.pages: must be a whole number, got 'x'"),
        ({"pages": 3}, "cache.eviction.options.pages: must be even, got 3"),
        (
            {"mode": "x"},
            "cache.eviction.options.mode: must be a whole number, got 'x'\n"
            "cache.eviction.options.mode: must be a list, got 'x'",
        ),
        ({"mode": ["a", 1]}, "cache.eviction.options.mode: must be a whole number, got ['a', 1]\n"
                             "cache.eviction.options.mode[1]: must be a string, got 1; put it in quotes"),
    ],
)  # fmt: skip
def test_wrong_options_are_reported_with_their_path(raw, message):
    registry = load(Strategies(provider(options=TightOptions)))
    with pytest.raises(ConfigError) as caught:
        registry.options(registry.provider("eviction", "oldest"), raw, "cache.eviction.options")
    assert str(caught.value) == message


def test_a_provider_without_options_takes_none(seven):
    with pytest.raises(ConfigError, match=r"^cache\.eviction\.options\.x: unknown key; no keys are allowed here$"):
        seven.options(seven.provider("eviction", "lru"), {"x": 1}, "cache.eviction.options")


def test_wrong_options_in_a_file_are_reported_with_file_and_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("engine.yaml").write_text("cache:\n  eviction:\n    name: oldest\n    options:\n      wieght: 1\n")
    config = EngineConfig.load("engine.yaml")
    registry = load(Strategies(provider(options=SharedOptions)))
    chosen = registry.provider("eviction", config.cache.eviction.name)
    with pytest.raises(ConfigError) as caught:
        registry.create("eviction", chosen, config.cache.eviction.options, None, config.origins)
    assert str(caught.value) == "engine.yaml:5: cache.eviction.options.wieght: unknown key; did you mean 'weight'?"


@pytest.mark.parametrize("raw", [{"window_s": "7"}, SharedOptions(window_s=7)])
def test_create_gets_checked_options_and_the_context(raw):
    seen = []

    def create(options, context):
        seen.append((options, context))
        return Oldest()

    registry = load(Strategies(provider(options=SharedOptions, create=create)))
    created = registry.create("eviction", registry.provider("eviction", "oldest"), raw, "the context")
    assert isinstance(created, Oldest)
    assert seen == [(SharedOptions(window_s=7), "the context")]


def test_create_must_return_an_instance_of_the_contract(install):
    install("foo", source_of_strategies("theirs"))
    registry = load()
    with pytest.raises(PluginError) as caught:
        registry.create("eviction", registry.provider("eviction", "theirs"), {}, None)
    assert str(caught.value) == (
        "Eviction strategy 'theirs' (foo 1.0) must create an instance of graftlm.contracts.EvictionStrategy, "
        "got builtins.NoneType"
    )


def failing(error):
    def create(options, context):
        raise error

    return create


def test_an_error_in_create_becomes_a_plugin_error_with_its_cause():
    cause = RuntimeError("no kernel")
    registry = load(Strategies(provider(create=failing(cause))))
    with pytest.raises(PluginError, match="could not be created: RuntimeError: no kernel") as caught:
        registry.create("eviction", registry.provider("eviction", "oldest"), {}, None)
    assert caught.value.__cause__ is cause


def test_a_graftlm_error_in_create_is_raised_unchanged():
    cause = RequestError("too long")
    registry = load(Strategies(provider(create=failing(cause))))
    with pytest.raises(RequestError) as caught:
        registry.create("eviction", registry.provider("eviction", "oldest"), {}, None)
    assert caught.value is cause


# -- Observers and other processes


def test_there_are_no_observers_by_default(seven):
    assert seven.observers("step_finished") == ()


def test_an_observer_may_take_the_record_or_no_argument():
    seen = []

    class Listener:
        @hookimpl
        def step_finished(self, record):
            seen.append(record)

    class Counter:
        @hookimpl
        def step_finished(self):
            seen.append("step")

    class Urgent:
        @hookimpl(tryfirst=True)
        def step_finished(self, record):
            seen.append("urgent")

    for observe in load(Listener(), Urgent(), Counter()).observers("step_finished"):
        observe("the record")
    assert seen == ["urgent", "step", "the record"]


def test_an_importable_module_can_be_loaded_by_another_process(install):
    for name in ("one", "two"):
        install(f"graftlm-{name}", source_of_strategies(name), entry_points={})
    for plugin in (importlib.import_module("graftlm_two"), "graftlm_two"):
        registry = load(plugin, modules=("graftlm_one",))
        assert registry.import_names() == ["graftlm_one", "graftlm_two"]
        assert registry.names("eviction") == ["one", "two"]


@pytest.mark.parametrize("plugin", [Strategies(provider()), ModuleType("in_memory")])
def test_an_object_that_cannot_be_imported_is_refused_by_name(plugin):
    if isinstance(plugin, ModuleType):
        plugin.provide_models = Models().provide_models
    with pytest.raises(PluginError, match=f"plugin {re.escape(repr(plugin))} is not an importable module"):
        load(plugin).import_names()


# -- A whole configuration


def test_every_configured_family_has_a_selection():
    found = {selection.family.key: selection.name for selection in selections(EngineConfig())}
    assert found == {
        "attention": "auto",
        "cache": "radix",
        "eviction": "lru",
        "grammar": "auto",
        "media": "auto",
        "model": "auto",
        "scheduling": "lpm",
        "routing_policy": "auto",
        "executor": "auto",
        "tool_calls": "auto",
        "reasoning": "auto",
    }


class Everything(Models):
    """A plugin with the providers that the default configuration selects."""

    @hookimpl
    def provide_eviction_strategies(self):
        return [provider("lru", options=SharedOptions), provider("gpu", unavailable=needs_cuda)]

    @hookimpl
    def provide_prefix_caches(self):
        return [provider("radix", options=TightOptions, capabilities=CacheCapabilities())]

    @hookimpl
    def provide_attention_backends(self):
        return [provider("plain", capabilities=AttentionCapabilities())]

    @hookimpl
    def provide_scheduling_policies(self):
        return [provider("lpm")]


def test_a_correct_configuration_has_no_findings():
    findings = check(EngineConfig(), load(Everything()))
    assert (findings.errors, findings.warnings) == ([], [])


def test_check_finds_every_wrong_name_and_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("engine.yaml").write_text(
        "model: {architecture: lama}\n"
        "cache:\n"
        "  options: {pagse: 1}\n"
        "  eviction: lur\n"
        "scheduling:\n"
        "  policy: {options: {x: 1}}\n"
        "attention: {options: {y: 1}}\n"
    )
    findings = check(EngineConfig.load("engine.yaml"), load(Everything()))
    assert findings.errors == [
        "engine.yaml:7: attention.options.y: unknown key; no keys are allowed here",
        "engine.yaml:3: cache.options.pagse: unknown key; did you mean 'pages'?",
        "engine.yaml:4: cache.eviction.name: Unknown eviction strategy 'lur'. Available: gpu, lru. "
        "Set cache.eviction.name. Did you mean 'lru'?",
        "engine.yaml:1: model.architecture: Unknown model 'lama'. Available: fast, gpu-only, llama. "
        "Set model.architecture. Did you mean 'llama'?",
        "engine.yaml:6: scheduling.policy.options.x: unknown key; no keys are allowed here",
    ]


def test_check_warns_about_plugins_that_cannot_run_here():
    config = EngineConfig(cache={"eviction": "gpu"}, plugins={"modules": ["no_such_plugin"]})
    findings = check(config, load(Everything(), modules=config.plugins.modules))
    assert findings.errors == []
    assert findings.warnings == [
        "plugin 'no_such_plugin' (dist no_such_plugin) failed to load: "
        "ModuleNotFoundError: No module named 'no_such_plugin'",
        "eviction strategy 'gpu' cannot run on this machine: needs a CUDA device",
    ]


def test_check_reports_a_missing_family():
    (*_, error) = check(EngineConfig(scheduling={"policy": "auto"}), load(Models())).errors
    assert error == "scheduling.policy.name: No scheduling policy is installed."


def test_the_cpu_is_always_an_available_platform():
    assert probe_platform("cpu") == Platform("cpu")
    assert probe_platform("auto").device in ("cpu", "cuda")


# -- The JSON Schema


@pytest.fixture
def schema() -> dict:
    return json_schema(load(Everything()))


def test_the_schema_lists_names_and_describes_options(schema):
    text = json.dumps(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["$defs"]["eviction.lru"]["properties"].keys() == {"weight", "window_s"}
    assert '"enum": ["auto", "gpu", "lru"]' in text


def test_every_reference_in_the_schema_resolves(schema):
    targets = re.findall(r'"#/\$defs/([^"]+)"', json.dumps(schema))
    assert targets
    assert set(targets) <= schema["$defs"].keys()


@pytest.mark.parametrize(
    ("document", "valid"),
    [
        ({}, True),
        ({"model": "demo", "cache": "radix", "server": None}, True),
        ({"cache": {"options": {"pages": 2}, "eviction": {"name": "lru", "options": {"weight": 2.0}}}}, True),
        ({"cache": {"page_size": "${PAGES:-16}"}, "debug": "${DEBUG}"}, True),
        ({"cache": {"options": {"pagse": 2}}}, False),
        ({"cache": {"eviction": {"options": {"wieght": 2.0}}}}, False),
        ({"cache": {"eviction": {"name": "gpu", "options": {"weight": 2.0}}}}, False),
        ({"cache": {"eviction": "lur"}}, False),
        ({"cache": {"page_size": "sixteen"}}, False),
        ({"evicton": {}}, False),
        ({"memory": {"kv_tokens": 0}}, False),
    ],
)
def test_the_schema_accepts_the_same_files_as_the_loader(schema, document, valid):
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    validator.check_schema(schema)
    assert validator(schema).is_valid(document) == valid


class NestedOptions(Options):
    inner: SharedOptions = SharedOptions()


class OpaqueOptions(Options):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    thing: Oldest | None = None


def test_the_schema_has_nested_options_and_omits_what_it_cannot_express():
    found = json_schema(
        load(Strategies(provider("nested", options=NestedOptions), provider("o", options=OpaqueOptions)))
    )
    assert "weight" in found["$defs"]["eviction.nested.SharedOptions"]["properties"]
    assert found["$defs"]["eviction.o"]["type"] == "object"


def test_the_schema_omits_options_of_a_duplicate_name(two_lrus):
    assert "eviction.lru" not in json_schema(load())["$defs"]


# -- Hooks, families and docs

HOOKS = {name for name, value in vars(hookspecs).items() if hasattr(value, "graftlm_spec")}


def test_every_providing_hook_has_a_family():
    assert {family.hook for family in FAMILIES.values()} == {name for name in HOOKS if name.startswith("provide_")}


def test_family_paths_are_fields_of_the_configuration():
    leaves = EngineConfig().sources.keys()
    paths = [path for family in FAMILIES.values() for path in (family.name_path, family.options_path) if path]
    assert set(paths) <= leaves


def test_docs_list_every_hook_with_its_signature():
    text = PLUGIN_DOCS.read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(\w+\([\w, ]*\))` \|", text, re.MULTILINE))
    assert documented == {
        f"{hook}({', '.join(inspect.signature(getattr(hookspecs, hook)).parameters)})" for hook in HOOKS
    }


def test_docs_list_every_family():
    text = PLUGIN_DOCS.read_text(encoding="utf-8")
    assert [key for key in FAMILIES if f"| `{key}` |" not in text] == []


def test_the_example_in_the_docs_is_a_valid_plugin(install):
    source, project = (
        re.search(rf"```{language}\n(.*?)```", PLUGIN_DOCS.read_text(encoding="utf-8"), re.DOTALL)[1]
        for language in ("python", "toml")
    )
    name, target = re.search(r'\[project\.entry-points\.graftlm\]\n(\w+) = "(\w+)"', project).groups()
    install("graftlm-example", source, entry_points={name: target}, module=target)
    registry = load()
    (entry,) = registry.entries()
    chosen = registry.provider(entry.family, entry.name)
    assert isinstance(registry.create(entry.family, chosen, {}, None), FAMILIES[entry.family].contract)


@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        (
            {"disabled": ["cahce"]},
            "plugins.disabled: no plugin has the name 'cahce'; did you mean 'cache'?",
        ),
        ({"disabled": ["qqqq"]}, "plugins.disabled: no plugin has the name 'qqqq'"),
        (
            {"prefer": {"eviction/lruu": "graftlm"}},
            "plugins.prefer: nothing provides 'eviction/lruu'; did you mean 'eviction/lru'?",
        ),
        (
            {"prefer": {"eviction/lru": "graftml"}},
            "plugins.prefer: no plugin has the name 'graftml'; did you mean 'graftlm'?",
        ),
        ({"disabled": ["graftlm_cache"], "prefer": {"eviction/lru": "graftlm"}}, None),
    ],
)
def test_an_unused_name_in_the_plugins_section_causes_a_warning(settings, warning, caplog):
    Registry.load(PluginSettings(**settings))
    assert [record.getMessage() for record in caplog.records] == ([warning] if warning else [])
