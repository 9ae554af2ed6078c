"""A replica's answers to calls about adapters, with a loader whose reads the test controls."""

import threading
from dataclasses import dataclass

import pytest

from graftlm.errors import AdapterError, AdapterNotFoundError
from graftlm.processes.adapter_calls import AdapterCalls
from graftlm.processes.messages import Call


@dataclass
class Loaded:
    path: str
    digest: str = "digest"


@dataclass
class Read:
    path: str
    digest: str


class SlowLoader:
    """Reads an adapter once `may_read` is set, except "hangs"; adapters in folders called "bad" are refused."""

    def __init__(self, **paths):
        self.loaded = {name: Loaded(path) for name, path in paths.items()}
        self.may_read = threading.Event()
        self.may_read.set()
        self.hangs = threading.Event()

    def read(self, name, path):
        assert (self.hangs if path == "hangs" else self.may_read).wait(10)
        if path == "bad":
            raise AdapterError("bad fits nothing")
        if path == "worse":
            raise ZeroDivisionError
        return Read(path, f"digest of {path}")

    def install(self, name, path, weights):
        assert weights.path == path
        self.loaded[name] = Loaded(path, weights.digest)
        return self.loaded[name]

    def unload(self, name):
        if name not in self.loaded:
            raise AdapterNotFoundError(name)
        del self.loaded[name]
        return 2


def load(call_id, path):
    return Call(call_id=call_id, name="load_adapter", arguments={"name": path, "path": path})


@pytest.fixture
def woken():
    return threading.Semaphore(0)


def test_an_adapter_is_installed_only_after_it_has_been_read(woken):
    loader = SlowLoader()
    loader.may_read.clear()
    calls = AdapterCalls(loader, woken.release)
    for call_id, path in ((1, "a"), (2, "bad")):
        calls.begin_load(load(call_id, path))
    assert calls.take_read() == []
    loader.may_read.set()
    assert woken.acquire(timeout=10)
    assert woken.acquire(timeout=10)
    (first, install), (second, fail) = sorted(calls.take_read(), key=lambda read: read[0].call_id)
    assert (first.call_id, second.call_id, list(loader.loaded)) == (1, 2, [])
    assert install() == "digest of a"
    assert list(loader.loaded) == ["a"]
    with pytest.raises(AdapterError, match="bad fits nothing"):
        fail()
    assert calls.take_read() == []


def wanted(**adapters):
    return {name: {"path": path, "digest": digest} for name, (path, digest) in adapters.items()}


def test_a_restarted_replica_loads_the_adapters_of_the_others(woken, caplog):
    loader = SlowLoader(kept="k", gone="g", moved="old", changed="c")
    calls = AdapterCalls(loader, woken.release)
    calls.set_all(
        wanted(
            worse=("worse", None),
            kept=("k", "digest"),
            moved=("new", None),
            changed=("c", "digest of c"),
            broken=("bad", None),
            late=("l", "digest of l"),
        )
    )
    paths = {name: adapter.path for name, adapter in loader.loaded.items()}
    assert paths == {"kept": "k", "moved": "new", "changed": "c", "late": "l"}
    assert loader.loaded["changed"].digest == "digest of c"
    for name in ("worse of worse", "broken of bad"):
        assert f"adapter {name} cannot be loaded again" in caplog.text


def test_a_restarted_replica_leaves_out_an_adapter_whose_files_have_changed(woken, caplog):
    loader = SlowLoader()
    calls = AdapterCalls(loader, woken.release)
    calls.set_all(wanted(sql=("s", "digest of what was there before")))
    assert not loader.loaded
    assert (
        "the content of s has changed: its digest is digest of s, and that of the loaded adapter 'sql' is"
        in caplog.text
    )
    assert calls.unload("sql") == 0


def test_a_hanging_read_does_not_delay_other_loads(woken):
    loader = SlowLoader()
    calls = AdapterCalls(loader, woken.release)
    calls.begin_load(load(1, "hangs"))
    calls.begin_load(load(2, "a"))
    assert woken.acquire(timeout=10)
    ((call, install),) = calls.take_read()
    assert (call.call_id, install()) == (2, "digest of a")
    loader.hangs.set()
    assert woken.acquire(timeout=10)
    assert [call.call_id for call, _ in calls.take_read()] == [1]


def test_an_abandoned_load_leaves_no_adapter(woken):
    loader = SlowLoader()
    calls = AdapterCalls(loader, woken.release)
    calls.begin_load(load(1, "hangs"))
    assert calls.unload("hangs") == 0
    loader.hangs.set()
    assert woken.acquire(timeout=10)
    assert calls.take_read() == []
    calls.begin_load(load(2, "hangs"))
    assert woken.acquire(timeout=10)
    ((call, install),) = calls.take_read()
    assert (call.call_id, install(), list(loader.loaded)) == (2, "digest of hangs", ["hangs"])


def test_a_replica_without_adapter_memory_refuses_loads(woken):
    calls = AdapterCalls(None, woken.release)
    for ask in (lambda: calls.begin_load(load(1, "a")), lambda: calls.unload("a"), lambda: calls.set_all({})):
        with pytest.raises(AdapterError, match=r"Set lora\.enabled: true"):
            ask()
