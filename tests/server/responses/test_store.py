"""The stores of responses keep to their bounds."""

import pytest

from graftlm.errors import ConfigError
from graftlm.server.openai.responses.store import MemoryResponseStore, SqliteResponseStore, StoredResponse


@pytest.fixture(params=["memory", "sqlite"])
def make_store(request, tmp_path):
    def make(max_responses=3, max_bytes=1000):
        if request.param == "memory":
            return MemoryResponseStore(max_responses, max_bytes)
        return SqliteResponseStore(tmp_path / "responses.db", max_responses, max_bytes)

    return make


def response(name, num_bytes=10):
    return StoredResponse(name, b"b" * (num_bytes - 1), b"i")


async def names_in(store, names):
    return [name for name in names if await store.get(name) is not None]


async def test_a_response_is_read_replaced_and_deleted(make_store):
    store = make_store()
    assert await store.get("a") is None
    await store.put(response("a"))
    assert await store.get("a") == response("a")
    await store.put(response("a", 20))
    assert await store.get("a") == response("a", 20)
    assert await store.delete("a")
    assert not await store.delete("a")
    assert await store.get("a") is None


async def test_a_database_keeps_its_responses(tmp_path):
    for name in "ab":
        store = SqliteResponseStore(tmp_path / "responses.db", 3, 1000)
        await store.put(response(name))
        assert await names_in(store, "ab") == list("ab"[: "ab".index(name) + 1])


async def test_the_oldest_response_makes_room(make_store):
    store = make_store(max_responses=3)
    for name in "abcd":
        await store.put(response(name))
    assert await names_in(store, "abcd") == ["b", "c", "d"]


async def test_the_size_is_bounded(make_store):
    store = make_store(max_bytes=100)
    for name in "abc":
        await store.put(response(name, 40))
    assert await names_in(store, "abc") == ["b", "c"]
    await store.put(response("huge", 101))
    assert await store.get("huge") is None


async def test_a_store_of_size_zero_keeps_nothing(make_store):
    store = make_store(max_responses=0)
    await store.put(response("a"))
    assert await store.get("a") is None


def test_a_database_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"server\.response_store\.path"):
        SqliteResponseStore(tmp_path / "nowhere" / "responses.db", 3, 100)
    file = tmp_path / "text"
    file.write_text("not a database" * 100)
    with pytest.raises(ConfigError, match="not a database"):
        SqliteResponseStore(file, 3, 100)
