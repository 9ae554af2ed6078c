"""The trace of its requests that a server writes, and its replay by `graftlm cache-sim`."""

import json

import pytest
import requests

from graftlm.cli import main
from graftlm.testing.server_process import ServerProcess

QUESTIONS = ["What is a page?", "What is a leaf?", "What is a page?"]
SYSTEM = "You answer questions about trees of prefixes, in one short sentence. " * 4


def chat(url, messages, **fields):
    body = {"model": "demo", "messages": messages, "max_tokens": 24, "temperature": 0, **fields}
    answer = requests.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    return answer["choices"][0]["message"]["content"], answer["usage"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Send a few chats to a server; return (trace file, prompt tokens, cached tokens as reported by the server)."""
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    config = {
        "model": "demo",
        "memory": {"kv_tokens": 16384},
        "cache": {"page_size": 16},
        "server": {"record_trace": str(path)},
    }
    prompt_tokens = cached_tokens = 0
    with ServerProcess(config, environment={"OMP_NUM_THREADS": "1"}) as server:
        for question, salt in [*((question, None) for question in QUESTIONS), (QUESTIONS[0], "a tenant")]:
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
            for follow_up in ["Why?", None]:
                answer, usage = chat(server.url, messages, cache_salt=salt)
                prompt_tokens += usage["prompt_tokens"]
                cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": follow_up}]
        refused = requests.post(f"{server.url}/v1/completions", json={"prompt": "a", "temperature": -1}, timeout=60)
        assert refused.status_code == 400
        assert server.stop() == 0
    return path, prompt_tokens, cached_tokens


def test_finished_requests_are_recorded_without_their_text(recorded):
    path, prompt_tokens, _ = recorded
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 2 * (len(QUESTIONS) + 1)
    assert sum(line["input_length"] for line in lines) == prompt_tokens
    assert {line["block_tokens"] for line in lines} == {16}
    assert [bool(line["namespace"]) for line in lines] == [False] * 6 + [True] * 2
    assert "tenant" not in path.read_text()
    assert set(lines[0]) == {
        "timestamp",
        "input_length",
        "output_length",
        "hash_ids",
        "output_hash_ids",
        "block_tokens",
        "namespace",
        "priority",
    }


def test_a_replay_finds_the_same_cached_tokens_as_the_server(recorded, tmp_path, capsys):
    path, prompt_tokens, cached_tokens = recorded
    assert cached_tokens > prompt_tokens / 2
    found = tmp_path / "found.json"
    with pytest.raises(SystemExit) as ended:
        main(["cache-sim", str(path), "--capacity", "16384", "--json", str(found)])
    assert ended.value.code == 0
    (trace,) = json.loads(found.read_text())["traces"]
    (capacity,) = trace["capacities"]
    assert (trace["prompt_tokens"], trace["page_size"]) == (prompt_tokens, 16)
    assert capacity["outcomes"][0]["hit_tokens"] == cached_tokens
    assert capacity["optimum"]["hit_tokens"] == cached_tokens
    assert "offline optimum" in capsys.readouterr().out


def test_a_trace_file_that_cannot_be_written_ends_the_start(tmp_path, capsys):
    config = tmp_path / "engine.yaml"
    config.write_text(f"server:\n  port: 0\n  record_trace: {tmp_path}/none/trace.jsonl\n")
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(config)])
    assert ended.value.code == 2
    assert "server.record_trace: cannot append to" in capsys.readouterr().err
