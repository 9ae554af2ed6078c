"""Files and batches with OpenAI's own client, against a real server."""

import json
import time

import httpx2
import openai
import pytest

from graftlm.errors import ConfigError
from graftlm.server.batches.folder import BatchFolder
from graftlm.testing.server_process import ServerProcess, wait_until

CHAT = "/v1/chat/completions"
ENDED = {"completed", "failed", "expired", "cancelled"}


def chat_line(i, **fields):
    body = {"messages": [{"role": "user", "content": f"What is {i} plus 3?"}], "temperature": 0, "max_tokens": 12}
    return {"custom_id": f"q{i}", "method": "POST", "url": CHAT, "body": body | fields}


def as_file(lines):
    return "requests.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode()


def upload(client, lines):
    return client.files.create(file=as_file(lines), purpose="batch")


def start(client, lines, endpoint=CHAT, window="24h", **fields):
    file = upload(client, lines)
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window=window, **fields)


def ended(client, batch, timeout_s=120):
    """Wait for the end of a batch and return it."""
    wait_until(lambda: client.batches.retrieve(batch.id).status in ENDED, timeout_s, "the end of the batch")
    return client.batches.retrieve(batch.id)


def results(client, file_id):
    """Return the results in a file by custom_id; each is there once."""
    lines = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    by_id = {line["custom_id"]: line for line in lines}
    assert len(by_id) == len(lines)
    return by_id


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as it:
        yield it


def post(server, path, **body):
    return httpx2.post(server.url + path, json=body, timeout=60)


def test_a_batch_answers_every_request_as_the_endpoint_does(server, client):
    lines = [chat_line(i) for i in range(20)]
    batch = start(client, lines, metadata={"run": "1"})
    assert (batch.object, batch.status, batch.endpoint) == ("batch", "validating", CHAT)
    batch = ended(client, batch)
    assert batch.status == "completed"
    assert batch.request_counts.to_dict() == {"total": 20, "completed": 20, "failed": 0}
    assert batch.metadata == {"run": "1"}
    assert batch.error_file_id is None
    assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    answers = results(client, batch.output_file_id)
    assert answers.keys() == {line["custom_id"] for line in lines}
    for line in lines[:3]:
        answer = answers[line["custom_id"]]["response"]
        assert answer["status_code"] == 200
        direct = post(server, CHAT, **line["body"]).json()
        assert answer["body"]["choices"][0]["message"] == direct["choices"][0]["message"]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "One, two,", "max_tokens": 3}),
        ("/v1/embeddings", {"input": "a fox"}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 3, "store": False}),
    ],
)
def test_a_batch_may_call_other_endpoints(client, endpoint, body):
    lines = [{"custom_id": "a", "method": "POST", "url": endpoint, "body": body}]
    batch = ended(client, start(client, lines, endpoint))
    assert batch.request_counts.completed == 1
    assert results(client, batch.output_file_id)["a"]["response"]["body"]["usage"]


def test_refused_requests_are_in_the_error_file(client):
    lines = [chat_line(1), chat_line(2, temperature=9), chat_line(3, model="other")]
    batch = ended(client, start(client, lines))
    assert batch.request_counts.to_dict() == {"total": 3, "completed": 1, "failed": 2}
    errors = results(client, batch.error_file_id)
    assert {key: error["response"]["status_code"] for key, error in errors.items()} == {"q2": 400, "q3": 404}
    assert errors["q2"]["response"]["body"]["error"]["param"] == "temperature"


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        (["no JSON"], "invalid_json_line", 1),
        ([chat_line(1), chat_line(1)], "duplicate_custom_id", 2),
        ([chat_line(1) | {"url": "/v1/completions"}], "invalid_request", 1),
        ([chat_line(1) | {"method": "GET"}], "invalid_request", 1),
        ([chat_line(1) | {"custom_id": ""}], "invalid_request", 1),
        ([chat_line(1) | {"custom_id": "\ud800"}], "invalid_request", 1),
        ([chat_line(1) | {"body": []}], "invalid_request", 1),
        ([chat_line(1, stream=True)], "invalid_request", 1),
        ([], "empty_file", None),
    ],
)
def test_a_wrong_input_fails_the_batch_and_names_the_line(client, lines, code, number):
    content = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    file = client.files.create(file=("requests.jsonl", content.encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    batch = ended(client, batch)
    assert batch.status == "failed"
    (error,) = batch.errors.data
    assert (error.code, error.line) == (code, number)


def test_a_cancelled_batch_keeps_its_answers(client):
    lines = [chat_line(i, max_tokens=400, ignore_eos=True) for i in range(60)]
    batch = start(client, lines)
    wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0, 120, "the first answer")
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = ended(client, batch)
    assert batch.status == "cancelled"
    assert 0 < batch.request_counts.completed < 60
    assert len(results(client, batch.output_file_id)) == batch.request_counts.completed
    assert client.batches.cancel(batch.id).status == "cancelled"


def test_a_batch_expires(client):
    lines = [chat_line(i, max_tokens=400, ignore_eos=True) for i in range(200)]
    batch = ended(client, start(client, lines, window="2s"))
    assert batch.status == "expired"
    assert batch.request_counts.completed + batch.request_counts.failed == 200
    errors = results(client, batch.error_file_id)
    assert {error["error"]["code"] for error in errors.values()} == {"batch_expired"}


def test_files_are_listed_read_and_deleted(server, client):
    file = upload(client, [chat_line(1)])
    assert (file.object, file.purpose, file.filename) == ("file", "batch", "requests.jsonl")
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == as_file([chat_line(1)])[1]
    assert client.files.list().data[0].id == file.id
    other = upload(client, [chat_line(2)])
    page = httpx2.get(server.url + f"/v1/files?limit=1&after={other.id}").json()
    assert [entry["id"] for entry in page["data"]] == [file.id]
    assert page["has_more"] == (len(client.files.list().data) > 2)
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_an_expired_file_is_gone(client):
    expiry = {"anchor": "created_at", "seconds": 1}
    file = client.files.create(file=as_file([chat_line(1)]), purpose="batch", expires_after=expiry)
    assert file.expires_at == file.created_at + 1

    def is_gone():
        return httpx2.get(f"{client.base_url}files/{file.id}").status_code == 404

    wait_until(is_gone, 10, "the end of the file")


def test_batches_are_listed(server, client):
    batch = ended(client, start(client, [chat_line(1)]))
    assert client.batches.list(limit=1).data[0].id == batch.id
    answer = httpx2.get(server.url + f"/v1/batches?after={batch.id}&limit=100")
    assert batch.id not in [entry["id"] for entry in answer.json()["data"]]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/files/file-0", None, 404),
        ("GET", "/v1/files/..%2F..%2Flock", None, 404),
        ("GET", "/v1/files/file-0/content", None, 404),
        ("DELETE", "/v1/files/file-0", None, 404),
        ("GET", "/v1/batches/batch-0", None, 404),
        ("POST", "/v1/batches/batch-0/cancel", None, 404),
        ("POST", "/v1/files", {"file": "a"}, 400),
        ("GET", "/v1/files?after=file-0", None, 400),
        ("POST", "/v1/batches", {"input_file_id": "a", "endpoint": CHAT, "completion_window": "24h"}, 404),
        ("POST", "/v1/batches", {"input_file_id": "a", "endpoint": "/health", "completion_window": "24h"}, 400),
    ],
)
def test_what_is_not_there_is_refused(server, method, path, body, status):
    answer = httpx2.request(method, server.url + path, json=body, timeout=60)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("parts", "param"),
    [
        ({"data": {"purpose": "batch"}}, "file"),
        ({"data": {"purpose": "fine-tune"}}, "purpose"),
        (
            {"data": {"purpose": "batch", "expires_after[anchor]": "now", "expires_after[seconds]": "5"}},
            "expires_after",
        ),
    ],
)
def test_a_wrong_form_names_its_field(server, parts, param):
    file = {"file": ("a.jsonl", b"{}")} if param != "file" else {"other": ("a.jsonl", b"{}")}
    answer = httpx2.post(server.url + "/v1/files", files=file, timeout=60, **parts)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_the_time_of_a_batch_has_a_unit(server, client):
    file = upload(client, [chat_line(1)])
    answer = post(server, "/v1/batches", input_file_id=file.id, endpoint=CHAT, completion_window="soon")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "completion_window"


def test_without_a_folder_the_setting_is_named(thinking_server):
    answer = httpx2.get(thinking_server.url + "/v1/files")
    assert answer.status_code == 404
    assert "server.files.path" in answer.json()["error"]["message"]


def test_a_folder_in_use_is_an_error_of_the_configuration(tmp_path):
    first = BatchFolder(tmp_path / "files", time.time)
    with pytest.raises(ConfigError, match=r"server\.files\.path: another server uses .*/files\. Set another folder"):
        BatchFolder(tmp_path / "files", time.time)
    first.close()
    BatchFolder(tmp_path / "files", time.time).close()


@pytest.mark.full  # the previous test locks a folder twice, without the start of a second server
def test_a_folder_has_one_server(keyed_server):
    with pytest.raises(RuntimeError, match="another server uses"):
        ServerProcess(keyed_server.config, environment={"OMP_NUM_THREADS": "1"})


def test_a_file_and_the_folder_have_limits(keyed_server):
    key = {"Authorization": "Bearer s3cret-of-users"}

    def upload_bytes(count):
        files = {"file": ("a.jsonl", b"x" * count)}
        return httpx2.post(keyed_server.url + "/v1/files", files=files, data={"purpose": "batch"}, headers=key)

    refused = upload_bytes(1 << 20)
    assert (refused.status_code, "server.files.max_file_bytes" in refused.text) == (413, True)
    answers = [upload_bytes(80) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 400]
    for answer in answers[:2]:
        httpx2.delete(f"{keyed_server.url}/v1/files/{answer.json()['id']}", headers=key).raise_for_status()
