"""AIPerf: small benchmarks of chats and completions as streams, without an error in their reports."""

import json
import os
import tempfile
from pathlib import Path

import checks
import loads
from checks import check


def benchmark(kind):
    with tempfile.TemporaryDirectory() as folder:
        command = [loads.program("aiperf"), "profile", "--model", "demo", "--url", checks.URL]
        command += ["--endpoint-type", kind, "--streaming", "--api-key", checks.KEY, "--tokenizer", loads.TOKENIZER]
        command += ["--request-count", str(loads.NUM_REQUESTS), "--concurrency", str(loads.CONCURRENCY)]
        command += ["--prompt-input-tokens-mean", str(loads.INPUT_LEN), "--num-dataset-entries", "4"]
        command += ["--prompt-output-tokens-mean", str(loads.OUTPUT_LEN), "--extra-inputs", "ignore_eos:true"]
        command += ["--use-server-token-count", "--ui", "none", "--output-artifact-dir", folder]
        # The folder is a tokenizer; in offline mode, AIPerf takes it for the name of a repository.
        loads.run(command, **{name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"})
        report = json.loads((Path(folder) / "profile_export_aiperf.json").read_text())
    assert report["is_complete"]
    assert report["error_summary"] == []
    assert report["request_count"]["avg"] == loads.NUM_REQUESTS
    assert report["output_sequence_length"]["avg"] == loads.OUTPUT_LEN
    assert report["time_to_first_token"]["avg"] > 0


@check
def chats():
    """a benchmark of chats"""
    benchmark("chat")


@check
def completions():
    """a benchmark of completions"""
    benchmark("completions")


if __name__ == "__main__":
    checks.main("aiperf")
