"""Measures several ranks on a CPU: the way of a plan, the exchange of tensors, and the speed against one process.

python benchmarks/ranks.py plans                   # plan to ranks and result back, 1 and 256 rows
python benchmarks/ranks.py exchange                # all-reduce through gloo and through shared memory
python benchmarks/ranks.py engine MODEL            # tensor 2 with one thread each against one process
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

_STEPS = 2000


def main() -> None:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("plans", "exchange", "engine", "rank", "one"))
    parser.add_argument("arguments", nargs="*")
    options = parser.parse_args()
    {"plans": plans, "exchange": exchange, "engine": engine, "rank": rank, "one": one}[options.what](*options.arguments)


def plans() -> None:
    """Print the time from `submit` to the result, with two ranks that compute nothing."""
    from graftlm.contracts import ExecutorContext, StepExecutor
    from graftlm.testing.fake_ranks import fake_executor
    from graftlm_executor.processes import LocalProcesses

    def create(context: ExecutorContext) -> StepExecutor:
        return context.run_on(LocalProcesses(context.launches, [None] * len(context.launches)))

    executor = fake_executor(2, create, is_idle=True)
    try:
        for num_rows, num_pages in ((1, 32), (256, 32)):
            plan = _plan(num_rows, num_pages)
            times = []
            for _ in range(_STEPS):
                start_s = time.perf_counter()
                executor.submit(plan).result()
                times.append((time.perf_counter() - start_s) * 1e6)
            times.sort()
            high = times[_STEPS * 9 // 10]
            print(f"{num_rows} rows of {num_pages} pages: median {median(times):.0f} us, 90 % {high:.0f} us")
    finally:
        executor.close()


def _plan(num_rows: int, num_pages: int) -> Any:
    from graftlm.plan import StepPlan

    rows = np.arange(num_rows)
    return StepPlan(
        step_id=0,
        rows=rows.astype(np.int32),
        query_lens=np.ones(num_rows, dtype=np.int32),
        seq_lens=np.ones(num_rows, dtype=np.int32),
        page_table=np.zeros((num_rows, num_pages), dtype=np.int32),
        input_ids=rows,
        device_idx=rows,
        positions=rows,
        out_slots=rows,
        num_decodes=num_rows,
        sample_idx=rows,
        sample_positions=rows,
    )


def exchange() -> None:
    """Print the time of an all-reduce between two processes."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        command = [sys.executable, __file__, "rank", folder]
        processes = [subprocess.Popen([*command, str(index)]) for index in range(2)]
        for process in processes:
            process.wait()


def rank(folder: str, index: str) -> None:
    """Run one process of `exchange`."""
    import torch

    from graftlm.layers.kernel_build import user_cache_dir
    from graftlm.parallel.shared_communicator import join_shared_memory
    from graftlm.testing.rank_threads import gloo_communicator

    torch.set_num_threads(1)
    gloo = gloo_communicator(Path(folder), int(index), 2, 30.0)
    shared = join_shared_memory(gloo, Path(folder, "shared"), "g++", user_cache_dir(os.environ))
    for name, communicator in (("gloo", gloo), ("shared memory", shared)):
        for num_rows in (1, 32, 2048):
            tensor = torch.zeros(num_rows, 960, dtype=torch.bfloat16)
            times = []
            for _ in range(500 if num_rows < 100 else 50):
                start_s = time.perf_counter()
                communicator.all_reduce(tensor)
                times.append((time.perf_counter() - start_s) * 1e6)
            if index == "0":
                print(f"{name}: {num_rows} rows of 960 bfloat16: median {median(times):.0f} us", flush=True)


def engine(model: str) -> None:
    """Print the speed of one process and of two ranks in turns: one stream, 32 requests, a prompt of 2,048 tokens."""
    for _ in range(2):
        for settings in ({}, {"tensor": 2}):
            subprocess.run([sys.executable, __file__, "one", model, json.dumps(settings)], check=True)


def one(model: str, settings: str) -> None:
    """Run one engine of `engine`."""
    from graftlm import Engine, SamplingParams

    parallel = json.loads(settings)
    rng = np.random.default_rng(0)
    with Engine(
        model={"path": model, "device": "cpu", "dtype": "bfloat16"}, memory={"kv_tokens": 16384}, parallel=parallel
    ) as graftlm:

        def seconds(num_requests: int, prompt_len: int, max_tokens: int) -> float:
            prompts = rng.integers(10, 1000, (num_requests, prompt_len)).tolist()
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            start_s = time.perf_counter()
            graftlm.generate(prompts, params, progress=False)
            return time.perf_counter() - start_s

        seconds(1, 16, 8)
        seconds(32, 16, 4)
        stream = 64 / seconds(1, 16, 64)
        batch = 32 * 32 / seconds(32, 16, 32)
        prefill = 2048 / seconds(1, 2048, 1)
    print(
        f"{settings}: stream {stream:.1f} tokens/s, batch {batch:.1f} tokens/s, prompt {prefill:.0f} tokens/s",
        flush=True,
    )


if __name__ == "__main__":
    main()
