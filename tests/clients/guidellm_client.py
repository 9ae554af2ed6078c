"""GuideLLM: small benchmarks of chats, completions and responses, without an error in their reports."""

import json
import os
import tempfile
from pathlib import Path

import checks
import loads
from checks import check


def benchmark(route):
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        backend = f"kind=openai_http,target={checks.URL},model=demo,api_key={checks.KEY},request_format={route}"
        command = [loads.program("guidellm"), "run", "--backend", backend, "--disable-console"]
        command += ["--profile", f"kind=concurrent,streams={loads.CONCURRENCY}"]
        command += ["--constraint", f"kind=max_requests,count={loads.NUM_REQUESTS}"]
        command += ["--tokenizer", f"kind=hf_auto,model={loads.TOKENIZER}"]
        shape = f"prompt_tokens={loads.INPUT_LEN},output_tokens={loads.OUTPUT_LEN}"
        command += ["--data", f"kind=synthetic_text,{shape}", "--output", f"kind=json,path={report}"]
        loads.run(command, **os.environ, HF_HUB_OFFLINE="1")
        (measured,) = json.loads(report.read_text())["benchmarks"]
    # GuideLLM closes its report before the last requests are counted.
    counts = measured["metrics"]["request_totals"]
    assert counts["errored"] == 0
    assert counts["successful"] >= loads.NUM_REQUESTS - loads.CONCURRENCY, counts
    requests = measured["requests"]["successful"]
    assert all(request["output_tokens"] == loads.OUTPUT_LEN for request in requests)
    assert all(request["time_to_first_token_ms"] > 0 for request in requests)


@check
def chats():
    """a benchmark of chats"""
    benchmark("/v1/chat/completions")


@check
def completions():
    """a benchmark of completions"""
    benchmark("/v1/completions")


@check
def responses():
    """a benchmark of responses"""
    benchmark("/v1/responses")


if __name__ == "__main__":
    checks.main("guidellm")
