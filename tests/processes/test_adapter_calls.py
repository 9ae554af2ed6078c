"""A replica's answers to calls about adapters, with a loader that reads when it is told to."""

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


class SlowLoader:
    """Reads an adapter when `may_read` is set; folders called "bad" fit no model."""

    def __init__(self, **paths):
        self.loaded = {name: Loaded(path) for name, path in paths.items()}
        self.may_read = threading.Event()
        self.may_read.set()

    def read(self, name, path):
        assert self.may_read.wait(10)
        if path == "bad":
            raise AdapterError("bad fits nothing")
        return f"weights of {path}"

    def install(self, name, path, weights):
        assert weights == f"weights of {path}"
        self.loaded[name] = Loaded(path)
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


def test_an_adapter_is_installed_when_it_has_been_read_and_not_before(woken):
    loader = SlowLoader()
    loader.may_read.clear()
    calls = AdapterCalls(loader, woken.release)
    for call_id, path in ((1, "a"), (2, "bad")):
        calls.begin_load(load(call_id, path))
    assert calls.take_read() == []
    loader.may_read.set()
    assert woken.acquire(timeout=10)
    assert woken.acquire(timeout=10)
    (first, install), (second, fail) = calls.take_read()
    assert (first.call_id, second.call_id, list(loader.loaded)) == (1, 2, [])
    assert install() == "digest"
    assert list(loader.loaded) == ["a"]
    with pytest.raises(AdapterError, match="bad fits nothing"):
        fail()
    assert calls.take_read() == []
    calls.close()


def test_a_fresh_replica_takes_over_what_the_others_have(woken, caplog):
    loader = SlowLoader(kept="k", gone="g", moved="old")
    calls = AdapterCalls(loader, woken.release)
    calls.set_all({"kept": "k", "moved": "new", "broken": "bad", "late": "l"})
    assert {name: adapter.path for name, adapter in loader.loaded.items()} == {"kept": "k", "moved": "new", "late": "l"}
    assert "adapter broken of bad cannot be loaded again" in caplog.text
    calls.close()


def test_a_replica_without_room_for_adapters_says_so(woken):
    calls = AdapterCalls(None, woken.release)
    for ask in (lambda: calls.begin_load(load(1, "a")), lambda: calls.unload("a"), lambda: calls.set_all({})):
        with pytest.raises(AdapterError, match=r"Set lora\.enabled: true"):
            ask()
    calls.close()
