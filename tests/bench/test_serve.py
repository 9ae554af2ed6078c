"""`graftlm bench serve` against a real server, and the saved report."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from graftlm.bench import BenchSettings, load_report, run_benchmark, save_report
from graftlm.cli import main
from graftlm.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs" / "benchmarking.md"
APIS = ["native", "openai-completions", "openai-chat"]
SMALL = ("--num-prompts", "12", "--prompt-tokens", "40", "--output-tokens", "6", "--concurrency", "4")


@pytest.fixture
def bench(capfd):
    """Run `graftlm bench serve`; return (exit status, stdout, stderr)."""

    def run(*arguments):
        with pytest.raises(SystemExit) as caught:
            main(["bench", "serve", *arguments])
        return (int(caught.value.code or 0), *capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def report(server, tmp_path_factory):
    """A saved run with every part of a report: shared prefixes, a schedule, a failure, chunks."""
    file = tmp_path_factory.mktemp("reports") / "set.jsonl"
    good = [{"prompt": f"{i} and {i + 1} and", "max_tokens": 8} for i in range(6)]
    bad = {"prompt": "too long", "max_tokens": 8, "input_ids": None}
    lines = [*good, bad | {"prompt": "word " * 9000}]  # longer than the model's context
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = BenchSettings(
        url=server.url,
        dataset=str(file),
        request_rate=200.0,
        percentiles=(50.0, 99.9),
        save_chunks=True,
        label="all of it",
    )
    path = file.with_name("report.json")
    save_report(asyncio.run(run_benchmark(settings, api_key="secret-key")), path)
    return path


@pytest.mark.parametrize("api", APIS)
def test_every_api_is_measured(bench, server, tmp_path, api):
    path = tmp_path / "new" / "result.json"
    status, out, err = bench("--url", server.url, "--api", api, *SMALL, "--output", str(path), "--label", "a try")
    assert (status, err) == (0, ""), out
    report = load_report(path)
    summary = report.summary
    assert (summary.requests, summary.completed, summary.failed) == (12, 12, 0)
    assert summary.finish_reasons == {"length": 12}
    assert summary.output_tokens == 12 * 6
    assert summary.requests_without_usage == 0
    assert summary.max_in_flight <= 4
    assert 0 < summary.ttft_s.min <= summary.ttft_s.max < summary.e2e_s.max
    assert summary.tpot_s.count == sum(r.num_chunks > 1 for r in report.requests) > 0
    assert summary.gap_s.count == sum(r.num_chunks - 1 for r in report.requests)
    if api == "openai-chat":
        assert min(r.prompt_tokens for r in report.requests) > 40  # the words and the chat template
    else:
        assert {r.prompt_tokens for r in report.requests} == {40}
    assert (report.server.model, report.label) == ("demo", "a try")
    for text in ("a try", "time to first token", "p99", "requests completed", f"saved as {path}"):
        assert text in out


def test_shared_prefixes_are_found_by_the_servers_cache(bench, server, tmp_path):
    path = tmp_path / "result.json"
    shape = ("--shared-prefix-tokens", "32", "--num-prefixes", "2", "--seed", "7", "--flush-cache")
    assert bench("--url", server.url, *SMALL, *shape, "--concurrency", "1", "--output", str(path))[0] == 0
    report = load_report(path)
    assert report.summary.cached_tokens == 10 * 32
    # A busy machine may keep the client itself waiting, which is for the machine to answer.
    assert [warning for warning in report.warnings if not warning.startswith("this client was too slow")] == []


def test_a_second_run_with_the_same_prompts_causes_a_warning(bench, server):
    arguments = ("--url", server.url, *SMALL, "--seed", "11")
    bench(*arguments)
    status, out, _ = bench(*arguments)
    assert status == 0
    assert "an earlier run has sent these prompts" in out


def test_a_schedule_is_followed_and_saved(bench, server, tmp_path):
    path = tmp_path / "result.json"
    assert bench("--url", server.url, *SMALL[:6], "--request-rate", "60", "--output", str(path))[0] == 0
    report = load_report(path)
    assert (report.summary.mode, report.summary.asked_rate) == ("open", 60.0)
    due = [r.scheduled_s for r in report.requests]
    assert due == sorted(due)
    assert all(r.sent_s >= r.scheduled_s for r in report.requests)
    assert due[-1] == pytest.approx(11 / 60)


def test_a_run_is_compared_with_a_saved_one(bench, server, report):
    status, out, _ = bench("--url", server.url, *SMALL, "--compare", str(report))
    assert status == 0
    assert "ratio" in out
    assert "all of it" in out
    assert re.search(r"time to first token +[\d.,]+ \(\d+\.\d\dx\)", out)


class TestFailures:
    def test_an_unknown_model_is_reported_by_the_first_request(self, bench, server):
        status, _, err = bench("--url", server.url, "--api", "openai-chat", "--model", "nope", *SMALL)
        assert status == 1
        assert err.startswith("error: a warm-up request failed (http 404): ")
        assert "nope" in err

    @pytest.mark.parametrize(("more", "expected"), [((), 1), (("--allow-failures",), 0)])
    def test_failed_requests_are_printed_saved_and_set_the_exit_status(self, bench, server, tmp_path, more, expected):
        path = tmp_path / "result.json"
        arguments = ("--url", server.url, "--api", "openai-completions", "--model", "nope", "--warmup", "0", *SMALL)
        status, out, _ = bench(*arguments, "--output", str(path), *more)
        assert status == expected
        assert "failed: 12 x http 404: " in out
        assert "12 of 12 requests failed" in out
        report = load_report(path)
        assert (report.summary.completed, report.summary.failed) == (0, 12)
        assert {r.failure.kind for r in report.requests} == {"http 404"}

    def test_back_pressure_is_counted(self, bench, server, tmp_path):
        path = tmp_path / "result.json"
        shape = ("--num-prompts", "60", "--prompt-tokens", "30", "--output-tokens", "40", "--seed", "3")
        status, out, _ = bench("--url", server.url, *shape, "--output", str(path))  # at most 8 run and 16 wait
        assert status == 1
        summary = load_report(path).summary
        assert [failure.kind for failure in summary.failures] == ["http 429"]
        assert summary.completed >= 16
        assert "failed: " in out

    def test_a_missing_server_ends_the_run(self, bench, refused_url):
        status, out, err = bench("--url", refused_url, *SMALL)
        assert (status, out) == (1, "")
        assert err.startswith(f"error: GET {refused_url}/get_model_info failed: Cannot connect")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-prompts", "0"), "--num-prompts must be at least 1, got 0"),
        (("--percentiles", "50,x"), "--percentiles must be numbers separated by commas"),
        (("--random", "--dataset", "x"), "--random and --dataset cannot be combined"),
        (("--dataset", "x"), "cannot read the dataset x: No such file"),
        (("--compare", "x"), "cannot read the report x: No such file"),
        (("--output", "/proc/x.json"), "cannot write the report /proc/x.json"),
        (("--prompt-tokens", "4000000"), "the model's context has only"),
    ],
)
def test_wrong_arguments_exit_with_2_before_any_request(bench, server, arguments, message):
    status, out, err = bench("--url", server.url, *arguments)
    assert (status, out) == (2, "")
    assert message in err


def test_a_dataset_for_another_api_is_refused_with_its_line(bench, server, tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    status, _, err = bench("--url", server.url, "--dataset", str(file))
    assert status == 2
    assert f"error: {file}:1: messages can only be sent with --api openai-chat" in err
    assert bench("--url", server.url, "--dataset", str(file), "--api", "openai-chat", "--output-tokens", "4")[0] == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a report of graftlm bench serve"),
        ('{"schema_version": 99}', ": schema_version must be 1, got 99; "),
        ('{"schema_version": 1}', "is not a report of graftlm bench serve: Object missing required field"),
    ],
)
def test_a_file_that_is_not_a_report_is_refused(tmp_path, content, message):
    path = tmp_path / "report.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_report(path)


def test_a_saved_report_is_read_back_unchanged(report, tmp_path):
    again = tmp_path / "again.json"
    save_report(load_report(report), again)
    assert again.read_bytes() == report.read_bytes()


def test_chunks_are_saved_only_on_request_and_the_key_is_never_saved(report, tmp_path):
    chunks = json.loads(report.read_text())["requests"][0]
    assert len(chunks["gaps_s"]) == chunks["num_chunks"] - 1
    assert sum(chunks["chunk_tokens"]) == chunks["output_tokens"] == 8
    assert "secret-key" not in report.read_text()
    loaded = load_report(report)
    bare = tmp_path / "bare.json"
    settings = {name: getattr(loaded.settings, name) for name in loaded.settings.__slots__} | {"save_chunks": False}
    fields = {name: getattr(loaded, name) for name in loaded.__slots__} | {"settings": BenchSettings(**settings)}
    save_report(type(loaded)(**fields), bare)
    assert json.loads(bare.read_text())["requests"][0]["gaps_s"] is None


def paths(value, prefix=""):
    """Yield the dotted names of a report's fields; for a list, the names of its entries' fields."""
    if isinstance(value, list):
        for entry in value:
            yield from paths(entry, prefix)
    elif isinstance(value, dict):
        for key, inner in value.items():
            name = f"{prefix}.{key}" if prefix else key
            has_free_keys = name.endswith((".percentiles", ".finish_reasons"))
            yield from [name] if has_free_keys or not isinstance(inner, dict | list) else paths(inner, name)
            if isinstance(inner, dict | list):
                yield name


def test_the_page_documents_exactly_the_saved_fields(report):
    spreads = "tpot_s|gap_s|e2e_s|e2e_from_arrival_s|client_queue_s|loop_lag_s"
    found = {
        name
        for name in paths(json.loads(report.read_text()))
        if name not in {"settings", "environment", "server", "summary", "requests", "summary.ttft_s.count"}
        and not re.match(rf"summary\.({spreads})\.", name)  # these are documented once, at ttft_s
    } | {"summary.ttft_s.count"}
    saved = DOCS.read_text(encoding="utf-8").split("## The saved result")[1].split("\n## ")[0]
    documented = {
        name for row in re.findall(r"^\| (.*?) \|", saved, re.MULTILINE) for name in re.findall(r"`([\w.]+)`", row)
    } | set(re.findall(r"`(summary\.failures\.\w+|requests\.failure\.\w+)`", saved))
    assert documented == found


def test_every_option_is_documented(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "serve", "--help"])
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    page = DOCS.read_text(encoding="utf-8")
    # An option that is a setting is in the table of settings.
    missing = {o for o in options if o not in page and f"`settings.{o[2:].replace('-', '_')}`" not in page}
    assert missing == set()


def test_a_client_needs_no_engine():
    code = "import sys, graftlm.bench, graftlm.cli.bench; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"torch", "transformers", "pydantic", "fastapi", "zmq", "graftlm.engine.engine", "graftlm.config"}
    assert heavy & set(loaded) == set()
