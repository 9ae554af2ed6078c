"""A trace is the graph of a program. Where the graph depends on generated text, the error has the line."""

import json
import random
import re
import textwrap
import xml.etree.ElementTree as ET
from itertools import combinations

import pytest

from graftlm import assistant, function, gen, select, separate_reasoning, user
from graftlm.errors import ProgramError, RequestError, TraceError
from graftlm.lang.tracer import trace


def judge(s, essay, dimensions):
    s += user(f"Judge: {essay}")
    forks = s.fork(len(dimensions))
    for fork, dimension in zip(forks, dimensions, strict=True):
        fork += assistant(dimension + ": " + gen("judgment", max_tokens=8))
    s += assistant("\n".join(f"{fork['judgment'].strip()}." for fork in forks) + select("grade", ["A", "B"]))
    return s["grade"]


def test_a_graph_has_a_text_form():
    graph = function(judge).trace(dimensions=["style", "sense"])
    assert str(graph) == graph.to_text()
    assert graph.to_text().splitlines() == [
        "judge(essay)",
        "state 0",
        "    0  begin     user",
        "    1  text      'Judge: '",
        "    2  argument  essay",
        "    3  end       user",
        "    4  fork      state 1, state 2",
        "   13  begin     assistant",
        "   14  read      #7.strip()",
        r"   15  text      '.\n'",
        "   16  read      #11.strip()",
        "   17  text      '.'",
        "   18  select    grade of 'A', 'B'",
        "   19  end       assistant",
        "state 1, from 4",
        "    5  begin     assistant",
        "    6  text      'style: '",
        "    7  gen       judgment(max_tokens=8)",
        "    8  end       assistant",
        "state 2, from 4",
        "    9  begin     assistant",
        "   10  text      'sense: '",
        "   11  gen       judgment(max_tokens=8)",
        "   12  end       assistant",
        "variable grade = #18",
        "returns #18",
    ]


def test_separate_reasoning_cannot_be_traced():
    program = function(lambda s: s.__iadd__(separate_reasoning(gen("a"), model_type="qwen3")))
    with pytest.raises(TraceError, match="separate_reasoning is not supported"):
        program.trace()


def test_a_node_has_the_line_of_the_program():
    nodes = {node.node_id: node for node in function(judge).trace(dimensions=["style"]).nodes()}
    assert nodes[1].site.lineno == judge.__code__.co_firstlineno + 1
    assert nodes[1].site.filename == __file__


#: operation that needs a value -> the error message
STOPS = {
    "bool()": lambda x: "a" if x else "b",
    "==": lambda x: str(x == "yes"),
    "!=": lambda x: str(x != "yes"),
    "len()": lambda x: str(len(x)),
    "int()": lambda x: str(int(x)),
    "float()": lambda x: str(float(x)),
    "a whole number": lambda x: str(list(range(x))),
    "iteration": lambda x: "".join(letter for letter in x),
    "in on": lambda x: str("yes" in x),
    "hash()": lambda x: {"yes": "no"}[x],
    "an ordering": lambda x: str(x < 3),
    "arithmetic": lambda x: str(x * 2),
    "+ int": lambda x: str(x + 1),
    ".split": lambda x: x.split()[0],
    "a call": lambda x: x(),
}


def one_argument(code):
    def program(s, topic):
        s += "About: "
        s += code(topic)

    return program


def one_variable(code):
    def program(s):
        s += "About: " + gen("topic", max_tokens=4)
        s += code(s["topic"])

    return program


@pytest.mark.parametrize("operation", STOPS)
def test_a_program_that_needs_an_arguments_value_is_refused_with_the_line(operation):
    program = one_argument(STOPS[operation])
    with pytest.raises(TraceError, match="'topic', which is free; topic=") as caught:
        function(program).trace()
    assert f"uses {operation}" in str(caught.value)
    assert caught.value.lineno == STOPS[operation].__code__.co_firstlineno
    assert caught.value.filename == __file__
    assert isinstance(caught.value, ProgramError)


@pytest.mark.parametrize("operation", STOPS)
def test_a_program_that_needs_generated_text_is_refused_with_the_line(operation):
    with pytest.raises(TraceError, match="text that is not generated yet") as caught:
        function(one_variable(STOPS[operation])).trace()
    assert caught.value.lineno == STOPS[operation].__code__.co_firstlineno


#: Python code that changes the text of an f-string, which is an ordinary string.
CHANGES = {
    "strip": lambda x: f" {x} ".strip() + f"{x}".strip(),
    "upper": lambda x: f"{x}!".upper(),
    "split": lambda x: f"{x} a".split()[0],
    "slice": lambda x: f"{x} a"[:3],
    "end": lambda x: f"a {x}"[-4:],
    "length": lambda x: str(len(f"{x}")),
    "json": lambda x: json.dumps({"text": f"{x}"}),
    "repr": lambda x: repr(f"{x}"),
    "replace": lambda x: f"a {x}".replace("\n", " ").replace("\t", " "),
    "replace a character": lambda x: f"{x}".replace("_", " "),
    "replace a word": lambda x: f"{x}".replace("word", "term"),
    "split at a character": lambda x: f"{x}".split(",")[0] + f"{x}".split(".")[0],
    "find a character": lambda x: "asks" if "?" in f"{x}" else "says",
    "find a word": lambda x: "agrees" if any(word in f"{x}".lower() for word in ("yes", "sure")) else "does not",
    "find numbers": lambda x: " ".join(re.findall(r"\d+", f"{x}")),
    "first number": lambda x: (re.findall(r"\d+", f"{x}") or ["none"])[0],
    "first word": lambda x: re.split(r"\W", f"{x} a")[0],
    "under a length": lambda x: "short" if len(f"{x}") < 100 else "long",
    "under a small length": lambda x: "short" if len(f"{x}") < 4 else "long",
    "pad": lambda x: f"{x}".ljust(8) + f"{x}".zfill(5),
    "number": lambda x: "number" if f"{x}".isdigit() else "none",
    "capitals": lambda x: "loud" if f"{x}".isupper() else "calm",
    "small letters": lambda x: "calm" if f"{x}".islower() else "loud",
    "blank": lambda x: "some" if f"{x}".strip() else "none",
    "lines": lambda x: "\n".join(f"> {line}" for line in f"{x}".split("\n")),
    "indent": lambda x: textwrap.dedent(f"""
        About {x}
        and more"""),
    "order": lambda x: "".join(sorted(f"{x}")),
    "to ASCII": lambda x: f"{x}".encode("ascii", "ignore").decode(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_text_with_an_argument_is_detected(change):
    with pytest.raises(TraceError, match=r"has changed a text that contains|characters of a text") as caught:
        function(one_argument(CHANGES[change])).trace()
    assert caught.value.lineno == one_argument(None).__code__.co_firstlineno + 2


def test_unchanged_texts_are_not_reported_as_changed():
    def program(s, topic):
        question = ", ".join([f"{topic}!", "9{}_%s" + f"{topic}{topic}"])
        s += user(question) + "word" + gen("a", max_tokens=2)
        s["note"] = f"1{s['a']}2{topic}"
        s += textwrap.indent("fixed", "  ") + "{x}".replace("{x}", f"{topic}")

    graph = function(program).trace()
    assert [graph.label(node) for node in graph.nodes() if graph.label(node)[0] in ("argument", "text")] == [
        ("argument", "topic"),
        ("text", repr("!, 9{}_%s")),
        ("argument", "topic"),
        ("argument", "topic"),
        ("text", repr("word")),
        ("text", repr("  fixed")),
        ("argument", "topic"),
    ]
    assert "variable note = '1' + #7 + '2' + topic" in graph.to_text()


def test_a_random_program_is_refused_with_the_line():
    def program(s):
        s += "Pick: "
        s += f"{random.random()}"

    with pytest.raises(TraceError, match="randomness") as caught:
        function(program).trace()
    assert caught.value.lineno == program.__code__.co_firstlineno + 2


def test_a_caught_trace_error_still_stops_the_trace():
    def program(s, topic):
        try:
            s += "long" if len(topic) > 3 else "short"
        except Exception:
            s += "unknown"

    with pytest.raises(TraceError, match=r"len\(\)"):
        function(program).trace()


def test_code_that_fails_with_placeholders_is_refused_with_the_line():
    def program(s):
        s += "{" + gen("json", max_tokens=4)
        return json.loads(s["json"])

    with pytest.raises(TraceError, match="it raised TypeError: the JSON object") as caught:
        function(program).trace()
    assert caught.value.lineno == program.__code__.co_firstlineno + 2
    assert isinstance(caught.value.__cause__, TypeError)


def test_an_endless_loop_over_an_answer_ends_with_an_error():
    def program(s):
        s += "Count:"
        s["word"] = ""
        while "done" not in f"{s['word']}":
            s += gen("word", max_tokens=1)

    with pytest.raises(TraceError, match="more than 99 expressions; does a loop wait") as caught:
        trace(program, {}, max_nodes=99)
    assert caught.value.lineno == program.__code__.co_firstlineno + 4


#: Features that a program has only at run time.
def asks_for_messages(s):
    s += user("Hi")
    return s.messages()


def follows_the_text(s):
    s += "a" + gen("x", max_tokens=2)
    return list(s.text_iter())


def follows_a_variable(s):
    s += "a" + gen("x", max_tokens=2)
    return list(s.text_iter("x"))


def returns_an_object(s):
    s += "a"
    return {1, 2}


def samples_by_an_argument(s, number):
    s += "a" + gen("x", max_tokens=number)


def samples_by_an_answer(s):
    s += "a" + gen("x", max_tokens=2)
    s += gen("y", json_schema=f"{s['x']}")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (asks_for_messages, r"messages\(\)"),
        (follows_the_text, "text_iter"),
        (follows_a_variable, "text_iter"),
        (returns_an_object, "stores or returns set"),
        (samples_by_an_argument, r"gen\(max_tokens=...\) is not constant; pass number as constants"),
        (samples_by_an_answer, r"gen\(json_schema=...\) is not constant; it cannot depend on generated"),
    ],
)
def test_features_that_a_trace_does_not_support_are_refused(program, message):
    with pytest.raises(TraceError, match=message):
        function(program).trace()


def test_a_constant_must_be_an_argument():
    with pytest.raises(RequestError, match=r"judge\(\) has no argument topic; it has: essay, dimensions"):
        function(judge).trace(topic="x")


def test_constants_allow_operations_that_need_a_value():
    program = function(one_argument(STOPS["len()"]))
    assert "'4'" in program.trace(topic="cats").to_text()


def test_a_drawing_shows_every_node_once_without_overlap():
    graph = function(judge).trace(dimensions=["style", "sense"])
    svg = ET.fromstring(graph.to_svg())
    space = "{http://www.w3.org/2000/svg}"
    titles = [title.text for title in svg.findall(f"{space}g/{space}title")]
    assert [title.split()[0] for title in titles] == [*(str(node.node_id) for node in graph.nodes()), "variable"]
    corners = [(int(rect.get("x")), int(rect.get("y"))) for rect in svg.findall(f"{space}g/{space}rect")]
    assert len(corners) == len(titles)
    assert all(abs(a[0] - b[0]) >= 200 or abs(a[1] - b[1]) >= 24 for a, b in combinations(corners, 2))
    assert all(0 <= x <= int(svg.get("width")) - 200 for x, _ in corners)


def test_a_drawing_shows_a_node_below_the_nodes_it_depends_on():
    graph = function(judge).trace(dimensions=["style", "sense"])
    svg = ET.fromstring(graph.to_svg())
    space = "{http://www.w3.org/2000/svg}"
    tops = {
        g.find(f"{space}title").text.split()[0]: int(g.find(f"{space}rect").get("y")) for g in svg.findall(f"{space}g")
    }
    assert tops["7"] < tops["14"] < tops["16"]
    assert tops["11"] < tops["16"] < tops["variable"]
    assert tops["7"] == tops["11"]  # at the same height


def test_a_drawing_escapes_text():
    def program(s):
        s += '<b> & "c"'

    assert "&lt;b&gt; &amp;" in function(program).trace().to_svg()


@pytest.mark.parametrize("name", ["a\nb", "a\x00b", "a\x1bb", "a\ud800b", "a\ufffeb", "a\u2028b"])
def test_a_drawing_is_well_formed_and_a_node_is_one_line_for_any_name(name):
    def program(s):
        with s.var_scope(name), s.user():
            s += name + gen(name, max_tokens=2) + select(name + "c", [name, "d"])
        s[name + "e"] = name

    program.__name__ = name
    graph = function(program).trace()
    shown = repr(name)[1:-1]
    titles = [title.text for title in ET.fromstring(graph.to_svg().encode()).iter("{http://www.w3.org/2000/svg}title")]
    assert titles[0] == f"{shown}()"
    assert sum(shown in title for title in titles[1:]) == 8  # two for the scope, text, gen, select and three variables
    assert sum(shown in line for line in graph.to_text().splitlines()[1:]) == 8
