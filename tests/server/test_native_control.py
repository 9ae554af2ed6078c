"""Control of a real server and its description: pause, flush, abort, health, information."""

import threading

import httpx2
import pytest

import graftlm
from graftlm.testing.server_process import wait_until

PROMPT = "The capital of France is"
GREEDY = {"temperature": 0, "max_new_tokens": 8}
LONG = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}


@pytest.fixture(scope="module")
def client(server):
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client


def generate(client, **body):
    response = client.post("/generate", json={"text": PROMPT, "sampling_params": GREEDY} | body)
    assert response.status_code == 200, response.text
    return response.json()


def post(client, path, **body):
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_sglangs_frontend_may_report_joined_texts(client):
    post(client, "/concate_and_append_request", src_rids=["a", "b"], dst_rid="c")


class Background:
    """A request to /generate that runs in a thread."""

    def __init__(self, client, **body):
        self.answer = None
        self._thread = threading.Thread(target=self._run, args=(client, body))
        self._thread.start()

    def _run(self, client, body):
        self.answer = generate(client, **body)

    def join(self):
        self._thread.join(30)
        assert self.answer is not None, "no answer came"
        return self.answer


def num_requests(client):
    return sum(load["num_reqs"] for load in client.get("/get_load").json())


def state(client):
    """Return the last report of the replica."""
    return client.get("/server_info").json()["internal_states"][0]


class TestPause:
    @pytest.fixture(autouse=True)
    def resumed(self, client):
        yield
        post(client, "/continue_generation")

    @pytest.mark.parametrize("mode", ["in_place", "retract"])
    def test_a_paused_request_continues_with_the_same_tokens(self, client, mode):
        expected = generate(client, sampling_params=LONG | {"max_new_tokens": 250})
        running = Background(client, sampling_params=LONG | {"max_new_tokens": 250})
        wait_until(lambda: num_requests(client) == 1, 10, "the start of the request")
        assert post(client, "/pause_generation", mode=mode)["status"] == "ok"
        waiting = Background(client)
        wait_until(lambda: running.answer is not None or num_requests(client) >= 1, 5)
        assert waiting.answer is None
        post(client, "/continue_generation")
        assert running.join()["output_ids"] == expected["output_ids"]
        assert waiting.join()["text"] == generate(client)["text"]

    def test_abort_is_the_default_mode_and_ends_running_requests(self, client):
        running = Background(client, sampling_params=LONG)
        wait_until(lambda: num_requests(client) == 1, 10, "the start of the request")
        post(client, "/pause_generation")
        assert running.join()["meta_info"]["finish_reason"]["type"] == "abort"

    def test_an_unknown_mode_is_refused(self, client):
        response = client.post("/pause_generation", json={"mode": "later"})
        assert response.status_code == 400
        assert "mode" in response.json()["error"]["message"]


class TestFlushAndAbort:
    @pytest.mark.parametrize("method", ["GET", "POST"])
    def test_a_flushed_prefix_is_computed_again(self, client, method):
        generate(client)
        assert generate(client)["meta_info"]["cached_tokens"] > 0
        response = client.request(method, "/flush_cache")
        assert response.status_code == 200
        assert response.json()["flushed_tokens"] > 0
        assert generate(client)["meta_info"]["cached_tokens"] == 0

    def test_abort_all_ends_every_request(self, client):
        running = [Background(client, sampling_params=LONG) for _ in range(2)]
        wait_until(lambda: num_requests(client) == 2, 10, "the start of the requests")
        post(client, "/abort_request", abort_all=True)
        assert [job.join()["meta_info"]["finish_reason"]["type"] for job in running] == ["abort", "abort"]

    def test_unknown_ids_are_ignored(self, client):
        running = Background(client, sampling_params=LONG | {"max_new_tokens": 100})
        wait_until(lambda: running.answer is not None or num_requests(client) == 1, 10, "the start of the request")
        post(client, "/abort_request", rid="nobody")
        post(client, "/abort_request", rid=["nobody", "either"])
        assert running.join()["meta_info"]["finish_reason"]["type"] == "length"

    @pytest.mark.parametrize("body", [{}, {"rid": ""}, {"abort_all": False}])
    def test_an_abort_without_an_id_is_refused(self, client, body):
        response = client.post("/abort_request", json=body)
        assert response.status_code == 400
        assert "rid" in response.json()["error"]["message"]


class TestInformation:
    def test_health_of_a_working_server_lists_no_problems(self, client):
        response = client.get("/health")
        assert (response.status_code, response.json()) == (200, {"status": "ok", "problems": [], "paused": False})

    def test_health_generate_generates_tokens_and_shares_no_prefix(self, client):
        client.post("/flush_cache")
        before = state(client)["generated_tokens"]

        def has_generated():
            assert client.get("/health_generate").status_code == 200
            return state(client)["generated_tokens"] >= before + 2

        wait_until(has_generated, 10, "the second token; a result is used for a second")
        assert state(client)["num_cached_pages"] <= 2
        assert generate(client, input_ids=[0, 1], text=None)["meta_info"]["cached_tokens"] == 0

    @pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
    def test_model_information_is_returned(self, client, path):
        info = client.get(path).json()
        assert info["model_path"] == info["tokenizer_path"] == "demo"
        assert info["is_generation"] is True
        assert info["vocab_size"] > 0
        assert info["context_len"] > 0

    def test_the_selected_plugins_are_listed_with_reasons(self, client, server):
        resolved = client.get("/server_info").json()["resolved"]
        families = {"attention", "cache", "eviction", "model", "scheduling", "tool_calls"}
        assert families <= resolved.keys()
        assert all(set(one) == {"name", "distribution", "why"} for one in resolved.values())
        assert resolved["cache"] | {"distribution": ""} == {
            "name": "radix", "distribution": "", "why": "cache.name: the default"
        }  # fmt: skip
        assert resolved["attention"]["why"].startswith("auto: the highest rank that fits ")
        (line,) = [line for line in server.log.splitlines() if "resolved: " in line]
        assert "cache=radix (cache.name: the default)" in line

    @pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
    def test_the_configuration_and_the_replicas_are_listed(self, client, path):
        info = client.get(path).json()
        assert info["version"] == graftlm.__version__
        assert info["config"]["memory"]["kv_tokens"] == info["max_total_num_tokens"]
        assert info["kv_dtype"] == info["dtype"]
        assert info["dp_size"] == len(info["internal_states"]) == 1
        assert info["internal_states"][0]["ready"] is True
        assert info["uptime_s"] > 0

    def test_the_load_counts_running_requests_and_their_tokens(self, client):
        body = {"text": PROMPT, "sampling_params": LONG, "stream": True}
        with client.stream("POST", "/generate", json=body) as response:
            lines = response.iter_lines()  # the connection would be closed if it were freed
            next(lines)
            wait_until(lambda: client.get("/get_load").json()[0]["num_tokens"] > 0, 10, "the report of the pages")
            (load,) = client.get("/get_load").json()
            assert load["dp_rank"] == 0
            assert load["num_reqs"] == 1
            assert load["num_waiting_reqs"] == 0
        wait_until(lambda: num_requests(client) == 0, 10, "the end of the request")
