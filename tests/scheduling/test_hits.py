"""The hit counts of cache nodes, which eviction strategies use."""

import pytest

PROMPT = list(range(40)) * 5


def hits_by_depth(rig):
    return {view.stats.depth: view.stats.hits for view in rig.scheduler.kv.cache.walk()}


def serve(rig, request_id, prompt):
    request = rig.add(request_id, prompt, max_new_tokens=2)
    rig.run()
    rig.assert_right(request_id)
    return request


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prefill_tokens", [7, 64, 1000])
def test_tokens_cached_by_a_requests_own_chunks_are_not_hits(make_rig, prefill_tokens, overlap):
    rig = make_rig(num_pages=1024, prefill_tokens=prefill_tokens, overlap=overlap)
    serve(rig, "first", PROMPT)
    assert set(hits_by_depth(rig).values()) == {0}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prefill_tokens", [7, 64, 1000])
def test_a_request_counts_as_one_hit_for_any_number_of_chunks(make_rig, prefill_tokens, overlap):
    rig = make_rig(num_pages=1024, prefill_tokens=prefill_tokens, overlap=overlap)
    serve(rig, "first", PROMPT)
    for num_found, request_id in enumerate(["second", "third"], 1):
        tail = [number + num_found for number in PROMPT]
        assert serve(rig, request_id, PROMPT + tail).cached_tokens == len(PROMPT)
        found = {hits for depth, hits in hits_by_depth(rig).items() if depth < len(PROMPT)}
        assert found == {num_found}


def test_requests_that_share_a_prompt_at_the_same_time_count_once_each(make_rig):
    rig = make_rig(num_pages=4096, prefill_tokens=64)
    for i in range(4):
        rig.add(f"r{i}", [*PROMPT, i, i + 1], max_new_tokens=2)
    rig.run()
    shared = {hits for depth, hits in hits_by_depth(rig).items() if depth < len(PROMPT)}
    assert shared == {3}
