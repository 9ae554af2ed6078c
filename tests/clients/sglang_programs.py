"""Programs in SGLang's language. This file runs with SGLang's frontend or with graftlm's; see `sglang_frontend.py`.

Usage: python sglang_programs.py sglang|graftlm URL|process [--wheel]
"""

import asyncio
import importlib
import inspect
import json
import sys
import traceback
import warnings

sgl = importlib.import_module(sys.argv[1])
choices_methods = importlib.import_module(f"{sys.argv[1]}.lang{'.choices' if sys.argv[1] == 'sglang' else ''}")

CAPITAL = "The capital of France is"
GREEDY = {"temperature": 0, "max_new_tokens": 8}


@sgl.function
def qa(s, question):
    s += question + sgl.gen("answer")


@sgl.function
def chat(s, question):
    s += sgl.system("You are helpful.")
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer"))
    with s.user():
        s += "Why?"
    with s.assistant():
        s += sgl.gen("reason")


def few_shot():
    """A program is called and run; equal arguments give equal greedy texts."""
    states = [qa(CAPITAL, **GREEDY), qa.run(question=CAPITAL, **GREEDY), qa(CAPITAL, use_thread=False, **GREEDY)]
    assert len({state.text() for state in states}) == 1
    assert states[0].text() == CAPITAL + states[0]["answer"]
    assert qa.arg_names == ["question"]
    assert "answer" in states[0]


def batches():
    """A batch takes mappings, lists and tuples."""
    entries = [{"question": CAPITAL}, {"question": "Berlin is"}]
    whole = qa.run_batch(entries, progress_bar=False, num_threads=2, **GREEDY)
    by_position = qa.run_batch([[CAPITAL], ("Berlin is",)], **GREEDY)
    assert [state.text() for state in whole] == [state.text() for state in by_position]
    assert len(list(qa.run_batch(entries, generator_style=True, **GREEDY))) == 2


def messages():
    """Roles are functions, methods and blocks."""
    state = chat("What is 2 + 3?", **GREEDY)
    said = state.messages()
    assert [message["role"] for message in said][-4:] == ["user", "assistant", "user", "assistant"]
    assert said[-1]["content"] == state["reason"].lstrip()


def choices():
    """A choice is one of the given texts, by the methods of the language and by a program's own."""

    def first(*, choices, **given):
        assert len(given["normalized_prompt_logprobs"]) == len(given["input_token_logprobs"]) == len(choices)
        return choices_methods.ChoicesDecision(choices[0], {"mine": True})

    first.requires_unconditional_logprobs = False
    methods = [sgl.token_length_normalized]
    if sys.argv[1] == "graftlm":
        # SGLang's own versions of these fail with a TypeError if the first log-probability is None, which it is on
        # SGLang's servers too.
        methods += [sgl.greedy_token_selection, sgl.unconditional_likelihood_normalized]
    for method in methods:
        state = pick(method)
        assert state["c"] in (" Paris", " Rome")
        assert len(state.get_meta_info("c")["normalized_prompt_logprobs"]) == 2
    state = pick(first)
    assert state["c"] == " Paris"
    assert state.get_meta_info("c")["mine"]


@sgl.function
def picks(s, method):
    s += CAPITAL
    s += sgl.select("c", [" Paris", " Rome"], choices_method=method)


def pick(method):
    """Return the state of a choice by a method."""
    return picks.run(method=method)


@sgl.function
def constrained(s):
    s += "A number: " + sgl.gen_int("i", 4) + " and " + sgl.gen("f", 6, dtype=float) + "\n"
    s += "A string: " + sgl.gen_string("s", 16, stop="\n") + sgl.gen("b", dtype=bool) + "\n"
    with s.var_scope("json"):
        s += '{"age": ' + sgl.gen("age", regex="[0-9]{2}") + "}"
    s += sgl.gen("schema", 32, json_schema='{"type": "object", "properties": {}, "additionalProperties": false}')


def structures():
    """Texts match their constraints."""
    state = constrained(temperature=0)
    assert int(state["i"]) >= 0
    assert state["b"] in ("True", "False")
    assert 10 <= json.loads(state["json"])["age"] <= 99
    assert json.loads(state["schema"]) == {}


@sgl.function
def branches(s):
    s += "Some facts about towns. " * 12
    forks = s.fork(3, position_ids_offset=None)
    forks += lambda i: f"Town {i}: "
    for fork in forks:
        fork += sgl.gen("tip", max_tokens=6)
    forks.join()
    s += "".join(forks[i]["tip"] for i in range(3)) + sgl.gen("end", max_tokens=4)
    with s.copy() as c:
        c += sgl.gen("more", max_tokens=2)


def forks():
    """Forks are joined; the parent has their variables as lists."""
    state = branches(temperature=0)
    assert len(state["tip"]) == 3
    assert len(state["more"]) == 1
    assert state["end"] in state.text()


def concatenation():
    """The texts of forks are appended to their parent."""

    @sgl.function
    def program(s):
        s += "Remember: "
        parts = s.fork(2)
        parts += lambda i: f"statement {i}. "
        parts.join(mode="concate_and_append")
        s += sgl.gen("answer", max_tokens=2)

    state = program(temperature=0)
    assert state.text().startswith("Remember: statement 0. statement 1. ")
    assert state["answer"] in state.text()


def streams():
    """A streamed text is the whole text in pieces."""
    state = qa(CAPITAL, stream=True, **GREEDY)
    assert "".join(state.text_iter()) == state.text()
    state = qa(CAPITAL, stream=True, **GREEDY)
    assert "".join(state.text_iter("answer")) == state["answer"]

    async def follow():
        state = qa(CAPITAL, stream=True, return_logprob=True, **GREEDY)
        pairs = [pair async for pair in state.text_async_iter("answer", return_meta_data=True)]
        assert all(piece for piece, _ in pairs)
        assert "".join(piece for piece, _ in pairs) == state["answer"]
        for _, meta in pairs:
            assert meta["output_token_logprobs_length"] == meta["completion_tokens"]

    asyncio.run(follow())


def parameters():
    """Sampling parameters reach the engine."""
    program = sgl.function(sampled)
    state = program(CAPITAL, min_p=0.1, top_k=5, frequency_penalty=0.1, presence_penalty=0.1, top_p=0.9)
    if sys.argv[1] == "graftlm":  # SGLang's RuntimeEndpoint cannot read the list that a server answers for n
        several = sgl.function(lambda s: s.__iadd__(CAPITAL + sgl.gen("n", n=2, max_tokens=4, temperature=1.0)))()
        assert len(several["n"]) == 2
        assert several.get_meta_info("n")[0]["completion_tokens"] <= 4
    assert state.get_meta_info("long")["completion_tokens"] >= 12
    assert state.get_meta_info("p")["output_token_logprobs"]
    assert len(state.get_meta_info("p")["output_top_logprobs"][0]) == 2
    assert state["zero"] == ""
    assert state.get_meta_info("zero")["output_top_logprobs"]


def sampled(s, question):
    s += question
    s += sgl.gen("long", min_tokens=12, max_tokens=16, ignore_eos=True, stop_token_ids=[5])
    s += sgl.gen("p", 3, return_logprob=True, top_logprobs_num=2, return_text_in_logprobs=True, logprob_start_len=0)
    s += sgl.gen("zero", max_tokens=0, return_logprob=True, top_logprobs_num=2)


def failures():
    """A wrong parameter leaves its error in the state; the program ends."""
    state = qa(CAPITAL, top_p=3.0)
    assert "top_p" in str(state.error())
    try:
        value = state["answer"]
    except Exception:
        return
    raise AssertionError(f"reading the failed value returned {value!r}")


def backends():
    """The backend answers the calls of SGLang's programs."""
    if sys.argv[2] == "process":
        assert sgl.get_server_info()
    else:
        endpoint = sgl.RuntimeEndpoint(sys.argv[2], None, None, "chatml")
        assert endpoint.get_model_name() == "demo"
        assert sgl.get_server_info(endpoint)["model_path"] == "demo"
        endpoint.cache_prefix("A text that is cached by a call.")
        assert chat("Hi", backend=endpoint, **GREEDY).text().startswith("<|im_start|>system\nYou are helpful.")
    qa.cache()
    sgl.flush_cache()


PROGRAMS = [
    few_shot,
    batches,
    messages,
    choices,
    structures,
    forks,
    concatenation,
    streams,
    parameters,
    failures,
    backends,
]


def result_of(program, *arguments):
    """Run a program; returns "ok", "content: ..." for a wrong text in SGLang's own programs, or the error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            program(*arguments)
            result = "ok"
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            result = f"{type(error).__name__} at {place.filename.rsplit('/', 1)[-1]}:{place.lineno}: {str(error)[:300]}"
            is_content = (
                isinstance(error, (AssertionError, SyntaxError, ValueError)) and "stream" not in program.__name__
            )
            if program.__module__ == "sglang.test.test_programs" and is_content:
                result = f"content: {result}"
    errors = [str(w.message) for w in caught if "Error in stream_executor" in str(w.message)]
    if errors and program is not failures:
        return f"the frontend reported an error: {errors[0].strip().splitlines()[-1]}"
    return result


def wheel_programs():
    """Return the test programs in SGLang's wheel that run on a server with a text model."""
    module = importlib.import_module("sglang.test.test_programs")
    left_out = {
        "test_image_qa": "graftlm has no images",
        "test_completion_speculative": "for OpenAI's service",
        "test_chat_completion_speculative": "for OpenAI's service",
        "test_gen_min_new_tokens": "loads the tokenizer with SGLang's runtime; `parameters` checks min_tokens",
        "test_stream_logprobs": "for a server with --incremental-streaming-output; `streams` checks the lengths",
    }
    found = [value for name, value in vars(module).items() if name.startswith("test_") and name not in left_out]
    return [(f, [False] if "check_answer" in inspect.signature(f).parameters else []) for f in found]


def main():
    """Run all programs; prints one JSON list of name and result per line."""
    if sys.argv[2] == "process":
        sgl.set_default_backend(sgl.Engine(model="demo"))
    else:
        sgl.set_default_backend(sgl.RuntimeEndpoint(sys.argv[2]))
    programs = wheel_programs() if "--wheel" in sys.argv else [(program, []) for program in PROGRAMS]
    for program, arguments in programs:
        print(json.dumps([program.__name__, result_of(program, *arguments)]), flush=True)
    print(json.dumps(["end", "ok"]), flush=True)


if __name__ == "__main__":
    main()
