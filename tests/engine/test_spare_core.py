"""While a grammar compiles, steps use one thread less and generate the same tokens."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from graftlm import Engine, FinishReason, Options, Provider, SamplingParams, hookimpl
from graftlm.testing import FakeGrammarBackend

LIMIT_S = 20
FREE = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class Plugin:
    """Offers `gated`, whose grammars compile or fail when their gate opens. Records what they and the steps do."""

    def __init__(self, outcome=None):
        self.outcome = outcome
        self.gate, self.began = threading.Event(), threading.Event()
        self.num_compiled = 0

    def create(self, options, context):
        backend = FakeGrammarBackend.of(context)
        compile_spec = backend.compile

        def compile_gated(spec):
            self.num_compiled += 1
            self.began.set()
            assert self.gate.wait(LIMIT_S)
            if self.outcome is not None:
                raise self.outcome
            return compile_spec(spec)

        backend.compile = compile_gated
        return backend

    @hookimpl
    def provide_grammar_backends(self):
        return [Provider(name="gated", summary="For tests", api_version=1, create=self.create, options=Options)]


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def threads_of_steps(engine):
    executor = engine._parts.loop._executor
    return engine._thread.call(lambda: executor.call(torch.get_num_threads).result(LIMIT_S)).result(LIMIT_S)


def threads_of_new_threads():
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(torch.get_num_threads).result()


@pytest.mark.parametrize(
    ("overlap", "outcome"),
    [(False, None), (True, ValueError("broken on purpose")), (True, SystemExit(3))],
)
def test_steps_use_all_threads_again_after_a_compilation(three_threads, overlap, outcome):
    plugin = Plugin(outcome)
    with (
        Engine(
            model="demo", grammar={"name": "gated"}, scheduling={"overlap": overlap}, plugins=[plugin], debug=True
        ) as engine,
        ThreadPoolExecutor() as pool,
    ):
        (alone,) = engine.generate("Hello", FREE)
        assert threads_of_steps(engine) == 3
        under_grammar = pool.submit(engine.generate, "a", SamplingParams(ebnf="ab bc", temperature=0, max_tokens=4))
        assert plugin.began.wait(LIMIT_S)
        (beside,) = engine.generate("Hello", FREE)
        assert threads_of_steps(engine) == 2
        assert threads_of_new_threads() == 3
        plugin.gate.set()
        (output,) = under_grammar.result(LIMIT_S)
        assert output.finish_reason is (FinishReason.STOP if outcome is None else FinishReason.ERROR)
        (after,) = engine.generate("Hello", FREE)
        assert threads_of_steps(engine) == 3
    assert alone.token_ids == beside.token_ids == after.token_ids
    assert threads_of_new_threads() == torch.get_num_threads() == 3


def test_grammars_of_aborted_requests_and_of_a_closed_engine_are_not_compiled(three_threads):
    plugin = Plugin()
    with Engine(model="demo", grammar={"name": "gated"}, plugins=[plugin]) as engine, ThreadPoolExecutor() as pool:
        outputs = [pool.submit(engine.generate, "a", SamplingParams(ebnf="ab"))]
        assert plugin.began.wait(LIMIT_S)
        (given_up,) = engine.generate("a", SamplingParams(ebnf="cd"), timeout_s=0.05)
        assert given_up.finish_reason is FinishReason.ABORT
        outputs.append(pool.submit(engine.generate, "a", SamplingParams(ebnf="ef")))
        engine.generate("Hello", FREE)
        engine.close()
        for output in outputs:
            assert output.result(LIMIT_S)[0].finish_reason is FinishReason.ABORT
        plugin.gate.set()
    assert plugin.num_compiled == 1
    assert threads_of_new_threads() == 3
