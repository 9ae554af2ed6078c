"""Measures the cost of a long prompt for the server's event loop, from the HTTP request to the scheduler process.

    python benchmarks/long_prompts.py [--tokens N] [--rounds N] [--json FILE]

    text    /v1/completions with a text
    chat    /v1/chat/completions with a message, for a model with reasoning
    ids     /generate with token ids

The server's application runs in this process, without sockets and without a model. The scheduler is replaced by a
replica that accepts each prompt and answers with one token. For each request:

    loop CPU, ms   CPU time of the event loop's thread for this request
    stall, ms      the longest time in which the event loop ran nothing else; includes waits for the GIL
    total, ms      time from request to answer, tokenisation included
    intake, ms     time in the scheduler process for decoding the message and creating the request

Each figure is the median over rounds; the first round is not counted. Loop CPU and stall are measured in separate
rounds, because the measurement of stalls costs CPU time.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from graftlm import EngineConfig
from graftlm.bench.report import Environment
from graftlm.bench.workload import ordinary_token_ids
from graftlm.chat.chat_formats import ChatFormats
from graftlm.checkpoint import resolve_checkpoint
from graftlm.intake import Intake, IntakeLimits
from graftlm.outputs import completion_ids
from graftlm.processes.messages import (
    Accepted,
    Generate,
    Message,
    TextBatch,
    decode,
    encode,
    params_from_wire,
)
from graftlm.processes.replicas import ReplicaSet
from graftlm.processes.served_model import ServedModel
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.scheduling import Finish, RequestUpdate
from graftlm.server.app import create_app
from graftlm.tokenization import TextStream, Tokenizer
from graftlm.types import FinishReason, Usage
from graftlm_chat.think import ThinkFormat

RESULTS = Path(__file__).parent / "results"
REPLICA = "scheduler-0"
SENTENCE = "The capital of France is Paris, and it rains there on Mondays. "
HEARTBEAT_S = 0.001


class NoMetrics:
    """Request metrics that record nothing."""

    def first_token(self, seconds: float) -> None: ...

    def more_tokens(self, seconds: float, num_tokens: int) -> None: ...

    def finished(self, output: Any, seconds: float, outcome: str) -> None: ...


class Server:
    """The server's application, and a simulated replica that answers its requests.

    Attributes:
        intake_s: the replica's intake time for the latest prompt, in seconds.
    """

    def __init__(self, tokenizer: Tokenizer, num_tokens: int) -> None:
        config = EngineConfig.load({"model": "demo", "server": {"max_body_bytes": 64 * num_tokens + 2**20}})
        context_len = 4 * num_tokens
        limits = IntakeLimits(tokenizer.vocab_size, context_len, context_len, tokenizer.eos_token_ids)
        self._intake = Intake(limits, lambda params: TextStream(tokenizer, params), time.monotonic)
        model = ServedModel(
            name="demo",
            path="demo",
            architectures=(),
            dtype="float32",
            kv_dtype="float32",
            vocab_size=limits.vocab_size,
            context_len=context_len,
            memory_tokens=context_len,
            eos_token_ids=limits.eos_token_ids,
            has_chat_template=True,
            created_s=0,
        )
        replicas = ReplicaSet([REPLICA], can_recover=False)
        self._manager = TokenizerManager(
            config,
            model,
            tokenizer,
            self._intake,
            replicas,
            self._send,
            NoMetrics(),
            chat_formats=ChatFormats(reasoning=ThinkFormat()),
        )
        self._manager.process_ready(REPLICA)
        self._app = create_app(self._manager)
        self._wire = b""
        self.intake_s = 0.0

    def _send(self, process: str, message: Message) -> None:
        """Encode a message on the event loop, like a channel. The answer arrives in a later callback."""
        if not isinstance(message, Generate):
            return
        self._wire = encode(message)
        loop = asyncio.get_running_loop()
        loop.call_soon(self._manager.receive, Accepted(prompt_id=message.prompt_id))
        (completion_id,) = completion_ids(message.prompt_id, 1)
        num_prompt_tokens = len(message.prompt) // 4
        finish = Finish(FinishReason.LENGTH)
        update = RequestUpdate(completion_id, (5,), finish=finish, usage=Usage(num_prompt_tokens, 1, 0), total_s=1.0)
        loop.call_soon(self._manager.receive, TextBatch(updates=[update], texts=["a"]))

    async def post(self, path: str, body: bytes) -> dict[str, Any]:
        """Send a request and return the answer; raise RuntimeError if the request is refused."""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "scheme": "http",
            "root_path": "",
        }
        events = [{"type": "http.request", "body": body, "more_body": False}]
        never = asyncio.get_running_loop().create_future()
        sent: list[Any] = []

        async def receive() -> Any:
            return events.pop() if events else await never

        async def send(event: Any) -> None:
            sent.append(event)

        await self._app(scope, receive, send)
        never.cancel()
        answer = b"".join(event.get("body", b"") for event in sent)
        if sent[0]["status"] != 200:
            raise RuntimeError(f"{path}: {answer[:500]!r}")
        return dict(json.loads(answer))

    def take_in(self) -> None:
        """Decode the latest prompt's message and create its request, as the scheduler process does; record the time."""
        start_s = time.perf_counter()
        message = decode(self._wire)
        assert isinstance(message, Generate)
        prompt = np.frombuffer(message.prompt, dtype=np.int32)
        (completion_id,) = completion_ids(message.prompt_id, 1)
        self._intake.request(completion_id, prompt, params_from_wire(message.params), seed=message.seed)
        self.intake_s = time.perf_counter() - start_s

    def close(self) -> None:
        self._manager.close()


@dataclass(frozen=True, slots=True)
class Row:
    """The times of one kind of request in ms: medians, and the value of each round."""

    workload: str
    prompt_tokens: int
    loop_cpu_ms: float
    stall_ms: float
    total_ms: float
    intake_ms: float
    rounds: dict[str, list[float]]


async def longest_stall(work: Callable[[], Any]) -> float:
    """Run a coroutine function, and return the longest time in seconds in which the event loop ran nothing else."""
    longest_s = 0.0

    async def beat() -> None:
        nonlocal longest_s
        while True:
            start_s = time.perf_counter()
            await asyncio.sleep(HEARTBEAT_S)
            longest_s = max(longest_s, time.perf_counter() - start_s - HEARTBEAT_S)

    beating = asyncio.ensure_future(beat())
    await asyncio.sleep(2 * HEARTBEAT_S)
    try:
        await work()
        await asyncio.sleep(0)
    finally:
        beating.cancel()
    return longest_s


def workloads(tokenizer: Tokenizer, num_tokens: int) -> Mapping[str, tuple[str, bytes]]:
    """Return kind of request -> (path, body)."""
    text = SENTENCE * (num_tokens // len(tokenizer.encode(SENTENCE, add_special_tokens=False)) + 1)
    ids = ordinary_token_ids(tokenizer.vocab_size)
    token_ids = np.random.default_rng(0).integers(ids.start, ids.stop, size=num_tokens).tolist()
    chat = [{"role": "user", "content": text}]
    bodies: dict[str, tuple[str, Any]] = {
        "text": ("/v1/completions", {"prompt": text, "max_tokens": 1}),
        "chat": ("/v1/chat/completions", {"messages": chat, "max_tokens": 1}),
        "ids": ("/generate", {"input_ids": token_ids, "sampling_params": {"max_new_tokens": 1}}),
    }
    return {name: (path, json.dumps(body).encode()) for name, (path, body) in bodies.items()}


async def measure(num_tokens: int, num_rounds: int) -> list[Row]:
    tokenizer = Tokenizer.load(resolve_checkpoint("demo"))
    server = Server(tokenizer, num_tokens)
    rows = []
    for name, (path, body) in workloads(tokenizer, num_tokens).items():
        cpu, stall, total, intake = [], [], [], []
        answer: dict[str, Any] = {}
        for _ in range(num_rounds + 1):
            start_s, start_cpu_s = time.perf_counter(), time.thread_time()
            answer = await server.post(path, body)
            cpu.append(1e3 * (time.thread_time() - start_cpu_s))
            total.append(1e3 * (time.perf_counter() - start_s))
            server.take_in()
            intake.append(1e3 * server.intake_s)
            stall.append(1e3 * await longest_stall(lambda path=path, body=body: server.post(path, body)))
        rounds = {"loop_cpu_ms": cpu[1:], "stall_ms": stall[1:], "total_ms": total[1:], "intake_ms": intake[1:]}
        usage = answer.get("usage") or answer["meta_info"]
        medians = {key: statistics.median(values) for key, values in rounds.items()}
        rows.append(Row(name, usage["prompt_tokens"], **medians, rounds=rounds))
    server.close()
    return rows


def show(rows: Sequence[Row]) -> None:
    table = Table(title="long prompts, medians")
    for column in ("request", "prompt tokens", "loop CPU, ms", "stall, ms", "total, ms", "intake, ms"):
        table.add_column(column, justify="left" if column == "request" else "right")
    for row in rows:
        numbers = (row.loop_cpu_ms, row.stall_ms, row.total_ms, row.intake_ms)
        table.add_row(row.workload, f"{row.prompt_tokens:,}", *[f"{number:,.2f}" for number in numbers])
    Console(width=120).print(table)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--tokens", type=int, default=100_000, help="of each prompt, about")
    made.add_argument("--rounds", type=int, default=7, help="that count; one more goes before them")
    made.add_argument("--json", type=Path, help="where to save; default: results/long-prompts.json beside this")
    return made


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser().parse_args(argv)
    environment = Environment.now()
    rows = asyncio.run(measure(arguments.tokens, arguments.rounds))
    show(rows)
    path = arguments.json or RESULTS / "long-prompts.json"
    content = {"environment": asdict(environment), "rounds": arguments.rounds, "rows": [asdict(row) for row in rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"saved as {path}")


if __name__ == "__main__":
    main()
