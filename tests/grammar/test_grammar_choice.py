"""The choice of the backend for a specification: the default, a named one, or a fallback."""

import pytest

from graftlm import Engine, Options, Provider, SamplingParams, hookimpl
from graftlm.contracts import GrammarBackend, GrammarKind, GrammarSpec
from graftlm.errors import ConfigError, GrammarError, PluginError, UnsupportedFeatureError
from graftlm.grammar.grammar_choice import Grammars
from graftlm.grammar.grammars import GrammarCompiler


class Picky(GrammarBackend):
    """Refuses specifications with some words; ignores these words in lenient specifications."""

    def __init__(self, *words):
        self.words = words
        self.num_checks = 0

    def check(self, spec):
        self.num_checks += 1
        refused = tuple(word for word in self.words if word in spec.text)
        if refused and spec.strict:
            raise GrammarError(f"{refused[0]} is not enforced")
        return refused

    def compile(self, spec):
        raise NotImplementedError


def spec(text, strict=True):
    return GrammarSpec(GrammarKind.JSON_SCHEMA, text, strict)


@pytest.fixture
def backends():
    return {"first": Picky("not", "if"), "second": Picky("not", "then"), "third": Picky("if")}


def refuse(compiled, reasoning):
    raise AssertionError(f"nothing here waits for {reasoning}")


@pytest.fixture
def grammars(backends):
    def make_compiler(name):
        return GrammarCompiler(lambda: backends[name], lambda: 0.0, delay=refuse, cache_size=4, timeout_s=1.0)

    return Grammars(make_compiler, "first", ["second"], list(backends))


@pytest.mark.parametrize(
    ("text", "named", "chosen"),
    [("plain", None, "first"), ("if", None, "second"), ("plain", "third", "third"), ("not", "third", "third")],
)
def test_the_first_backend_that_enforces_everything_is_chosen(grammars, text, named, chosen):
    enforcement = grammars.choose(spec(text), named)
    assert (enforcement.backend, enforcement.unenforced) == (chosen, ())


def test_if_all_refuse_the_error_has_the_reason_of_each(grammars):
    with pytest.raises(GrammarError, match=r"^not is not enforced$"):
        grammars.choose(spec("not if"))
    with pytest.raises(GrammarError, match=r"^if is not enforced; fallback second: then is not enforced$"):
        grammars.choose(spec("if then"))


def test_a_named_backend_has_no_fallback(grammars):
    with pytest.raises(GrammarError, match=r"^if is not enforced$"):
        grammars.choose(spec("if"), "first")


@pytest.mark.parametrize(
    ("text", "chosen", "unenforced"),
    [("if", "second", ()), ("not", "first", ("not",)), ("not if", "second", ("not",)), ("not then", "first", ("not",))],
)
def test_a_lenient_specification_goes_to_the_backend_that_enforces_most(grammars, text, chosen, unenforced):
    enforcement = grammars.choose(spec(text, strict=False))
    assert (enforcement.backend, enforcement.unenforced) == (chosen, unenforced)


def test_an_unknown_backend_is_refused(grammars):
    with pytest.raises(
        UnsupportedFeatureError, match=r"Unknown grammar backend 'fourth'. Available: first, second, third"
    ):
        grammars.choose(spec("plain"), "fourth")
    with pytest.raises(UnsupportedFeatureError, match="Did you mean 'second'"):
        grammars.choose(spec("plain"), "secnod")


def test_a_choice_is_remembered(grammars, backends):
    for _ in range(3):
        grammars.choose(spec("if"))
    assert (backends["first"].num_checks, backends["second"].num_checks) == (1, 1)


# -- In an engine


class Strict(GrammarBackend):
    """Refuses everything."""

    def check(self, spec):
        raise GrammarError("nothing is enforced")

    compile = check


class StrictOptions(Options):
    """Options without a fallback."""


class StrictPlugin:
    @hookimpl
    def provide_grammar_backends(self):
        def create(options, context):
            return Strict()

        return [Provider(name="strict", summary="Refuses all.", create=create, options=StrictOptions, api_version=1)]


def test_a_request_may_name_its_backend():
    with Engine(model="demo", grammar="strict", plugins=[StrictPlugin()]) as engine:
        with pytest.raises(GrammarError, match="nothing is enforced"):
            engine.generate("x", SamplingParams(regex="ab"))
        (output,) = engine.generate("x", SamplingParams(regex="ab", grammar_backend="xgrammar"))
        assert output.text == "ab"
        with pytest.raises(UnsupportedFeatureError, match="Unknown grammar backend 'gone'"):
            engine.generate("x", SamplingParams(regex="ab", grammar_backend="gone"))
        with pytest.raises(UnsupportedFeatureError, match="Did you mean 'xgrammar'"):
            engine.generate("x", SamplingParams(grammar_backend="xgramar"))
        stats = engine.stats()
        assert (stats.grammar_hits, stats.grammar_misses) == (0, 1)


class Broken:
    @hookimpl
    def provide_grammar_backends(self):
        def create(options, context):
            raise PluginError("no licence")

        return [Provider(name="broken", summary="Cannot be created.", create=create, api_version=1)]


def test_preload_creates_the_backend_at_the_start():
    with pytest.raises(PluginError, match="no licence"):
        Engine(model="demo", grammar={"name": "broken", "preload": True}, plugins=[Broken()])
    with Engine(model="demo", grammar="broken", plugins=[Broken()]) as engine:
        assert engine.generate("x", SamplingParams(max_tokens=1))


def test_a_fallback_writes_json_like_the_default_backend():
    a = {"type": "string", "pattern": "^b+$", "maxLength": 2}
    schema = {"type": "object", "properties": {"a": a}, "required": ["a"], "additionalProperties": False}
    options = {"fallback": ["llguidance"], "whitespace": "compact"}
    with Engine(model="demo", grammar={"name": "xgrammar", "options": options}) as engine:
        (output,) = engine.generate(["x"], SamplingParams(temperature=1.5, seed=1, json_schema=schema))
    assert output.text in ('{"a":"b"}', '{"a":"bb"}')


def test_a_backend_does_not_fall_back_to_itself():
    with pytest.raises(ConfigError, match="xgrammar cannot fall back to itself"):
        Engine(model="demo", grammar={"name": "xgrammar", "options": {"fallback": ["xgrammar"]}})


def test_an_unknown_fallback_is_refused_at_the_start():
    with pytest.raises(ConfigError, match=r"Unknown grammar backend 'gone'.* Set grammar.options.fallback"):
        Engine(model="demo", grammar={"name": "xgrammar", "options": {"fallback": ["gone"]}})
