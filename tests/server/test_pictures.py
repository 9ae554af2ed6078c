"""Pictures in requests to a real server, in each of its APIs; hostile ones are refused while others continue."""

import base64
import contextlib
import io
import os
import shutil
import time

import anthropic
import httpx2
import openai
import psutil
import pytest
from PIL import Image
from playwright.sync_api import expect, sync_playwright

import graftlm
from graftlm.testing.server_process import ServerProcess
from graftlm.testing.tiny_media import MediaOracle, random_picture, write_media_checkpoint

pytestmark = pytest.mark.full

PICTURES = [random_picture(40, 30, 1), random_picture(64, 100, 2)]
NUM_TOKENS = 6


def data_url(picture):
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


URLS = [data_url(picture) for picture in PICTURES]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_media_checkpoint(tmp_path_factory.mktemp("llava"), "llava")


@pytest.fixture(scope="module")
def server(path):
    config = {
        "model": {"path": str(path), "dtype": "float32"},
        "memory": {"kv_tokens": 4096},
        "server": {"served_model_name": "tiny"},
        "media": {"max_pixels": 10_000, "max_bytes": 100_000},
    }
    with ServerProcess(config, environment={"OMP_NUM_THREADS": "1"}) as it:
        yield it


@pytest.fixture(scope="module")
def oracle(path):
    return MediaOracle(path)


def expected(oracle, text, pictures):
    ids = oracle.generate(text, pictures, NUM_TOKENS)
    return oracle.processor.tokenizer.decode(ids, skip_special_tokens=True)


def generate(server, **body):
    parameters = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    return httpx2.post(server.url + "/generate", json=body | {"sampling_params": parameters}, timeout=30)


def parts(*urls):
    pieces = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"type": "text", "text": "Compare"}, *pieces, {"type": "text", "text": " please"}]


def test_native_prompts(server, oracle):
    text = "First <image> then <image>."
    answer = generate(server, text=text, image_data=URLS).json()
    assert answer["text"] == expected(oracle, text, PICTURES)
    num_tokens = len(oracle.processor.tokenizer(text)["input_ids"]) - 2 + 2 * 16
    assert answer["meta_info"]["prompt_tokens"] == num_tokens
    again = generate(server, text=text, image_data=URLS).json()
    assert (again["text"], again["meta_info"]["cached_tokens"]) == (answer["text"], num_tokens - 1)
    many = generate(server, text=[text, "A <image>", "none"], image_data=[URLS, URLS[0], None]).json()
    wanted = [expected(oracle, "A <image>", PICTURES[:1]), expected(oracle, "none", [])]
    assert [one["text"] for one in many] == [answer["text"], *wanted]


def test_token_ids_and_log_probabilities_show_no_placeholders(server, oracle):
    ids = oracle.processor.tokenizer("A <image>")["input_ids"]
    body = {"input_ids": ids, "image_data": URLS[0], "return_logprob": True, "logprob_start_len": 0}
    answer = generate(server, **body, return_text_in_logprobs=True).json()
    assert answer["text"] == expected(oracle, "A <image>", PICTURES[:1])
    shown = [entry[1] for entry in answer["meta_info"]["input_token_logprobs"]]
    assert shown[: len(ids)] == ids
    assert min(shown) >= 0


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as it:
        yield it


def test_chats_of_openai(client, oracle):
    chat = [
        {"role": "user", "content": parts(*URLS)},
        {"role": "assistant", "content": "Equal."},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": URLS[0]}}]},
    ]
    prompt = "<|user|>Compare<image><image> please<|end|><|assistant|>Equal.<|end|><|user|><image><|end|><|assistant|>"
    wanted = expected(oracle, prompt, [*PICTURES, PICTURES[0]])
    options = {"temperature": 0, "max_tokens": NUM_TOKENS, "extra_body": {"ignore_eos": True}}
    answer = client.chat.completions.create(model="tiny", messages=chat, **options)
    assert answer.choices[0].message.content == wanted
    stream = client.chat.completions.create(model="tiny", messages=chat, stream=True, **options)
    assert "".join(event.choices[0].delta.content or "" for event in stream) == wanted
    item = [{"type": "input_text", "text": "Look"}, {"type": "input_image", "image_url": URLS[1]}]
    found = client.responses.create(
        model="tiny",
        input=[{"role": "user", "content": item}],
        temperature=0,
        max_output_tokens=NUM_TOKENS,
        extra_body={"ignore_eos": True},
    )
    assert found.output_text == expected(oracle, "<|user|>Look<image><|end|><|assistant|>", PICTURES[1:])


def test_messages_of_anthropic(server, oracle):
    source = {"type": "base64", "media_type": "image/png", "data": URLS[0].partition(",")[2]}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
    messages = [{"role": "user", "content": content}]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        answer = client.messages.create(
            model="tiny", messages=messages, max_tokens=NUM_TOKENS, extra_body={"temperature": 0}
        )
        counted = client.messages.count_tokens(model="tiny", messages=messages)
    assert answer.content[0].text == expected(oracle, "<|user|><image>What?<|end|><|assistant|>", PICTURES[:1])
    assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


def test_programs_of_the_language(server, oracle, tmp_path):
    file = tmp_path / "picture.png"
    file.write_bytes(base64.b64decode(URLS[0].partition(",")[2]))

    @graftlm.function
    def ask(s):
        s += graftlm.user("See " + graftlm.image(file) + "what?")
        s += graftlm.assistant(graftlm.gen("answer", max_tokens=NUM_TOKENS, ignore_eos=True))

    wanted = expected(oracle, "<|user|>See <image>what?<|end|><|assistant|>", PICTURES[:1])
    with contextlib.closing(graftlm.RuntimeEndpoint(server.url)) as backend:
        assert ask.run(backend=backend, temperature=0)["answer"] == wanted


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("data:image/png;base64," + "A" * 4_000_000, "max_bytes"),
        ("data:image/png;base64,!!!", "base64"),
        ("data:text/plain;base64,aGVsbG8=", "text/plain"),
        ("data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode(), "supported format"),
        (data_url(random_picture(200, 100)), "max_pixels"),
        ("file:///etc/passwd", "must start with"),
        ("http://127.0.0.1:1/a.png", "may not be downloaded"),
        ("http://169.254.169.254/latest/meta-data", "may not be downloaded"),
        ("/etc/passwd", "base64"),
        ("", "image_data"),
    ],
)
def test_hostile_pictures_are_refused_quickly(server, source, message):
    process = psutil.Process(server.process.pid)
    before, start = process.memory_info().rss, time.monotonic()
    answer = generate(server, text="A <image>", image_data=source)
    assert answer.status_code == 400
    assert message in answer.text
    assert time.monotonic() - start < 1 or os.getloadavg()[0] > 2
    assert process.memory_info().rss - before < 200 * 2**20
    assert generate(server, text="still here").status_code == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"text": "<image><image>", "image_data": URLS[0]}, "2 places for pictures"),
        ({"text": "A <image>", "image_data": [URLS[0]] * 17}, "max_items"),
        ({"input_ids": [5, -7, 8]}, "input_ids.1"),
        ({"text": ["a", "b"], "image_data": [URLS]}, "image_data"),
    ],
)
def test_prompts_that_contradict_their_pictures_are_refused(server, body, message):
    answer = generate(server, **body)
    assert answer.status_code == 400
    assert message in answer.text


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

#: Drops a file with the given bytes, in base64, on an element.
DROP = """(target, content) => {
  const bytes = Uint8Array.from(atob(content), (c) => c.charCodeAt(0));
  const data = new DataTransfer();
  data.items.add(new File([bytes], "picture.png", { type: "image/png" }));
  target.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
}"""


def test_a_picture_is_dropped_on_the_dashboard(server):
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with (
        sync_playwright() as playwright,
        contextlib.closing(
            playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        ) as browser,
    ):
        page = browser.new_page()
        complaints = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(server.url)
        expect(page.locator("#health")).to_have_text("ready")
        page.locator("#chat").evaluate(DROP, URLS[0].partition(",")[2])
        expect(page.locator("#chat-pictures img")).to_have_count(1)
        with page.expect_request("**/v1/chat/completions") as sent:
            page.get_by_label("Message", exact=True).fill("What?")
            page.keyboard.press("Enter")
        content = sent.value.post_data_json["messages"][0]["content"]
        assert content == [{"type": "image_url", "image_url": {"url": URLS[0]}}, {"type": "text", "text": "What?"}]
        expect(page.locator(".user img")).to_have_count(1)
        expect(page.locator("#chat-pictures img")).to_have_count(0)
        expect(page.locator(".assistant")).to_have_attribute("aria-busy", "false")
        assert page.locator(".assistant .error").count() == 0
        assert complaints == []
