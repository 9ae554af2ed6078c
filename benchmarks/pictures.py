"""Measures pictures in prompts: gaps of running streams, and the time to first token beside Transformers.

    python benchmarks/pictures.py [--model FOLDER] [--json FILE]

    gap, ms     the longest time between two tokens of 8 running streams while 4 pictures are prepared and computed
    step, ms    the median time between two tokens of these streams without pictures
    ratio       gap / step
    cold, ms    time to first token of a question about a new picture
    warm, ms    the same for a second question about this picture
    HF, ms      the same with Transformers: its processor, and `generate` with one token

The streams run with chunks of 8 prompt tokens, because longer chunks of any prompt cause gaps.

Without a model, a random checkpoint of LLaVA 1.5 is written: a tower of 12 layers with 336 x 336 pixels, and a text
model of 16 layers.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from graftlm import Engine, SamplingParams
from graftlm.bench.report import Environment
from graftlm.contracts import Picture
from graftlm.testing.tiny_media import random_picture, write_media_checkpoint

NUM_STREAMS, NUM_PICTURES = 8, 4
#: Prompt tokens per step beside the streams. Chunks of prompts cause gaps too, with and without pictures.
CHUNK = 8
QUESTION = "<image> What is in this picture, and where?"


@dataclass(frozen=True)
class Figures:
    """The figures of one run, in milliseconds."""

    gap_ms: float
    step_ms: float
    cold_ms: float
    warm_ms: float
    hf_ms: float

    @property
    def gap_ratio(self) -> float:
        return self.gap_ms / self.step_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint of LLaVA; default: a random one")
    parser.add_argument("--rounds", type=int, default=5, help="pictures for each time to first token")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each running stream")
    parser.add_argument("--size", choices=("small", "tiny"), default="small", help="size of the random checkpoint")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.model or write_checkpoint(Path(folder), arguments.size)
        figures = measure(path, arguments.rounds, arguments.tokens)
    for name, value in {**asdict(figures), "gap_ratio": figures.gap_ratio}.items():
        print(f"{name:>10} {value:9.2f}")
    print(
        f"{'cold x':>10} {figures.hf_ms / figures.cold_ms:9.2f}\n{'warm x':>10} {figures.hf_ms / figures.warm_ms:9.2f}"
    )
    if arguments.json is not None:
        found = {"environment": asdict(Environment.current()), "figures": asdict(figures)}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def write_checkpoint(folder: Path, size: str) -> Path:
    """Write a random checkpoint of LLaVA 1.5."""
    return write_media_checkpoint(
        folder, "llava", adapt=_enlarge if size == "small" else _leave, initializer_range=0.02
    )


def _leave(config: Any, processor: Any) -> None:
    return None


def _enlarge(config: Any, processor: Any) -> None:
    text, vision = config.text_config, config.vision_config
    text.hidden_size, text.intermediate_size, text.num_hidden_layers = 768, 2048, 16
    text.num_attention_heads, text.num_key_value_heads, text.head_dim = 12, 4, 64
    vision.hidden_size, vision.intermediate_size, vision.num_hidden_layers = 512, 2048, 12
    vision.num_attention_heads, vision.image_size, vision.patch_size = 8, 336, 14
    processor.patch_size = 14
    processor.image_processor.size = {"shortest_edge": 336}
    processor.image_processor.crop_size = {"height": 336, "width": 336}


def measure(path: Path, num_rounds: int, num_tokens: int) -> Figures:
    """Return the figures of a checkpoint."""
    model, memory = {"path": str(path), "dtype": "float32"}, {"kv_tokens": 16384}
    with Engine(model=model, memory=memory, scheduling={"prefill_tokens_per_step": CHUNK}) as engine:
        engine.generate(QUESTION, SamplingParams(max_tokens=2), image_data=random_picture(400, 300, 99))
        step_ms, _ = asyncio.run(_stream_gaps(engine, num_tokens, []))
        _, gap_ms = asyncio.run(
            _stream_gaps(engine, num_tokens, [random_picture(400, 300, i) for i in range(NUM_PICTURES)])
        )
    with Engine(model=model, memory=memory) as engine:
        engine.generate(QUESTION, SamplingParams(max_tokens=2), image_data=random_picture(400, 300, 99))
        cold = [_first_token_ms(engine, random_picture(500, 400, 100 + i), QUESTION) for i in range(num_rounds)]
        again = QUESTION.replace("where", "when")
        warm = [_first_token_ms(engine, random_picture(500, 400, 100 + i), again) for i in range(num_rounds)]
    reference = _transformers_ms(path, [random_picture(500, 400, 100 + i) for i in range(num_rounds)])
    return Figures(gap_ms, step_ms, statistics.median(cold), statistics.median(warm), statistics.median(reference))


async def _stream_gaps(engine: Engine, num_tokens: int, pictures: list[Picture]) -> tuple[float, float]:
    """Return the median and the longest time between two tokens of the streams, in milliseconds."""
    gaps: list[float] = []
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=0)
    are_running = asyncio.Event()

    async def stream(i: int) -> None:
        last = None
        async for output in engine.astream(f"A stream with the number {i} begins:", params):
            now = time.perf_counter()
            if len(output.token_ids) > num_tokens // 8:
                are_running.set()
                if last is not None:
                    gaps.append(1000 * (now - last))
            last = now

    async def ask(picture: Picture) -> None:
        await are_running.wait()
        await engine.agenerate(QUESTION, SamplingParams(max_tokens=1), image_data=picture)

    await asyncio.gather(*[stream(i) for i in range(NUM_STREAMS)], *[ask(picture) for picture in pictures])
    return statistics.median(gaps), max(gaps)


def _first_token_ms(engine: Engine, picture: Picture, text: str) -> float:
    start = time.perf_counter()
    next(iter(engine.stream(text, SamplingParams(max_tokens=1, temperature=0), image_data=picture)))
    return 1000 * (time.perf_counter() - start)


def _transformers_ms(path: Path, pictures: list[Picture]) -> list[float]:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(path)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    times = []
    for picture in [pictures[0], *pictures]:  # the first call is not counted
        start = time.perf_counter()
        with torch.inference_mode():
            inputs = processor(text=QUESTION, images=[Image.fromarray(picture)], return_tensors="pt")
            model.generate(**inputs, max_new_tokens=1, do_sample=False)
        times.append(1000 * (time.perf_counter() - start))
    return times[1:]


if __name__ == "__main__":
    main()
