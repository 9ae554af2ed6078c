"""Adapters of a real server: as models of OpenAI's client, in /generate, loaded and unloaded."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import httpx2
import openai
import pytest

from graftlm.testing.aged_server import age, ageable, bring_back, call
from graftlm.testing.server_process import ServerProcess, wait_until

PAGE = (Path(__file__).parents[2] / "docs" / "lora.md").read_text(encoding="utf-8")
NUM_TOKENS = 8
PROMPT = [7, 40, 41, 9, 100, 12]


@pytest.fixture(scope="module")
def attention_folder(adapters, tmp_path_factory):
    """The folder of the configured adapter; a test moves it away."""
    return shutil.copytree(adapters.folders["attention"], tmp_path_factory.mktemp("configured") / "attention")


@pytest.fixture(scope="module")
def lora_server(request, adapters, attention_folder, tmp_path_factory):
    """A server; with `--full`, it has first served requests that leave state behind in its processes."""
    folder = tmp_path_factory.mktemp("aged")
    config = {
        "model": str(adapters.base),
        "lora": {"adapters": {"attention": str(attention_folder)}, "max_loaded": 3, "max_rank": 8},
        "memory": {"kv_tokens": 2048},
        "server": {
            "served_model_name": "tiny",
            "restart": True,
            "checkpoint_roots": [str(tmp_path_factory.getbasetemp())],
        },
    }
    with ServerProcess(ageable(config, folder), environment={"OMP_NUM_THREADS": "1"}) as it:
        if request.config.getoption("--full"):
            age(it.url, folder, str(adapters.base))
            call(it.url, "/unload_lora_adapter", {"lora_name": "aged"})
        yield it


@pytest.fixture(scope="module")
def http(lora_server):
    with httpx2.Client(base_url=lora_server.url, timeout=60) as it:
        yield it


@pytest.fixture(scope="module")
def client(lora_server):
    with openai.OpenAI(base_url=lora_server.url + "/v1", api_key="none", max_retries=0) as it:
        yield it


def generate(http, **body):
    sampling = {"temperature": 0, "max_new_tokens": NUM_TOKENS}
    return http.post("/generate", json={"input_ids": PROMPT, "sampling_params": sampling} | body)


def test_the_model_list_has_the_base_and_each_adapter(client, adapters, attention_folder):
    base, adapted = client.models.list().data
    assert (base.id, base.root, base.parent) == ("tiny", str(adapters.base), None)
    assert (adapted.id, adapted.root, adapted.parent) == (
        "tiny:attention",
        str(attention_folder),
        "tiny",
    )
    assert client.models.retrieve("tiny:attention").parent == "tiny"


def test_the_models_name_selects_the_adapter(client, adapters):
    named = ("tiny:attention", "attention", f"{adapters.base}:attention")
    for model, name in (("tiny", None), *((model, "attention") for model in named)):
        answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0)
        expected = adapters.expected(name, PROMPT, NUM_TOKENS)
        assert answer.model == ("tiny" if name is None else f"tiny:{name}")
        assert answer.choices[0].text == client.post(
            "/detokenize", body={"model": model, "tokens": expected}, cast_to=dict[str, object]
        )["text"]  # fmt: skip


def test_chats_and_their_streams_have_the_name_of_the_requested_model(client):
    ask = {
        "model": "tiny:attention",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 6,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert {whole.model, *(chunk.model for chunk in chunks)} == {"tiny:attention"}
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0
    other = client.chat.completions.create(**ask | {"model": "tiny"})
    assert other.usage.prompt_tokens_details.cached_tokens == 0
    assert other.choices[0].message.content != text


def test_embeddings_use_the_requested_adapter(client):
    one, other = (client.embeddings.create(model=model, input=["a"]) for model in ("tiny", "tiny:attention"))
    assert other.model == "tiny:attention"
    assert one.data[0].embedding != other.data[0].embedding


@pytest.mark.parametrize(
    ("path", "body", "found"),
    [
        ("/v1/score", {"query": "a", "items": ["b"]}, lambda answer: answer["scores"]),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, lambda answer: answer["results"]),
    ],
)
def test_scores_use_the_requested_adapter_and_return_its_name(http, path, body, found):
    models = ("tiny", "tiny:attention")
    one, other = (http.post(path, json=body | {"model": m, "label_token_ids": [5, 9]}).json() for m in models)
    assert (one["model"], other["model"]) == models
    assert found(one) != found(other)


def test_an_unloaded_adapter_is_a_404_with_a_list_of_the_loaded_ones(client, http):
    with pytest.raises(openai.NotFoundError, match="This server has 'tiny', 'tiny:attention'") as refused:
        client.completions.create(model="tiny:x", prompt="a")
    assert refused.value.code == "model_not_found"
    for answer in (generate(http, lora_path="x"), http.post("/classify", json={"text": "a", "lora_path": "x"})):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert "Loaded: attention." in answer.json()["error"]["message"]


def test_an_adapter_is_loaded_used_and_unloaded(http, client, adapters, attention_folder):
    body = {"lora_name": "new", "lora_path": str(adapters.folders["all"])}
    answer = http.post("/load_lora_adapter", json=body)
    assert answer.status_code == 200, answer.text
    folders = {"attention": str(attention_folder), "new": body["lora_path"]}
    assert answer.json()["loaded_adapters"] == folders
    assert "tiny:new" in [model.id for model in client.models.list().data]
    names = ["new", None, "attention", "new"]
    answers = generate(http, input_ids=[PROMPT] * len(names), lora_path=names).json()
    folder_of = {"new": "all", "attention": "attention", None: None}
    expected = [adapters.expected(folder_of[name], PROMPT, NUM_TOKENS) for name in names]
    assert [answer["output_ids"] for answer in answers] == expected
    pinned = http.post("/pin_prefix", json={"input_ids": PROMPT, "lora_path": "new"}).json()
    assert pinned == {"pinned_tokens": [len(PROMPT)]}
    answer = http.post("/unload_lora_adapter", json={"lora_name": "new"})
    assert list(answer.json()["loaded_adapters"]) == ["attention"]
    assert generate(http, lora_path="new").status_code == 404


def test_vllms_paths_load_and_unload_an_adapter(http, client, adapters):
    body = {"lora_name": "new", "lora_path": str(adapters.folders["all"])}
    answer = http.post("/v1/load_lora_adapter", json=body | {"load_inplace": False, "is_3d_lora_weight": False})
    assert answer.status_code == 200, answer.text
    ask = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
    whole = client.completions.create(model="new", **ask)
    assert whole.model == "tiny:new"
    assert whole.choices[0].text == client.completions.create(model="tiny:new", **ask).choices[0].text
    assert whole.choices[0].text != client.completions.create(model="tiny", **ask).choices[0].text
    answer = http.post("/v1/unload_lora_adapter", json={"lora_name": "new", "lora_int_id": None})
    assert answer.status_code == 200, answer.text
    refused = http.post("/v1/load_lora_adapter", json=body | {"load_inplace": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "load_inplace")


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/nothing"}, 403, "server.checkpoint_roots"),
        (
            "/load_lora_adapter",
            {"lora_name": "a", "lora_path": "{base}/nothing"},
            400,
            "No adapter at '{base}/nothing'",
        ),
        ("/load_lora_adapter", {"lora_name": "a:b", "lora_path": "{base}/nothing"}, 400, "an adapter's name"),
        ("/load_lora_adapter", {"lora_name": "attention", "lora_path": "{base}/a"}, 400, "is already loaded"),
        ("/load_lora_adapter", {"lora_name": "a"}, 400, "lora_path"),
        ("/unload_lora_adapter", {"lora_name": "a"}, 404, "Loaded: attention"),
        ("/generate", {"input_ids": [[1], [2]], "lora_path": ["attention"]}, 400, "lora_path: got 1 entries"),
        ("/generate", {"input_ids": [1], "lora_path": 3}, 400, "lora_path"),
    ],
)
def test_invalid_adapter_requests_are_refused(http, adapters, path, body, status, said):
    base = os.path.realpath(adapters.base)
    body, said = json.loads(json.dumps(body).replace("{base}", base)), said.replace("{base}", base)
    answer = http.post(path, json=body)
    assert (answer.status_code, said in answer.json()["error"]["message"]) == (status, True), answer.text


def test_programs_run_with_an_adapter(lora_server, adapters):
    from graftlm import RuntimeEndpoint, function, gen

    @function
    def answer(s):
        s += "a" + gen("text", max_tokens=NUM_TOKENS, temperature=0)

    texts = []
    for name in (None, "attention"):
        with RuntimeEndpoint(lora_server.url, adapter=name) as backend:
            texts.append(answer.run(backend=backend)["text"])
    assert texts[0] != texts[1]


def test_the_client_example_of_the_docs_runs(lora_server):
    code = next(code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "openai" in code)
    code = code.replace("http://127.0.0.1:30000", lora_server.url).replace("Qwen3-8B:sql", "tiny:attention")
    found = {}
    exec(compile(code, "lora.md", "exec"), found)
    found["client"].close()


def test_a_restarted_replica_serves_unchanged_adapters_only(lora_server, http, adapters, attention_folder, tmp_path):
    kept, changed = (shutil.copytree(adapters.folders["all"], tmp_path / name) for name in ("kept", "changed"))
    for folder in (kept, changed):
        body = {"lora_name": folder.name, "lora_path": str(folder)}
        assert http.post("/load_lora_adapter", json=body).status_code == 200
    attention_folder.rename(tmp_path / "away")
    shutil.copytree(adapters.folders["second-layer"], changed, dirs_exist_ok=True)
    os.kill(lora_server.children()["scheduler-0"], signal.SIGKILL)
    wait_until(lambda: "scheduler-0 is ready again" in lora_server.log, what="a new replica")
    bring_back(lora_server, str(adapters.base))
    for name, folder in ((None, None), ("kept", "all")):
        expected = adapters.expected(folder, PROMPT, NUM_TOKENS)
        assert generate(http, lora_path=name).json()["output_ids"] == expected
    for name in ("attention", "changed"):
        assert generate(http, lora_path=name).status_code == 404
        assert f"adapter {name} of" in lora_server.log
    assert "changed has changed: its digest is" in lora_server.log
    assert http.post("/unload_lora_adapter", json={"lora_name": "changed"}).status_code == 200
    assert http.post("/load_lora_adapter", json=body).status_code == 200
    expected = adapters.expected("second-layer", PROMPT, NUM_TOKENS)
    assert generate(http, lora_path="changed").json()["output_ids"] == expected
