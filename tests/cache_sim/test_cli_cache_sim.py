"""`graftlm cache-sim` from the command line."""

import json
import sys
from pathlib import Path

import pytest

from graftlm.cli import main

PLUGIN = """
from graftlm import Options, Provider, hookimpl
from graftlm.contracts import EvictionStrategy

class ByDepthOptions(Options):
    sign: int = 1

class ByDepth(EvictionStrategy):
    def __init__(self, sign):
        self.sign = sign

    def priority(self, node):
        return (self.sign * node.depth, node.last_access)

@hookimpl
def provide_eviction_strategies():
    return [
        Provider(
            name="by_depth",
            summary="Those at the front, or at the back, first",
            api_version=1,
            create=lambda options, context: ByDepth(options.sign),
            options=ByDepthOptions,
        )
    ]
"""


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with a plugin and two traces: growing chats with one system prompt, in blocks of 4 tokens."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("sim_plugin.py").write_text(PLUGIN)
    for name, num_chats in (("few", 3), ("many", 9)):
        with Path(f"{name}.jsonl").open("w") as file:
            for i in range(10 * num_chats):
                chat, turn = i % num_chats, i // num_chats
                hash_ids = [0, *(100 * chat + block for block in range(1, turn + 2))]
                file.write(json.dumps({"timestamp": i, "input_length": 4 * len(hash_ids), "hash_ids": hash_ids}) + "\n")
    yield tmp_path
    sys.modules.pop("sim_plugin", None)


@pytest.fixture
def cache_sim(workplace, capsys):
    """Run the command; return (exit status, stdout, stderr)."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["cache-sim", "--block-tokens", "4", *arguments])
        return ended.value.code, *capsys.readouterr()

    return run


def found_in(file="found.json"):
    return json.loads(Path(file).read_text())["traces"]


def test_a_table_compares_each_capacity_with_the_optimum(cache_sim):
    status, output, _ = cache_sim("few.jsonl", "--capacity", "20,50%,1K", "--cache", "radix,chunk")
    lines = output.splitlines()
    assert status == 0
    assert lines[0] == "few: 30 requests, 780 prompt tokens, footprint 124 tokens, pages of 4"
    assert lines[1].split()[:5] == ["capacity", "cache", "eviction", "hit", "rate"]
    assert [line.split("  ")[0] for line in lines if "offline optimum" in line] == [
        "20 (16.13%)",
        "60 (48.39%)",
        "1,000 (806.45%)",
    ]
    largest = next(i for i, line in enumerate(lines) if line.startswith("1,000"))
    # 656 of 780: each block is a hit except the first time
    assert lines[largest + 1].split()[:4] == ["radix", "lru", "84.10%", "100.00%"]
    assert lines[largest + 2].split()[:4] == ["chunk", "lru", "0.00%", "0.00%"]


def test_the_json_file_has_every_figure(cache_sim):
    status, _, _ = cache_sim("few.jsonl", "many.jsonl", "--capacity", "10%", "--in-flight", "2", "--json", "found.json")
    few, many = found_in()
    assert status == 0
    assert (few["trace"], many["trace"]) == ("few", "many")
    assert {key: many[key] for key in ("requests", "prompt_tokens", "footprint_tokens", "block_tokens")} == {
        "requests": 90,
        "prompt_tokens": 2340,
        "footprint_tokens": 364,
        "block_tokens": 4,
    }
    (capacity,) = many["capacities"]
    (outcome,) = capacity["outcomes"]
    assert (many["page_size"], many["in_flight"], capacity["asked"], capacity["capacity_tokens"]) == (4, 2, "10%", 36)
    assert outcome["cache"] == {"name": "radix", "options": {}}
    assert outcome["hit_rate"] == outcome["hit_tokens"] / 2340
    assert outcome["share_of_optimum"] == outcome["hit_tokens"] / capacity["optimum"]["hit_tokens"]
    assert 0 < outcome["work_saved"] < outcome["hit_rate"]  # hits are at the start of prompts, where tokens cost least
    assert outcome["evicted_tokens"] > capacity["optimum"]["evicted_tokens"] > 0
    assert outcome["bypassed_requests"] == 18  # the last two turns have 40 and 44 tokens
    assert set(outcome["bookkeeping_us"]) == {"match", "lock", "insert", "evict"}


def test_third_party_plugins_are_compared_by_name_with_options(cache_sim):
    plugin = ("--set", "plugins.modules=[sim_plugin]")
    status, output, _ = cache_sim(
        "many.jsonl", "--eviction", "all,by_depth:sign=-1", "--eviction", "by_depth", *plugin, "--json", "found.json"
    )
    assert status == 0
    assert "by_depth:sign=-1" in output
    evictions = [outcome["eviction"] for outcome in found_in()[0]["capacities"][0]["outcomes"]]
    assert evictions[:2] == [{"name": "by_depth", "options": {"sign": -1}}, {"name": "by_depth", "options": {}}]
    assert {"name": "lru", "options": {}} in evictions[2:]
    assert len([one for one in evictions if one["name"] == "by_depth"]) == 2


def test_the_configuration_sets_what_is_compared(cache_sim):
    Path("engine.yaml").write_text(
        "cache: {name: radix, page_size: 2, eviction: {name: by_depth, options: {sign: -1}}}\n"
        "plugins: {modules: [sim_plugin]}\n"
    )
    status, _, _ = cache_sim("few.jsonl", "--config", "engine.yaml", "--capacity", "50%", "--json", "found.json")
    (trace,) = found_in()
    (outcome,) = trace["capacities"][0]["outcomes"]
    assert (status, trace["page_size"]) == (0, 2)
    assert outcome["eviction"] == {"name": "by_depth", "options": {"sign": -1}}


def test_a_progress_bar_is_shown_on_request(cache_sim):
    assert "replaying" in cache_sim("few.jsonl", "--progress")[2]
    assert "replaying" not in cache_sim("few.jsonl", "--no-progress")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.jsonl"], "cannot read the trace none.jsonl: No such file or directory"),
        (["few.jsonl", "--block-tokens", "8"], "few.jsonl:1: hash_ids has 2 ids, expected 1"),
        (["few.jsonl", "--eviction", "lur"], "Unknown eviction strategy 'lur'"),
        (["few.jsonl", "--cache", "radish"], "Did you mean 'radix'?"),
        (["few.jsonl", "--eviction", "lru:x=1"], "cache.eviction.options.x"),
        (["few.jsonl", "--capacity", "much"], "a capacity must be a number of tokens"),
        (["few.jsonl", "--page-size", "3"], "--page-size 3 does not divide the block length of trace few, 4 tokens"),
        (["few.jsonl", "--plot", "found.pdf"], "--plot writes PNG or SVG files, got found.pdf; name it found.png"),
        (["few.jsonl", "--json", "none/found.json"], "--json: cannot write none/found.json: No such file"),
        (["few.jsonl", "--plot", "none/found.png"], "--plot: cannot write none/found.png: No such file"),
    ],
)
def test_wrong_arguments_are_reported(arguments, message, cache_sim):
    status, output, errors = cache_sim(*arguments)
    assert (status, output) == (2, "")
    assert message in errors


def test_a_plot_is_saved_as_an_image(cache_sim):
    pytest.importorskip("matplotlib")
    status, output, _ = cache_sim("few.jsonl", "many.jsonl", "--cache", "radix,chunk", "--plot", "found.png")
    assert status == 0
    assert output.splitlines()[-1] == "plot saved as found.png"
    assert Path("found.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_before_any_work(cache_sim, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, output, errors = cache_sim("few.jsonl", "--plot", "found.png")
    assert (status, output) == (2, "")
    assert "pip install 'graftlm[plot]'" in errors


def test_no_tensor_library_is_imported(cache_sim, workplace):
    import subprocess

    code = (
        "import sys; from graftlm.cli import main\n"
        "try: main(['cache-sim', 'few.jsonl', '--block-tokens', '4'])\n"
        "finally: print({'torch', 'transformers', 'matplotlib'} & set(sys.modules))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "set()"


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_result_never_overwrites_an_input_file(option, cache_sim, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trace, other_name = tmp_path / "recorded.jsonl", tmp_path / "again.png"
    line = '{"timestamp": 0, "input_length": 4, "block_tokens": 4, "hash_ids": [1]}\n'
    trace.write_text(line)
    other_name.symlink_to(trace)
    code, _, errors = cache_sim(str(trace), option, str(other_name))
    assert code == 2
    assert "choose another path" in errors
    assert trace.read_text() == line


@pytest.mark.parametrize("tokens", [9 * 10**18, 3 * 10**9, 2**26 + 1])
def test_token_counts_beyond_the_limit_are_refused(tokens, cache_sim, tmp_path):
    trace = tmp_path / "huge.jsonl"
    trace.write_text(f'{{"timestamp": 0, "input_length": {tokens}, "block_tokens": {tokens}, "hash_ids": [1]}}\n')
    code, _, errors = cache_sim(str(trace))
    assert code == 2
    assert f"{tokens} tokens is too long" in errors


def test_a_capacity_beyond_the_limit_is_refused(cache_sim, tmp_path):
    trace = tmp_path / "small.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 4, "block_tokens": 4, "hash_ids": [1]}\n')
    code, _, errors = cache_sim(str(trace), "--capacity", "999999999999999999G")
    assert code == 2
    assert "smaller --capacity" in errors
