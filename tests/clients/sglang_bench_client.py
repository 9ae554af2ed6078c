"""SGLang's `bench_serving`: `/generate`, completions and chats with random prompts and with shared prefixes."""

import argparse
import importlib.machinery
import json
import os
import sys
import tempfile
import types
from pathlib import Path

import checks
import loads
import server_options
from checks import check

os.environ |= {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": checks.KEY}

RANDOM = ["--dataset-name", "random-ids", "--random-input-len", str(loads.INPUT_LEN), "--random-range-ratio", "1"]
RANDOM += ["--random-output-len", str(loads.OUTPUT_LEN), "--num-prompts", str(loads.NUM_REQUESTS)]
SHARED = ["--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "2", "--gsp-prompts-per-group"]
SHARED += [str(loads.NUM_REQUESTS // 2), "--gsp-system-prompt-len", "64", "--gsp-question-len", "16"]
SHARED += ["--gsp-output-len", str(loads.OUTPUT_LEN), "--gsp-range-ratio", "1", "--cache-report"]


class Absent(types.ModuleType):
    """A package that SGLang imports but a benchmark of texts does not use; every name in it is such a module."""

    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


def load():
    """Return SGLang's module of the benchmark. torchvision, which needs CUDA's PyTorch, is replaced."""
    from transformers.utils import is_torchvision_available

    if not is_torchvision_available() and "torchvision" not in sys.modules:
        transforms = Absent("torchvision").transforms
        transforms.functional  # noqa: B018  # creates the module
        sys.modules["torchvision"].io  # noqa: B018
    from sglang.benchmark import serving

    return serving


def benchmark(backend, *arguments):
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.jsonl"
        command = ["bench_serving", "--backend", backend, "--base-url", checks.URL, "--model", "demo"]
        command += ["--tokenizer", loads.TOKENIZER, "--max-concurrency", str(loads.CONCURRENCY), "--disable-tqdm"]
        sys.argv = [*command, "--output-file", str(output), "--output-details", *arguments]
        load().cli_main()
        result = json.loads(output.read_text().splitlines()[-1])
    assert result["completed"] == loads.NUM_REQUESTS, result
    assert result["output_lens"] == [loads.OUTPUT_LEN] * loads.NUM_REQUESTS
    assert not any(result["errors"]), result["errors"]
    assert all(result["ttfts"])
    return result


@check
def generate():
    """sglang: `/generate` with random prompts and log-probabilities"""
    benchmark("sglang", *RANDOM, "--return-logprob")


@check
def shared_prefix():
    """sglang: prompts with shared prefixes, of which the cache has tokens"""
    benchmark("sglang", *SHARED)


@check
def completions():
    """sglang-oai: completions with random prompts"""
    benchmark("sglang-oai", *RANDOM)


@check
def chats():
    """sglang-oai-chat: chats with shared prefixes"""
    benchmark("sglang-oai-chat", *SHARED)


@check
def options():
    """graftlm has an answer to each option of SGLang's server"""
    load()
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    server_options.check_options(parser)


if __name__ == "__main__":
    checks.main("sglang")
