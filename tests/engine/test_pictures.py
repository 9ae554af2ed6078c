"""Pictures in an engine: their forms, what they share in the prefix cache, and their failures."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from graftlm import Engine, Provider, SamplingParams, hookimpl
from graftlm.contracts import MediaCapabilities
from graftlm.errors import InvalidPromptError, MediaError, PromptTooLongError, UnsupportedFeatureError
from graftlm.testing.tiny_media import random_picture, write_media_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
FIRST, SECOND = random_picture(40, 30, 1), random_picture(40, 30, 2)
NUM_FEATURES = 16


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_media_checkpoint(tmp_path_factory.mktemp("llava"), "llava")


def make_engine(path, plugins=(), **sections):
    defaults = {"memory": {"kv_tokens": 2048}, "debug": True}
    return Engine(model={"path": str(path), "dtype": "float32"}, plugins=plugins, **defaults | sections)


@pytest.fixture(scope="module")
def engine(path):
    with make_engine(path, media={"max_pixels": 10_000}) as it:
        yield it


def towers(engine):
    """Return the number of pictures that the tower has computed."""
    return engine._parts.media.feeding.pool.num_computed


def ask(engine, text, pictures, **options):
    return engine.generate(text, GREEDY, image_data=pictures, **options)[0]


def png(picture):
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return buffer.getvalue()


def test_the_second_question_about_a_picture_runs_no_tower(engine):
    engine.flush_cache()
    first = ask(engine, "See <image> here. What is it?", FIRST)
    before = towers(engine)
    second = ask(engine, "See <image> here. How large is it?", FIRST)
    shared = len(engine.tokenizer.encode("See ")) + NUM_FEATURES + len(engine.tokenizer.encode(" here. "))
    assert second.usage.cached_tokens >= shared - 1
    assert towers(engine) == before
    assert ask(engine, "See <image> here. What is it?", FIRST).token_ids == first.token_ids


def test_another_picture_shares_only_the_text_before_it(engine):
    engine.flush_cache()
    ask(engine, "See <image> here", FIRST)
    before = len(engine.tokenizer.encode("See "))
    changed = FIRST.copy()
    changed[29, 39, 2] ^= 255
    for picture in (SECOND, changed):
        assert ask(engine, "See <image> here", picture).usage.cached_tokens == before
    assert ask(engine, "See <image> here", FIRST, cache_salt="another").usage.cached_tokens == 0
    assert ask(engine, "See <image> here", FIRST).usage.cached_tokens > before


def test_every_form_of_a_picture_is_the_same_picture(engine, tmp_path):
    file = tmp_path / "picture.png"
    file.write_bytes(png(FIRST))
    url = "data:image/png;base64," + base64.b64encode(png(FIRST)).decode()
    forms = [FIRST, png(FIRST), file, str(file), url, url.partition(",")[2], Image.fromarray(FIRST)]
    answers = [ask(engine, "See <image>", form) for form in forms]
    assert len({answer.token_ids for answer in answers}) == 1
    assert all(answer.usage.cached_tokens == answer.usage.prompt_tokens - 1 for answer in answers[1:])


def test_chats_have_pictures_in_every_turn(engine):
    def turn(role, *content):
        parts = [{"type": "text", "text": x} if isinstance(x, str) else {"type": "image", "image": x} for x in content]
        return {"role": role, "content": parts}

    chat = [turn("user", "One", FIRST, SECOND), turn("assistant", "Two."), turn("user", SECOND, "and?")]
    text = "<|user|>One<image><image><|end|><|assistant|>Two.<|end|><|user|><image>and?<|end|><|assistant|>"
    found = engine.generate(chat, GREEDY)[0]
    assert found.token_ids == ask(engine, text, [FIRST, SECOND, SECOND]).token_ids
    plain = engine.generate([{"role": "user", "content": "Hello"}], GREEDY)[0]
    assert plain.token_ids == engine.generate("<|user|>Hello<|end|><|assistant|>", GREEDY)[0].token_ids


def test_token_ids_with_markers_equal_text(engine):
    text = "See <image> and <image>!"
    ids = engine.tokenizer.encode(text)
    expected = ask(engine, text, [FIRST, SECOND])
    assert ask(engine, ids, [FIRST, SECOND]).prompt_token_ids == expected.prompt_token_ids
    assert ask(engine, ids.tolist(), [FIRST, SECOND]).token_ids == expected.token_ids


def test_outputs_show_the_image_token(engine):
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, repetition_penalty=1.3, n=2)
    (output,) = engine.generate("See <image>!", params, image_data=FIRST)
    ids = [entry.token_id for entry in output.prompt_logprobs[1:]]
    assert ids == list(output.prompt_token_ids[1:])
    assert min(output.prompt_token_ids) >= 0
    assert all(np.isfinite(entry.logprob) for entry in output.prompt_logprobs[1:])
    assert len(output.completions) == 2


def test_a_batch_has_pictures_for_some_prompts(engine):
    outputs = engine.generate(
        ["See <image>", "Nothing", "<image>, <image>"], GREEDY, image_data=[FIRST, None, [FIRST, SECOND]]
    )
    alone = [
        ask(engine, "See <image>", FIRST),
        engine.generate("Nothing", GREEDY)[0],
        ask(engine, "<image>, <image>", [FIRST, SECOND]),
    ]
    assert [output.token_ids for output in outputs] == [output.token_ids for output in alone]
    assert ask(engine, "without a marker", FIRST).token_ids == ask(engine, "<image>without a marker", FIRST).token_ids


def test_pins_cover_pictures(engine):
    engine.flush_cache()
    chat = [{"role": "user", "content": [{"type": "image", "image": FIRST}, {"type": "text", "text": "Long question"}]}]
    engine.generate(chat, GREEDY)
    assert engine.pin_prefix(chat, 60.0) > NUM_FEATURES
    assert engine.unpin_prefix(chat)


@pytest.mark.parametrize(
    ("text", "pictures", "error", "message"),
    [
        ("<image>", [FIRST, SECOND], InvalidPromptError, "1 places for pictures .* 2 pictures"),
        ("<image>", [FIRST] * 17, MediaError, "max_items"),
        ("<image>", np.zeros((200, 200, 3), np.uint8), MediaError, "max_pixels"),
        ("<image>", b"text", MediaError, "supported format"),
        ("<image>", 5, MediaError, "got int"),
        ("<image>", "missing.png", MediaError, "base64"),
        ("x" * 3000 + "<image>", FIRST, PromptTooLongError, "context"),
        ([{"role": "user", "content": "a"}], FIRST, InvalidPromptError, "content parts"),
    ],
)
def test_wrong_prompts_are_refused(engine, text, pictures, error, message):
    with pytest.raises((error, InvalidPromptError), match=message):
        ask(engine, text, pictures)


def test_a_model_without_a_tower_refuses_pictures():
    with Engine(model="demo", memory={"kv_tokens": 256}) as engine:
        with pytest.raises(UnsupportedFeatureError, match="cannot use pictures"):
            engine.generate("<image>", GREEDY, image_data=FIRST)
        part = {"type": "image_url", "image_url": {"url": "data:,"}}
        with pytest.raises(UnsupportedFeatureError, match="cannot use pictures"):
            engine.generate([{"role": "user", "content": [part]}], GREEDY)


def test_a_picture_larger_than_the_memory_for_features_is_refused(path):
    with (
        make_engine(path, media={"feature_bytes": (NUM_FEATURES - 1) * 64 * 4}) as engine,
        pytest.raises(MediaError, match="feature_bytes"),
    ):
        ask(engine, "<image>", FIRST)


@pytest.mark.parametrize("drafter", ["radix", "suffix"])
def test_drafts_end_before_pictures(path, drafter):
    texts, pictures = ["say say <image> say say", "say say"], [FIRST, None]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with make_engine(path) as engine:
        expected = [output.token_ids for output in engine.generate(texts, params, image_data=pictures)]
    with make_engine(path, speculation=drafter) as engine:
        for _ in range(3):
            outputs = engine.generate(texts, params, image_data=pictures)
            assert [output.token_ids for output in outputs] == expected


class Fragile:
    """A plugin whose tower raises for black pictures."""

    @hookimpl
    def provide_media(self):
        from graftlm_media.processor import TransformersMedia
        from graftlm_media.tower import TransformersTower

        class Tower(TransformersTower):
            def features(self, inputs):
                if inputs["pixel_values"].max() < -1:
                    raise RuntimeError("a black picture")
                return super().features(inputs)

        class Processor(TransformersMedia):
            def load_tower(self, weights, device, dtype):
                return Tower(self._config, weights, device, dtype)

        capabilities = MediaCapabilities(("LlavaForConditionalGeneration",))
        create = lambda options, context: Processor(context)  # noqa: E731
        return [
            Provider(
                name="fragile",
                summary="Fails for black pictures",
                api_version=1,
                create=create,
                capabilities=capabilities,
            )
        ]


def test_a_failure_of_the_tower_fails_one_request(path):
    black = np.zeros_like(FIRST)
    with make_engine(path, [Fragile()], media="fragile") as engine:
        expected = ask(engine, "See <image>", FIRST).token_ids
        engine.flush_cache()
        outputs = engine.generate(["A <image>", "See <image>", "none"], GREEDY, image_data=[black, FIRST, None])
        assert "a black picture" in outputs[0].completions[0].error
        assert [output.finish_reason.value for output in outputs[1:]] == ["length", "length"]
        assert outputs[1].token_ids == expected
        assert "a black picture" in ask(engine, "A <image>", black).completions[0].error
