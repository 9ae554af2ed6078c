import json

import pytest

from graftlm import Engine, Provider, hookimpl
from graftlm.contracts import CacheCapabilities
from graftlm.errors import InvalidPromptError, RequestError
from graftlm.testing import NaiveCache, provider_kit

SYSTEM = list(range(2, 66))
ONE_TOKEN = {"max_tokens": 1, "temperature": 0.0}


@pytest.fixture(scope="module")
def engine():
    fields = {"memory.kv_tokens": 256, "cache.page_size": 16, "scheduling.max_running_requests": 2}
    with Engine(model="demo", overrides=[f"{name}={value}" for name, value in fields.items()]) as engine:
        yield engine


def cached(engine, prompt):
    return engine.generate(prompt, ONE_TOKEN)[0].usage.cached_tokens


def fill(engine, first):
    for i in range(3):
        engine.generate([first + i] * 90, ONE_TOKEN)


def test_a_pinned_prefix_is_kept_when_others_are_evicted(engine):
    engine.flush_cache()
    engine.generate([*SYSTEM, 70], ONE_TOKEN)
    assert engine.pin_prefix(SYSTEM, ttl_s=600.0) == len(SYSTEM)
    fill(engine, 100)
    assert cached(engine, [*SYSTEM, 71]) == len(SYSTEM)
    assert engine.unpin_prefix(SYSTEM)
    fill(engine, 200)
    assert cached(engine, [*SYSTEM, 72]) == 0


def test_pins_do_not_keep_requests_waiting(engine):
    engine.flush_cache()
    engine.generate([*SYSTEM, 70], ONE_TOKEN)
    engine.pin_prefix(SYSTEM, ttl_s=600.0)
    (output,) = engine.generate([300] * 250, ONE_TOKEN)
    assert output.usage.completion_tokens == 1
    assert engine.pin_prefix(SYSTEM, ttl_s=600.0) < len(SYSTEM)


def test_pins_are_separate_for_each_salt(engine):
    engine.flush_cache()
    engine.generate([*SYSTEM, 70], ONE_TOKEN, cache_salt="tenant")
    assert engine.pin_prefix(SYSTEM, ttl_s=600.0) == 0
    assert engine.pin_prefix(SYSTEM, ttl_s=600.0, cache_salt="tenant") == len(SYSTEM)
    assert not engine.unpin_prefix(SYSTEM)


def test_a_snapshot_is_json_with_the_tokens_of_prompts(engine):
    engine.flush_cache()
    engine.generate([*SYSTEM, 70], ONE_TOKEN)
    snapshot = json.loads(json.dumps(engine.cache_snapshot()))
    assert snapshot["nodes"][0]["token_ids"] == SYSTEM
    assert (snapshot["evictable_pages"], snapshot["locked_pages"]) == (len(SYSTEM) // 16, 0)


@pytest.mark.parametrize("ttl_s", [0, -1.0, float("nan"), float("inf"), "soon", True])
def test_a_bad_ttl_is_refused(engine, ttl_s):
    with pytest.raises(RequestError, match="ttl_s"):
        engine.pin_prefix(SYSTEM, ttl_s)


def test_a_bad_prompt_is_refused(engine):
    with pytest.raises(InvalidPromptError):
        engine.pin_prefix([10**7], 1.0)


@pytest.mark.parametrize("ttl_s", [10**400, 10**5000, 1.1e9], ids=["huge", "beyond printing", "just above"])
def test_an_infinite_ttl_is_refused_and_uses_no_memory(engine, ttl_s):
    prompt = list(range(2, 40))
    engine.generate([prompt], {"max_tokens": 2})
    before = cached(engine, prompt)
    with pytest.raises(RequestError, match="at most 1000000000"):
        engine.pin_prefix(prompt, ttl_s)
    assert cached(engine, prompt) == before > 0


def test_a_salt_that_is_not_unicode_is_refused(engine):
    for call in (
        lambda: engine.generate([[5, 6]], {"max_tokens": 1}, cache_salt="\ud800"),
        lambda: engine.pin_prefix([5, 6], 1.0, cache_salt="\ud800"),
        lambda: engine.unpin_prefix([5, 6], cache_salt="\ud800"),
    ):
        with pytest.raises(RequestError, match="cache_salt must be valid Unicode"):
            call()


class CoarseCachePlugin:
    """A cache that shares only multiples of 32 tokens, for any page size."""

    @hookimpl
    def provide_prefix_caches(self):
        return [
            Provider(
                name="coarse",
                summary="Shares multiples of 32 tokens",
                api_version=1,
                create=lambda options, context: NaiveCache(context, block_pages=32 // context.page_size),
                capabilities=CacheCapabilities(granularity_tokens=32),
            )
        ]


def test_an_engine_runs_with_a_cache_of_larger_blocks(engine):
    params = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    fields = {"memory.kv_tokens": 512, "cache.page_size": 1, "cache.name": "coarse", "debug": "true"}
    overrides = [f"{name}={value}" for name, value in fields.items()]
    with Engine(model="demo", overrides=overrides, plugins=[CoarseCachePlugin()]) as coarse:
        first, second = (coarse.generate([*SYSTEM, 70], params)[0] for _ in range(2))
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 64)
    assert first.token_ids == second.token_ids == engine.generate([*SYSTEM, 70], params)[0].token_ids


def test_plugins_check_uses_the_declared_granularity():
    (provider,) = CoarseCachePlugin().provide_prefix_caches()
    assert provider_kit("cache", provider, lambda context: None).granularity_tokens == 32
