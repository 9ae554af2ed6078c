"""Prefixes of models with a recurrent state are reused up to the deepest page end with a stored state."""

import numpy as np
import pytest

from graftlm.contracts import PrefixKey


def tokens(seed, n):
    return np.random.default_rng(seed).integers(0, 50, n).tolist()


def run(rig, request_id, prompt, **fields):
    """Run one request alone; return the number of its reused tokens, and check its output."""
    rig.add(request_id, prompt, **fields)
    rig.run()
    rig.assert_right(request_id)
    return rig.requests[request_id].cached_tokens


def make(make_rig, page_size=4, num_snapshots=32, **fields):
    fields = {"num_pages": 1024 // page_size, "num_rows": 10, "prefill_tokens": 64, **fields}
    return make_rig(page_size=page_size, num_snapshots=num_snapshots, **fields)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("num_tokens", [130, 192, 193])
def test_an_identical_prompt_is_reused_up_to_its_last_page_end_also_after_splits(make_rig, page_size, num_tokens):
    rig = make(make_rig, page_size)
    prompt = tokens(0, num_tokens)
    last = (num_tokens - 1) // page_size * page_size
    assert run(rig, "first", prompt) == 0
    assert run(rig, "second", prompt) == last
    for cut in (101, 64, 33):  # each splits the node of the prompt, most of them within a page
        run(rig, f"cut {cut}", prompt[:cut] + tokens(cut, 20))
        assert run(rig, f"after {cut}", prompt) == last


def test_the_place_where_prompts_branch_is_reused_from_the_third_prompt_on(make_rig):
    rig = make(make_rig)
    shared = tokens(0, 50)
    hits = [run(rig, f"r{i}", shared + tokens(i + 1, 30)) for i in range(4)]
    assert hits == [0, 0, 48, 48]


def test_intermediate_states_let_the_second_prompt_reuse_a_prefix(make_rig):
    rig = make(make_rig, state_interval_tokens=15)  # rounded up to 16, because a page has 4 tokens
    shared = tokens(0, 50)
    hits = [run(rig, f"r{i}", shared + tokens(i + 1, 30)) for i in range(3)]
    assert hits == [0, 48, 48]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_chat_reuses_prompt_and_answer_of_its_last_turn(make_rig, overlap):
    rig = make(make_rig, 16, overlap=overlap)
    chat, expected = tokens(0, 40), 0
    for turn in range(4):
        assert run(rig, f"turn {turn}", chat, max_new_tokens=37) == expected
        expected = (len(chat) + 36) // 16 * 16  # the last token of the answer is not computed
        chat = chat + rig.tokens[f"turn {turn}"] + tokens(turn + 9, 11)


def test_forks_in_one_step_compute_their_prompt_once(make_rig):
    rig = make(make_rig, prefill_tokens=512)
    prompt = tokens(0, 101)
    for i in range(8):
        rig.add(f"fork {i}", prompt)
    rig.run()
    assert sum(plan.num_prefill_tokens for plan in rig.plans) <= 101 + 8
    assert [rig.requests[f"fork {i}"].cached_tokens for i in range(8)] == [0] + 7 * [100]
    for i in range(8):
        rig.assert_right(f"fork {i}")


def test_states_are_evicted_without_their_pages_and_stored_again(make_rig):
    rig = make(make_rig)
    prompt = tokens(0, 101)
    run(rig, "first", prompt)
    kv = rig.scheduler.kv
    num_pages = kv.usage.evictable
    assert kv.states.pool.evict(100) == 1 or kv.states.pool.num_stored == 0
    assert run(rig, "second", prompt) == 0
    assert kv.usage.evictable == num_pages
    assert run(rig, "third", prompt) == 100


def test_evicted_pages_free_their_states(make_rig):
    rig = make(make_rig)
    run(rig, "first", tokens(0, 101))
    kv = rig.scheduler.kv
    assert kv.states.pool.num_stored > 0
    kv.reset()
    assert kv.states.pool.num_stored == 0
    assert kv.states.pool.num_free == 32


def test_without_snapshots_requests_run_and_reuse_nothing(make_rig):
    rig = make(make_rig, num_snapshots=0)
    prompt = tokens(0, 101)
    assert run(rig, "first", prompt) == run(rig, "second", prompt) == 0


@pytest.mark.parametrize(("page_size", "most_tokens"), [(1, 8), (4, 8), (16, 16), (64, 64)])
def test_a_retracted_request_continues_at_its_latest_snapshot(make_rig, page_size, most_tokens):
    rig = make(make_rig, page_size)
    for i in range(2):
        rig.add(f"r{i}", tokens(i, 70), max_new_tokens=60)
    for _ in range(40):
        rig.step()
    rig.scheduler.retract_all()
    rig.run()
    assert rig.scheduler.counters.retractions == 2
    assert sum(plan.num_tokens for plan in rig.plans) <= 2 * (70 + 59 + most_tokens)
    for i in range(2):
        rig.assert_right(f"r{i}")


def test_a_waiting_prompt_is_probed_again_when_a_state_is_stored(make_rig):
    rig = make(make_rig)
    prompt = tokens(0, 101)
    cache = rig.scheduler.kv.cache
    key = PrefixKey(np.array(prompt[:-1], dtype=np.int32))
    assert cache.probe_again(key, None) is None
    run(rig, "first", prompt)
    place = cache.probe_again(key, None)
    assert place.num_pages == 25
    assert cache.probe_again(key, place) is place
    rig.scheduler.kv.states.pool.evict(100)
    assert cache.probe_again(key, place) is None


def play_chats(rig):
    """Run 10 chats of 5 turns with a common system prompt, one turn after another; return the reused tokens."""
    chats = [tokens(0, 60) + tokens(i + 1, 20) for i in range(10)]
    hits = 0
    for turn in range(5):
        for i, chat in enumerate(chats):
            request_id = f"chat {i} turn {turn}"
            hits += run(rig, request_id, chat, max_new_tokens=30)
            chats[i] = chat + rig.tokens[request_id] + tokens(100 * turn + i, 15)
    return hits


def play_few_shot(rig):
    """Run 40 questions with the same examples; return the reused tokens."""
    examples = tokens(0, 200)
    return sum(run(rig, f"q{i}", examples + tokens(i + 1, 25)) for i in range(40))


@pytest.mark.full
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("play", [play_chats, play_few_shot])
def test_chats_and_few_shot_prompts_have_95_percent_of_the_hits_of_pure_attention(make_rig, page_size, play):
    sizes = {
        "num_pages": 8192 // page_size,
        "num_rows": 10,
        "prefill_tokens": 64,
        "page_size": page_size,
        "debug": False,
    }
    expected = play(make_rig(**sizes))
    assert expected > 0
    assert play(make_rig(**sizes, num_snapshots=8 * 10)) >= 0.95 * expected
