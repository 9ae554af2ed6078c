"""Compares the speed of speculation with vLLM's drafters `ngram` and `suffix`; the engines take turns.

    python benchmarks/speculation_peers.py --model DIR --vllm-python FILE [--only CASE ...] [--rounds N] [--out FILE]

DIR is a Llama checkpoint whose weights set the cost of a step, such as the one of 360M parameters. FILE is the Python
of an environment with vLLM, and with `arctic-inference` for its drafter `suffix`.

A random model does not copy text. The script therefore writes a changed copy of the checkpoint: the layers compute as
usual but add nearly nothing, and the head maps each token to a fixed successor. A greedy output is thus known in
advance, in every engine. A prompt decides which parts of the output can be drafted:

    regenerate      a prompt is answered a second time
    edit            the prompt has the output's 400 tokens, with a change about every 40 tokens
    copy            the output quotes spans of 12 to 40 tokens from the prompt, between new tokens
    records         the output repeats spans of 4 to 8 tokens from the prompt, such as keys of records, between new ones
    replay          agents: 12 calls, each with the whole history as its prompt, run a second time
    random          one request with sampled tokens
    random-N        N simultaneous requests with sampled tokens
    edit-N          N simultaneous edits

All engines load the model once, and then run each case in turns, `--rounds` times. The output of greedy cases is
checked. The table has the tokens per second of each engine, as medians of the rounds.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "speculation_peers.json"
#: engine -> its drafter; None: no speculation.
ENGINES = {
    "graftlm": None,
    "graftlm auto": "auto",
    "vllm": None,
    "vllm ngram": "ngram",
    "vllm suffix": "suffix",
}
VLLM_DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "suffix": {"method": "suffix"},
}
FIRST_TOKEN, NUM_TOKENS = 100, 30_000
#: Logit of a token's successor; the logits of other tokens are between -2 and 2.
PEAK = 12.0
SAMPLED_TEMPERATURE = 2.0  # the maximum in vLLM

#: A prompt, the number of output tokens, and the expected output; None: tokens are sampled.
Job = tuple[list[int], int, list[int] | None]
#: The batches of a case, and how many of them run before the measurement.
Plan = tuple[list[list[Job]], int]


def successors() -> list[int]:
    """Return all tokens in the order in which each one follows the other."""
    order = list(range(FIRST_TOKEN, FIRST_TOKEN + NUM_TOKENS))
    random.Random(0).shuffle(order)
    return order


def write_checkpoint(source: Path, folder: Path) -> None:
    """Write a copy of a Llama checkpoint whose output is the order of `successors`."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}), encoding="utf-8")
    for path in source.glob("*"):
        if path.suffix in (".json", ".jinja") and path.name not in ("config.json", "model.safetensors.index.json"):
            (folder / path.name).write_bytes(path.read_bytes())
    weights = {name: weight for path in source.glob("*.safetensors") for name, weight in load_file(path).items()}
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.mul_(1e-3)
    embedding = weights["model.embed_tokens.weight"]
    embedding.copy_(torch.randn(embedding.shape, generator=torch.Generator().manual_seed(0)))
    weights["model.norm.weight"].fill_(1.0)
    head, order = torch.zeros_like(embedding), torch.tensor(successors())
    head[order.roll(-1)] = embedding[order] * (PEAK / embedding.shape[1])
    weights["lm_head.weight"] = head
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")


class Texts:
    """Draws prompts and outputs; the output of a prompt is the chain of successors after its last token."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._order = successors()

    def noise(self, num_tokens: int) -> list[int]:
        """Return random tokens."""
        return [self._random.choice(self._order) for _ in range(num_tokens)]

    def chain(self, num_tokens: int) -> list[int]:
        """Return consecutive tokens of the chain."""
        start = self._random.randrange(NUM_TOKENS - num_tokens)
        return self._order[start : start + num_tokens]

    def new(self, num_tokens: int) -> Job:
        """Return a job whose output is not in its prompt."""
        first, *output = self.chain(num_tokens + 1)
        return [*self.noise(199), first], num_tokens, output

    def sampled(self, num_prompt: int, num_tokens: int) -> Job:
        """Return a job with sampled tokens."""
        return self.noise(num_prompt), num_tokens, None

    def edit(self, num_tokens: int = 400) -> Job:
        """Return a job whose prompt has the output with a change about every 40 tokens."""
        first, *output = self.chain(num_tokens + 1)
        text = list(output)
        for place in range(20, num_tokens - 4, 40):
            num_changed = self._random.randint(1, 3)
            text[place : place + num_changed] = self.noise(self._random.randint(1, 4))
        return [*self.noise(30), *text, *self.noise(20), first], num_tokens, output

    def quotes(self, num_tokens: int, shortest: int, longest: int, least: int, most: int) -> Job:
        """Return a job whose output consists of spans from the prompt, in another order, and of new tokens between."""
        first, *output = self.chain(num_tokens + 1)
        spans, start = [], 0
        while start < num_tokens:
            start += self._random.randint(least, most)
            length = self._random.randint(shortest, longest)
            spans.append(output[start : start + length])
            start += length
        self._random.shuffle(spans)
        prompt = [token for span in spans for token in [*span, *self.noise(10)]]
        return [*self.noise(50), *prompt, first], num_tokens, output

    def calls(self) -> list[list[Job]]:
        """Return the calls of an agent; each prompt is the whole history."""
        history, calls = self.noise(300), []
        for call in range(12):
            first, *answer = self.chain(41 + 10 * (call % 4))
            history = [*history, *self.noise(60), first]
            calls.append([(list(history), len(answer), answer)])
            history += answer
        return calls


def repeated(batches: list[list[Job]]) -> Plan:
    """Run all batches twice, and measure the second time."""
    return batches * 2, len(batches)


CASES: dict[str, Callable[[Texts], Plan]] = {
    "regenerate": lambda texts: repeated([[texts.new(200)]]),
    "edit": lambda texts: ([[texts.edit()]], 0),
    "copy": lambda texts: ([[texts.quotes(300, 12, 40, 3, 9)]], 0),
    "records": lambda texts: ([[texts.quotes(300, 4, 8, 2, 4)]], 0),
    "replay": lambda texts: repeated(texts.calls()),
    "random": lambda texts: ([[texts.sampled(200, 150)]], 0),
    "random-32": lambda texts: ([[texts.sampled(50, 60) for _ in range(32)]], 0),
    "random-64": lambda texts: ([[texts.sampled(50, 40) for _ in range(64)]], 0),
    "edit-32": lambda texts: ([[texts.edit(200) for _ in range(32)]], 0),
    "edit-64": lambda texts: ([[texts.edit(120) for _ in range(64)]], 0),
}

#: Generates a batch: prompts, numbers of output tokens, and whether tokens are sampled; returns the output.
Generate = Callable[[list[list[int]], list[int], bool], list[list[int]]]


def graftlm_engine(model: str, drafter: str | None) -> Generate:
    """Load the model in graftlm."""
    from graftlm import Engine, SamplingParams

    sections = {"model": {"path": model, "dtype": "bfloat16"}, "memory": {"kv_tokens": 40_000}}
    engine = Engine({"speculation": drafter, **sections})

    def generate(prompts: list[list[int]], sizes: list[int], is_sampled: bool) -> list[list[int]]:
        temperature = SAMPLED_TEMPERATURE if is_sampled else 0.0
        params = [SamplingParams(temperature=temperature, seed=7, max_tokens=n, ignore_eos=True) for n in sizes]
        return [list(output.token_ids) for output in engine.generate(prompts, params, progress=False)]

    return generate


def vllm_engine(model: str, drafter: str | None) -> Generate:
    """Load the model in vLLM, in this process."""
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="0-1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="ERROR",
    )
    from vllm import LLM, SamplingParams

    speculation = {} if drafter is None else {"speculative_config": VLLM_DRAFTERS[drafter]}
    limits = {"max_model_len": 4096, "max_num_seqs": 64}
    llm = LLM(model=model, dtype="bfloat16", enable_prefix_caching=True, seed=0, **limits, **speculation)

    def generate(prompts: list[list[int]], sizes: list[int], is_sampled: bool) -> list[list[int]]:
        temperature = SAMPLED_TEMPERATURE if is_sampled else 0.0
        params = [
            SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True, detokenize=False) for n in sizes
        ]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(r.outputs[0].token_ids) for r in llm.generate(requests, params, use_tqdm=False)]

    return generate


def work(name: str, model: str) -> None:
    """Load an engine, and answer each line with a case on stdin by a line with its result on stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the engines write to stdout, too
    load = graftlm_engine if name.startswith("graftlm") else vllm_engine
    generate = load(model, ENGINES[name])
    print(json.dumps({"is_ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        case, seed = json.loads(line)
        batches, num_unmeasured = CASES[case](Texts(seed))
        num_tokens, seconds, num_wrong = 0, 0.0, 0
        for i, batch in enumerate(batches):
            start = time.perf_counter()
            outputs = generate([job[0] for job in batch], [job[1] for job in batch], batch[0][2] is None)
            if i >= num_unmeasured:
                seconds += time.perf_counter() - start
                num_tokens += sum(map(len, outputs))
            num_wrong += sum(job[2] not in (None, output) for job, output in zip(batch, outputs, strict=True))
        print(json.dumps({"speed": num_tokens / seconds, "num_wrong": num_wrong}), file=answers, flush=True)


class Worker:
    """A process with an engine; only one worker runs at a time."""

    def __init__(self, python: str, name: str, model: Path) -> None:
        command = [python, __file__, "--worker", name, "--model", str(model)]
        self._name = name
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def run(self, case: str, seed: int) -> dict[str, Any]:
        """Run a case; return its speed in tokens per second and the number of wrong outputs."""
        assert self._process.stdin is not None
        print(json.dumps([case, seed]), file=self._process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine {self._name} ended")
        result: dict[str, Any] = json.loads(line)
        return result


def measure(workers: dict[str, Worker], case: str, rounds: int) -> dict[str, Any]:
    """Run a case with all engines; their order alternates."""
    speeds: dict[str, list[float]] = {name: [] for name in workers}
    num_wrong: dict[str, int] = dict.fromkeys(workers, 0)
    for i in range(rounds):
        for name in list(workers)[:: -1 if i % 2 else 1]:
            result = workers[name].run(case, 1 + i)
            speeds[name].append(result["speed"])
            num_wrong[name] += result["num_wrong"]
    return {
        "tokens_per_s": {name: round(statistics.median(found), 1) for name, found in speeds.items()},
        "rounds": {name: [round(speed, 1) for speed in found] for name, found in speeds.items()},
        "num_wrong": num_wrong,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the cases, print a table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--vllm-python")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work(options.worker, str(options.model))
        return
    workers: dict[str, Worker] = {}
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(options.model, Path(folder))
        try:
            for name in options.engines:
                python = sys.executable if name.startswith("graftlm") else options.vllm_python
                workers[name] = Worker(python, name, Path(folder))
                workers[name].run("random", 0)
                workers[name].run("edit", 0)
            for case in options.only:
                results[case] = measure(workers, case, options.rounds)
                print(case, results[case]["tokens_per_s"], results[case]["num_wrong"], flush=True)
        finally:
            for worker in workers.values():
                worker.close()
    options.out.write_text(json.dumps({"median_of": options.rounds, "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
