"""Pictures in programs on an engine in this process."""

import io

import pytest
from PIL import Image

from graftlm import Engine, EngineBackend, SamplingParams, assistant, function, gen, image, select, user
from graftlm.errors import ProgramError
from graftlm.testing.tiny_media import random_picture, write_media_checkpoint

PICTURES = [random_picture(40, 30, 1), random_picture(20, 50, 2)]
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def png(picture):
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = write_media_checkpoint(tmp_path_factory.mktemp("llava"), "llava")
    with Engine(model={"path": str(path), "dtype": "float32"}, memory={"kv_tokens": 2048}) as it:
        yield it


def answer(name="answer"):
    return gen(name, max_tokens=5, ignore_eos=True)


def text_of(engine, text, pictures):
    return engine.generate(text, GREEDY, image_data=pictures)[0].text


def test_a_program_has_pictures_in_several_turns(engine, tmp_path):
    file = tmp_path / "second.png"
    file.write_bytes(png(PICTURES[1]))

    @function
    def compare(s):
        s += user("See " + image(png(PICTURES[0])) + "this.")
        s += assistant(answer("first"))
        s += user(image(str(file)) + "And this?")
        s += assistant(answer("second"))

    state = compare.run(backend=EngineBackend(engine), temperature=0)
    prompt = "<|user|>See <image>this.<|end|><|assistant|>"
    assert state["first"] == text_of(engine, prompt, PICTURES[:1])
    prompt += f"{state['first']}<|end|><|user|><image>And this?<|end|><|assistant|>"
    assert state["second"] == text_of(engine, prompt, PICTURES)
    assert state.text().count("<image>") == 2


def test_forks_share_pictures_and_pass_them_to_their_parent(engine):
    @function
    def branch(s):
        s += "Look: " + image(png(PICTURES[0]))
        forks = s.fork(2)
        for i, fork in enumerate(forks):
            fork += image(png(PICTURES[i])) + f" {i}:" + answer()
        s += forks[1].written()
        s += answer("last")
        s.set_var("answers", [fork["answer"] for fork in forks])

    state = branch.run(backend=EngineBackend(engine), temperature=0)
    for i, found in enumerate(state["answers"]):
        assert found == text_of(engine, f"Look: <image><image> {i}:", [PICTURES[0], PICTURES[i]])
    whole = f"Look: <image><image> 1:{state['answers'][1]}"
    assert state["last"] == text_of(engine, whole, PICTURES)


def test_streams_and_batches(engine):
    @function
    def ask(s, picture):
        s += image(picture) + "What?" + answer()

    backend, wanted = EngineBackend(engine), [text_of(engine, "<image>What?", [one]) for one in PICTURES]
    streamed = ask.run(png(PICTURES[0]), backend=backend, temperature=0, stream=True)
    assert "".join(streamed.text_iter("answer")) == wanted[0]
    states = ask.run_batch([{"picture": png(one)} for one in PICTURES], backend=backend, temperature=0)
    assert [state["answer"] for state in states] == wanted


@pytest.mark.parametrize(
    ("expr", "message"),
    [
        (lambda: image("missing.png") + answer(), "cannot read 'missing.png'"),
        (lambda: image(b"text") + answer(), "supported format"),
        (lambda: image(png(PICTURES[0])) + select("answer", choices=["a", "b"]), "select is not supported after"),
    ],
)
def test_what_cannot_be_done_is_an_error_of_the_program(engine, expr, message):
    @function
    def ask(s):
        s += expr()

    with pytest.raises(ProgramError, match=message):
        ask.run(backend=EngineBackend(engine), temperature=0)["answer"]


def test_a_model_without_a_tower_refuses_pictures():
    @function
    def ask(s):
        s += image(b"") + answer()

    with (
        Engine(model="demo", memory={"kv_tokens": 256}) as engine,
        pytest.raises(ProgramError, match="cannot use pict"),
    ):
        ask.run(backend=EngineBackend(engine), temperature=0)["answer"]
