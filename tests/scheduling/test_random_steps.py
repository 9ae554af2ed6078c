"""Ten thousand random steps with arrivals, grammars, aborts, timeouts, eviction, retraction and failures leak no page.

With `debug`, the step loop checks after every step that each page has exactly one owner. A violation ends requests with
an error that these tests do not accept. `random_steps.py` runs the same storms for millions of steps.
"""

import random
from concurrent.futures import Future

import pytest

import graftlm_scheduling
from graftlm.contracts import GrammarKind, GrammarSpec, SchedulingContext
from graftlm.errors import NeverFitsError
from graftlm.memory import WindowSpan
from graftlm.scheduling import RequestGrammar
from graftlm.speculation import Speculator
from graftlm.testing import FakeGrammarBackend
from graftlm.testing.drafter import SCRIPTS, AllDrafts, ScriptedDrafter
from graftlm.testing.fake_device import expected_output
from graftlm.types import FinishReason, SamplingParams

#: (page size, chunk, overlap, reuse, seed, policy); all cases together run 10,000 steps.
CASES = [
    (1, 16, False, True, 1, "lpm"),
    (1, 7, True, True, 2, "lpm"),
    (4, 16, True, True, 3, "dfs_weight"),
    (16, 64, True, True, 4, "lpm"),
    (4, 5, False, True, 5, "priority"),
    (1, 16, True, False, 6, "fcfs"),
    (16, 8, False, True, 11, "lpm"),
    (4, 64, True, True, 8, "priority"),
    (1, 64, True, True, 9, "random"),
    (16, 16, True, False, 10, "lof"),
]
STEPS_PER_CASE = 1000
#: Seeds of the cases that run in the quick set.
QUICK_SEEDS = {2, 3, 5, 6, 11}
VOCAB = 50
STOP = VOCAB - 1
GRAMMARS = FakeGrammarBackend([*(chr(ord("A") + i) for i in range(STOP)), ""], VOCAB, [STOP])
#: Errors with which the device and `Storm` may fail a request.
EXPECTED_ERRORS = {
    "logits are not finite",
    "hidden states are not finite",
    "RuntimeError: the device is out of memory",
}
POLICIES = {provider.name: provider for provider in graftlm_scheduling.provide_scheduling_policies()}


class Storm:
    """Does one random operation before each step."""

    def __init__(self, rig, seed):
        self.rig = rig
        self.random = random.Random(seed)
        self.num_added = 0
        self.num_refused = 0
        self.words = {}  # request id -> its grammar
        self.prefixes = [[self.random.randrange(50) for _ in range(n)] for n in (5, 17, 40, 64)]

    def arrive(self):
        draw = self.random
        prefix = draw.choice(self.prefixes)[: draw.randint(0, 64)]
        prompt = prefix + [draw.randrange(50) for _ in range(draw.randint(1, 20))]
        self.num_added += 1
        pooling = draw.choice([None, None, None, None, "mean", "last"])
        fields = {
            "timeout_s": draw.choice([None, None, None, 0.05]),
            "priority": draw.choice([0, 0, 0, 1, -1]),
            "namespace": draw.choice(["", "", "tenant"]),
        }
        if pooling is not None:
            self.rig.add_embedding(f"r{self.num_added}", prompt, pooling, **fields)
            return
        if draw.random() < 0.15:
            # Words of two letters and more, so no mask is ever empty.
            words = " ".join("".join(draw.sample("ABCDEFGH", draw.randint(2, 5))) for _ in range(draw.randint(1, 40)))
            fields["grammar"] = grammar(words)
            self.words[f"r{self.num_added}"] = words
        try:
            self.rig.add(
                f"r{self.num_added}",
                prompt,
                max_new_tokens=draw.choice([1, 3, 10, 40, 150]),
                stop=() if "grammar" in fields else tuple(draw.sample(range(VOCAB), draw.choice([0, 0, 2]))),
                params=SamplingParams(
                    prompt_logprobs=draw.choice([None, None, None, 0]),
                    prompt_logprobs_start=self.num_added % 2 * (self.num_added % 61),
                ),
                **fields,
            )
        except NeverFitsError:
            self.num_refused += 1
            self.words.pop(f"r{self.num_added}", None)

    def abort_one(self):
        unfinished = [r for r, updates in self.rig.updates.items() if not updates or updates[-1].finish is None]
        if unfinished:
            self.rig.loop.abort(self.random.choice(unfinished), "changed my mind")

    def step(self):
        draw = self.random.random()
        if draw < 0.30 and self.rig.scheduler.num_waiting < 20:
            self.arrive()
        elif draw < 0.34:
            self.abort_one()
        elif draw < 0.345:
            self.rig.loop.flush_cache()
        elif draw < 0.35:
            self.rig.device.fail_rows = {self.rig.scheduler.counters.steps + 1: self.random.randrange(4)}
        elif draw < 0.352:
            self.rig.device.fail_steps = {self.rig.scheduler.counters.steps + 1}
        elif draw < 0.355:
            self.rig.device.fail_pools = {self.rig.scheduler.counters.steps + 1}
        elif draw < 0.358:  # as after an update of weights
            self.rig.take(self.rig.loop.settle())
            self.rig.loop.change_model(lambda: None, keep_memory=self.random.random() < 0.3)
        self.rig.step()


def grammar(words):
    compiled = Future()
    compiled.set_result(GRAMMARS.compile(GrammarSpec(GrammarKind.EBNF, words)))
    return RequestGrammar(compiled, lambda: 1e9, VOCAB, GRAMMARS.fill_bitmasks)


def assert_right_under_grammar(rig, request_id, words):
    """Assert that the request has the device's tokens among the allowed ones, and ended where the grammar ended."""
    request, finish = rig.requests[request_id], rig.finish(request_id)
    matcher = GRAMMARS.compile(GrammarSpec(GrammarKind.EBNF, words)).matcher()
    expected = expected_output(request.prompt_token_ids.tolist(), request.max_new_tokens, VOCAB, matcher)
    if finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
        assert rig.tokens[request_id] == expected
        assert finish.reason is (FinishReason.STOP if expected[-1] == STOP else FinishReason.LENGTH)
    else:
        assert rig.tokens[request_id] == expected[: len(rig.tokens[request_id])]


def assert_right_answers(rig, storm):
    """Assert that every request ended with its own tokens, and only for a reason that `Storm` may cause."""
    for request_id in rig.requests:
        words = storm.words.get(request_id)
        if words is None:
            rig.assert_right(request_id)
        else:
            assert_right_under_grammar(rig, request_id, words)
    finishes = [rig.finish(request_id) for request_id in rig.requests]
    unexpected = {finish.error for finish in finishes if finish.reason is FinishReason.ERROR} - EXPECTED_ERRORS
    assert not unexpected, unexpected
    assert rig.scheduler.counters.finished_requests == len(rig.requests)


def assert_right_prompt_logprobs(rig):
    for request_id, request in rig.requests.items():
        reported = [entry.token_id for update in rig.updates[request_id] for entry in update.prompt_logprobs]
        wanted = request.prompt_token_ids[max(request.params.prompt_logprobs_start, 1) :].tolist()
        if request.params.prompt_logprobs is None:
            assert not reported
        elif rig.finish(request_id).reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert reported == wanted
        else:
            assert reported == wanted[: len(reported)]


def speculate(storm, seed):
    """Let drafters of all kinds draft for a storm's requests; those that break the contract are rare."""

    def oracle(request, num_tokens):
        for request_id, words in storm.words.items():
            under_grammar = storm.rig.requests[request_id]
            if under_grammar.row == request.row:
                matcher = GRAMMARS.compile(GrammarSpec(GrammarKind.EBNF, words)).matcher()
                prompt = under_grammar.prompt_token_ids.tolist()
                done = len(request.token_ids) - len(prompt)
                return expected_output(prompt, done + num_tokens, VOCAB, matcher)[done:] or [0]
        return expected_output(request.token_ids.tolist(), num_tokens, VOCAB)

    scripts = 8 * ["right", "partly"] + 4 * ["too_long", "wrong", "random", "none"] + list(SCRIPTS)
    return Speculator({"storm": ScriptedDrafter(oracle, scripts, VOCAB, seed)}, 5, VOCAB, AllDrafts(5))


def play(make_rig, steps, page_size, chunk, overlap, reuse, seed, policy, drafts=False):
    """Run a storm on one memory and check every invariant; return the rig."""
    rig = make_rig(
        num_pages=160 // page_size,
        page_size=page_size,
        num_rows=6,
        prefill_tokens=chunk,
        overlap=overlap,
        reuse=reuse,
        policy=POLICIES[policy].create(POLICIES[policy].options(), SchedulingContext(seed)),
        debug=True,
    )
    storm = Storm(rig, seed)
    if drafts:
        rig.use(speculate(storm, seed))
    for _ in range(steps):
        storm.step()
    rig.run()
    usage = rig.scheduler.kv.usage
    assert usage.owned == usage.locked == 0
    assert usage.free + usage.evictable == usage.total
    assert_right_answers(rig, storm)
    assert_right_prompt_logprobs(rig)
    return rig


@pytest.mark.parametrize(
    ("page_size", "chunk", "overlap", "reuse", "seed", "policy"),
    [case if case[4] in QUICK_SEEDS else pytest.param(*case, marks=pytest.mark.full) for case in CASES],
)
def test_every_page_has_one_owner_after_every_step(make_rig, page_size, chunk, overlap, reuse, seed, policy):
    rig = play(make_rig, STEPS_PER_CASE, page_size, chunk, overlap, reuse, seed, policy)
    counters = rig.scheduler.counters
    assert len(rig.requests) > 150
    assert counters.retractions > 0
    reasons = {rig.finish(request_id).reason for request_id in rig.requests}
    assert {FinishReason.ABORT, FinishReason.LENGTH, FinishReason.STOP} <= reasons
    assert sum(request.grammar is not None for request in rig.requests.values()) > 10
    embedded = [rig.requests[r].pooling.way for r in rig.requests if rig.updates[r][-1].embedding is not None]
    assert min(embedded.count("mean"), embedded.count("last")) > 5
    if reuse:
        assert counters.cached_tokens > 0
        assert rig.scheduler.kv.evicted_pages > 0


@pytest.mark.parametrize(("page_size", "chunk", "overlap", "reuse", "seed", "policy"), CASES[1:4])
def test_every_page_is_accounted_for_when_drafts_are_verified(make_rig, page_size, chunk, overlap, reuse, seed, policy):
    rig = play(make_rig, STEPS_PER_CASE // 3, page_size, chunk, overlap, reuse, seed, policy, drafts=True)
    counts = rig.scheduler.counters.drafts["storm"]
    assert counts.accepted > 30
    assert counts.drafted - counts.accepted > 15


#: (page size, window, spare tokens, tokens of window pages, chunk, overlap, reuse, seed)
WINDOW_CASES = [
    (1, 8, 0, 40, 16, True, True, 11),
    (1, 1, 0, 40, 7, False, True, 12),
    (4, 8, 4, 48, 5, True, True, 13),
    (4, 11, 0, 160, 64, True, True, 14),
    (16, 20, 0, 128, 16, True, True, 19),
    (1, 8, 2, 30, 64, True, False, 16),
    (4, 9, 0, 60, 16, False, False, 17),
]


def play_windows(
    make_rig, steps, page_size, window_tokens, spare_tokens, memory_tokens, chunk, overlap, reuse, seed, drafts=False
):
    """Run a storm on two memories, one of them for windows, and check every invariant; return the rig."""
    span = WindowSpan(window_tokens, page_size, spare_tokens)
    rig = make_rig(
        num_pages=160 // page_size,
        page_size=page_size,
        num_rows=6,
        prefill_tokens=chunk,
        overlap=overlap,
        reuse=reuse,
        window=span,
        num_window_pages=memory_tokens // page_size,
        debug=True,
    )
    storm = Storm(rig, seed)
    if drafts:
        rig.use(speculate(storm, seed))
    kv = rig.scheduler.kv
    chunk_pages = -(-chunk // page_size) + 1
    for _ in range(steps):
        storm.step()
        held = kv.window.num_held - kv.cache.evictable_window_pages
        assert held <= rig.scheduler.num_running * span.row_pages + chunk_pages
    rig.run()
    assert kv.usage.owned == kv.usage.locked == 0
    assert kv.window.num_held == kv.cache.evictable_window_pages
    assert_right_answers(rig, storm)
    return rig


@pytest.mark.parametrize(
    ("page_size", "window_tokens", "spare_tokens", "memory_tokens", "chunk", "overlap", "reuse", "seed"), WINDOW_CASES
)
def test_every_window_has_its_tokens_in_too_little_memory(
    make_rig, page_size, window_tokens, spare_tokens, memory_tokens, chunk, overlap, reuse, seed
):
    rig = play_windows(
        make_rig, 600, page_size, window_tokens, spare_tokens, memory_tokens, chunk, overlap, reuse, seed
    )
    if reuse:
        assert rig.scheduler.counters.cached_tokens > 0
        assert rig.scheduler.counters.retractions > 0 or chunk == 5  # with small chunks few rows run at a time


#: (page size, snapshots, interval of snapshots in tokens, chunk, overlap, reuse, seed)
STATE_CASES = [
    (1, 8, None, 16, True, True, 21),
    (1, 2, 8, 7, False, True, 22),
    (4, 40, 8, 5, True, True, 23),
    (16, 6, 16, 64, True, True, 24),
    (4, 0, None, 16, True, True, 25),
    (16, 0, None, 16, False, False, 26),
]


def play_states(make_rig, steps, page_size, num_snapshots, interval_tokens, chunk, overlap, reuse, seed):
    """Run a storm with recurrent states, and check every invariant; return the rig."""
    rig = make_rig(
        num_pages=160 // page_size,
        page_size=page_size,
        num_rows=6,
        prefill_tokens=chunk,
        overlap=overlap,
        reuse=reuse,
        num_snapshots=num_snapshots,
        state_interval_tokens=interval_tokens,
        debug=True,
    )
    storm = Storm(rig, seed)
    for _ in range(steps):
        storm.step()
    rig.run()
    kv = rig.scheduler.kv
    assert kv.usage.owned == kv.usage.locked == 0
    assert kv.states.pool.num_free + kv.states.pool.num_stored == num_snapshots
    assert_right_answers(rig, storm)
    return rig


@pytest.mark.parametrize(
    ("page_size", "num_snapshots", "interval_tokens", "chunk", "overlap", "reuse", "seed"),
    [case if case[-1] in {22, 24} else pytest.param(*case, marks=pytest.mark.full) for case in STATE_CASES],
)
def test_every_state_contains_the_tokens_of_its_row(
    make_rig, page_size, num_snapshots, interval_tokens, chunk, overlap, reuse, seed
):
    rig = play_states(make_rig, 400, page_size, num_snapshots, interval_tokens, chunk, overlap, reuse, seed)
    counters = rig.scheduler.counters
    assert (counters.cached_tokens > 0) == (num_snapshots > 0)
    assert counters.retractions > 0 or chunk == 5  # with small chunks few rows run at a time
    assert num_snapshots > 8 or not num_snapshots or rig.scheduler.kv.states.pool.num_evicted > 0
