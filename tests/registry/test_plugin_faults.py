"""If a plugin method raises while serving, the requests that need it fail with the reason, and others are served."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from graftlm import Engine, FinishReason, Provider, SamplingParams, hookimpl
from graftlm.contracts import EvictionStrategy, LogitsProcessor
from graftlm.errors import GrammarError
from graftlm.registry import Registry

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def choice(name):
    """Return parameters for one of two texts; another name gives another grammar, which is not compiled yet."""
    return SamplingParams(temperature=0, max_tokens=12, choice=("Lima", name))


@dataclass
class Fault:
    """The method that currently raises, "family.method", or none."""

    place: str = ""
    times: int = 0

    def strike(self, place: str) -> None:
        if place == self.place:
            self.times += 1
            raise ValueError(f"broken on purpose: {place}")


class Breaking:
    """A plugin with a provider `breaking` for each family: the built-in one, whose methods raise if the test sets
    it.
    """

    METHODS = {  # noqa: RUF012
        "attention": ("torch_native", ("prepare", "forward")),
        "cache": ("radix", ("match", "insert", "evict", "lock", "unlock", "probe_again", "continuation")),
        "scheduling": ("lpm", ("order",)),
        "drafter": ("radix", ("propose", "close")),
        "grammar": ("xgrammar", ("check", "compile")),
        "model": ("llama", ("forward", "logits")),
    }

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self._built_in = Registry.load()

    def _provider(self, family: str) -> list[Provider]:
        name, methods = self.METHODS[family]
        inner = self._built_in.find(family, name)

        def create(options, context):
            part = inner.create(options, context)
            for method in methods:
                self._break(part, family, method)
            if family == "grammar":
                self._break_matchers(part)
            return part

        return [replace(inner, name="breaking", create=create, rank=-1)]

    def _break(self, part: object, family: str, method: str) -> None:
        works: Callable = getattr(part, method)

        def call(*arguments, **named):
            self.fault.strike(f"{family}.{method}")
            return works(*arguments, **named)

        setattr(part, method, call)

    def _break_matchers(self, backend) -> None:
        compile_spec = backend.compile
        fill = backend.fill_bitmasks

        def fill_bitmasks(matchers, mask):
            self.fault.strike("grammar.fill_bitmasks")
            fill([matcher.inner for matcher in matchers], mask)

        backend.compile = lambda spec: BreakingGrammar(compile_spec(spec), self.fault)
        backend.fill_bitmasks = fill_bitmasks

    @hookimpl
    def provide_attention_backends(self):
        return self._provider("attention")

    @hookimpl
    def provide_prefix_caches(self):
        return self._provider("cache")

    @hookimpl
    def provide_eviction_strategies(self):
        create = lambda options, context: BreakingStrategy(self.fault)  # noqa: E731
        return [Provider(name="breaking", summary="x", api_version=1, create=create)]

    @hookimpl
    def provide_scheduling_policies(self):
        return self._provider("scheduling")

    @hookimpl
    def provide_drafters(self):
        return self._provider("drafter")

    @hookimpl
    def provide_grammar_backends(self):
        return self._provider("grammar")

    @hookimpl
    def provide_models(self):
        return self._provider("model")

    @hookimpl
    def provide_logits_processors(self):
        def create(options, context):
            self.fault.strike("logits_processor.create")
            return BreakingProcessor(self.fault)

        return [Provider(name="breaking", summary="x", api_version=1, create=create)]

    @hookimpl
    def request_finished(self, record):
        self.fault.strike("observer.request_finished")

    @hookimpl
    def step_finished(self, record):
        self.fault.strike("observer.step_finished")

    @hookimpl
    def cache_event(self, event):
        self.fault.strike("observer.cache_event")


class BreakingStrategy(EvictionStrategy):
    """Evicts the least recently used entry first."""

    def __init__(self, fault):
        self.fault = fault

    def priority(self, node):
        self.fault.strike("eviction.priority")
        return (node.last_access,)

    def on_insert(self, node):
        self.fault.strike("eviction.on_insert")

    def on_hit(self, node):
        self.fault.strike("eviction.on_hit")

    def on_evict(self, node):
        self.fault.strike("eviction.on_evict")


class BreakingGrammar:
    """A wrapper of a compiled grammar."""

    def __init__(self, inner, fault):
        self.inner, self.fault = inner, fault

    def matcher(self):
        self.fault.strike("grammar.matcher")
        return BreakingMatcher(self.inner.matcher(), self.fault)


class BreakingMatcher:
    """A wrapper of a matcher."""

    def __init__(self, inner, fault):
        self.inner, self.fault = inner, fault

    def __getattr__(self, name):
        self.fault.strike(f"grammar.{name}")
        return getattr(self.inner, name)


class BreakingProcessor(LogitsProcessor):
    """Changes no logits."""

    def __init__(self, fault):
        self.fault = fault

    def process(self, output_token_ids, logits):
        self.fault.strike("logits_processor.process")
        return logits


FAULT = Fault()


@pytest.fixture(scope="module")
def engine():
    """An engine in which all parts are `breaking`."""
    config = {
        "model": {"path": "demo", "architecture": "breaking"},
        "attention": "breaking",
        "cache": {"name": "breaking", "eviction": "breaking"},
        "scheduling": {"policy": "breaking"},
        "speculation": "breaking",
        "grammar": {"name": "breaking", "options": {}},
        "memory": {"kv_tokens": 384},
        "debug": True,
    }
    with Engine(config, plugins=[Breaking(FAULT)]) as it:
        yield it


@pytest.fixture(autouse=True)
def _mended():
    FAULT.place, FAULT.times = "", 0
    yield
    FAULT.place = ""


def fill(engine):
    """Fill the memory with different prompts, so that entries must be evicted."""
    engine.flush_cache()
    for token in range(100, 103):
        engine.generate([[token] * 100], GREEDY)


def broken_errors(outputs, place):
    """Return the errors of the failed outputs; each must name the failing method."""
    failed = [output for output in outputs if output.finish_reason is FinishReason.ERROR]
    for output in failed:
        assert f"broken on purpose: {place}" in output.error, output.error
    return failed


#: Methods that a step or the shared memory needs: all requests of the step fail.
SHARED = [
    "model.forward",
    "model.logits",
    "attention.prepare",
    "attention.forward",
    "cache.match",
    "cache.insert",
    "cache.evict",
    "cache.lock",
    "cache.unlock",
    "eviction.on_insert",
    "eviction.on_evict",
]


@pytest.mark.parametrize("place", SHARED)
def test_a_failure_in_a_step_fails_its_requests_and_later_ones_are_served(engine, place):
    fill(engine)
    FAULT.place = place
    outputs = engine.generate([CHAT, [7] * 120], GREEDY)
    assert FAULT.times > 0, "the method was never called"
    assert broken_errors(outputs, place), [output.finish_reason for output in outputs]
    FAULT.place = ""
    assert [output.text for output in engine.generate([CHAT, CHAT], GREEDY)] == [PARIS, PARIS]


#: Methods for which there is an alternative: no request fails.
SPARED = [
    ("eviction.priority", GREEDY, "the node is evicted first"),
    ("scheduling.order", GREEDY, "using arrival order"),
    ("drafter.propose", GREEDY, "drafter 'breaking' failed; the request continues without drafts of this drafter"),
    ("drafter.close", GREEDY, "drafter 'breaking' failed to close a request"),
    ("cache.continuation", GREEDY, "drafter 'breaking' failed; the request continues without drafts of this drafter"),
    ("grammar.fill_bitmasks", choice("fill"), None),  # one matcher after the other
]


@pytest.mark.parametrize(("place", "params", "logged"), SPARED, ids=[place for place, *_ in SPARED])
def test_a_failure_with_an_alternative_fails_no_request(engine, place, params, logged, caplog):
    fill(engine)
    FAULT.place = place
    outputs = engine.generate([CHAT, [7] * 120], [params, GREEDY])
    assert FAULT.times > 0, "the method was never called"
    assert not broken_errors(outputs, place)
    assert outputs[0].text in (PARIS, "Lima")
    assert logged is None or logged in caplog.text


def test_a_check_that_raises_refuses_the_request_with_the_reason(engine):
    FAULT.place = "grammar.check"
    with pytest.raises(
        GrammarError, match=r"the grammar backend failed: ValueError: broken on purpose: grammar\.check"
    ):
        engine.generate([CHAT], choice("check"))
    assert engine.generate([CHAT], GREEDY)[0].text == PARIS


#: Methods that one request needs: only this request fails.
OWN = [
    ("grammar.compile", choice("compile")),
    ("grammar.matcher", choice("matcher")),
    ("grammar.accept", choice("accept")),
    ("grammar.forced_text", choice("forced_text")),
    ("logits_processor.create", replace(GREEDY, logits_processors={"breaking": {}})),
    ("logits_processor.process", replace(GREEDY, logits_processors={"breaking": {}})),
]


@pytest.mark.parametrize(("place", "params"), OWN, ids=[place for place, _ in OWN])
def test_a_failure_in_one_requests_method_fails_only_that_request(engine, place, params):
    engine.flush_cache()
    FAULT.place = place
    failing, other = engine.generate([CHAT, CHAT], [params, GREEDY])
    assert FAULT.times > 0, "the method was never called"
    assert failing.finish_reason is FinishReason.ERROR
    assert broken_errors([failing], place)
    assert other.text == PARIS
    FAULT.place = ""
    assert engine.generate([CHAT], params)[0].finish_reason is not FinishReason.ERROR


@pytest.mark.parametrize("hook", ["request_finished", "step_finished", "cache_event"])
def test_an_observer_that_raises_affects_no_request(engine, hook, caplog):
    engine.flush_cache()
    FAULT.place = f"observer.{hook}"
    assert engine.generate([CHAT], GREEDY)[0].text == PARIS
    assert FAULT.times > 0
    assert re.search(f"broken on purpose: observer.{hook}", caplog.text)
