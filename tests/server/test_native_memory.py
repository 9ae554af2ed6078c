"""A real server releases memory to the system, sleeps truthfully, and generates the same tokens when it is awake."""

import os
import random
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx2
import psutil
import pytest
from safetensors.torch import load_file, save

from graftlm.demo import demo_checkpoint
from graftlm.testing.server_process import ServerProcess, wait_until
from graftlm.testing.sparse_checkpoint import LlamaShape, write_sparse_checkpoint

NORM = "model.norm.weight"
MB = 1_000_000
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
LONG = {"temperature": 0, "max_new_tokens": 300, "ignore_eos": True}


def serve(**config):
    server = {"open_admin": True} | config.pop("server", {})
    return ServerProcess(
        {"model": "demo", "memory": {"kv_tokens": 8192}, "server": server} | config, environment=ONE_THREAD
    )


@pytest.fixture
def client(weights_server):
    with httpx2.Client(base_url=weights_server.url, timeout=60) as client:
        yield client
        client.post("/wake_up")
        restored = {"model_path": "demo", "weight_version": "default"}
        assert client.post("/update_weights_from_disk", json=restored).status_code == 200
        assert client.post("/continue_generation", json={}).status_code == 200
        assert client.get("/health").json() == {"status": "ok", "problems": [], "paused": False}


@pytest.fixture(scope="module")
def weights():
    return load_file(demo_checkpoint() / "model.safetensors")


def ask(client, text="The capital of France is", **sampling):
    sampling = {"temperature": 0, "max_new_tokens": 12} | sampling
    return client.post("/generate", json={"text": text, "sampling_params": sampling})


def tokens(client):
    return ask(client).json()["output_ids"]


def send(client, tensors, **params):
    headers = {"Content-Type": "application/octet-stream"}
    return client.post("/update_weights_from_tensor", content=save(tensors), params=params, headers=headers)


def running(client, threads):
    """Start a long request and wait until it runs."""
    request = threads.submit(ask, client, **LONG)
    wait_until(lambda: client.get("/get_load").json()[0]["num_reqs"] == 1)
    return request


@pytest.mark.parametrize("tags", [None, [], ["kv_cache"], ["weights"], ["kv_cache", "weights", "cuda_graph"]])
def test_after_a_release_and_a_resumption_the_tokens_are_the_same(client, tags):
    before = tokens(client)
    body = {} if tags is None else {"tags": tags}
    assert client.post("/release_memory_occupation", json=body).json()["success"]
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert client.post("/resume_memory_occupation", json=body).json()["success"]
    assert client.get("/is_sleeping").json() == {"is_sleeping": False}
    again = ask(client).json()
    assert again["output_ids"] == before
    if tags != ["weights"]:
        assert again["meta_info"]["cached_tokens"] == 0


def test_memory_that_is_never_released_has_no_effect(client):
    assert client.post("/release_memory_occupation", json={"tags": ["cuda_graph"]}).json()["success"]
    assert client.get("/is_sleeping").json() == {"is_sleeping": False}
    assert client.get("/health").json()["status"] == "ok"
    assert ask(client).status_code == 200
    assert client.post("/resume_memory_occupation", json={"tags": ["cuda_graph"]}).json()["success"]


def test_calls_without_a_body_release_and_resume_everything(client):
    assert client.post("/release_memory_occupation").status_code == 200
    assert ask(client).status_code == 503
    assert client.post("/resume_memory_occupation").status_code == 200
    assert ask(client).status_code == 200


def test_a_sleeping_server_says_so_and_refuses_requests(client):
    answer = client.post("/sleep", params={"level": 1})
    assert (answer.status_code, answer.content) == (200, b"")
    message = "the server sleeps: its memory is released (kv_cache, weights)"
    for path in ("/health", "/ready", "/ping"):
        health = client.get(path)
        assert (health.status_code, health.json()["status"]) == (503, "sleeping")
        assert health.json()["problems"][0].startswith(message)
    assert message in client.get("/health_generate").json()["problems"][0]
    refused = ask(client)
    assert refused.status_code == 503
    assert refused.json()["error"]["message"].startswith(message)
    assert client.get("/get_load").json()[0]["num_cached_pages"] == 0
    assert client.get("/cache_snapshot").json()["replicas"][0]["nodes"] == []
    assert client.post("/sleep").status_code == 200
    woken = client.post("/wake_up", params={"tags": ["weights"]})
    assert (woken.status_code, woken.content) == (200, b"")
    assert "(kv_cache)" in ask(client).json()["error"]["message"]
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert client.post("/wake_up", params={"tags": ["kv_cache"]}).status_code == 200
    assert ask(client).status_code == client.get("/health_generate").status_code == 200


@pytest.mark.parametrize(
    ("path", "send_body", "param"),
    [
        ("/sleep", {"params": {"level": 3}}, "level"),
        ("/sleep", {"params": {"mode": "now"}}, "mode"),
        ("/wake_up", {"params": {"tags": "kv"}}, "tags"),
        ("/release_memory_occupation", {"json": {"tags": ["weight"]}}, "tags"),
    ],
)
def test_unknown_levels_modes_and_tags_are_refused(client, path, send_body, param):
    answer = client.post(path, **send_body)
    assert answer.status_code == 400
    assert param in str(answer.json()["error"])
    assert client.get("/is_sleeping").json() == {"is_sleeping": False}


@pytest.mark.parametrize("release", ["/release_memory_occupation", "/sleep?level=1"])
def test_weights_that_were_sent_as_tensors_are_restored(client, weights, release):
    original = tokens(client)
    changed = {name: tensor * 0.5 for name, tensor in weights.items() if "layers.0" in name}
    assert send(client, changed, weight_version="half").status_code == 200
    name, tensor = next(iter(changed.items()))
    before = tokens(client)
    assert before != original
    assert client.post(release).status_code == 200
    assert "released" in client.post("/get_weights_by_name", json={"name": name}).json()["error"]["message"]
    assert client.post("/wake_up").status_code == 200
    assert tokens(client) == before
    read = client.post("/get_weights_by_name", json={"name": name, "truncate_size": 2}).json()
    assert read == tensor[:2].float().tolist()
    assert client.get("/model_info").json()["weight_version"] == "half"


def test_after_level_2_all_weights_are_needed_before_a_request(client, weights):
    before = tokens(client)
    assert client.post("/sleep", params={"level": 2}).status_code == 200
    refused = send(client, weights)
    assert (refused.status_code, "resume it first" in refused.json()["error"]["message"]) == (400, True)
    assert client.post("/wake_up").status_code == 200
    assert client.get("/is_sleeping").json() == {"is_sleeping": False}
    for half in (list(weights.items())[::2], list(weights.items())[1::2]):
        health, refused = client.get("/health"), ask(client)
        assert (health.status_code, health.json()["status"]) == (503, "unavailable")
        assert refused.status_code == 503
        assert "the weights were dropped" in refused.json()["error"]["message"]
        assert refused.json()["error"]["message"] == health.json()["problems"][0]
        assert send(client, dict(half)).status_code == 200
    assert tokens(client) == before
    assert client.get("/health").status_code == 200


def test_a_trainer_wakes_the_weights_first_sends_new_ones_and_then_wakes_the_cache(client, weights):
    before = tokens(client)
    assert client.post("/sleep", params={"level": 2}).status_code == 200
    assert client.post("/wake_up", params={"tags": "weights"}).status_code == 200
    for name, tensor in weights.items():
        assert send(client, {name: tensor}, weight_version="next").status_code == 200
    assert ask(client).status_code == 503
    assert client.post("/wake_up", params={"tags": "kv_cache"}).status_code == 200
    answer = ask(client).json()
    assert answer["output_ids"] == before
    assert answer["meta_info"]["weight_version"] == "next"


def test_a_release_is_refused_while_requests_run(client):
    with ThreadPoolExecutor(1) as threads:
        request = running(client, threads)
        refused = client.post("/release_memory_occupation")
        assert refused.status_code == 400
        assert "1 requests are running" in refused.json()["error"]["message"]
        assert len(request.result().json()["output_ids"]) == 300
    assert client.get("/is_sleeping").json() == {"is_sleeping": False}


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_sleep_aborts_running_requests_or_waits_for_them(client, mode):
    with ThreadPoolExecutor(1) as threads:
        request = running(client, threads)
        assert client.post("/sleep", params={"mode": mode}).status_code == 200
        assert request.done()
        finish = request.result().json()["meta_info"]["finish_reason"]["type"]
        assert finish == {"abort": "abort", "wait": "length"}[mode]


@pytest.mark.parametrize("level", [1, 2])
def test_kept_requests_continue_after_the_sleep(client, level):
    expected, short = ask(client, **LONG).json()["output_ids"], tokens(client)
    with ThreadPoolExecutor(2) as threads:
        request = running(client, threads)
        assert client.post("/sleep", params={"mode": "keep", "level": level}).status_code == 200
        waiting = threads.submit(tokens, client)
        wait_until(lambda: client.get("/get_load").json()[0]["num_held_reqs"] == 1)
        assert not request.done()
        assert client.post("/wake_up", params={"tags": "weights"}).status_code == 200
        if level == 2:
            assert client.post("/update_weights_from_disk", json={"model_path": "demo"}).status_code == 200
        assert client.post("/wake_up").status_code == 200
        assert request.result().json()["output_ids"] == expected
        assert waiting.result() == short


def test_paused_requests_survive_a_release(client):
    expected = ask(client, **LONG).json()["output_ids"]
    with ThreadPoolExecutor(2) as threads:
        request = running(client, threads)
        assert client.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
        assert client.post("/release_memory_occupation").status_code == 200
        refused = client.post("/continue_generation", json={})
        assert (refused.status_code, "the server sleeps" in refused.json()["error"]["message"]) == (400, True)
        assert client.post("/resume_memory_occupation").status_code == 200
        assert not request.done()
        assert client.post("/continue_generation", json={}).status_code == 200
        assert request.result().json()["output_ids"] == expected


@pytest.mark.full
def test_weights_that_cannot_be_read_again_are_missing_until_others_are_loaded(tmp_path, weights):
    model = tmp_path / "model"
    shutil.copytree(demo_checkpoint(), model)
    with serve(model=str(model)) as server, httpx2.Client(base_url=server.url, timeout=60) as client:
        before = tokens(client)
        assert client.post("/sleep").status_code == 200
        file = model / "model.safetensors"
        file.rename(tmp_path / "elsewhere")
        assert client.post("/wake_up").status_code == 200
        (problem,) = client.get("/health").json()["problems"]
        assert problem.startswith(
            "scheduler-0 lacks weights: the released weights cannot be loaded again (No weights in "
        )
        assert ask(client).json()["error"]["message"] == problem
        (tmp_path / "elsewhere").rename(file)
        assert client.post("/update_weights_from_disk", json={"model_path": str(model)}).status_code == 200
        assert tokens(client) == before


def rss_bytes(server):
    return psutil.Process(server.children()["scheduler-0"]).memory_info().rss


def fill(client, num_prompts):
    for _ in range(num_prompts):
        prompt = [random.randrange(300, 2000) for _ in range(3000)]
        body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 2}}
        assert client.post("/generate", json=body).status_code == 200


@pytest.mark.full
@pytest.mark.parametrize("prepack", [True, False])
def test_released_memory_is_returned_to_the_operating_system(tmp_path, prepack):
    shape = LlamaShape(512, 1024, 8, 8, 4, 64, 8192)
    write_sparse_checkpoint(tmp_path, shape)
    model = {"path": str(tmp_path), "dtype": "bfloat16", "prepack": prepack}
    kv_bytes = 15_000 * shape.kv_bytes_per_token
    with (
        serve(model=model, memory={"kv_tokens": 20_000}) as server,
        httpx2.Client(base_url=server.url, timeout=120) as client,
    ):
        fill(client, 5)
        used = rss_bytes(server)
        assert client.post("/release_memory_occupation", json={"tags": ["kv_cache"]}).status_code == 200
        without_kv = rss_bytes(server)
        assert used - without_kv > 0.9 * kv_bytes > 100 * MB
        assert client.post("/release_memory_occupation", json={"tags": ["weights"]}).status_code == 200
        asleep = rss_bytes(server)
        assert without_kv - asleep > 0.9 * shape.weight_bytes > 45 * MB
        assert client.post("/resume_memory_occupation", json={"tags": ["weights"]}).status_code == 200
        assert rss_bytes(server) - asleep > 0.9 * shape.weight_bytes
        assert client.post("/resume_memory_occupation").status_code == 200
        fill(client, 5)
        assert client.post("/sleep?level=2").status_code == 200
        assert rss_bytes(server) < asleep + 20 * MB
        assert client.post("/wake_up").status_code == 200
        assert rss_bytes(server) < asleep + 20 * MB  # memory takes RAM when it is written


@pytest.mark.full
def test_host_memory_of_the_cache_is_released_and_blocks_in_storage_are_found_again(tmp_path):
    storage = {"name": "file", "options": {"path": str(tmp_path / "blocks")}}
    options = {"host_gib": 0.2, "storage": storage}
    model = tmp_path / "model"
    model.mkdir()
    shape = LlamaShape(512, 1024, 8, 8, 4, 64, 8192)
    write_sparse_checkpoint(model, shape)
    config = {"model": {"path": str(model), "dtype": "bfloat16"}, "cache": {"name": "hicache", "options": options}}
    with (
        serve(**config, memory={"kv_tokens": 4096}) as server,
        httpx2.Client(base_url=server.url, timeout=120) as client,
    ):
        client.post("/release_memory_occupation", json={"tags": ["kv_cache"]})
        empty = rss_bytes(server)
        client.post("/resume_memory_occupation")
        body = {"input_ids": [*range(300, 2300)], "sampling_params": {"temperature": 0, "max_new_tokens": 2}}
        before = client.post("/generate", json=body).json()["output_ids"]
        fill(client, 6)
        host_bytes = 15_000 * shape.kv_bytes_per_token
        stats = client.get("/server_info").json()["internal_states"][0]["tiers"]
        wait_until(lambda: rss_bytes(server) - empty > host_bytes, what=f"blocks in host memory, {stats}")
        assert client.post("/release_memory_occupation", json={"tags": ["kv_cache"]}).status_code == 200
        assert rss_bytes(server) < empty + 20 * MB
        assert client.post("/resume_memory_occupation").status_code == 200
        again = client.post("/generate", json=body).json()
        assert again["output_ids"] == before
        assert again["meta_info"]["cached_tokens"] > 1000


def test_a_scheduler_that_dies_during_the_sleep_comes_back_asleep(client, weights_server):
    before = tokens(client)
    assert client.post("/sleep", params={"level": 2}).status_code == 200
    kill(weights_server, client, "scheduler-0")
    assert ask(client).status_code == 503
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert client.post("/wake_up").status_code == 200
    assert "the weights were dropped" in ask(client).json()["error"]["message"]
    assert client.post("/update_weights_from_disk", json={"model_path": "demo"}).status_code == 200
    assert tokens(client) == before


@pytest.mark.full
def test_schedulers_that_die_during_the_sleep_lack_the_weights_that_were_sent_before(weights):
    with (
        serve(parallel={"data": 2}, server={"restart": True}) as server,
        httpx2.Client(base_url=server.url, timeout=120) as client,
    ):
        before = tokens(client)
        assert client.post("/sleep", params={"level": 2}).status_code == 200
        kill(server, client, "scheduler-0")
        assert ask(client).status_code == 503
        assert client.post("/wake_up", params={"tags": "weights"}).status_code == 200
        names = list(weights)
        assert send(client, {name: weights[name] for name in names[::2]}).status_code == 200
        kill(server, client, "scheduler-1")
        assert client.post("/wake_up").status_code == 200
        assert send(client, {name: weights[name] for name in names[1::2]}).status_code == 200
        health = client.get("/health").json()
        assert health["status"] == "degraded"
        assert "scheduler-1 lacks weights: the weights were dropped, and only a part" in health["problems"][0]
        assert tokens(client) == before
        assert send(client, {name: weights[name] for name in names[::2]}).status_code == 200
        assert client.get("/health").json()["status"] == "ok"
        assert client.post("/sleep").status_code == 200
        kill(server, client, "scheduler-0")
        assert client.post("/wake_up").status_code == 200
        assert "scheduler-0 does not have the current weights" in client.get("/health").json()["problems"][0]
        assert tokens(client) == before


def kill(server, client, name):
    """Kill a process, and wait until its successor has released its memory."""
    num_before = server.log.count(f"{name} is ready again")
    os.kill(server.children()[name], signal.SIGKILL)
    wait_until(lambda: server.log.count(f"{name} is ready again") > num_before, timeout_s=120)
    released = f"{name} was restarted while the server sleeps, and has released its memory"
    wait_until(lambda: server.log.count(released) > num_before, timeout_s=60, what=released)


@pytest.mark.full
def test_quantized_weights_are_restored_from_the_checkpoint_but_not_from_tensors(weights):
    with (
        serve(model={"path": "demo", "quantization": {"name": "int8"}}) as server,
        httpx2.Client(base_url=server.url, timeout=120) as client,
    ):
        before = tokens(client)
        assert client.post("/sleep").status_code == 200
        assert client.post("/wake_up").status_code == 200
        assert tokens(client) == before
        assert send(client, weights).status_code == 200
        refused = client.post("/release_memory_occupation")
        assert refused.status_code == 400
        assert "cannot be restored after a release" in refused.json()["error"]["message"]
        assert tokens(client) == before
        assert client.post("/sleep", params={"level": 2}).status_code == 200
        assert client.post("/wake_up").status_code == 200
        assert send(client, weights).status_code == 200
        assert tokens(client) == before
