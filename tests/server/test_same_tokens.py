"""One question gets the same tokens over every API that generates."""

import httpx2
import pytest

CHATS = {
    "question": [{"role": "user", "content": "Which day comes after Thursday?"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 plus 3?"}],
    "turns": [
        {"role": "user", "content": "What is 2 plus 3?"},
        {"role": "assistant", "content": "2 + 3 = 5."},
        {"role": "user", "content": "And 4 plus 5?"},
    ],
}
SAMPLING = {"greedy": {"temperature": 0}, "seeded": {"temperature": 0.9, "top_p": 0.8, "seed": 7}}
LIMIT = 24


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("chat", CHATS)
def test_every_api_generates_the_same_tokens(server, chat, sampling):
    messages, sampling = CHATS[chat], SAMPLING[sampling]

    def post(path, **body):
        answer = httpx2.post(server.url + path, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    completed = post("/v1/chat/completions", messages=messages, max_tokens=LIMIT, **sampling)
    text = completed["choices"][0]["message"]["content"]
    num_tokens = completed["usage"]["completion_tokens"]
    response = post("/v1/responses", input=messages, max_output_tokens=LIMIT, store=False, **sampling)
    system = [message["content"] for message in messages if message["role"] == "system"]
    turns = [message for message in messages if message["role"] != "system"]
    message = post(
        "/v1/messages", messages=turns, max_tokens=LIMIT, **({"system": system[0]} if system else {}), **sampling
    )
    prompt = post("/v1/tokenize", messages=messages)["tokens"]
    native = {("sampling_seed" if name == "seed" else name): value for name, value in sampling.items()}
    generated = post("/generate", input_ids=prompt, sampling_params={"max_new_tokens": LIMIT} | native)
    # A stop token is no part of the text.
    assert [part["text"] for item in response["output"] for part in item["content"]] == [text]
    assert [block["text"] for block in message["content"]] == [text]
    assert generated["text"] == text
    counts = response["usage"]["output_tokens"], message["usage"]["output_tokens"], len(generated["output_ids"])
    assert counts == (num_tokens,) * 3
    assert response["usage"]["input_tokens"] == len(prompt) == completed["usage"]["prompt_tokens"]
