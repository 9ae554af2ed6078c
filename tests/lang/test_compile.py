"""A compiled program generates the same text as the program, with at most as many requests."""

import asyncio
import sys

import pytest

from graftlm import Engine, OpenAI, assistant, assistant_begin, assistant_end, function, gen, select, system, user
from graftlm.errors import InvalidPromptError, ProgramCancelledError, ProgramError, RequestError
from graftlm.lang import EngineBackend
from graftlm.lang.expressions import Gen
from graftlm.lang.nodes import Adopt
from graftlm.testing import ScriptedApi, ScriptedModel

LONG = "The capital of France is Paris. The day after Monday is Tuesday. " * 4


class CountingBackend(EngineBackend):
    """Records the requests that it gets."""

    def __init__(self, engine):
        super().__init__(engine)
        self.calls = []

    async def generate(self, request):
        self.calls.append("generate")
        return await super().generate(request)

    async def score(self, prompt, choices, **options):
        self.calls.append("score")
        return await super().score(prompt, choices, **options)

    async def cache_prefix(self, prompt):
        self.calls.append("cache_prefix")
        await super().cache_prefix(prompt)


@pytest.fixture
def counting(engine):
    return CountingBackend(engine)


def texts(s, topic, number):
    s += "Topic: " + topic
    s += f" ({topic:>6}, {topic!r}, {number:03d}) {topic[0]}{topic.upper()}" + str(number)
    s += gen("a", max_tokens=4)
    s += "[" + s["a"].strip() + f"|{s['a']!r}|" + s["a"] + "]" + gen("b", max_tokens=4, stop=["\n"])
    s["note"] = f"{topic}: {s['b']}"
    s["number"] = number
    return {"b": s["b"], "all": [s["a"], (topic, 1)], "tokens": s.get_meta_info("b")["completion_tokens"]}


def chat(s, question):
    s += system("You are a friendly assistant.")
    with s.user():
        s += question
    with s.assistant(), s.var_scope("turn"):
        s += "Well: " + gen("answer", max_tokens=6)
    s += user(f"You said {s['turn']!s}. Sure?") + assistant_begin() + select("sure", ["yes", "no"]) + assistant_end()
    return s.text()


def branches(s, topics):
    s += user(LONG)
    forks = s.fork(len(topics))
    for fork, topic in zip(forks, topics, strict=True):
        fork += user(f"Now answer in one short sentence what you think about {topic}.")
        fork += assistant(gen("view", max_tokens=6) + "." + gen("unread", max_tokens=6))
    s += assistant("".join(f"{i}{fork['view']}" for i, fork in enumerate(forks)) + gen("sum", max_tokens=6))


def joined(s, question):
    s += question
    with s.fork(3) as forks:
        forks += " It is" + gen("answer", max_tokens=4)
        forks += lambda i: f" {i}" + gen(f"more_{i}", max_tokens=2)
    s += f" Not {s['answer'][1]}" + gen("end", max_tokens=4)


def copies(s, word):
    s += f"Say {word}:"
    for i in range(3):
        with s.copy() as c:
            c += f" {i}" + gen(f"word_{i}", max_tokens=3)
        s += s[f"word_{i}"][0]


def nested(s, word):
    s += word
    for child in s.fork(2):
        child += " and"
        grandchildren = child.fork(2)
        grandchildren += [" a" + gen("x", max_tokens=2), " b" + gen("x", max_tokens=2)]
        s += grandchildren[0]["x"] + grandchildren[1]["x"] + child.text()


def chosen(s, options):
    s += "I like "
    s += select("first", [options[0], options[1]]) + " and " + select("only", ["tea"])
    s += f" ({s['only']})"
    s += select("again", [f"{s['first']}!", f"{s['only']}!"])


def several(s, word):
    s += word + gen("xs", max_tokens=3, n=2)
    s += s["xs"][1]


def numbers(s):
    s += "1 + 1 =" + gen("n", dtype=int, max_tokens=4) + gen("r", regex=r" (is|was)")


def unfinished(s, word="day"):
    s += word
    forks = s.fork(2)
    forks += gen("x", max_tokens=2)


PROGRAMS = {
    "texts": (texts, {"topic": "tea", "number": 7}, {}),
    "chat": (chat, {"question": "What is 2 + 3?"}, {}),
    "branches": (branches, {}, {"topics": ["trees", "tea", "towns"]}),
    "joined": (joined, {"question": "What is 2 + 3?"}, {}),
    "copies": (copies, {"word": "day"}, {}),
    "nested": (nested, {"word": "day"}, {}),
    "chosen": (chosen, {"options": ["tea", "coffee"]}, {}),
    "several": (several, {"word": "Monday"}, {}),
    "numbers": (numbers, {}, {}),
    "unfinished": (unfinished, {}, {}),
}


def variables_of(state):
    return {name: state[name] for name in state.parts()[1].copy()}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_compiled_program_generates_the_same_text_with_no_more_requests(name, counting):
    func, arguments, constants = PROGRAMS[name]
    program = function(func)
    compiled = program.compile(**constants)
    expected = program.run(**arguments, **constants, temperature=0, backend=counting)
    num_calls = len(counting.calls)
    state = compiled.run(**arguments, temperature=0, backend=counting)
    assert state.text() == expected.text()
    assert state.messages() == expected.messages()
    assert state.ret_value == expected.ret_value
    assert variables_of(state) == variables_of(expected)
    assert len(counting.calls) - num_calls <= num_calls


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_compiled_program_streams_the_same_text(name, in_process):
    func, arguments, constants = PROGRAMS[name]
    expected = function(func).run(**arguments, **constants, temperature=0, backend=in_process)
    state = function(func).compile(**constants).run(**arguments, temperature=0, backend=in_process, stream=True)
    assert "".join(state.text_iter()) == expected.text()
    assert state.ret_value == expected.ret_value


def test_a_compiled_program_generates_the_same_text_through_a_server(endpoint):
    func, _, constants = PROGRAMS["branches"]
    expected = function(func).run(**constants, temperature=0, backend=endpoint)
    state = function(func).compile(**constants).run(temperature=0, backend=endpoint)
    assert state.text() == expected.text()


def test_a_compiled_batch_generates_the_same_text(in_process):
    words = ["day", "tea", "one"]
    expected = function(joined).run_batch(words, temperature=0, backend=in_process)
    states = function(joined).compile().run_batch(words, temperature=0, backend=in_process)
    assert [state.text() for state in states] == [state.text() for state in expected]
    assert [state["answer"] for state in states] == [state["answer"] for state in expected]


def test_variables_have_meta_info(in_process):
    state = function(joined).compile().run("What is 2 + 3?", temperature=0, backend=in_process)
    assert state.get_meta_info("end")["completion_tokens"] == 4


def test_arguments_may_be_positional_and_have_defaults(in_process):
    compiled = function(unfinished).compile()
    assert compiled.run("tea", backend=in_process).text() == "tea"
    assert compiled.run(backend=in_process).text() == "day"
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        compiled.run(other=1, backend=in_process)


def test_adjacent_constant_texts_are_joined():
    def program(s, name):
        s += "a" + f"b{1}"
        s += select("c", ["c"])
        s += "" if name is None else s["c"].upper()
        s += gen("x")

    lines = function(program).compile(name="x", outputs="x").graph.to_text().splitlines()
    assert lines[2:] == ["    0  text      'ab1cC'", "    3  gen       x()", "variable x = #3"]


def test_a_single_choice_keeps_its_scores(in_process):
    @function
    def program(s):
        s += "The capital is" + select("c", [" Paris"])

    one, other = (p.run(backend=in_process).get_meta_info("c") for p in (program, program.compile()))
    assert one["choices"] == other["choices"] == [" Paris"]
    assert one["normalized_prompt_logprobs"] == pytest.approx(other["normalized_prompt_logprobs"], abs=1e-4)


@pytest.mark.parametrize("make", [lambda p: p.bind(style="x"), lambda p: p.compile(style="x")])
@pytest.mark.parametrize("arguments", [{}, {"topic": "a", "style": "b"}])
def test_the_error_for_wrong_arguments_lists_the_bound_ones(in_process, make, arguments):
    def story(s, topic, style):
        s += topic + style

    says = r"story\(\): .*; its free arguments: topic; bound already: style"
    with pytest.raises(TypeError, match=says):
        make(function(story)).run(backend=in_process, **arguments)


@pytest.mark.parametrize("compiles", [False, True])
def test_a_join_has_one_value_per_fork(in_process, compiles):
    @function
    def program(s):
        s += "a"
        with s.fork(3) as forks:
            forks[1].set_var("v", "x")
        return s["v"]

    made = program.compile() if compiles else program
    assert made.run(backend=in_process).ret_value == [None, "x", None]


def test_a_select_is_kept_if_its_scores_are_read(counting):
    def program(s):
        s += "Tea or" + select("x", [" tea"])
        return s.get_meta_info("x")["normalized_prompt_logprobs"]

    compiled = function(program).compile()
    assert compiled.run(backend=counting).ret_value == function(program).run(backend=counting).ret_value


def test_branches_that_are_not_read_are_left_out(counting):
    function(unfinished).compile().run(temperature=0, backend=counting)
    assert counting.calls == []


def test_parts_that_no_output_depends_on_are_left_out(counting):
    def program(s):
        s += LONG
        forks = s.fork(3)
        forks += lambda i: f"{i}" + gen("x", max_tokens=2)
        s += (
            gen("early", max_tokens=2)
            + forks[1]["x"]
            + gen("middle", max_tokens=2)
            + forks[2]["x"]
            + gen("late", max_tokens=2)
        )

    whole = function(program).run(temperature=0, backend=counting)
    del counting.calls[:]
    state = function(program).compile(outputs=["middle"]).run(temperature=0, backend=counting)
    assert counting.calls == ["generate"] * 3
    assert state["middle"] == whole["middle"]
    assert whole.text().startswith(state.text())
    assert "late" not in state


def test_an_output_must_be_a_variable():
    with pytest.raises(RequestError, match="outputs names z; the program's variables are: a, b, note, number"):
        function(texts).compile(outputs=["a", "z"])


def test_the_common_start_of_branches_is_cached_with_the_prefix(engine):
    def program(s):
        s += "Here are some notes."
        forks = s.fork(4)
        forks += lambda i: LONG + f"The best of them is number {i}" + gen("x", max_tokens=2)
        return [fork.get_meta_info("x")["cached_tokens"] for fork in forks]

    engine.flush_cache()
    apart = function(program).run(backend=engine).ret_value
    engine.flush_cache()
    merged = function(program).compile().run(backend=engine).ret_value
    shared = len(engine.tokenizer.encode(LONG)) - 4
    assert min(merged) >= shared > min(apart)


def test_the_common_start_of_branches_is_moved_before_the_fork():
    def program(s, word):
        forks = s.fork(2)
        forks += lambda i: user(f"{word}: the thing numbered as {i}") + gen("x")
        return [fork["x"] for fork in forks]

    graph = function(program).compile().graph
    assert len({node.node_id for node in graph.nodes()}) == len(list(graph.nodes()))
    assert graph.to_text().splitlines()[1:] == [
        "state 0",
        "    0  fork      state 3",
        "state 1, from 12",
        "    3  text      ' 0'",
        "    4  end       user",
        "    5  gen       x()",
        "state 2, from 12",
        "    8  text      ' 1'",
        "    9  end       user",
        "   10  gen       x()",
        "state 3, from 0",
        "    1  begin     user",
        "    2  argument  word",
        "   11  text      ': the thing numbered as'",
        "   12  fork      state 1, state 2",
        "returns [#5, #10]",
    ]


def test_copies_of_one_text_become_one_fork(counting, engine):
    def program(s):
        s += LONG
        for i in range(3):
            with s.copy() as c:
                c += f" {i}" + gen(f"x{i}", max_tokens=2)

    engine.flush_cache()
    function(program).compile().run(temperature=0, backend=counting)
    assert counting.calls == ["cache_prefix"] + ["generate"] * 3


def test_equal_branches_share_a_request(counting):
    function(joined).compile().run("What is 2 + 3?", temperature=0, backend=counting)
    assert counting.calls == ["generate"] * (1 + 3 + 1)


@pytest.mark.parametrize(
    ("num_branches", "requests"),
    [(2, [2]), (4, [4]), (5, [2, 3]), (6, [3, 3]), (9, [3, 3, 3]), (300, [4] * 75)],
)
def test_a_shared_request_has_at_most_four_completions(num_branches, requests):
    def program(s):
        s += "Say:"
        with s.fork(num_branches) as forks:
            forks += gen("x", max_tokens=2)

    actions = [node.action for node in function(program).compile().graph.nodes()]
    assert [action.sampling.n for action in actions if isinstance(action, Gen)] == requests
    taken = [(action.node_id, action.index) for action in actions if isinstance(action, Adopt)]
    assert len(set(taken)) == num_branches


def ask_three_times(s):
    s += "Say:"
    with s.fork(3) as forks:
        forks += gen("x", max_tokens=2)


def test_completions_beyond_a_small_queue_are_requested_separately():
    with Engine(model="demo", memory={"kv_tokens": 512}, scheduling={"max_queued_requests": 2}) as engine:
        counting = CountingBackend(engine)
        expected = function(ask_three_times).run(temperature=0, backend=counting)
        del counting.calls[:]
        state = function(ask_three_times).compile().run(temperature=0, backend=counting)
    assert state["x"] == expected["x"]
    assert counting.calls == ["generate"] * (1 + 3)


@pytest.mark.parametrize(("limits", "num_calls"), [({}, 1), ({"refused": ["n"]}, 1 + 3), ({"ignored": ["n"]}, 1 + 3)])
@pytest.mark.parametrize("num_api_spec_tokens", [None, 16])
def test_an_endpoint_without_n_gets_a_request_for_each_branch(num_api_spec_tokens, limits, num_calls):
    program = function(ask_three_times, num_api_spec_tokens=num_api_spec_tokens).compile()
    with (
        ScriptedApi(ScriptedModel(lambda prompt: " yes"), **limits) as api,
        OpenAI("scripted", base_url=api.url, is_chat=False) as backend,
    ):
        assert program.run(temperature=0, backend=backend)["x"] == [" yes"] * 3
        assert len(api.bodies) == num_calls


def test_an_error_that_n_does_not_cause_is_reported_unchanged(in_process):
    def program(s):
        s += "Say:"
        with s.fork(2) as forks:
            forks += gen("x", temperature=-1.0)

    with pytest.raises(ProgramError, match="temperature"):
        function(program).compile().run(backend=in_process).text()


def test_branches_with_several_gens_share_no_request(counting):
    def program(s):
        s += "Say:"
        with s.fork(2) as forks:
            forks += gen("x", max_tokens=2)

    state = function(program).compile().run(n=2, backend=counting, temperature=0)
    assert [len(texts) for texts in state["x"]] == [2, 2]
    assert counting.calls == ["generate"] * 2


def test_completions_of_a_shared_request_are_sampled_independently(in_process):
    def program(s):
        s += "Once upon a time"
        with s.fork(8) as forks:
            forks += gen("x", max_tokens=12)

    assert len(set(function(program).compile().run(temperature=1.5, backend=in_process)["x"])) > 1


def test_a_batch_caches_the_common_prefix_of_its_runs(counting, engine):
    def program(s, notes, question, style="short"):
        s += system(notes) + user(f"Be {style}. {question}") + assistant_begin()
        forks = s.fork(2)
        forks += lambda i: f"{i}: " + gen("x", max_tokens=2)
        s += forks[0]["x"] + forks[1]["x"]
        return [fork.get_meta_info("x")["cached_tokens"] for fork in forks]

    compiled = function(program).compile()
    runs = [{"notes": LONG, "question": f"What is {i} + 1?"} for i in range(4)]
    engine.flush_cache()
    cached = [state.ret_value for state in compiled.run_batch(runs, temperature=0, backend=counting)]
    assert counting.calls.count("cache_prefix") == 1
    assert min(min(pair) for pair in cached) >= len(engine.tokenizer.encode(LONG)) - 4


def test_a_batch_without_forks_sends_no_request_in_advance(counting):
    def program(s, word):
        s += LONG + word + gen("x", max_tokens=2)

    function(program).compile().run_batch(["tea", "day"], temperature=0, backend=counting)
    assert counting.calls == ["generate"] * 2


class MeetingBackend(CountingBackend):
    """Starts no request before three have arrived."""

    def __init__(self, engine):
        super().__init__(engine)
        self.all_there = asyncio.Event()

    async def generate(self, request):
        self.calls.append("generate")
        if len(self.calls) == 3:
            self.all_there.set()
        await asyncio.wait_for(self.all_there.wait(), 20)
        return await super().generate(request)


def test_independent_parts_run_in_parallel(engine):
    def program(s, word):
        for i in range(3):
            with s.copy() as c:
                c += f"{word} {i}" + gen(f"word_{i}", max_tokens=3)
        s += f"{s['word_0'][0]} {s['word_1'][0]} {s['word_2'][0]}"

    state = function(program).compile().run("day", temperature=0, backend=MeetingBackend(engine))
    assert state.text() == function(program).run("day", temperature=0, backend=engine).text()


def test_nested_forks_may_exceed_pythons_recursion_limit(in_process):
    def program(s):
        s += "a"
        last = s
        for _ in range(sys.getrecursionlimit() + 100):
            (last,) = last.fork(1)
            last += "b"
        return last.text()

    compiled = function(program).compile()
    assert compiled.run(backend=in_process).ret_value == "a" + "b" * (sys.getrecursionlimit() + 100)
    assert compiled.graph.to_svg().endswith("</svg>\n")


# -- Errors -------------------------------------------------------------------------------------------------


def test_a_wrong_argument_fails_at_the_line_that_appends_it(in_process):
    compiled = function(joined).compile()
    with pytest.raises(ProgramError, match="got int 5") as caught:
        compiled.run(5, backend=in_process).text()
    assert isinstance(caught.value.__cause__, InvalidPromptError)
    assert caught.value.lineno == joined.__code__.co_firstlineno + 1


def test_an_error_in_a_branch_ends_the_run_with_its_line(backend, all_requests_end):
    def program(s):
        s += "x"
        bad, good = s.fork(2)
        bad += "y" + gen("y", temperature=-1.0)
        good += "z" + gen("z", max_tokens=2000, ignore_eos=True)
        s += f"{bad['y']}{good['z']}"

    with pytest.raises(ProgramError, match="temperature") as caught:
        function(program).compile().run(backend=backend).text()
    assert isinstance(caught.value.__cause__, RequestError)
    assert caught.value.lineno == program.__code__.co_firstlineno + 3
    all_requests_end()


def test_a_failing_run_does_not_affect_the_others(in_process):
    good, bad = function(joined).compile().run_batch(["day", 5], temperature=0, backend=in_process)
    assert good.text().startswith("day")
    with pytest.raises(ProgramError, match="got int"):
        bad.text()


def test_a_cancelled_run_leaves_no_request(backend, all_requests_end):
    def program(s):
        s += "x"
        with s.fork(3) as forks:
            forks += lambda i: f"{i}" + gen("y", max_tokens=2000, ignore_eos=True)

    state = function(program).compile().run(backend=backend, stream=True)
    state.cancel()
    with pytest.raises(ProgramCancelledError):
        _ = state["y"]
    all_requests_end()


def test_a_single_output_may_be_given_as_a_string():
    @function
    def program(s):
        s += "a" + gen("city") + gen("dead")

    assert set(program.compile(outputs="city").graph.variables) == {"city"}
