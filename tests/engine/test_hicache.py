"""Conversations whose KV was evicted from the device, or written before a restart, continue with the same tokens."""

import threading
import time
from dataclasses import dataclass, field

import numpy as np
import pytest

from graftlm.assembly.assemble import assemble
from graftlm.config import EngineConfig
from graftlm.contracts import KVStorage, Platform, StorageStats
from graftlm.registry import Registry
from graftlm.testing.hugging_face import HuggingFaceModel
from graftlm.types import FinishReason, SamplingParams

POLICIES = ["write_through", "write_through_selective", "write_back"]
KV_TOKENS = 512
TURN_TOKENS = 150
MAX_TOKENS = 12
NUM_CONVERSATIONS = 4
NUM_TURNS = 3


@dataclass
class Medium:
    """The medium that outlives an engine: blocks by fingerprint and key, with the faults that a test sets."""

    blocks: dict = field(default_factory=dict)
    fault: str | None = None
    gate: threading.Event = field(default_factory=threading.Event)
    fingerprints: list = field(default_factory=list)

    def __post_init__(self):
        self.gate.set()


class MemoryStorage(KVStorage):
    """A storage in memory, with configurable faults."""

    def __init__(self, medium, context):
        self._medium = medium
        self._context = context
        self._stats = {"hits": 0, "misses": 0, "stored": 0, "corrupt": 0, "failures": 0}
        medium.fingerprints.append(context.fingerprint)

    def _meet(self, fault):
        if self._medium.fault == fault:
            raise OSError(f"fault: {fault}")

    def contains(self, keys):
        self._medium.gate.wait(20)
        self._meet("contains raises")
        for i, key in enumerate(keys):
            if (self._context.fingerprint, key) not in self._medium.blocks:
                return i
        return len(keys)

    def get(self, key, out):
        self._medium.gate.wait(20)
        self._meet("get raises")
        data = self._medium.blocks.get((self._context.fingerprint, key))
        if self._medium.fault == "damaged" or data is None:
            out[:] = 0xA5  # the content that was in memory before, half overwritten
            self._stats["corrupt" if data is not None else "misses"] += 1
            return False
        out[:] = data
        self._stats["hits"] += 1
        return True

    def put(self, key, data):
        self._meet("put raises")
        if self._medium.fault == "full":
            self._stats["failures"] += 1
            return False
        assert data.shape == (self._context.block_bytes,)
        self._medium.blocks[self._context.fingerprint, key] = data.copy()
        self._stats["stored"] += 1
        return True

    def clear(self):
        self._medium.blocks.clear()

    def stats(self):
        return StorageStats(num_blocks=len(self._medium.blocks), **self._stats)

    def close(self):
        return


class RegistryWithStorage:
    """A registry that also offers the storage `memory`."""

    def __init__(self, registry, medium):
        self._registry = registry
        self._medium = medium

    def __getattr__(self, name):
        return getattr(self._registry, name)

    def provider(self, family, name, *where):
        return None if family == "storage" else self._registry.provider(family, name)

    def options(self, provider, *rest):
        return None if provider is None else self._registry.options(provider, *rest)

    def create(self, family, provider, options, context, *rest):
        if family == "storage":
            return MemoryStorage(self._medium, context)
        fault = None if self._medium is None else self._medium.fault
        if family == "cache" and (fault == "no cache" or (fault == "no host memory" and context.transfer is not None)):
            raise MemoryError(fault)
        return self._registry.create(family, provider, options, context, *rest)


class Run:
    """An engine's parts, run step by step."""

    def __init__(self, path, *, medium=None, page_size=16, overlap=True, kv_tokens=KV_TOKENS, debug=True, **options):
        if medium is not None:
            options.setdefault("storage", {"name": "memory", "prefetch": "wait_complete"})
        options = {"host_tokens": 4096, "block_tokens": 32} | options
        config = EngineConfig.load(
            {"model": {"path": str(path), "dtype": "float32", "device": "cpu"}, "debug": debug},
            cache={"name": "hicache", "page_size": page_size, "options": options},
            memory={"kv_tokens": kv_tokens},
            scheduling={"overlap": overlap, "max_running_requests": 8, "prefill_tokens_per_step": 64},
        )
        registry = RegistryWithStorage(Registry.load(config.plugins), medium)
        self.parts = assemble(config, registry, Platform("cpu"))
        self.loop = self.parts.loop
        self.tokens, self.finishes = {}, {}
        self._wake = threading.Event()
        self._num_requests = 0

    def ask(self, *prompts, namespace="", max_tokens=MAX_TOKENS):
        """Run prompts to their ends; return the generated tokens and the usage of each."""
        ids = [self.add(prompt, namespace, max_tokens) for prompt in prompts]
        self.drain()
        return [(self.tokens[i], self.finishes[i][1]) for i in ids]

    def add(self, prompt, namespace="", max_tokens=MAX_TOKENS):
        self._num_requests += 1
        request_id = str(self._num_requests)
        intake = self.parts.intake
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        request = intake.request(request_id, intake.check_prompt(prompt), params)
        request.namespace = namespace
        self.tokens[request_id] = []
        self.loop.add([request], self._wake.set)
        return request_id

    def step(self):
        for update in self.loop.step():
            self.tokens[update.request_id] += update.token_ids
            if update.finish is not None:
                self.finishes[update.request_id] = (update.finish, update.usage)

    def drain(self):
        limit = time.monotonic() + 60
        while self.loop.scheduler.has_work:
            idle_s = self.loop.idle_s
            if idle_s != 0.0:
                self._wake.wait(10 if idle_s is None else min(idle_s, 10))
                self._wake.clear()
            self.step()
            assert time.monotonic() < limit, "the engine does not come to an end"

    @property
    def tiers(self):
        return self.loop.stats().tiers

    def close(self):
        self.loop.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()


def make_turns(seed, num_turns=NUM_TURNS, turn_tokens=TURN_TOKENS):
    """Return the messages of a user, turn by turn."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 300, turn_tokens).tolist() for _ in range(num_turns)]


@pytest.fixture(scope="module")
def conversations(checkpoint):
    """Return each conversation's prompts, turn by turn with the previous answers, and Hugging Face's answers."""
    oracle = HuggingFaceModel(checkpoint("llama"))
    told = []
    for seed in range(NUM_CONVERSATIONS):
        history, turns = [], []
        for said in make_turns(seed):
            prompt = history + said
            answer = oracle.generate(prompt, MAX_TOKENS)
            turns.append((prompt, answer))
            history = prompt + answer
        told.append(turns)
    return told


def talk(run, conversations, turn):
    """Run one turn of every conversation, one after the other; return the usages."""
    usages = []
    for turns in conversations:
        prompt, answer = turns[turn]
        [(tokens, usage)] = run.ask(prompt)
        assert tokens == answer
        usages.append(usage)
    return usages


@pytest.mark.covering
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_conversation_evicted_from_the_device_continues_from_host_memory(
    checkpoint, conversations, policy, page_size, overlap
):
    with Run(checkpoint("llama"), write_policy=policy, page_size=page_size, overlap=overlap) as run:
        usages = [talk(run, conversations, turn) for turn in range(NUM_TURNS)]
        tiers = run.tiers
    assert sum(usage.cached_tokens for usage in usages[0]) == 0
    later = usages[1 if policy != "write_through_selective" else 2 :]
    for usage in (usage for turn in later for usage in turn):
        by_tier = usage.cached_tokens_by_tier
        assert by_tier["host"] > 0, by_tier
        assert by_tier["storage"] == 0
        # All tokens except those that had not filled a block at the end of the previous turn.
        assert sum(by_tier.values()) == usage.cached_tokens
    assert tiers.loaded_blocks > 0
    assert tiers.lost_copies == 0


@pytest.mark.covering
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_a_conversation_continues_from_storage_after_a_restart(checkpoint, conversations, policy, page_size, overlap):
    medium = Medium()
    settings = {"write_policy": policy, "page_size": page_size, "overlap": overlap, "medium": medium}
    for turn in range(NUM_TURNS):
        with Run(checkpoint("llama"), **settings) as run:
            usages = talk(run, conversations, turn)
            assert run.tiers.storage_failures == 0
        for usage in usages if turn else ():
            expected = (usage.prompt_tokens - TURN_TOKENS - 1) // 32 * 32  # the last token was never an input
            assert usage.cached_tokens_by_tier == {"device": 0, "host": 0, "storage": expected}
    assert len(set(medium.fingerprints)) == 1


@pytest.mark.covering
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("policy", POLICIES)
def test_many_requests_in_little_memory_generate_the_same_tokens_as_alone(
    checkpoint, conversations, policy, page_size, overlap
):
    """Blocks are stored, evicted, overwritten and loaded in the same steps, while requests wait for storage."""
    medium = Medium()
    with Run(
        checkpoint("llama"),
        medium=medium,
        write_policy=policy,
        page_size=page_size,
        overlap=overlap,
        kv_tokens=576,
        host_tokens=640,
        storage={"name": "memory", "prefetch": "timeout", "prefetch_timeout_s": 0.05},
    ) as run:
        for _ in range(2):
            asked = [(prompt, answer) for turns in conversations for prompt, answer in turns]
            for (prompt, answer), (tokens, _usage) in zip(asked, run.ask(*[p for p, _ in asked]), strict=True):
                assert tokens == answer, f"prompt of {len(prompt)} tokens"
        tiers = run.tiers
    assert tiers.evicted_blocks > 0
    assert tiers.loaded_blocks > 0


FAULTS = ["damaged", "full", "contains raises", "get raises", "put raises"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_storage_only_costs_speed(checkpoint, conversations, fault):
    medium = Medium()
    with Run(checkpoint("llama"), medium=medium) as run:
        talk(run, conversations[:1], 0)
    medium.fault = fault
    with Run(checkpoint("llama"), medium=medium) as run:
        [usage] = talk(run, conversations[:1], 1)
        stats = run.tiers
    if "put" in fault or fault == "full":
        assert usage.cached_storage_tokens > 0
    else:
        assert usage.cached_tokens == 0
    if fault == "damaged":
        assert stats.storage_corrupt == 1
    else:
        assert stats.storage_failures > 0


def test_namespaces_share_no_blocks_on_any_tier(checkpoint, conversations):
    medium = Medium()
    prompt, answer = conversations[0][1]
    for namespace in ("", "tenant"):
        with Run(checkpoint("llama"), medium=medium) as run:
            [(tokens, usage)] = run.ask(prompt, namespace=namespace)
            assert (tokens, usage.cached_tokens) == (answer, 0)
            talk(run, conversations[1:], 1)  # evicts it from the device
            [(tokens, usage)] = run.ask(prompt, namespace=f"not {namespace}")
            assert (tokens, usage.cached_tokens) == (answer, 0)
            [(tokens, usage)] = run.ask(prompt, namespace=namespace)
            assert tokens == answer
            assert usage.cached_host_tokens > 0


def test_other_weights_have_another_fingerprint(checkpoint, tmp_path):
    medium = Medium()
    for name in ("llama", "qwen2", "llama"):
        with Run(checkpoint(name), medium=medium):
            pass
    first, other, again = medium.fingerprints
    assert first == again != other


def test_a_request_waits_for_its_prefetch_while_others_run(checkpoint, conversations):
    medium = Medium()
    with Run(checkpoint("llama"), medium=medium) as run:
        talk(run, conversations[:1], 0)
    (prompt, answer), (other, other_answer) = conversations[0][1], conversations[1][0]
    medium.gate.clear()
    with Run(checkpoint("llama"), medium=medium) as run:
        waiting = run.add(prompt)
        run.step()
        assert run.loop.idle_s is None, "it waits for nothing but storage"
        medium.gate.set()
        run.loop.scheduler._live.get(waiting).prefetch.ended.result(10)
        medium.gate.clear()
        going = run.add(other)  # this request also waits until its prefetch ends
        while waiting not in run.finishes:
            run.step()
        assert going not in run.finishes
        medium.gate.set()
        run.drain()
        assert (run.tokens[waiting], run.tokens[going]) == (answer, other_answer)
        assert run.finishes[waiting][1].cached_storage_tokens > 0


@pytest.mark.parametrize("storage", [{"prefetch": "best_effort"}, {"prefetch": "timeout", "prefetch_timeout_s": 0.05}])
def test_with_best_effort_no_request_waits_for_a_slow_storage(checkpoint, conversations, storage):
    medium = Medium()
    with Run(checkpoint("llama"), medium=medium) as run:
        talk(run, conversations[:1], 0)
    medium.gate.clear()
    run = Run(checkpoint("llama"), medium=medium, storage={"name": "memory", **storage})
    [usage] = talk(run, conversations[:1], 1)
    assert usage.cached_tokens == 0
    assert run.tiers.late_prefetches == 1
    medium.gate.set()
    run.close()


def test_a_failed_step_discards_its_copies(checkpoint, conversations):
    with Run(checkpoint("llama")) as run:
        talk(run, conversations, 0)
        runner = run.loop._executor
        prompt, answer = conversations[0][1]
        submit = runner._run
        calls = []

        def fail_once(plan):
            calls.append(plan.copies)
            if len(calls) == 1:
                raise RuntimeError("the device is out of memory")
            return submit(plan)

        runner._run = fail_once
        [(tokens, _)] = run.ask(prompt)
        assert tokens == []
        assert calls[0].loads
        assert run.tiers.lost_copies > 0
        assert run.tiers.host_used_blocks == 0
        [(tokens, usage)] = run.ask(prompt)
        assert (tokens, usage.cached_tokens) == (answer, 0)
        talk(run, conversations, 2)


def have_the_cache_fail(run):
    """Raise within the cache, like a faulty plugin."""
    assert run.loop.pin(None, 1.0) == 0


def test_a_hanging_storage_does_not_delay_a_recovery(checkpoint, conversations):
    medium = Medium()
    storage = {"name": "memory", "prefetch": "best_effort"}
    run = Run(checkpoint("llama"), medium=medium, storage=storage)
    medium.gate.clear()
    talk(run, conversations[:1], 0)  # its prefetch hangs
    began = time.monotonic()
    have_the_cache_fail(run)
    took_s = time.monotonic() - began
    assert not medium.gate.is_set()
    assert took_s < 15, "it did not wait for the storage, which would answer after 20 s"
    [usage] = talk(run, conversations[:1], 1)
    assert usage.cached_tokens == 0
    medium.gate.set()
    run.close()


def test_after_a_recovery_lower_tiers_work_again(checkpoint, conversations):
    medium = Medium()
    with Run(checkpoint("llama"), medium=medium) as run:
        talk(run, conversations[:1], 0)
        have_the_cache_fail(run)
        assert run.tiers.host_used_blocks == 0
        [usage] = talk(run, conversations[:1], 1)
        assert usage.cached_tokens == usage.cached_storage_tokens
        assert run.tiers.host_used_blocks > 0
    assert len(medium.blocks) > 0


def test_without_host_memory_a_recovered_engine_continues_on_the_device(checkpoint, conversations):
    medium = Medium()
    with Run(checkpoint("llama"), medium=medium) as run:
        talk(run, conversations[:1], 0)
        medium.fault = "no host memory"
        have_the_cache_fail(run)
        talk(run, conversations, 1)
        [usage] = talk(run, conversations[-1:], 2)
        assert usage.cached_tokens > 0
        assert run.tiers.host_blocks == 0


def test_while_no_cache_can_be_created_every_request_is_answered(checkpoint, conversations):
    medium = Medium()
    prompt, answer = conversations[0][0]
    with Run(checkpoint("llama"), medium=medium) as run:
        going = [run.add(prompt) for prompt, _ in (turns[0] for turns in conversations)]
        run.step()
        medium.fault = "no cache"
        have_the_cache_fail(run)
        run.drain()
        assert {run.finishes[i][0].reason for i in going} == {FinishReason.ERROR}
        for _ in range(2):
            [(tokens, _)] = run.ask(prompt)
            assert tokens == []
        medium.fault = None
        [(tokens, _)] = run.ask(prompt)
        assert tokens == answer
