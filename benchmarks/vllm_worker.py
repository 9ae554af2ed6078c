"""Generates with vLLM for `versus_transformers.py`, in a process of vLLM's own environment.

    VLLM_PYTHON benchmarks/vllm_worker.py CHECKPOINT DTYPE THREADS

Each line of the standard input is a JSON object with `prompts` (lists of token ids) and `output_lens`. The answer is
one line with the duration of `generate` in seconds and the generated token ids. The prefix cache is emptied before each
run.
"""

import json
import os
import sys
import time

_ANSWER = "answer: "  # prefix of answers: vLLM and its libraries also print lines


def main() -> None:
    """Answer until the input ends."""
    folder, dtype, threads = sys.argv[1:]
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{int(threads) - 1}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    import vllm

    engine = vllm.LLM(model=folder, dtype=dtype, max_model_len=2048, max_num_seqs=64, skip_tokenizer_init=True, seed=0)
    print(_ANSWER + json.dumps({"version": vllm.__version__}), flush=True)
    for line in sys.stdin:
        workload = json.loads(line)
        engine.reset_prefix_cache()
        params = [
            vllm.SamplingParams(temperature=0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False)
            for n in workload["output_lens"]
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in workload["prompts"]]
        start_s = time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start_s
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        print(_ANSWER + json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
