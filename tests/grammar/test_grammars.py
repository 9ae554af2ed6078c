"""The grammar compiler compiles each specification once, outside the step loop, within limits."""

import sys
import threading
import time

import pytest

from graftlm.contracts import CompiledGrammar, GrammarBackend, GrammarKind, GrammarSpec
from graftlm.errors import EngineClosedError, GrammarError, PluginError, SamplingParamsError
from graftlm.grammar.delayed_grammar import Reasoning
from graftlm.grammar.grammars import GrammarCompiler, grammar_spec
from graftlm.sampling_params import GRAMMAR_FIELDS
from graftlm.types import SamplingParams

LIMIT_S = 20


class Panic(BaseException):
    """An exception like those that Rust libraries raise for a panic."""


class Named(CompiledGrammar):
    def __init__(self, text):
        self.text = text

    def behind(self, reasoning):
        return Named(f"{reasoning.end} {self.text}")

    def matcher(self):
        raise NotImplementedError


class Backend(GrammarBackend):
    """Compiles a specification when its gate opens; "bad..." is refused, "bug..." and "panic..." raise other
    exceptions.
    """

    def __init__(self):
        self.compiled = []
        self.gates = {}
        self.started = threading.Semaphore(0)

    def hold(self, text):
        self.gates[text] = threading.Event()
        return self.gates[text]

    def check(self, spec):
        if spec.text.startswith("bad"):
            raise GrammarError(f"no {spec.text}")
        if spec.text.startswith("bug"):
            raise KeyError(spec.text)
        if spec.text.startswith("panic"):
            raise Panic(spec.text)
        if spec.text.startswith("exit"):
            sys.exit(3)
        return ()

    def compile(self, spec):
        self.started.release()
        if spec.text in self.gates:
            assert self.gates[spec.text].wait(LIMIT_S)
        self.check(spec)
        self.compiled.append(spec.text)
        return Named(spec.text)


def spec(text):
    return GrammarSpec(GrammarKind.REGEX, text)


class Rig:
    def __init__(self, **kwargs):
        self.backend = Backend()
        self.num_created = 0
        self.now = 0.0
        fields = {"delay": Named.behind, "cache_size": 4, "timeout_s": 10.0, "num_threads": 1} | kwargs
        self.compiler = GrammarCompiler(self._create, lambda: self.now, **fields)

    def _create(self):
        self.num_created += 1
        return self.backend

    def get(self, text):
        return self.compiler.compile(spec(text)).result(LIMIT_S)


def test_every_kind_of_grammar_is_a_sampling_parameter():
    assert {kind.value for kind in GrammarKind} == set(GRAMMAR_FIELDS)


def test_a_specification_is_compiled_once():
    rig = Rig()
    first = rig.get("a")
    assert rig.get("a") is first
    assert rig.backend.compiled == ["a"]
    assert (rig.compiler.hits, rig.compiler.misses, rig.num_created) == (1, 1, 1)


def test_the_backend_is_created_at_its_first_use():
    rig = Rig()
    assert rig.num_created == 0
    rig.compiler.check(spec("a"))
    assert rig.num_created == 1


def test_requests_during_a_compilation_share_its_result():
    rig = Rig()
    gate = rig.backend.hold("a")
    first, second = rig.compiler.compile(spec("a")), rig.compiler.compile(spec("a"))
    assert first is second
    assert not first.done()
    gate.set()
    assert first.result(LIMIT_S).text == "a"


def test_a_burst_of_grammars_is_evicted_after_compilation():
    rig = Rig(cache_size=2)
    gate = rig.backend.hold("a")
    burst = [rig.compiler.compile(spec(text)) for text in "abcdef"]
    gate.set()
    for future in burst:
        future.result(LIMIT_S)
    for _ in range(2):  # the first one may still be leaving the last compilation
        rig.get("f")
    misses = rig.compiler.misses
    rig.get("a")
    assert rig.compiler.misses == misses + 1


def test_a_compilation_longer_than_a_second_does_not_block_the_queue():
    rig = Rig()
    gate = rig.backend.hold("a")
    slow = rig.compiler.compile(spec("a"))
    assert rig.backend.started.acquire(timeout=LIMIT_S)
    rig.now = 1.5
    assert rig.get("b").text == "b"
    assert not slow.done()
    gate.set()
    assert slow.result(LIMIT_S).text == "a"


def test_the_queue_continues_behind_a_hanging_compilation():
    rig = Rig(timeout_s=0.05)
    gate = rig.backend.hold("a")
    rig.compiler.compile(spec("a"))
    assert rig.backend.started.acquire(timeout=LIMIT_S)
    waiting = rig.compiler.compile(spec("b"))
    rig.now = 1.0
    assert waiting.result(LIMIT_S).text == "b"
    gate.set()


def test_the_least_recently_used_grammars_are_evicted():
    rig = Rig(cache_size=2)
    for text in "ab":
        rig.get(text)
    rig.get("a")
    rig.get("c")
    rig.get("a")
    rig.get("b")
    assert rig.backend.compiled == ["a", "b", "c", "b"]


def test_a_grammar_in_compilation_is_not_evicted():
    rig = Rig(cache_size=1, num_threads=2)
    gate = rig.backend.hold("slow")
    slow = rig.compiler.compile(spec("slow"))
    for text in "abc":
        rig.get(text)
    assert rig.compiler.compile(spec("slow")) is slow
    gate.set()
    slow.result(LIMIT_S)
    assert rig.backend.compiled.count("slow") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bad one", "^no bad one$"),
        ("bug", "^the grammar backend failed: KeyError: 'bug'$"),
        ("panic", "^the grammar backend failed: Panic: panic$"),
        ("exit", "^the grammar backend failed: SystemExit: 3$"),
    ],
)
def test_a_failed_compilation_is_a_grammar_error_and_not_cached(text, said):
    rig = Rig()
    with pytest.raises(GrammarError, match=said):
        rig.compiler.check(spec(text))
    for _ in range(2):
        with pytest.raises(GrammarError, match=said):
            rig.get(text)
    assert rig.compiler.misses == 2
    assert rig.get("good").text == "good"


def test_a_backend_that_cannot_be_created_is_an_error_each_time():
    def create():
        raise PluginError("no such library")

    compiler = GrammarCompiler(create, lambda: 0.0, delay=Named.behind, cache_size=4, timeout_s=1.0)
    for _ in range(2):
        with pytest.raises(PluginError, match="no such library"):
            compiler.check(spec("a"))
        with pytest.raises(PluginError, match="no such library"):
            compiler.compile(spec("a")).result(LIMIT_S)


def test_a_panic_during_creation_fails_the_waiting_requests():
    def create():
        raise Panic("no luck")

    compiler = GrammarCompiler(create, lambda: 0.0, delay=Named.behind, cache_size=4, timeout_s=1.0)
    with pytest.raises(GrammarError, match="Panic: no luck"):
        compiler.compile(spec("a")).result(LIMIT_S)


def test_an_endless_compilation_does_not_block_other_requests():
    rig = Rig()
    gate = rig.backend.hold("endless")
    endless = rig.compiler.compile(spec("endless"))
    assert rig.backend.started.acquire(timeout=LIMIT_S)
    waiting = rig.compiler.compile(spec("a"))
    assert not waiting.done()
    rig.now = 11.0
    assert rig.get("b").text == "b"
    assert waiting.result(LIMIT_S).text == "a"
    assert not endless.done()
    gate.set()
    assert endless.result(LIMIT_S).text == "endless"


def num_compile_threads():
    return sum(thread.name == "graftlm-grammar" for thread in threading.enumerate())


def test_the_number_of_threads_is_limited_and_they_end():
    before = num_compile_threads()
    rig = Rig()
    gates = [rig.backend.hold(f"t{i}") for i in range(20)]
    futures = []
    for i in range(20):
        futures.append(rig.compiler.compile(spec(f"t{i}")))
        rig.now += 11.0
    assert num_compile_threads() - before <= GrammarCompiler.MAX_THREADS
    for gate in gates:
        gate.set()
    assert [future.result(LIMIT_S).text for future in futures] == [f"t{i}" for i in range(20)]
    for thread in threading.enumerate():
        if thread.name == "graftlm-grammar":
            thread.join(LIMIT_S)
            assert not thread.is_alive()


# -- From sampling parameters to specifications


class Model:
    @staticmethod
    def model_json_schema():
        return {"type": "integer"}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, None),
        ({"regex": "a+"}, (GrammarKind.REGEX, "a+")),
        ({"ebnf": 'root ::= "a"'}, (GrammarKind.EBNF, 'root ::= "a"')),
        ({"json_schema": {"type": "string", "const": "é"}}, ("json_schema", '{"type": "string", "const": "é"}')),
        ({"json_schema": '{ "type" : "null" }'}, ("json_schema", '{ "type" : "null" }')),
        ({"json_schema": Model}, ("json_schema", '{"type": "integer"}')),
    ],
)
def test_sampling_parameters_name_a_specification(params, expected):
    assert grammar_spec(SamplingParams(**params)) == (expected and GrammarSpec(GrammarKind(expected[0]), expected[1]))


@pytest.mark.parametrize("schema", [{"enum": {1, 2}}, {"const": float("nan")}, {"const": b"a"}])
def test_a_schema_that_is_not_json_is_refused(schema):
    with pytest.raises(SamplingParamsError, match=r"^json_schema is not JSON: "):
        grammar_spec(SamplingParams(json_schema=schema))


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"json_schema": 3}, "json_schema must be a dict, a string or a pydantic model class, got 3"),
        ({"regex": b"a"}, "regex must be a string"),
        ({"ebnf": ["a"]}, "ebnf must be a string"),
        ({"regex": "a", "ebnf": "b"}, "at most one of json_schema, regex, ebnf, choice, structural_tag must be given"),
    ],
)
def test_an_invalid_specification_is_refused_at_once(params, said):
    with pytest.raises(SamplingParamsError, match=said):
        SamplingParams(**params)


# -- Queues


def started_behind(rig, *stuck):
    """Start compilations that hang, and return their gates."""
    gates = [rig.backend.hold(text) for text in stuck]
    for text in stuck:
        rig.compiler.compile(spec(text))
        assert rig.backend.started.acquire(timeout=LIMIT_S)
        rig.now += 1.5
    return gates


def test_several_hanging_compilations_do_not_block_the_queue():
    rig = Rig(timeout_s=0.05)
    gates = [rig.backend.hold(text) for text in "ab"]
    futures = [rig.compiler.compile(spec(text)) for text in "abc"]
    for _ in gates:
        assert rig.backend.started.acquire(timeout=LIMIT_S)
        rig.now += 1.0
    assert futures[2].result(LIMIT_S).text == "c"
    for gate in gates:
        gate.set()


def test_the_timeout_of_a_queued_grammar_starts_when_the_queue_stops():
    rig = Rig()
    gates = [rig.backend.hold(text) for text in "ab"]
    futures = [rig.compiler.compile(spec(text)) for text in "abc"]
    assert rig.backend.started.acquire(timeout=LIMIT_S)
    assert [rig.compiler.deadline_s(future, 0.0) for future in futures] == [10.0, 10.0, 10.0]
    rig.now = 0.9
    gates[0].set()
    assert rig.backend.started.acquire(timeout=LIMIT_S)
    assert [rig.compiler.deadline_s(future, 0.0) for future in futures] == [10.0, 10.9, 10.9]
    assert rig.compiler.deadline_s(futures[2], 3.0) == 13.0
    gates[1].set()
    assert futures[2].result(LIMIT_S).text == "c"


def test_a_queued_compilation_without_waiters_is_cancelled():
    rig = Rig()
    (gate,) = started_behind(rig, "a")
    rig.now = 0.0
    wanted, left = rig.compiler.compile(spec("wanted")), rig.compiler.compile(spec("left"))
    assert rig.compiler.compile(spec("wanted")) is wanted
    for text in ("wanted", "left", "a", "unknown"):
        rig.compiler.leave(spec(text))
    again = rig.compiler.compile(spec("another"))
    gate.set()
    assert again.result(LIMIT_S).text == "another"
    assert rig.backend.compiled == ["a", "wanted", "another"]
    assert not left.done()
    assert rig.get("left").text == "left"


def test_a_closed_compiler_starts_no_compilation():
    rig = Rig()
    (gate,) = started_behind(rig, "a")
    rig.now = 0.0
    running, waiting = rig.compiler.compile(spec("a")), rig.compiler.compile(spec("b"))
    rig.compiler.close()
    with pytest.raises(EngineClosedError):
        waiting.result(LIMIT_S)
    gate.set()
    assert running.result(LIMIT_S).text == "a"
    assert rig.backend.compiled == ["a"]


def test_after_a_long_compilation_another_thread_continues_the_queue():
    rig = Rig()
    slow, other = started_behind(rig, "a", "b")
    rig.now -= 1.5  # the second one has just started
    waiting = rig.compiler.compile(spec("c"))
    before = num_compile_threads()
    slow.set()
    assert rig.get("a").text == "a"
    limit = time.monotonic() + LIMIT_S
    while num_compile_threads() >= before and time.monotonic() < limit:
        time.sleep(0.001)
    assert not waiting.done()
    other.set()
    assert waiting.result(LIMIT_S).text == "c"


def test_short_specifications_are_compiled_first_without_starving_long_ones():
    rig = Rig(cache_size=64)
    gate = rig.backend.hold("a")
    rig.compiler.compile(spec("a"))
    assert rig.backend.started.acquire(timeout=LIMIT_S)
    texts = ["long" * 9, *(f"s{i}" for i in range(8))]
    futures = [rig.compiler.compile(spec(text)) for text in texts]
    gate.set()
    for future in futures:
        future.result(LIMIT_S)
    order = rig.backend.compiled[1:]
    assert sorted(order) == sorted(texts)
    assert order[0] == "s0"
    assert 1 <= order.index(texts[0]) <= 3


def test_requests_with_and_without_reasoning_share_a_grammar():
    rig = Rig(cache_size=8)
    rig.get("a")
    for i in range(3):
        reasoning = Reasoning(f"</{i}>")
        assert rig.compiler.compile(spec("a"), reasoning).result(LIMIT_S).text == f"</{i}> a"
        assert rig.compiler.compile(spec("b"), reasoning).result(LIMIT_S).text == f"</{i}> b"
    rig.get("b")
    assert rig.backend.compiled == ["a", "b"]
    assert (rig.compiler.hits, rig.compiler.misses) == (1, 7)


@pytest.mark.parametrize("schema", [True, False])
def test_true_and_false_are_schemas(schema):
    assert grammar_spec(SamplingParams(json_schema=schema)).text == str(schema).lower()
