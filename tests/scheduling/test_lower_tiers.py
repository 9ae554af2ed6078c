"""All tokens are right when blocks are stored, evicted, overwritten, loaded, aborted and retracted in one step."""

import random
import threading

import numpy as np
import pytest

from graftlm.contracts import CacheContext, KVStorage, StorageStats
from graftlm.execution.executor import InlineExecutor
from graftlm.memory import KVManager, LowerTiers, PagePool, RequestTable, TransferQueue
from graftlm.observers import Observers
from graftlm.scheduling import Request, Scheduler, SchedulerLimits
from graftlm.step_loop import StepLoop
from graftlm.testing.fake_device import expected_output
from graftlm.testing.fake_host_memory import CopyingDevice
from graftlm.types import FinishReason, SamplingParams
from graftlm_cache.hicache.create import create_hicache
from graftlm_cache.hicache.options import HicacheOptions
from graftlm_eviction.lru import LRU
from graftlm_scheduling.fcfs import FirstComeFirstServed

VOCAB = 50
NUM_ROWS = 4


class Crowd:
    """Requests in too little memory, on a device that copies as late as possible."""

    def __init__(self, seed, page_size, policy, overlap, storage=None):
        self.rng = random.Random(seed)
        self.page_size = page_size
        self.storage = storage
        self.options = HicacheOptions(
            host_tokens=self.rng.choice([24, 64]),
            block_tokens=8,
            write_policy=policy,
            storage={"name": "given", "prefetch_timeout_s": 50} if storage else None,
        )
        self.num_pages = 72 // page_size
        self.device = CopyingDevice(self.num_pages, page_size, NUM_ROWS, VOCAB)
        self.queue = TransferQueue(self.device.page_bytes, "uint64", page_size, self.device.allocate)
        self.now = 0.0
        cache = self.make_cache()
        table = RequestTable(NUM_ROWS, self.num_pages)
        tiers = LowerTiers(cache, self.queue)
        self.kv = KVManager(PagePool(self.num_pages), cache, table, page_size, tiers=tiers)
        self.scheduler = Scheduler(self.kv, FirstComeFirstServed(), SchedulerLimits(100, 16), self.clock)
        self.loop = StepLoop(
            self.scheduler,
            InlineExecutor(self.device.run),
            overlap=overlap,
            make_cache=self.make_cache,
            observers=Observers(),
            clock=self.clock,
            mover=self.device,
            debug=True,
        )
        self.requests, self.tokens, self.ends = {}, {}, {}
        # Prompts continue each other, so they share blocks; some differ inside of a block.
        self.trunks = [[self.rng.randrange(VOCAB) for _ in range(40)] for _ in range(3)]

    def clock(self):
        self.now += 1.0
        return self.now

    def make_cache(self):
        context = CacheContext(
            self.page_size, LRU(), self.clock, transfer=self.queue, create_storage=lambda *_: self.storage
        )
        return create_hicache(self.options, context)

    def add(self, prompt_len=None):
        trunk = self.rng.choice(self.trunks)
        prompt = trunk[: prompt_len or self.rng.randint(1, len(trunk))] + [self.rng.randrange(VOCAB) for _ in range(4)]
        request_id = str(len(self.requests))
        request = Request(
            request_id=request_id,
            prompt_token_ids=np.array(prompt, dtype=np.int32),
            params=SamplingParams(temperature=0),
            max_new_tokens=self.rng.randint(1, 20),
            stop_token_ids=frozenset(),
            seed=0,
            arrival_s=self.clock(),
            priority=self.rng.randrange(2),
        )
        self.requests[request_id], self.tokens[request_id] = request, []
        self.loop.add([request], lambda: None)

    def step(self):
        self.take(self.loop.step())

    def take(self, updates):
        for update in updates:
            self.tokens[update.request_id] += update.token_ids
            if update.finish is not None:
                self.ends[update.request_id] = update.finish

    def act(self):
        """Do one random operation between two steps."""
        what = self.rng.random()
        if what < 0.3 and len(self.requests) < 60:
            self.add()
        elif what < 0.33 and self.requests:
            self.loop.abort(self.rng.choice(list(self.requests)), "changed my mind")
        elif what < 0.34:
            self.loop.flush_cache()
        elif what < 0.35:
            self.device.fail_steps.add(self.scheduler.counters.steps)
        elif what < 0.36:
            self.take(self.loop.settle())
            self.loop.retract_all()

    def check(self):
        for request_id, request in self.requests.items():
            end, tokens = self.ends[request_id], self.tokens[request_id]
            expected = expected_output(request.prompt_token_ids.tolist(), request.max_new_tokens, VOCAB)
            assert tokens == expected[: len(tokens)], f"request {request_id}"
            if end.reason is FinishReason.LENGTH:
                assert len(tokens) == request.max_new_tokens
            if end.reason is FinishReason.ERROR:
                assert "out of memory" in end.error


def play(crowd, steps):
    """Do random operations for some steps, wait for every request, and check answers and pages."""
    for _ in range(steps):
        crowd.act()
        crowd.step()
    for _ in range(2000):
        if not crowd.scheduler.has_work:
            break
        crowd.step()
    crowd.check()
    assert crowd.kv.usage.owned == crowd.kv.usage.locked == 0


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("page_size", [1, 4, 8])
def test_random_requests_generate_the_same_tokens_as_alone(page_size, policy, overlap):
    loaded = retracted = 0
    for seed in range(3):
        crowd = Crowd(seed, page_size, policy, overlap)
        play(crowd, 200)
        stats = crowd.loop.stats()
        loaded += stats.cached_host_tokens
        retracted += stats.retractions
        crowd.loop.close()
    assert loaded > 0
    assert retracted > 0


class Stuck(KVStorage):
    """A storage that answers only after its gate opens."""

    def __init__(self):
        self.gate = threading.Event()

    def contains(self, keys):
        assert self.gate.wait(20)
        return 0

    def get(self, key, out):
        return False

    def put(self, key, data):
        return False

    def clear(self):
        return

    def stats(self):
        return StorageStats()

    def close(self):
        return


def test_the_loop_wakes_at_the_end_of_a_prefetch_timeout_even_if_it_checks_late():
    storage = Stuck()
    crowd = Crowd(0, 1, "write_through", False, storage)
    crowd.add(prompt_len=30)
    crowd.step()
    assert crowd.scheduler.num_running == 0
    assert 0 < crowd.loop.idle_s < 100
    crowd.now += 200.0  # the loop checks later than the deadline
    assert crowd.loop.idle_s == 0.0
    crowd.step()
    assert crowd.scheduler.num_waiting == 0
    storage.gate.set()
    crowd.loop.close()
    assert crowd.loop.stats().tiers.late_prefetches == 1
