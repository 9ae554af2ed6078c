"""Weights of a real server are returned, replaced in place by tensors and from disk, and refused if they do not fit."""

from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
import torch
from safetensors.torch import load_file, save

from graftlm.demo import demo_checkpoint
from graftlm.testing.server_process import wait_until

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def client(server):
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client
        restored = {"model_path": "demo", "weight_version": "default"}
        assert client.post("/update_weights_from_disk", json=restored).status_code == 200


@pytest.fixture(scope="module")
def norm():
    return load_file(demo_checkpoint() / "model.safetensors")[NORM]


def generate(client):
    body = {"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    meta = client.post("/generate", json=body | {"return_logprob": True}).json()["meta_info"]
    return [logprob for logprob, _, _ in meta["output_token_logprobs"]], meta


def send(client, tensors, **params):
    headers = {"Content-Type": "application/octet-stream"}
    return client.post("/update_weights_from_tensor", content=save(tensors), params=params, headers=headers)


def weight(client, **body):
    return client.post("/get_weights_by_name", json={"name": NORM} | body)


def test_weights_are_replaced_by_tensors_and_then_by_a_checkpoint(client, norm):
    before, _ = generate(client)
    answer = send(client, {NORM: norm * 0.5}, weight_version="half")
    assert answer.json() == {"success": True, "message": answer.json()["message"], "num_paused_requests": 0}
    assert weight(client, truncate_size=3).json() == (norm * 0.5)[:3].float().tolist()
    changed, meta = generate(client)
    assert meta["weight_version"] == client.get("/model_info").json()["weight_version"] == "half"
    assert changed != pytest.approx(before, abs=0.01)
    assert meta["cached_tokens"] == 0
    done = client.post("/update_weights_from_disk", json={"model_path": "demo", "weight_version": "default"})
    assert done.status_code == 200
    assert weight(client).json() == norm[:100].float().tolist()
    assert generate(client)[0] == pytest.approx(before, abs=1e-3)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_paused_request_continues_with_the_new_weights(client, norm, mode):
    sampling = {"temperature": 0, "max_new_tokens": 300, "ignore_eos": True}
    body = {"text": "The capital of France is", "sampling_params": sampling}
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(client.post, "/generate", json=body)
        wait_until(lambda: client.get("/get_load").json()[0]["num_reqs"] == 1)
        assert client.post("/pause_generation", json={"mode": mode}).status_code == 200
        answer = send(client, {NORM: norm})
        assert not running.done()
        assert client.post("/continue_generation", json={}).status_code == 200
        assert answer.json()["num_paused_requests"] == 1
        assert running.result().json()["meta_info"]["completion_tokens"] == 300


def test_a_request_that_waits_for_an_update_reports_the_new_weights(client, norm):
    assert client.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(generate, client)
        wait_until(lambda: client.get("/get_load").json()[0]["num_held_reqs"] == 1)
        send(client, {NORM: norm}, weight_version="next")
        client.post("/continue_generation", json={})
        assert waiting.result()[1]["weight_version"] == "next"
    assert send(client, {NORM: norm}, weight_version="default").status_code == 200


def test_an_update_waits_for_running_requests(client, norm):
    sampling = {"temperature": 0, "max_new_tokens": 300, "ignore_eos": True}
    body = {"text": "The capital of France is", "sampling_params": sampling}
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(client.post, "/generate", json=body)
        wait_until(lambda: client.get("/get_load").json()[0]["num_reqs"] == 1)
        updating = threads.submit(send, client, {NORM: norm}, weight_version="later")
        assert running.result().json()["meta_info"]["weight_version"] == "default"
        assert updating.result().json()["num_paused_requests"] == 0
    assert send(client, {NORM: norm}, weight_version="default").status_code == 200


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({NORM: torch.ones(3)}, "has shape [3]"),
        ({"nonsense": torch.ones(3)}, "'nonsense', which this model does not use"),
        ({}, "no weights are given"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(client, norm, tensors, message):
    answer = send(client, tensors)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert weight(client).json() == norm[:100].float().tolist()


@pytest.mark.parametrize(
    ("path", "send_body", "message"),
    [
        ("/update_weights_from_tensor", {"content": b"\x80\x04pickled"}, "not in the format of a safetensors file"),
        ("/update_weights_from_disk", {"json": {}}, "model_path"),
        ("/get_weights_by_name", {"json": {"name": "model.norm.weigh"}}, "the nearest is 'model.norm.weight'"),
    ],
)
def test_an_impossible_update_is_refused_with_the_reason(client, path, send_body, message):
    answer = client.post(path, **send_body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/etc", "/nowhere", "~", "../", "/etc/passwd", "demo/../..", "nul\x00", ""])
@pytest.mark.parametrize("route", ["/update_weights_from_disk", "/load_lora_adapter"])
def test_a_path_outside_the_roots_is_refused_whether_it_exists_or_not(client, route, path):
    param = "model_path" if "weights" in route else "lora_path"
    answer = client.post(route, json={param: path} | ({} if "weights" in route else {"lora_name": "a"}))
    error = answer.json()["error"]
    if not path:
        assert (answer.status_code, error["param"]) == (400, param)
        return
    assert (answer.status_code, error["code"], error["param"]) == (403, "path_not_allowed", param)
    assert error["message"] == (
        f"{param} is outside the folders that clients may use; list its folder in server.checkpoint_roots"
    )
