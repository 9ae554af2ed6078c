"""Plugins as objects and by module name, faulty plugins, observers, and logits processors."""

import sys
import types

import pytest
import torch

from graftlm import Engine, FinishReason, Options, Provider, SamplingParams, hookimpl
from graftlm.contracts import EvictionStrategy, LogitsProcessor
from graftlm.errors import ConfigError, PluginLoadError, UnknownProviderError
from graftlm.testing import EventMirror

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=16)


class NewestFirst(EvictionStrategy):
    """Evicts the latest entry first."""

    def __init__(self):
        self.num_asked = 0

    def priority(self, node):
        self.num_asked += 1
        return (-node.last_access,)


class NewestFirstPlugin:
    """A plugin with one strategy; it keeps a list of the strategies that it created."""

    def __init__(self):
        self.made = []

    def _create(self, options, context):
        self.made.append(NewestFirst())
        return self.made[-1]

    @hookimpl
    def provide_eviction_strategies(self):
        return [Provider(name="newest", summary="Newest first", api_version=1, create=self._create)]


def test_a_plugin_object_provides_the_configured_name():
    plugin = NewestFirstPlugin()
    with Engine(model="demo", cache={"eviction": "newest"}, memory={"kv_tokens": 64}, plugins=[plugin]) as engine:
        for salt in "abc":  # more tokens than the memory holds
            assert engine.generate([CHAT], GREEDY, cache_salt=salt)[0].text == "The capital of France is Paris."
    assert plugin.made[0].num_asked > 0


def test_a_module_named_in_the_configuration_is_loaded():
    module = types.ModuleType("newest_module")
    module.provide_eviction_strategies = hookimpl(lambda: NewestFirstPlugin().provide_eviction_strategies())
    sys.modules["newest_module"] = module
    settings = {"model": "demo", "cache": {"eviction": "newest"}, "plugins": {"modules": ["newest_module"]}}
    with Engine(settings) as engine:
        assert engine.generate([CHAT], GREEDY)[0].finished


def test_a_plugin_that_fails_to_import_is_an_error_only_if_selected(tmp_path, monkeypatch):
    (tmp_path / "broken_graft.py").write_text("import no_such_package_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = {"model": "demo", "plugins": {"modules": ["broken_graft"]}}
    with Engine(settings) as engine:
        assert engine.generate([CHAT], GREEDY)[0].finished
    with pytest.raises(UnknownProviderError, match="no_such_package_at_all"):
        Engine(settings, cache={"eviction": "from_broken"})


def test_an_object_without_hooks_is_refused():
    with pytest.raises(PluginLoadError, match="implements no hook"):
        Engine(model="demo", plugins=[object()])


@pytest.mark.parametrize(
    ("plugins", "said"),
    [
        (["no_such_m"], r"^plugin 'no_such_m' .*failed to load: ModuleNotFoundError: No module named 'no_such_m'$"),
        (["no_such_m.part"], "No module named 'no_such_m'$"),
        (["json"], "plugin 'json' implements no hook"),
        ([""], "expected the import name of a module, got ''"),
        ([None], "got None"),
        ("graftlm_chat", r"expected a list, got 'graftlm_chat'; write \['graftlm_chat'\]"),
    ],
)
def test_a_module_that_fails_to_import_is_refused_with_the_reason(plugins, said):
    with pytest.raises(PluginLoadError, match=said):
        Engine(model="demo", plugins=plugins)


class Recorder:
    """Observes everything; one of its hooks raises."""

    def __init__(self, fail=False):
        self.requests, self.steps, self.events = [], [], []
        self.fail = fail

    @hookimpl
    def request_finished(self, record):
        self.requests.append(record)
        if self.fail:
            raise RuntimeError("the disk is full")

    @hookimpl
    def step_finished(self, record):
        self.steps.append(record)

    @hookimpl
    def cache_event(self, event):
        self.events.append(event)
        if self.fail:
            raise RuntimeError("the disk is full")


@pytest.mark.parametrize("fail", [False, True])
def test_observers_get_requests_steps_and_cache_events_and_cause_no_failure(fail):
    recorder = Recorder(fail)
    with Engine(model="demo", plugins=[recorder]) as engine:
        outputs = engine.generate([CHAT, CHAT, "go"], GREEDY)
        engine.flush_cache()
    assert [o.finish_reason for o in outputs[:2]] == [FinishReason.STOP] * 2
    assert len(recorder.requests) == 3
    assert {record.usage for record in recorder.requests} == {output.usage for output in outputs}
    assert sum(step.num_prefill_tokens for step in recorder.steps) > 0
    assert sum(step.num_decodes for step in recorder.steps) > 0
    assert {event.kind for event in recorder.events} - {"split"} == {"stored", "cleared"}


class FailsOnce(EvictionStrategy):
    """Evicts the oldest entry first, and raises when a test sets it to."""

    fails = False

    def priority(self, node):
        return (node.created,)

    def on_insert(self, node):
        if FailsOnce.fails:
            FailsOnce.fails = False
            raise ValueError("no idea")


def test_indexers_get_a_cleared_event_when_the_cache_restarts():
    mirror = EventMirror()

    class Plugin:
        @hookimpl
        def cache_event(self, event):
            mirror(event)

        @hookimpl
        def provide_eviction_strategies(self):
            return [
                Provider(
                    name="fails_once",
                    summary="For a test",
                    api_version=1,
                    create=lambda _options, _context: FailsOnce(),
                )
            ]

    cache = {"name": "radix", "eviction": {"name": "fails_once"}}
    with Engine(model="demo", cache=cache, memory={"kv_tokens": 256}, plugins=[Plugin()]) as engine:
        for token in (5, 6):
            engine.generate([[token] * 100], GREEDY)
        assert mirror.nodes
        FailsOnce.fails = True
        assert engine.generate([[7] * 100], GREEDY)[0].finish_reason is FinishReason.ERROR
        for token in (8, 9):
            engine.generate([[token] * 100], GREEDY)
        snapshot = engine.cache_snapshot()
        assert {node["id"] for node in snapshot["nodes"]} == set(mirror.nodes)
        engine.flush_cache()
    assert not mirror.nodes


class OnlyOptions(Options):
    """Options of the processor `Only`."""

    token_id: int
    fail_at: int | None = None


class Only(LogitsProcessor):
    """Allows only one token, or raises at a given length."""

    def __init__(self, options):
        self._options = options

    def process(self, output_token_ids, logits):
        if self._options.fail_at == len(output_token_ids):
            raise ValueError("no more")
        mask = torch.full_like(logits, float("-inf"))
        mask[self._options.token_id + len(output_token_ids)] = 0
        return logits + mask


class OnlyPlugin:
    """Offers `only`."""

    @hookimpl
    def provide_logits_processors(self):
        return [
            Provider(
                name="only",
                summary="One token",
                api_version=1,
                create=lambda options, context: Only(options),
                options=OnlyOptions,
            )
        ]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_logits_processor_changes_only_its_own_request(overlap):
    def only(**options):
        return SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logits_processors={"only": options})

    with Engine(model="demo", plugins=[OnlyPlugin()], scheduling={"overlap": overlap}) as engine:
        shaped, plain, failing, misused = engine.generate(
            [CHAT] * 4, [only(token_id=100), GREEDY, only(token_id=200, fail_at=2), only(token="x")]
        )
    assert shaped.token_ids == (100, 101, 102, 103, 104)
    assert plain.text == "The capital of France is Paris."
    assert failing.finish_reason is FinishReason.ERROR
    assert failing.token_ids == (200, 201)
    assert "no more" in failing.error
    assert "only" in failing.error
    assert misused.finish_reason is FinishReason.ERROR
    assert "token_id" in misused.error


def test_options_of_a_plugin_are_checked():
    with pytest.raises(ConfigError, match="max_wait"):
        Engine(model="demo", scheduling={"policy": {"name": "lpm", "options": {"max_wait": 3}}})


class EndsTheProcess(LogitsProcessor):
    """Raises SystemExit."""

    def process(self, output_token_ids, logits):
        raise SystemExit("enough")


class EndsTheProcessPlugin:
    """Offers `exit`."""

    @hookimpl
    def provide_logits_processors(self):
        create = lambda options, context: EndsTheProcess()  # noqa: E731
        return [Provider(name="exit", summary="Exits", api_version=1, create=create)]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_plugin_that_raises_system_exit_fails_only_its_step(overlap):
    params = SamplingParams(temperature=0, max_tokens=3, logits_processors={"exit": {}})
    with Engine(model="demo", plugins=[EndsTheProcessPlugin()], scheduling={"overlap": overlap}) as engine:
        (output,) = engine.generate(CHAT, params)
        assert output.finish_reason is FinishReason.ERROR
        assert engine.generate([CHAT], GREEDY)[0].text == "The capital of France is Paris."


def test_observers_get_aborts_and_may_call_the_engine():
    class Asker:
        seen: list = []  # noqa: RUF012

        @hookimpl
        def request_finished(self, record):
            self.seen.append((record.finish_reason, engine.stats().running_requests))

    asker = Asker()
    with Engine(model="demo", plugins=[asker]) as engine:
        next(engine.stream("go on", SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)))
        engine.stats()  # this call returns after the abort
        assert asker.seen == [(FinishReason.ABORT, 0)]
