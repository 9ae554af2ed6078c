"""`graftlm route-sim` from the command line."""

import json
from pathlib import Path

import pytest

from graftlm.cli import main


@pytest.fixture
def route_sim(tmp_path, monkeypatch, capsys):
    """Run the command in a folder with a trace; return (exit status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    with Path("chats.jsonl").open("w") as file:
        for turn in range(90):
            ids = [0, *(100 * (turn % 9) + block + 1 for block in range(turn // 9 + 1))]
            line = {"timestamp": 100 * turn, "input_length": 8 * len(ids), "output_length": 5, "hash_ids": ids}
            file.write(json.dumps(line) + "\n")

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(("route-sim", "chats.jsonl", "--block-tokens", "8", "--capacity", "400", *arguments))
        return ended.value.code, *capsys.readouterr()

    return run


def test_a_table_compares_all_policies(route_sim):
    status, out, _ = route_sim("--replicas", "2,3", "--no-progress")
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == "chats: 90 requests in 9 s, 4,680 prompt tokens, 400 tokens per replica, pages of 8"
    assert sum("one cache" in line for line in lines[2:]) == 2
    for policy in ("cache_aware", "approximate_tree", "consistent_hash", "power_of_two", "round_robin", "random"):
        assert sum(line.strip().startswith(policy) for line in lines) == 2


POLICY = "cache_aware:block_tokens=8,slack_requests=2"


def test_figures_are_saved(route_sim):
    status, out, _ = route_sim("--policy", POLICY, "--policy", "random", "--json", "f.json")
    assert status == 0
    assert out.endswith("saved as f.json\n")
    (trace,) = json.loads(Path("f.json").read_text())["traces"]
    (fleet,) = trace["fleets"]
    assert (trace["requests"], trace["capacity_tokens"], fleet["replicas"]) == (90, 400, 4)
    aware, random = fleet["policies"]
    assert aware["policy"] == {"name": "cache_aware", "options": {"block_tokens": 8, "slack_requests": 2}}
    assert 0 < random["hit_rate"] < aware["hit_rate"] < 1


@pytest.mark.full  # the import of matplotlib takes a second
def test_a_plot_is_saved(route_sim):
    status, out, _ = route_sim("--replicas", "1,3", "--policy", POLICY, "--policy", "random", "--plot", "f.svg")
    assert status == 0
    assert out.endswith("plot saved as f.svg\n")
    assert "one cache" in Path("f.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "cache_awar"), "Unknown routing policy 'cache_awar'. Available: "),
        (("--policy", "cache_aware:imbalanc=1"), "imbalanc"),
        (("--cache", "radix,chunk"), "--cache: expected one name, got radix, chunk"),
        (("--json", "chats.jsonl"), "--json: chats.jsonl is the same file as the input chats.jsonl"),
        (("--cost", "step=1"), "--cost: expected NAME=NUMBER"),
        (("--replicas", "0"), "--replicas: expected numbers"),
        (("--plot", "f.pdf"), "--plot writes PNG or SVG files"),
    ],
)
def test_mistakes_end_with_a_message(route_sim, arguments, message):
    status, _, err = route_sim(*arguments)
    assert status == 2
    assert message in err
